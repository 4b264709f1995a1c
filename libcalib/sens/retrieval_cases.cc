#include "libcalib/sens/retrieval_cases.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <string_view>

#include "kernels/core/layout.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/rng.h"
#include "libcalib/base/utf8.h"

namespace calib::sens {
namespace {

using Ids = std::vector<text::TokenId>;

constexpr std::array<const char*, kKeyDepths.size()> kThings = {"red house", "old bridge", "small boat", "north gate"};

std::string told(const char* thing, std::int64_t number) { return fmt::format("\nThe number of the {} is {}.\n", thing, number); }
std::string asked(const char* thing) { return fmt::format("\nQuestion: What is the number of the {0}?\nAnswer: The number of the {0} is", thing); }

bool has_digit(const std::string& piece) {
  return std::any_of(piece.begin(), piece.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool ends_sentence(std::string_view piece) {
  while (piece.ends_with(' ')) piece.remove_suffix(1);
  return !piece.empty() && std::string_view("\n.!?").find(piece.back()) != std::string_view::npos;
}

class CaseBuilder {
 public:
  CaseBuilder(const text::Tokenizer& tokenizer, const std::vector<text::Document>& documents) : tokenizer_(tokenizer) {
    for (const text::Document& d : documents) {
      const bool bos = tokenizer.adds_bos() && !d.ids.empty() && d.ids.front() == *tokenizer.bos();
      filler_.insert(filler_.end(), d.ids.begin() + (bos ? 1 : 0), d.ids.end());
    }
  }

  std::int64_t n_filler() const { return static_cast<std::int64_t>(filler_.size()); }

  /// One number of `thing`, or one of each. start: token of the filler to begin with.
  RetrievalCase build(std::int64_t length, std::optional<double> depth, std::size_t thing, std::int64_t start, Rng& rng) const {
    std::vector<std::size_t> things = {thing}, order = {0};
    std::vector<double> depths;
    if (depth) {
      depths = {*depth};
    } else {
      things = {0, 1, 2, 3}, order = things;
      depths.assign(kKeyDepths.begin(), kKeyDepths.end());
      for (std::size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[rng.below(i + 1)]);
    }
    std::vector<std::int64_t> numbers;
    while (numbers.size() < things.size()) {
      const auto number = static_cast<std::int64_t>(10000 + rng.below(90000));
      if (std::find(numbers.begin(), numbers.end(), number) == numbers.end()) numbers.push_back(number);
    }

    RetrievalCase out;
    out.depth = depth;
    Ids tail;
    for (const std::size_t i : order) out.answers.push_back(ask(kThings[things[i]], numbers[i], &tail));
    std::vector<Ids> sentences;
    std::size_t taken = tail.size() + (tokenizer_.adds_bos() ? 1 : 0);
    for (std::size_t i = 0; i < things.size(); ++i) {
      sentences.push_back(tokenizer_.encode(told(kThings[things[i]], numbers[i])));
      taken += sentences.back().size();
    }
    const auto used = static_cast<std::int64_t>(taken);
    if (2 * used > length)
      fail(ErrorKind::kUsage, "--retrieval", "is {}, but {} of that would be numbers and questions; expected lengths of at least {}", length,
           counted(used, "token"), 2 * used);

    const Ids filler = filler_from(start, length - used);
    Ids& ids = out.document.ids;
    if (tokenizer_.adds_bos()) ids.push_back(*tokenizer_.bos());
    std::vector<std::int64_t> told_at;
    std::ptrdiff_t from = 0;
    for (std::size_t i = 0; i < sentences.size(); ++i) {
      const std::ptrdiff_t cut = sentence_end(filler, depths[i], length / 20);
      ids.insert(ids.end(), filler.begin() + from, filler.begin() + cut);
      told_at.push_back(static_cast<std::int64_t>(ids.size()));
      ids.insert(ids.end(), sentences[i].begin(), sentences[i].end());
      from = cut;
    }
    ids.insert(ids.end(), filler.begin() + from, filler.end());
    const auto tail_at = static_cast<std::int64_t>(ids.size());
    ids.insert(ids.end(), tail.begin(), tail.end());
    for (std::size_t i = 0; i < order.size(); ++i) {
      RetrievalAnswer& answer = out.answers[i];
      answer.first += tail_at, answer.end += tail_at;
      answer.told_at = told_at[order[i]];
    }
    return out;
  }

 private:
  /// Appends question and answer. The answer is the tokens from the first digit on: a space in front of it, if a token of its own, is given.
  RetrievalAnswer ask(const char* thing, std::int64_t number, Ids* tail) const {
    const std::string question = (tail->empty() ? "" : ".") + asked(thing);
    const Ids bare = tokenizer_.encode(question), ids = tokenizer_.encode(fmt::format("{} {}", question, number));
    auto first = std::mismatch(bare.begin(), bare.end(), ids.begin(), ids.end()).second;
    while (first != ids.end() && !has_digit(tokenizer_.piece(*first))) ++first;
    CALIB_CHECK(first != ids.end());
    RetrievalAnswer out;
    out.first = static_cast<std::int64_t>(tail->size()) + (first - ids.begin());
    tail->insert(tail->end(), ids.begin(), ids.end());
    out.end = static_cast<std::int64_t>(tail->size());
    return out;
  }

  Ids filler_from(std::int64_t start, std::int64_t n) const {
    Ids out;
    for (std::int64_t i = 0; i < n; ++i) out.push_back(filler_[static_cast<std::size_t>((start + i) % n_filler())]);
    return out;
  }

  /// Tokens before the end that is next to `depth`, at most `reach` away.
  std::ptrdiff_t sentence_end(const Ids& filler, double depth, std::int64_t reach) const {
    const auto n = static_cast<std::int64_t>(filler.size()), target = static_cast<std::int64_t>(std::llround(depth * static_cast<double>(n)));
    for (std::int64_t away = 0; away <= reach; ++away)
      for (const std::int64_t cut : {target - away, target + away})
        if (cut > 0 && cut <= n && ends_sentence(tokenizer_.piece(filler[static_cast<std::size_t>(cut - 1)]))) return cut;
    return target;
  }

  const text::Tokenizer& tokenizer_;
  Ids filler_;
};

std::vector<std::int64_t> lengths_of(const EvalRetrieval& retrieval) {
  std::vector<std::int64_t> out;
  for (const RetrievalCell& cell : retrieval.cells)
    if (std::find(out.begin(), out.end(), cell.length) == out.end()) out.push_back(cell.length);
  return out;
}

bool says_something(const RetrievalSum& reference) { return 2 * reference.hits >= reference.n; }

}  // namespace

std::vector<RetrievalCase> retrieval_cases(const text::Tokenizer& tokenizer, const std::vector<text::Document>& documents, const std::vector<std::int64_t>& lengths,
                                           std::int64_t max_positions, std::uint64_t seed) {
  CALIB_CHECK(!lengths.empty());
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  if (max_positions > 0 && longest > max_positions) fail(ErrorKind::kUsage, "--retrieval", "is {}, but the model knows {} positions", longest, max_positions);
  const CaseBuilder builder(tokenizer, documents);
  if (builder.n_filler() < longest)
    fail(ErrorKind::kInfeasible, "--retrieval", "is {}, but the windows of --data hold {}; raise --num-samples, give more text or lower it", longest,
         counted(builder.n_filler(), "token"));

  std::vector<std::optional<double>> depths;
  for (const double depth : kPasskeyDepths) depths.insert(depths.end(), static_cast<std::size_t>(kPasskeysPerDepth), depth);
  depths.emplace_back();  // four numbers
  const auto n_cases = static_cast<std::int64_t>(lengths.size() * depths.size());
  const auto build = [&](std::int64_t length, std::size_t i, std::int64_t start) {
    Rng rng = Rng::for_item(seed, static_cast<std::uint64_t>(length), i);
    try {
      return builder.build(length, depths[i], i % kThings.size(), start, rng);
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kFormat) throw;
      fail(ErrorKind::kUnsupported, "--retrieval", "the model's vocabulary cannot write its sentences: {}", e.message());
    }
  };
  build(*std::min_element(lengths.begin(), lengths.end()), depths.size() - 1, 0);  // names what the text that needs most needs
  std::vector<RetrievalCase> out;
  for (const std::int64_t length : lengths)
    for (std::size_t i = 0; i < depths.size(); ++i) out.push_back(build(length, i, static_cast<std::int64_t>(out.size()) * builder.n_filler() / n_cases));
  return out;
}

void check_retrieval(const std::vector<RetrievalCase>& cases, const std::vector<Contender>& contenders) {
  std::size_t shortest = cases.front().document.ids.size();
  for (const RetrievalCase& c : cases) shortest = std::min(shortest, c.document.ids.size());
  const auto n = static_cast<std::int64_t>(shortest);
  for (const Contender& c : contenders)
    if (std::none_of(c.layers.begin(), c.layers.end(), [&](const LayerChange& layer) { return kvrt::blocks_out(layer.tiers, n) > 0; }))
      fail(ErrorKind::kInfeasible, "--retrieval", "is {}, all of which {} keeps exact (sinks {}, window {}); give greater lengths", n, to_valid_utf8(c.header.name),
           c.header.n_sinks, c.header.window);
}

std::vector<text::Document> documents_of(const std::vector<RetrievalCase>& cases) {
  std::vector<text::Document> out;
  for (const RetrievalCase& c : cases) out.push_back(c.document);
  return out;
}

RetrievalSum sum_hits(const EvalRetrieval& retrieval, std::optional<std::int64_t> length) {
  RetrievalSum out;
  for (const RetrievalCell& cell : retrieval.cells)
    if (!length || cell.length == *length) out.hits += cell.hits, out.n += cell.n;
  return out;
}

std::optional<bool> retrieval_passes(const EvalRetrieval& reference, const EvalRetrieval& contender) {
  std::int64_t lost = 0;
  bool judged = false;
  for (const std::int64_t length : lengths_of(reference)) {
    const RetrievalSum own = sum_hits(reference, length);
    if (!says_something(own)) continue;
    judged = true;
    lost += own.hits - sum_hits(contender, length).hits;
  }
  if (!judged) return std::nullopt;
  return lost <= kLostHits;
}

std::vector<std::string> retrieval_warnings(const EvalResult& result, const std::vector<RetrievalCase>& cases) {
  std::vector<std::string> out;
  bool judged = false;
  for (const std::int64_t length : lengths_of(*result.reference_retrieval)) {
    const RetrievalSum own = sum_hits(*result.reference_retrieval, length);
    judged = judged || says_something(own);
    if (!says_something(own))
      out.push_back(
          fmt::format("retrieval at {}: the model itself finds {} of {} numbers, so this length is not judged", counted(length, "token"), own.hits, own.n));
  }
  if (!judged) out.push_back("the retrieval test says nothing for this model");
  std::int64_t window = 0;
  for (const EvalContender& c : result.contenders) window = std::max(window, c.window);
  std::set<std::size_t> exact;
  for (const RetrievalCase& c : cases)
    if (std::any_of(c.answers.begin(), c.answers.end(), [&](const RetrievalAnswer& a) { return a.first - 1 - a.told_at < window; }))
      exact.insert(c.document.ids.size());
  if (!exact.empty())
    out.push_back(fmt::format("retrieval: at {} tokens some number lies within the newest {}, which a contender keeps exact", fmt::join(exact, ", "), window));
  for (const EvalContender& c : result.contenders)
    if (c.retrieval->pass == false) {
      const RetrievalSum own = sum_hits(*result.reference_retrieval), theirs = sum_hits(*c.retrieval);
      out.push_back(fmt::format("{} fails the retrieval test: {} of {} numbers, the reference {}", to_valid_utf8(c.name), theirs.hits, theirs.n, own.hits));
    }
  return out;
}

}  // namespace calib::sens

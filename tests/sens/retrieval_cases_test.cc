#include "libcalib/sens/retrieval_cases.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/tiny_models.h"

namespace calib::sens {
namespace {

/// A token a byte, but for pieces of two bytes: " 1" … " 9" where `digits_with_space`, pairs of digits where `digit_pairs`.
class ByteTokenizer final : public text::Tokenizer {
 public:
  bool with_bos = false, digits_with_space = false, digit_pairs = false;

  std::vector<text::TokenId> encode(std::string_view s, bool) const override {
    std::vector<text::TokenId> out;
    const auto digit = [&](std::size_t i) { return i < s.size() && s[i] >= '0' && s[i] <= '9'; };
    for (std::size_t i = 0; i < s.size(); ++i) {
      const bool pair = (digits_with_space && s[i] == ' ' && digit(i + 1)) || (digit_pairs && digit(i) && digit(i + 1));
      const int first = static_cast<unsigned char>(s[i]);
      out.push_back(pair ? 1000 + 256 * first + static_cast<unsigned char>(s[++i]) : first);
    }
    return out;
  }
  std::string piece(text::TokenId id) const override {
    if (id == kBos) return "<s>";
    return id < 1000 ? std::string(1, static_cast<char>(id)) : std::string{static_cast<char>((id - 1000) / 256), static_cast<char>((id - 1000) % 256)};
  }
  std::int64_t vocab_size() const override { return 1 << 17; }
  std::optional<text::TokenId> bos() const override { return kBos; }
  std::optional<text::TokenId> eos() const override { return {}; }
  bool adds_bos() const override { return with_bos; }

  std::string decode(const std::vector<text::TokenId>& ids, std::int64_t first, std::int64_t end) const {
    std::string out;
    for (std::int64_t i = first; i < end; ++i) out += piece(ids[static_cast<std::size_t>(i)]);
    return out;
  }
  static constexpr text::TokenId kBos = 500;
};

std::vector<text::Document> documents_of_text(const ByteTokenizer& tokenizer, const std::string& text, std::size_t seq_len = 1000) {
  std::vector<text::Document> out;
  for (std::size_t i = 0; i < text.size(); i += seq_len) {
    text::Document d;
    if (tokenizer.adds_bos()) d.ids.push_back(ByteTokenizer::kBos);
    for (const text::TokenId id : tokenizer.encode(text.substr(i, seq_len), false)) d.ids.push_back(id);
    out.push_back(std::move(d));
  }
  return out;
}

const std::vector<std::int64_t> kLengths = {1200, 1500};

std::vector<RetrievalCase> cases_of(const ByteTokenizer& tokenizer, std::uint64_t seed = 1, const std::vector<std::int64_t>& lengths = kLengths) {
  return retrieval_cases(tokenizer, documents_of_text(tokenizer, test::txt(20000)), lengths, 4096, seed);
}

/// 12345 of "The number of the red house is 12345."
std::string number_in(const std::string& sentence) { return sentence.substr(sentence.find(" is ") + 4, 5); }

// What a reader of the ids sees: exact lengths, one BOS, the number in its sentence, and the same number behind its question at the end.
TEST(RetrievalCases, TextsAreAsLongAsAskedAndEndInTheirAnswers) {
  for (int variant = 0; variant < 4; ++variant) {
    SCOPED_TRACE(variant);
    ByteTokenizer tokenizer;
    tokenizer.with_bos = variant == 1, tokenizer.digits_with_space = variant == 2, tokenizer.digit_pairs = variant == 3;
    const auto cases = cases_of(tokenizer);
    ASSERT_EQ(cases.size(), kLengths.size() * 7);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const RetrievalCase& c = cases[i];
      const auto& ids = c.document.ids;
      const std::int64_t length = kLengths[i / 7];
      ASSERT_EQ(static_cast<std::int64_t>(ids.size()), length) << i;
      EXPECT_EQ(std::count(ids.begin(), ids.end(), ByteTokenizer::kBos), tokenizer.with_bos ? 1 : 0);
      EXPECT_EQ(ids.front() == ByteTokenizer::kBos, tokenizer.with_bos);
      ASSERT_EQ(c.answers.size(), c.depth ? 1u : 4u);
      EXPECT_EQ(c.answers.back().end, length);
      std::set<std::string> numbers;
      for (const RetrievalAnswer& a : c.answers) {
        const std::string answer = tokenizer.decode(ids, a.first, a.end), sentence = tokenizer.decode(ids, a.told_at, std::min(length, a.told_at + 60));
        const std::string number = number_in(sentence), name = sentence.substr(1, sentence.find(" is ") - 1);
        EXPECT_EQ(answer, (variant == 2 ? " " : "") + number);
        numbers.insert(number);
        EXPECT_TRUE(sentence.starts_with("\nThe number of the ")) << sentence;
        EXPECT_NE(tokenizer.decode(ids, a.first - 60, a.first).find("Answer: " + name + " is"), std::string::npos) << name;
        EXPECT_EQ(a.end - a.first, variant == 3 ? 3 : 5);
        const std::string all = tokenizer.decode(ids, 0, length);
        EXPECT_EQ(all.find(number), static_cast<std::size_t>(all.find(sentence.substr(0, 40)) + sentence.find(number))) << "first told in its sentence";
        EXPECT_EQ(all.find(number, all.find(number, all.find(number) + 1) + 1), std::string::npos) << "told once, answered once";
      }
      EXPECT_EQ(numbers.size(), c.answers.size());
    }
  }
}

// Take the told sentences out, and what is left in front of the first question is the filler.
TEST(RetrievalCases, NumbersStandAtTheLineEndNextToTheirDepth) {
  const ByteTokenizer tokenizer;
  for (const RetrievalCase& c : cases_of(tokenizer)) {
    const auto length = static_cast<std::int64_t>(c.document.ids.size());
    std::string filler = tokenizer.decode(c.document.ids, 0, length);
    filler.resize(filler.find("\nQuestion: "));
    std::vector<std::int64_t> cuts;
    for (const RetrievalAnswer& a : c.answers) cuts.push_back(a.told_at);
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t i = cuts.size(); i-- > 0;)
      filler.erase(static_cast<std::size_t>(cuts[i]), filler.find('\n', static_cast<std::size_t>(cuts[i]) + 1) + 1 - static_cast<std::size_t>(cuts[i]));
    std::int64_t taken = 0;
    const std::string all = tokenizer.decode(c.document.ids, 0, length);
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      const auto cut = cuts[i] - taken, target = static_cast<std::int64_t>(std::llround((c.depth ? *c.depth : kKeyDepths[i]) * static_cast<double>(filler.size())));
      taken += static_cast<std::int64_t>(all.find('\n', static_cast<std::size_t>(cuts[i]) + 1)) + 1 - cuts[i];
      EXPECT_EQ(filler[static_cast<std::size_t>(cut - 1)], '\n');
      EXPECT_LE(std::abs(cut - target), length / 20);
      for (std::int64_t nearer = 0; nearer < std::abs(cut - target); ++nearer)
        for (const std::int64_t other : {target - nearer, target + nearer}) EXPECT_NE(filler[static_cast<std::size_t>(other - 1)], '\n');
    }
  }
}

TEST(RetrievalCases, WithoutLineEndsDepthsAreExact) {
  const ByteTokenizer tokenizer;
  const auto cases = retrieval_cases(tokenizer, documents_of_text(tokenizer, std::string(3000, 'x')), kLengths, 0, 1);
  for (const RetrievalCase& c : cases) {
    const auto& ids = c.document.ids;
    const auto filler = std::count(ids.begin(), ids.end(), 'x');  // its sentences have no x
    std::vector<std::int64_t> told;
    for (const RetrievalAnswer& a : c.answers) told.push_back(a.told_at);
    std::sort(told.begin(), told.end());
    for (std::size_t i = 0; i < told.size(); ++i) {
      const auto before = std::count(ids.begin(), ids.begin() + told[i], 'x');
      EXPECT_EQ(before, std::llround((c.depth ? *c.depth : kKeyDepths[i]) * static_cast<double>(filler)));
    }
  }
}

TEST(RetrievalCases, DependOnTheSeedAndHaveFillerOfTheirOwn) {
  const ByteTokenizer tokenizer;
  const auto a = cases_of(tokenizer, 1), b = cases_of(tokenizer, 1), other = cases_of(tokenizer, 2);
  std::set<std::vector<text::TokenId>> beginnings;
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].document.ids, b[i].document.ids);
    EXPECT_NE(a[i].document.ids, other[i].document.ids);
    beginnings.insert({a[i].document.ids.begin(), a[i].document.ids.begin() + 50});
  }
  EXPECT_EQ(beginnings.size(), a.size());
}

TEST(RetrievalCases, ImpossibleLengthsAreRefused) {
  const ByteTokenizer tokenizer;
  test::expect_error([&] { cases_of(tokenizer, 1, {1200, 4097}); }, ErrorKind::kUsage, {"--retrieval", "4097", "4096 positions"});
  test::expect_error([&] { cases_of(tokenizer, 1, {200, 1200}); }, ErrorKind::kUsage, {"--retrieval", "is 200", "at least"});
  const auto short_text = documents_of_text(tokenizer, test::txt(1400));
  test::expect_error([&] { retrieval_cases(tokenizer, short_text, kLengths, 0, 1); }, ErrorKind::kInfeasible, {"--retrieval", "is 1500", "1400 tokens"});
  EXPECT_EQ(retrieval_cases(tokenizer, short_text, {1200, 1400}, 0, 1).back().document.ids.size(), 1400u);  // fillers go round the end
}

TEST(RetrievalCases, WhatStaysExactIsRefused) {
  const auto cases = cases_of(ByteTokenizer{});
  Contender c;
  c.header.name = "wide", c.header.n_sinks = 4, c.header.window = 1200;
  c.layers.resize(2);
  for (LayerChange& layer : c.layers) layer.tiers = {4, 1200, 32, 0};
  test::expect_error([&] { check_retrieval(cases, {c}); }, ErrorKind::kInfeasible, {"--retrieval", "1200", "wide", "window 1200"});
  c.layers[1].tiers.window = 128;
  check_retrieval(cases, {c});
}

EvalRetrieval hits(std::vector<std::int64_t> by_length) {
  EvalRetrieval out;
  for (std::size_t i = 0; i < by_length.size(); ++i) {
    out.cells.push_back({static_cast<std::int64_t>(1000 * (i + 1)), 0.1, 6, std::min<std::int64_t>(6, by_length[i])});
    out.cells.push_back({static_cast<std::int64_t>(1000 * (i + 1)), {}, 4, std::max<std::int64_t>(0, by_length[i] - 6)});
  }
  return out;
}

TEST(RetrievalCases, OneLostHitPassesAndWeakLengthsAreNotJudged) {
  EXPECT_EQ(sum_hits(hits({10, 7})).hits, 17);
  EXPECT_EQ(sum_hits(hits({10, 7}), 2000).hits, 7);
  EXPECT_EQ(sum_hits(hits({10, 7}), 2000).n, 10);
  EXPECT_EQ(retrieval_passes(hits({10, 7}), hits({10, 7})), true);
  EXPECT_EQ(retrieval_passes(hits({10, 7}), hits({10, 6})), true);
  EXPECT_EQ(retrieval_passes(hits({10, 7}), hits({9, 6})), false);
  EXPECT_EQ(retrieval_passes(hits({10, 5}), hits({10, 3})), false);
  EXPECT_EQ(retrieval_passes(hits({10, 4}), hits({9, 0})), true);   // the reference itself finds less than half there
  EXPECT_EQ(retrieval_passes(hits({4, 4}), hits({10, 10})), std::nullopt);
}

TEST(RetrievalCases, WarningsSayWhatTheHitsDoNot) {
  EvalResult result;
  result.reference_retrieval = hits({4, 4});
  result.contenders.resize(1);
  result.contenders[0].name = "c";
  result.contenders[0].retrieval = hits({0, 0});
  const auto all = [&](const std::vector<RetrievalCase>& cases) { return fmt::format("{}", fmt::join(retrieval_warnings(result, cases), "\n")); };
  std::string text = all({});
  for (const char* part : {"at 1000 tokens: the model itself finds 4 of 10", "at 2000 tokens", "says nothing for this model"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_EQ(text.find("fails"), std::string::npos);
  result.reference_retrieval = hits({9, 4});
  result.contenders[0].retrieval->pass = false;
  text = all({});
  EXPECT_EQ(text.find("says nothing"), std::string::npos) << text;
  EXPECT_NE(text.find("c fails the retrieval test: 0 of 20 numbers, the reference 13"), std::string::npos) << text;
  // Row 999 chooses the answer's first token; a window of 100 holds tokens 900 … 999.
  RetrievalCase near;
  near.document.ids.resize(1005);
  near.answers = {{1000, 1005, 900}};
  result.contenders[0].window = 99;
  EXPECT_EQ(all({near}).find("newest"), std::string::npos);
  result.contenders[0].window = 100;
  EXPECT_NE(all({near}).find("at 1005 tokens some number lies within the newest 100"), std::string::npos);
}

}  // namespace
}  // namespace calib::sens

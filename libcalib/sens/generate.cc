#include "libcalib/sens/generate.h"

#include <algorithm>
#include <memory>

#include <c10/core/GradMode.h>

#include "libcalib/base/plural.h"
#include "libcalib/model/torch_block.h"
#include "libcalib/sens/joint_run.h"
#include "libcalib/sens/metrics.h"
#include "libcalib/sens/reply_metrics.h"
#include "libcalib/sens/sequence_cache.h"

namespace calib::sens {
namespace {

using Reply = std::vector<text::TokenId>;

/// A whole model in memory.
struct LoadedModel {
  explicit LoadedModel(const model::StreamingModel& m) : model(m), embedding(m.load_embedding()), head(m.load_head()) {
    for (std::int64_t l = 0; l < m.n_layers(); ++l) blocks.push_back(m.load_block(l));
  }
  const model::StreamingModel& model;
  std::unique_ptr<model::Embedding> embedding;
  std::unique_ptr<model::Head> head;
  std::vector<std::unique_ptr<model::Block>> blocks;
};

class Work {
 public:
  Work(const EvaluateProgressFn& report, std::int64_t total) : report_(report), total_(total) {}
  void advance(std::int64_t tokens) {
    done_ += tokens;
    if (report_) report_({done_, total_});
  }

 private:
  const EvaluateProgressFn& report_;
  std::int64_t done_ = 0, total_ = 0;
};

std::int64_t cache_bytes_per_prompt(const model::StreamingModel& model, const GenerateOptions& options) {
  std::int64_t bytes = 0;
  for (std::int64_t l = 0; l < model.n_layers(); ++l) bytes += 2 * std::int64_t{4} * model.layer(l).n_kv_heads * model.layer(l).head_dim;
  return bytes * (options.depth + options.n_tokens);
}

std::size_t prompts_together(const model::StreamingModel& model, std::size_t n_prompts, const GenerateOptions& options) {
  const std::int64_t fit = options.cache_memory_bytes / std::max<std::int64_t>(1, cache_bytes_per_prompt(model, options));
  return std::min(n_prompts, static_cast<std::size_t>(std::max<std::int64_t>(1, fit)));
}

/// Prompts of equal length, continued in step so that the weights are read once a token for all of them.
class Decoder {
 public:
  Decoder(const LoadedModel& loaded, const Contender* contender, const GenerateOptions& options, ThreadPool& pool, Work& work)
      : loaded_(loaded), contender_(contender), options_(options), pool_(pool), work_(work), name_(contender ? contender->header.name : "reference") {
    if (options.packed && contender)
      packed_ = std::make_unique<PackedCache>(loaded.model.identity(), *contender, options.depth + options.n_tokens, pool);
  }

  std::vector<Reply> run(const text::Document* prompts, std::size_t n) {
    std::vector<Reply> replies(n);
    std::vector<Caches> caches;
    std::vector<std::size_t> active;
    Reply next;
    for (std::size_t d = 0; d < n; ++d) {
      caches.push_back(empty_caches());
      const at::Tensor x = forward(loaded_.embedding->lookup(prompts[d].ids), {&caches[d]});
      active.push_back(d);
      next.push_back(greedy_choices(*loaded_.head, x.slice(0, x.size(0) - 1), name_).front());
      work_.advance(options_.depth);
    }
    for (std::int64_t t = 0; t < options_.n_tokens; ++t) {
      std::vector<std::size_t> going_on;
      Reply last;
      for (std::size_t i = 0; i < active.size(); ++i) {
        replies[active[i]].push_back(next[i]);
        if (options_.end_token == next[i]) caches[active[i]].clear();
        else going_on.push_back(active[i]), last.push_back(next[i]);
      }
      active = std::move(going_on);
      work_.advance(static_cast<std::int64_t>(n));
      if (active.empty() || t + 1 == options_.n_tokens) continue;
      std::vector<Caches*> rows;
      for (const std::size_t d : active) rows.push_back(&caches[d]);
      next = greedy_choices(*loaded_.head, forward(loaded_.embedding->lookup(last), rows), name_);
    }
    return replies;
  }

 private:
  using Caches = std::vector<std::unique_ptr<SequenceCache>>;  // by layer

  Caches empty_caches() {
    const std::int64_t capacity = options_.depth + options_.n_tokens;
    Caches out;
    for (std::size_t l = 0; l < loaded_.blocks.size(); ++l)
      out.push_back(packed_ ? make_packed_sequence(*packed_, l, capacity)
                            : make_sequence_cache(contender_ ? &contender_->layers[l] : nullptr, capacity, options_.query_tile, pool_));
    return out;
  }

  /// x: one sequence's next T rows, or the next row of each of several.
  at::Tensor forward(at::Tensor x, const std::vector<Caches*>& sequences) {
    const auto n = static_cast<std::int64_t>(sequences.size());
    const std::int64_t rows = x.size(0) / n;
    for (std::size_t l = 0; l < loaded_.blocks.size(); ++l) {
      const model::Block& block = *loaded_.blocks[l];
      const model::Projected p = block.project(x);
      std::vector<at::Tensor> o;
      for (std::int64_t s = 0; s < n; ++s) {
        const auto own = [&](const at::Tensor& y) { return y.slice(0, s * rows, (s + 1) * rows); };
        o.push_back((*sequences[static_cast<std::size_t>(s)])[l]->extend(block, {own(p.q_pre), own(p.k_pre), own(p.v)}));
      }
      x = block.finish(x, at::cat(o).to(x.options()));
    }
    return x;
  }

  const LoadedModel& loaded_;
  const Contender* contender_;
  const GenerateOptions& options_;
  ThreadPool& pool_;
  Work& work_;
  std::string name_;
  std::unique_ptr<PackedCache> packed_;
};

std::vector<Reply> replies_of(const LoadedModel& loaded, const std::vector<text::Document>& prompts, const Contender* contender, const GenerateOptions& options,
                              ThreadPool& pool, Work& work) {
  const std::size_t together = prompts_together(loaded.model, prompts.size(), options);
  Decoder decoder(loaded, contender, options, pool, work);
  std::vector<Reply> replies;
  for (std::size_t d = 0; d < prompts.size(); d += together)
    for (Reply& r : decoder.run(&prompts[d], std::min(together, prompts.size() - d))) replies.push_back(std::move(r));
  return replies;
}

/// Rows that chose a reply's tokens: the reference reading prompt and reply against the contender doing so.
std::vector<KldRow> reply_rows(const LoadedModel& loaded, const std::vector<text::Document>& prompts, const std::vector<Reply>& replies,
                               const Contender& contender, const GenerateOptions& options, ThreadPool& pool, Work& work) {
  std::unique_ptr<PackedCache> packed;
  if (options.packed) packed = std::make_unique<PackedCache>(loaded.model.identity(), contender, options.depth + options.n_tokens, pool);
  std::vector<KldRow> rows;
  for (std::size_t d = 0; d < prompts.size(); ++d) {
    std::vector<text::TokenId> ids = prompts[d].ids;
    ids.insert(ids.end(), replies[d].begin(), replies[d].end());
    at::Tensor reference = loaded.embedding->lookup(ids), changed = reference;
    for (std::size_t l = 0; l < loaded.blocks.size(); ++l) {
      reference = run_block(*loaded.blocks[l], reference, nullptr, options.query_tile, pool);
      changed = packed ? run_block_packed(*loaded.blocks[l], changed, l, *packed)
                       : run_block(*loaded.blocks[l], changed, &contender.layers[l], options.query_tile, pool);
    }
    const auto compared = compare_final_states(*loaded.head, reference, {changed}, {contender.header.name}, ids, static_cast<std::int32_t>(d),
                                               options.depth - 1, static_cast<std::int64_t>(ids.size()) - 1, pool);
    rows.insert(rows.end(), compared[0].begin(), compared[0].end());
    work.advance(2 * (options.depth + options.n_tokens));
  }
  return rows;
}

EvalReplies describe(const std::vector<Reply>& replies, const std::optional<text::TokenId>& end_token) {
  EvalReplies out;
  std::vector<double> suffix;
  double at_cap = 0;
  for (const Reply& r : replies) {
    out.document_rep_4.push_back(repeated_4grams(r));
    suffix.push_back(static_cast<double>(longest_repeated_suffix(r)));
    at_cap += end_token && r.back() == *end_token ? 0 : 1;
  }
  out.rep_4 = over_documents(out.document_rep_4);
  out.repeated_suffix = over_documents(suffix);
  out.hit_cap = at_cap / static_cast<double>(replies.size());
  return out;
}

EvalGeneration compare(const std::vector<Reply>& reference, const EvalReplies& reference_replies, const std::vector<Reply>& replies,
                       const std::vector<KldRow>& rows, const std::optional<text::TokenId>& end_token) {
  EvalGeneration out;
  out.replies = describe(replies, end_token);
  out.document_row_kld = document_klds(rows);
  std::vector<double> agreeing;
  for (std::size_t d = 0; d < replies.size(); ++d) {
    agreeing.push_back(static_cast<double>(agreeing_prefix(reference[d], replies[d])) / static_cast<double>(reference[d].size()));
    const bool loops = out.replies.document_rep_4[d] > reference_replies.document_rep_4[d] + kCatastrophicRep4;
    out.n_catastrophic += loops || out.document_row_kld[d] > kCatastrophicKld ? 1 : 0;
  }
  out.agreeing_prefix = over_documents(agreeing);
  out.row_kld = over_documents(out.document_row_kld);
  const Interval share = wilson_interval(out.n_catastrophic, static_cast<std::int64_t>(replies.size()));
  out.catastrophic_low = share.low;
  out.catastrophic_high = share.high;
  return out;
}

std::vector<text::Document> prompts_of(const std::vector<text::Document>& documents, std::int64_t depth) {
  std::vector<text::Document> prompts;
  for (const text::Document& d : documents) {
    if (static_cast<std::int64_t>(d.ids.size()) < depth) continue;
    prompts.push_back(d);
    prompts.back().ids.resize(static_cast<std::size_t>(depth));
  }
  return prompts;
}

}  // namespace

std::vector<std::vector<text::TokenId>> greedy_replies(const model::StreamingModel& model, const std::vector<text::Document>& prompts,
                                                       const Contender* contender, const GenerateOptions& options, ThreadPool& pool,
                                                       const EvaluateProgressFn& progress) {
  const c10::NoGradGuard no_grad;
  for (const text::Document& d : prompts) CALIB_CHECK(static_cast<std::int64_t>(d.ids.size()) == options.depth);
  Work work(progress, static_cast<std::int64_t>(prompts.size()) * (options.depth + options.n_tokens));
  return replies_of(LoadedModel(model), prompts, contender, options, pool, work);
}

void check_generate(const model::StreamingModel& model, const std::vector<text::Document>& documents, const std::vector<Contender>& contenders,
                    const GenerateOptions& options) {
  const std::int64_t positions = model.identity().max_positions;
  if (positions > 0 && options.depth + options.n_tokens > positions)
    fail(ErrorKind::kUsage, "--generate", "{} after a prompt of {} pass the model's {} positions; lower --generate or --depth",
         counted(options.n_tokens, "token"), options.depth, positions);
  for (const Contender& c : contenders)
    for (const LayerChange& layer : c.layers)
      if (const std::string what = only_in_place(layer); !what.empty())
        fail(ErrorKind::kUnsupported, "--generate", "{}: {} is not offered where replies are written; leave one of them out", c.header.name, what);
  for (const Contender& c : contenders)
    if (options.depth <= c.header.n_sinks)
      fail(ErrorKind::kInfeasible, "--depth", "is {}, not past the {} of {}", options.depth, counted(c.header.n_sinks, "sink"), c.header.name);
  if (std::none_of(documents.begin(), documents.end(), [&](const text::Document& d) { return static_cast<std::int64_t>(d.ids.size()) >= options.depth; }))
    fail(ErrorKind::kInfeasible, "--depth", "is {}, but no document has as many tokens; give longer text or lower it", options.depth);
}

void generate(const model::StreamingModel& model, const std::vector<text::Document>& documents, const std::vector<Contender>& contenders,
              const GenerateOptions& options, ThreadPool& pool, EvalResult* result, const LogSink& log, const EvaluateProgressFn& progress) {
  const c10::NoGradGuard no_grad;
  CALIB_CHECK(options.n_tokens > 0 && contenders.size() == result->contenders.size());
  check_generate(model, documents, contenders, options);
  const std::vector<text::Document> prompts = prompts_of(documents, options.depth);
  if (prompts.size() < documents.size())
    warn(result, log, fmt::format("{} of {} are shorter than the depth of {} and are not continued", documents.size() - prompts.size(),
                     counted(documents.size(), "document"), options.depth));
  if (options.n_tokens < kLoopsShowTokens)
    warn(result, log, fmt::format("replies of at most {}: loops show from about {} on", counted(options.n_tokens, "token"), kLoopsShowTokens));

  const LoadedModel loaded(model);
  const auto n = static_cast<std::int64_t>(prompts.size()), runs = static_cast<std::int64_t>(contenders.size());
  Work work(progress, n * (options.depth + options.n_tokens) * (1 + 3 * runs));
  const std::vector<Reply> reference = replies_of(loaded, prompts, nullptr, options, pool, work);
  result->generation = GenerationSettings{n, options.depth, options.n_tokens, options.end_token};
  result->reference_replies = describe(reference, options.end_token);
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    const std::vector<Reply> replies = replies_of(loaded, prompts, &contenders[c], options, pool, work);
    const std::vector<KldRow> rows = reply_rows(loaded, prompts, replies, contenders[c], options, pool, work);
    EvalGeneration& out = result->contenders[c].generation.emplace(compare(reference, *result->reference_replies, replies, rows, options.end_token));
    if (out.n_catastrophic > 0)
      warn(result, log,
           fmt::format("{}: {} of {} greedy replies loop or leave the reference (95 % interval of the share {:.3f} to {:.3f})", contenders[c].header.name,
                       out.n_catastrophic, replies.size(), out.catastrophic_low, out.catastrophic_high));
  }
}

std::int64_t generate_bytes(const model::StreamingModel& model, std::size_t n_prompts, const GenerateOptions& options) {
  return model.n_layers() * model.block_bytes() + model.head_bytes() +
         static_cast<std::int64_t>(prompts_together(model, n_prompts, options)) * cache_bytes_per_prompt(model, options);
}

}  // namespace calib::sens

#include "libcalib/sens/evaluate.h"

#include <algorithm>
#include <memory>

#include <c10/core/GradMode.h>

#include "libcalib/base/plural.h"
#include "libcalib/model/streaming_runner.h"
#include "libcalib/sens/attention_objective.h"
#include "libcalib/sens/joint_run.h"

namespace calib::sens {
namespace {

constexpr double kIndistinguishable = 3, kControlAboveFloor = 10;

/// Slots of the walk: the reference, its second tiling, the negative control, then the contenders.
enum Slot : std::int64_t { kReference, kFloor, kControl, kFirstContender };

struct RowRange {
  std::int64_t first = 0, end = 0;
};

RowRange scored_rows(std::int64_t n_tokens, std::int64_t n_sinks, bool second_half) {
  return {std::max(n_sinks, second_half ? n_tokens / 2 : 0), n_tokens - 1};
}

class Walk {
 public:
  Walk(const model::StreamingModel& model, const std::vector<text::Document>& documents, const std::vector<const Contender*>& runs,
       const EvaluateOptions& options, ThreadPool& pool, const EvaluateProgressFn& progress)
      : model_(model), documents_(documents), runs_(runs), options_(options), pool_(pool),
        walk_(model, documents, walk_runs(runs, options), options.hidden_memory_bytes, pool, progress) {}

  void through_blocks() {
    walk_.through_blocks([this](const model::Block& block, std::size_t layer, std::size_t document) {
      if (options_.attention) compare_attention(block, layer, document);
    });
  }

  /// [run - 1][row] against the reference.
  std::vector<std::vector<KldRow>> compare(const std::vector<std::string>& names, std::int64_t n_sinks) {
    const auto head = model_.load_head();
    std::vector<std::vector<KldRow>> out(runs_.size() - 1);
    for (std::size_t d = 0; d < documents_.size(); ++d) {
      const auto n = static_cast<std::int64_t>(documents_[d].ids.size());
      const RowRange range = scored_rows(n, n_sinks, options_.second_half);
      if (range.first < range.end) {
        std::vector<at::Tensor> finals;
        for (std::size_t r = 1; r < runs_.size(); ++r) finals.push_back(walk_.states(r, d));
        auto rows = compare_final_states(*head, walk_.states(kReference, d), finals, names, documents_[d].ids, static_cast<std::int32_t>(d), range.first,
                                         range.end, pool_);
        for (std::size_t r = 0; r < rows.size(); ++r) out[r].insert(out[r].end(), rows[r].begin(), rows[r].end());
      }
      walk_.advance(n * static_cast<std::int64_t>(runs_.size()));
    }
    return out;
  }

  /// Of one contender. Requires: options.attention, through_blocks() done.
  EvalAttention attention(std::size_t contender) const {
    EvalAttention out;
    std::vector<double> kl, e_out, e_mass;
    const auto n_layers = static_cast<std::size_t>(model_.n_layers());
    std::vector<AttentionLoss> layers(n_layers);
    for (std::size_t d = 0; d < documents_.size(); ++d) {
      double document[3] = {};
      for (std::size_t l = 0; l < n_layers; ++l) {
        const AttentionLoss& x = losses_[(contender * documents_.size() + d) * n_layers + l];
        document[0] += x.mean_kl(), document[1] += x.match.e_out(), document[2] += x.match.e_mass();
        layers[l] += x;
      }
      const auto n = static_cast<double>(n_layers);
      kl.push_back(document[0] / n), e_out.push_back(document[1] / n), e_mass.push_back(document[2] / n);
    }
    out.kl = over_documents(kl), out.e_out = over_documents(e_out), out.e_mass = over_documents(e_mass);
    for (const AttentionLoss& x : layers)
      out.layer_kl.push_back(x.mean_kl()), out.layer_e_out.push_back(x.match.e_out()), out.layer_e_mass.push_back(x.match.e_mass());
    return out;
  }

 private:
  static std::vector<WalkRun> walk_runs(const std::vector<const Contender*>& runs, const EvaluateOptions& options) {
    std::vector<WalkRun> out;
    for (std::size_t r = 0; r < runs.size(); ++r)
      out.push_back({runs[r], r == kFloor ? options.floor_query_tile : options.query_tile, options.packed && r >= kFirstContender});
    return out;
  }

  /// Before the layer's states are replaced: the reference's queries over every contender's cache of the reference's keys and values.
  void compare_attention(const model::Block& block, std::size_t l, std::size_t d) {
    const auto n_layers = static_cast<std::size_t>(model_.n_layers());
    const model::Projected p = block.project(walk_.states(kReference, d));
    const at::Tensor q = block.rotate(p.q_pre), k = block.rotate(p.k_pre);
    losses_.resize((runs_.size() - kFirstContender) * documents_.size() * n_layers);
    for (std::size_t c = 0; c + kFirstContender < runs_.size(); ++c) {
      const LayerChange& change = runs_[c + kFirstContender]->layers[l];
      const ChangedCache cache = change_cache(block, p.k_pre, k, p.v, change, pool_);
      const SampledPositions sampled = sample_positions(options_.seed, d, static_cast<std::uint64_t>(l), q.size(0), change.tiers.n_sinks, options_.attention_rows);
      losses_[(c * documents_.size() + d) * n_layers + l] =
          attention_loss(q, k, p.v, {cache.k_coded, cache.v_coded, cache.k_exact, cache.v_exact, change.tiers}, block.geometry(), sampled);
    }
  }

  const model::StreamingModel& model_;
  const std::vector<text::Document>& documents_;
  const std::vector<const Contender*>& runs_;
  const EvaluateOptions& options_;
  ThreadPool& pool_;
  JointWalk walk_;
  std::vector<AttentionLoss> losses_;  ///< [contender, document, layer]
};

EvalContender measured(const EvalContender& header, const std::vector<KldRow>& rows) {
  EvalContender out = header;
  out.total = summarise_kld(rows);
  out.document_kld = document_klds(rows);
  out.buckets = summarise_buckets(rows);
  out.kld_slope = kld_slope(rows, trend_start(out.n_sinks, out.window));
  return out;
}

}  // namespace

void evaluate(const model::StreamingModel& model, const std::vector<text::Document>& documents, const std::vector<Contender>& contenders,
              const EvaluateOptions& options, ThreadPool& pool, EvalResult* result, const LogSink& log, const EvaluateProgressFn& progress) {
  if (!model.has_head())
    fail(ErrorKind::kMismatch, model.identity().name, "has no lm_head.weight: next-token distributions cannot be compared");
  std::int64_t n_sinks = 0, longest = 0, n_rows = 0;
  for (const Contender& c : contenders) {
    CALIB_CHECK(c.layers.size() == static_cast<std::size_t>(model.n_layers()));
    n_sinks = std::max(n_sinks, c.header.n_sinks);
  }
  for (const text::Document& d : documents) {
    const auto n = static_cast<std::int64_t>(d.ids.size());
    const RowRange range = scored_rows(n, n_sinks, options.second_half);
    longest = std::max(longest, n);
    n_rows += std::max<std::int64_t>(0, range.end - range.first);
    if (range.first >= range.end)
      warn(result, log, fmt::format("a document of {} has no row past the {} and is not scored", counted(n, "token"), counted(n_sinks, "sink")));
  }
  if (n_rows == 0) fail(ErrorKind::kInfeasible, "--data", "no document is longer than the {} and one scored row", counted(n_sinks, "sink"));

  const Contender control = negative_control(model.identity());
  std::vector<const Contender*> runs = {nullptr, nullptr, &control};
  std::vector<std::string> names = {"noise floor", control.header.name};
  for (const Contender& c : contenders) {
    runs.push_back(&c);
    names.push_back(c.header.name);
  }
  Walk walk(model, documents, runs, options, pool, progress);
  walk.through_blocks();
  const std::vector<std::vector<KldRow>> rows = walk.compare(names, n_sinks);

  result->settings.seq_len = longest;
  result->settings.n_documents = static_cast<std::int64_t>(documents.size());
  result->settings.n_rows = n_rows;
  result->settings.second_half = options.second_half;
  result->settings.backend = options.packed ? "kvrt" : "fake";
  result->noise_floor = summarise_kld(rows[kFloor - 1]);
  result->negative_control = measured(control.header, rows[kControl - 1]);
  const double floor = result->noise_floor.kld.mean, negative = result->negative_control->total.kld.mean;
  if (!(negative > kControlAboveFloor * floor))
    fail(ErrorKind::kInternal, "negative control",
         "mean KLD of int2 keys is {:.3g}, not above {} times the noise floor {:.3g}: quantisation is not being applied, or the model does not use its keys",
         negative, kControlAboveFloor, floor);
  if (result->noise_floor.n_documents < 8)
    warn(result, log, fmt::format("only {} scored: standard errors are rough", counted(result->noise_floor.n_documents, "document")));
  result->contenders.clear();
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    EvalContender e = measured(contenders[c].header, rows[c + kFirstContender - 1]);
    if (options.attention) e.attention = walk.attention(c);
    e.length_limit = length_limit(e.buckets);
    e.indistinguishable = e.total.kld.mean < kIndistinguishable * floor;
    if (!e.indistinguishable) e.flags = length_flags(e.kld_slope, e.buckets, trend_start(e.n_sinks, e.window));
    if (options.contender_warnings) {
      if (e.total.kld.mean > negative)
        warn(result, log, fmt::format("{} loses more ({:.3g}) than the negative control ({:.3g})", e.name, e.total.kld.mean, negative));
      for (std::string& text : length_warnings(e)) warn(result, log, std::move(text));
    }
    result->contenders.push_back(std::move(e));
  }
}

EvaluateEstimate estimate_walk(const model::StreamingModel& model, const std::vector<text::Document>& documents, std::size_t n_runs,
                               const EvaluateOptions& options) {
  std::int64_t tokens = 0, longest = 0;
  for (const text::Document& d : documents) {
    tokens += static_cast<std::int64_t>(d.ids.size());
    longest = std::max(longest, static_cast<std::int64_t>(d.ids.size()));
  }
  const std::int64_t hidden = tokens * static_cast<std::int64_t>(n_runs) * model.hidden_bytes_per_token();
  EvaluateEstimate out;
  out.hidden_memory_bytes = std::min(hidden, options.hidden_memory_bytes);
  out.hidden_spill_bytes = hidden - out.hidden_memory_bytes;
  const LayerGeometry& layer = model.layer(0);
  const std::int64_t blocks = longest * (4 * model.hidden_bytes_per_token() + 3 * model.intermediate_size() * 4 +
                                         (4 * layer.n_q_heads + 8 * layer.n_kv_heads) * layer.head_dim * 4) +
                              3 * options.query_tile * longest * layer.n_q_heads * 4;
  const std::int64_t vocab = model.identity().vocab_size;
  const std::int64_t head = model.head_bytes() + 6 * model::logit_tile_rows(vocab) * vocab * 4 +
                            static_cast<std::int64_t>(n_runs) * longest * model.hidden_bytes_per_token();
  out.working_bytes = std::max(blocks + model.block_bytes(), head);
  return out;
}

EvaluateEstimate estimate_evaluate(const model::StreamingModel& model, const std::vector<text::Document>& documents, std::size_t n_contenders,
                                   const EvaluateOptions& options) {
  return estimate_walk(model, documents, n_contenders + kFirstContender, options);
}

}  // namespace calib::sens

#include "libcalib/sens/sweep.h"

#include <algorithm>

#include <c10/core/GradMode.h>

#include "libcalib/base/plural.h"
#include "libcalib/sens/fisher_walk.h"
#include "libcalib/sens/isolated.h"
#include "libcalib/sens/joint_run.h"
#include "libcalib/sens/layer_scorer.h"

namespace calib::sens {
namespace {

bool wants_isolated(const SweepOptions& options) { return wants(options, "logit_kl") || wants(options, "lookahead"); }

bool wants_fisher(const SweepOptions& options) {
  return wants(options, "fisher_softmax") || wants(options, "fisher_vec") || wants(options, "fisher") || wants(options, "fisher_dir");
}

std::int64_t longest(const std::vector<text::Document>& documents) {
  std::size_t n = 0;
  for (const text::Document& d : documents) n = std::max(n, d.ids.size());
  return static_cast<std::int64_t>(n);
}

class Sweep {
 public:
  Sweep(const model::StreamingModel& model, const std::vector<text::Document>& documents, const SweepOptions& options,
        const ParamsProvider& params, ThreadPool& pool, SensResult* result, const LogSink& log, const SweepProgressFn& progress)
      : model_(model), documents_(documents), options_(options), params_(params), pool_(pool), result_(result), log_(log), progress_(progress) {
    settings_.n_sinks = options.n_sinks;
    settings_.windows.clear(), settings_.salient_fractions.clear();
    for (const std::int64_t window : options.windows)
      for (const double fraction : options.salient_fractions) settings_.windows.push_back(window), settings_.salient_fractions.push_back(fraction);
    settings_.rows_per_document = options.rows_per_document;
    settings_.seed = options.seed;
    settings_.fisher = wants_fisher(options);
    settings_.fisher_softmax = wants(options, "fisher_softmax");
    settings_.attn_kl = wants(options, "attn_kl");
    settings_.attn_out = wants(options, "attn_out");
    for (const text::Document& d : documents) n_tokens_ += static_cast<std::int64_t>(d.ids.size());
  }

  void run() {
    prepare_tables(settings_, longest(documents_), result_);
    const at::TensorOptions options = model::tensor_options(model_.device(), model_.dtype());
    const std::int64_t n_layers = model_.n_layers(), hidden = model_.identity().hidden_size;
    const bool forward_scores = settings_.attn_kl || settings_.attn_out, isolated = wants_isolated(options_);
    const std::int64_t n_slots = settings_.fisher || isolated ? n_layers + 1 : 1;
    DocumentStates states(documents_, n_slots, hidden, options, options_.hidden_memory_bytes);
    walk_forward(states, n_slots > 1, forward_scores && !settings_.fisher, isolated);
    if (settings_.fisher) {
      DocumentStates gradients(documents_, options_.n_draws, hidden, options, options_.hidden_memory_bytes);
      seed_gradients(states, gradients);
      walk_backward(states, gradients);
    }
    for (std::size_t u = 0; u < result_->units.size(); ++u)
      for (const UnitCandidate& c : unit_candidates(*result_, u, params_)) store_params(c, u, result_);
    if (n_alternatives_ > 0)
      log_.note(fmt::format("codebooks of 2 bits: Q-Norm loses less attention in {} of {} cases and is kept there", n_alternatives_kept_, n_alternatives_));
    if (isolated) score_isolated(model_, documents_, states, options_, {}, params_, pool_, result_, progress_);
    warn_of_few_documents();
    drop_unasked();
  }

  void run_isolated(const std::vector<std::uint8_t>& cells) {
    result_->n_buckets = n_position_buckets(longest(documents_));
    DocumentStates states(documents_, model_.n_layers() + 1, model_.identity().hidden_size, model::tensor_options(model_.device(), model_.dtype()),
                          options_.hidden_memory_bytes);
    walk_forward(states, true, false, true);
    score_isolated(model_, documents_, states, options_, cells, params_, pool_, result_, progress_);
    warn_of_few_documents();
  }

 private:
  void warn_of_few_documents() const {
    if (documents_.size() < static_cast<std::size_t>(Bootstrap::kMinDocuments))
      log_.warning(fmt::format("only {}: standard errors come from blocks of 256 rows", counted(documents_.size(), "document")));
  }

  void report(const char* phase, std::int64_t done, std::int64_t total) const {
    if (progress_) progress_({phase, done, total});
  }

  // The units of a layer, if it is scored.
  bool units_of(std::int64_t l, std::size_t* key_unit, std::size_t* value_unit) const {
    const int index = model_.layer(l).index;
    bool found = false;
    for (std::size_t u = 0; u < result_->units.size(); ++u) {
      if (result_->units[u].layer != index) continue;
      (result_->units[u].side == Side::kK ? *key_unit : *value_unit) = u;
      found = true;
    }
    return found;
  }

  std::unique_ptr<LayerScorer> make_scorer(const model::Block& block, std::size_t key_unit, std::size_t value_unit) const {
    std::vector<UnitCandidate> keys = unit_candidates(*result_, key_unit, params_), values = unit_candidates(*result_, value_unit, params_);
    if (options_.judge_codebooks && (settings_.attn_kl || settings_.attn_out))
      for (std::vector<UnitCandidate>* side : {&keys, &values}) add_qnorm_alternatives(*side);
    return std::make_unique<LayerScorer>(block, std::move(keys), std::move(values), settings_, pool_, salient_tier_of(*result_, block.geometry().index));
  }

  void finish(LayerScorer& scorer, std::size_t key_unit, std::size_t value_unit) {
    scorer.finish(key_unit, value_unit, result_);
    n_alternatives_ += scorer.n_alternatives();
    n_alternatives_kept_ += scorer.n_alternatives_kept();
  }

  // `tiled`: attention in the tiles of run_block(), so that isolated runs meet no other rounding than their own.
  void walk_forward(DocumentStates& states, bool keep_all, bool score, bool tiled) {
    const c10::NoGradGuard no_grad;
    const auto embedding = model_.load_embedding();
    for (std::size_t d = 0; d < documents_.size(); ++d) states.put(0, d, embedding->lookup(documents_[d].ids));
    const std::int64_t n_layers = model_.n_layers();
    for (std::int64_t l = 0; l < n_layers; ++l) {
      const auto block = model_.load_block(l);
      std::size_t key_unit = 0, value_unit = 0;
      std::unique_ptr<LayerScorer> scorer;
      if (score && units_of(l, &key_unit, &value_unit)) scorer = make_scorer(*block, key_unit, value_unit);
      for (std::size_t d = 0; d < documents_.size(); ++d) {
        const at::Tensor x = states.get(keep_all ? l : 0, d);
        at::Tensor y;
        if (tiled) y = run_block(*block, x, nullptr, kQueryTile, pool_);
        if (scorer || !tiled) {
          const model::Projected p = block->project(x);
          const at::Tensor q = block->rotate(p.q_pre), k = block->rotate(p.k_pre);
          if (scorer)
            scorer->add_document(static_cast<std::int32_t>(d), {q.to(at::kFloat), p.k_pre.to(at::kFloat), k.to(at::kFloat), p.v.to(at::kFloat)}, nullptr);
          if (!tiled) y = block->finish(x, block->attend(q, k, p.v));
        }
        check_finite(y, l, d);
        states.put(keep_all ? l + 1 : 0, d, y);
        report("forward", l * static_cast<std::int64_t>(documents_.size()) + static_cast<std::int64_t>(d) + 1,
               n_layers * static_cast<std::int64_t>(documents_.size()));
      }
      if (scorer) finish(*scorer, key_unit, value_unit);
    }
  }

  void check_finite(const at::Tensor& y, std::int64_t l, std::size_t d) const {
    if (!at::isfinite(y.sum()).item<bool>())
      fail(ErrorKind::kNumeric, model_.identity().name, "non-finite hidden state leaves layer {} in document {}", l, d);
  }

  void seed_gradients(const DocumentStates& states, DocumentStates& gradients) {
    const auto head = model_.load_head();
    for (std::size_t d = 0; d < documents_.size(); ++d) {
      const auto g = sampled_label_gradients(*head, states.get(model_.n_layers(), d), settings_.n_sinks, options_.n_draws, options_.seed, d, pool_);
      for (int r = 0; r < options_.n_draws; ++r) gradients.put(r, d, g.d_hidden[static_cast<std::size_t>(r)]);
      report("labels", static_cast<std::int64_t>(d) + 1, static_cast<std::int64_t>(documents_.size()));
    }
  }

  void walk_backward(const DocumentStates& states, DocumentStates& gradients) {
    const std::int64_t n_layers = model_.n_layers();
    std::int64_t lowest = n_layers;
    std::size_t key_unit = 0, value_unit = 0;
    for (std::int64_t l = n_layers - 1; l >= 0; --l)
      if (units_of(l, &key_unit, &value_unit)) lowest = l;
    const auto n_documents = static_cast<std::int64_t>(documents_.size());
    for (std::int64_t l = n_layers - 1; l >= lowest; --l) {
      const auto block = model_.load_block(l);
      std::unique_ptr<LayerScorer> scorer;
      if (units_of(l, &key_unit, &value_unit)) scorer = make_scorer(*block, key_unit, value_unit);
      for (std::size_t d = 0; d < documents_.size(); ++d) {
        BlockGraph graph(*block, states.get(l, d));
        std::vector<at::Tensor> d_y;
        for (int r = 0; r < options_.n_draws; ++r) d_y.push_back(gradients.get(r, d));
        const AttentionGradients g = graph.backward(d_y, scorer ? scorer->key_classes() : std::vector<kvrt::Tiers>{},
                                                    scorer ? scorer->value_classes() : std::vector<kvrt::Tiers>{});
        if (scorer) scorer->add_document(static_cast<std::int32_t>(d), graph.attention(), &g);
        for (int r = 0; r < options_.n_draws; ++r) gradients.put(r, d, d_y[static_cast<std::size_t>(r)]);
        report("backward", (n_layers - 1 - l) * n_documents + static_cast<std::int64_t>(d) + 1, (n_layers - lowest) * n_documents);
      }
      if (scorer) finish(*scorer, key_unit, value_unit);
    }
  }

  // fisher, fisher_vec and what scales it come from one pass; only what was asked for is kept.
  void drop_unasked() {
    for (const char* metric : {"fisher_vec", "fisher", "fisher_dir"})
      if (!wants(options_, metric)) result_->scores.erase(metric);
  }

  const model::StreamingModel& model_;
  const std::vector<text::Document>& documents_;
  const SweepOptions& options_;
  const ParamsProvider& params_;
  ThreadPool& pool_;
  SensResult* result_;
  const LogSink& log_;
  const SweepProgressFn& progress_;
  ScoreSettings settings_;
  std::int64_t n_tokens_ = 0;
  std::size_t n_alternatives_ = 0, n_alternatives_kept_ = 0;
};

constexpr double kMixedPass = 1.2;  ///< forward passes of one with a changed cache

/// Share of a forward pass that runs on from a unit's layer.
double share_above(const SensResult& grid, std::size_t unit) {
  const auto n_layers = static_cast<double>(grid.model.layers.size());
  return (n_layers - static_cast<double>(layer_position(grid.model, grid.units[unit].layer))) / n_layers;
}

void check_rows(const model::StreamingModel& model, const std::vector<text::Document>& documents, std::int64_t n_sinks, bool needs_head) {
  for (std::size_t d = 0; d < documents.size(); ++d)
    if (static_cast<std::int64_t>(documents[d].ids.size()) <= n_sinks + 1)
      fail(ErrorKind::kInfeasible, "--sinks", "document {} has {}, no more than the {} and one scored row", d, counted(documents[d].ids.size(), "token"),
           counted(n_sinks, "sink"));
  if (needs_head && !model.has_head())
    fail(ErrorKind::kMismatch, model.identity().name,
         "has no lm_head.weight, which the Fisher metrics, lookahead and logit_kl need; use --metric attn_kl,attn_out or a complete checkpoint");
}

}  // namespace

bool wants(const SweepOptions& options, const char* metric) {
  return std::find(options.metrics.begin(), options.metrics.end(), metric) != options.metrics.end();
}

const std::vector<std::string>& known_metrics() {
  static const std::vector<std::string> names = {"fisher_softmax", "fisher_vec", "fisher", "fisher_dir", "attn_kl", "attn_out", "lookahead", "logit_kl"};
  return names;
}

void run_sweep(const model::StreamingModel& model, const std::vector<text::Document>& documents, const SweepOptions& options,
               const ParamsProvider& params, ThreadPool& pool, SensResult* result, const LogSink& log, const SweepProgressFn& progress) {
  for (const std::string& m : options.metrics)
    if (std::find(known_metrics().begin(), known_metrics().end(), m) == known_metrics().end())
      fail(ErrorKind::kUsage, "--metric", "unknown metric {}; known: {}", m, fmt::join(known_metrics(), ", "));
  if (options.n_draws < 1) fail(ErrorKind::kUsage, "--draws", "got {}, expected at least 1", options.n_draws);
  check_rows(model, documents, options.n_sinks, wants_fisher(options) || wants_isolated(options));
  result->n_sinks = options.n_sinks;
  Sweep(model, documents, options, params, pool, result, log, progress).run();
}

ScoreTable measure_isolated(const model::StreamingModel& model, const std::vector<text::Document>& documents, const SensResult& grid,
                            const std::vector<std::uint8_t>& cells, std::int64_t hidden_memory_bytes, ThreadPool& pool, const LogSink& log,
                            const SweepProgressFn& progress) {
  CALIB_CHECK(cells.size() == grid.units.size() * grid.schemes.size() * grid.windows.size());
  check_rows(model, documents, grid.n_sinks, true);
  SweepOptions options;
  options.metrics = {"logit_kl"};
  options.n_sinks = grid.n_sinks;
  options.hidden_memory_bytes = hidden_memory_bytes;
  const ParamsProvider kept = [&](std::size_t layer, Side side, const kvrt::Scheme& scheme, std::int64_t) -> quant::SchemeParams {
    fail(ErrorKind::kMismatch, fmt::format("layer {} {} {}", grid.model.layers[layer].index, side_name(side), kvrt::to_string(scheme)),
         "the scheme needs constants, and the scores keep none for it; run kvsens again");
  };
  SensResult part = grid;
  part.scores.clear();
  part.valid.assign(grid.valid.size(), 0);  // constants of other schemes may be missing
  for (std::size_t i = 0; i < cells.size(); ++i)
    if (cells[i]) part.valid[i / grid.windows.size()] = 1;
  Sweep(model, documents, options, kept, pool, &part, log, progress).run_isolated(cells);
  return std::move(part.scores.at("logit_kl"));
}

double isolated_forward_passes(const SensResult& grid, const std::vector<std::uint8_t>& cells) {
  double passes = 1;
  for (std::size_t i = 0; i < cells.size(); ++i)
    if (cells[i]) passes += kMixedPass * share_above(grid, i / (grid.schemes.size() * grid.windows.size()));
  return passes;
}

SweepEstimate estimate_sweep(const model::StreamingModel& model, const std::vector<text::Document>& documents, const SweepOptions& options,
                             const SensResult& grid) {
  std::int64_t tokens = 0;
  for (const text::Document& d : documents) tokens += static_cast<std::int64_t>(d.ids.size());
  const bool fisher = wants_fisher(options);
  const std::int64_t slots = (fisher || wants_isolated(options) ? model.n_layers() + 1 : 1) + (fisher ? options.n_draws : 0);
  const std::int64_t hidden = slots * tokens * model.hidden_bytes_per_token();
  SweepEstimate out;
  out.hidden_memory_bytes = std::min(hidden, options.hidden_memory_bytes);
  out.hidden_spill_bytes = hidden - out.hidden_memory_bytes;
  const LayerGeometry& layer = model.layer(0);
  const std::int64_t n = longest(documents), row = static_cast<std::int64_t>(layer.n_kv_heads) * layer.head_dim * 4;
  const std::int64_t query_row = static_cast<std::int64_t>(layer.n_q_heads) * layer.head_dim * 4;
  // Activations of one differentiable block, gradients of all draws and classes, probabilities of the sampled rows, scored rows.
  out.working_bytes = n * (8 * model.hidden_bytes_per_token() + 6 * model.intermediate_size() * 4) +
                      n * options.n_draws * (3 * query_row + 12 * row) + options.rows_per_document * n * layer.n_q_heads * 4 * 4 +
                      tokens * static_cast<std::int64_t>(grid.schemes.size() * options.windows.size() * options.salient_fractions.size()) * 2 * 4;

  // Measured on a 30-layer model: recompute costs a pass, each draw's backward 1.4, a scheme on all units of a side a tenth of one.
  constexpr double kBackwardPasses = 1.4, kPassesPerScheme = 0.1;
  const double n_layers = static_cast<double>(model.n_layers()), n_classes = static_cast<double>(options.windows.size() * options.salient_fractions.size());
  double scored = 0, isolated = 0;
  for (std::size_t u = 0; u < grid.units.size(); ++u)
    for (std::size_t s = 0; s < grid.schemes.size(); ++s) {
      if (grid.valid[u * grid.schemes.size() + s] == 0) continue;
      scored += n_classes / n_layers;
      const double left = share_above(grid, u);
      isolated += n_classes * (wants(options, "logit_kl") ? left : std::min(left, static_cast<double>(options.lookahead_blocks + 1) / n_layers));
    }
  const bool attention = wants(options, "attn_kl") || wants(options, "attn_out");
  out.forward_passes = 1 + (fisher ? 1.0 + kBackwardPasses * options.n_draws : 0.0) + (fisher || attention ? kPassesPerScheme * scored : 0.0) +
                       (wants_isolated(options) ? kMixedPass * isolated : 0.0);
  return out;
}

}  // namespace calib::sens

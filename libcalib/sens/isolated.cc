#include "libcalib/sens/isolated.h"

#include <algorithm>
#include <limits>

#include "libcalib/sens/metrics.h"
#include "libcalib/sens/layer_scorer.h"

namespace calib::sens {
namespace {

constexpr std::uint64_t kBootstrapSeed = 20240607;

/// One isolated change of one layer.
struct Isolated {
  std::size_t unit = 0, scheme = 0, window = 0;
  LayerChange change;
  std::string name;
};

std::vector<Isolated> isolated_changes(const SensResult& grid, int layer, const SweepOptions& options, const std::vector<std::uint8_t>& cells,
                                       const ParamsProvider& params) {
  std::vector<Isolated> out;
  const std::shared_ptr<const quant::SalientTier> salient = salient_tier_of(grid, layer);
  for (std::size_t u = 0; u < grid.units.size(); ++u) {
    if (grid.units[u].layer != layer) continue;
    for (UnitCandidate& c : unit_candidates(grid, u, params))
      for (std::size_t w = 0; w < grid.windows.size(); ++w) {
        if (!cells.empty() && !cells[grid.index(u, c.scheme_idx, w)]) continue;
        Isolated change{u, c.scheme_idx, w, {}, fmt::format("layer {} {} {}", layer, side_name(grid.units[u].side), grid.schemes[c.scheme_idx])};
        change.change.tiers = isolated_tiers(c.scheme, options.n_sinks, grid.windows[w], grid.salient_fraction(w));
        if (change.change.tiers.block_salient > 0) change.change.salient = salient;
        (grid.units[u].side == Side::kK ? change.change.k : change.change.v) = c;
        out.push_back(std::move(change));
      }
  }
  return out;
}

// Rows of one score, all changes of a layer over all documents.
struct Scored {
  RowIndex index;
  std::vector<std::vector<float>> values;  ///< per change
  void add_row(std::size_t document, std::int64_t position, double denominator) {
    index.document.push_back(static_cast<std::int32_t>(document));
    index.position.push_back(position);
    index.weight.push_back(1);
    index.denominator.push_back(denominator);
  }
};

class IsolatedWalk {
 public:
  IsolatedWalk(const model::StreamingModel& model, const std::vector<text::Document>& documents, const DocumentStates& states,
               const SweepOptions& options, const std::vector<std::uint8_t>& cells, const ParamsProvider& params, ThreadPool& pool, SensResult* result,
               const SweepProgressFn& progress)
      : model_(model), documents_(documents), states_(states), options_(options), cells_(cells), params_(params), pool_(pool), result_(result),
        progress_(progress), n_layers_(model.n_layers()), head_(model.load_head()) {
    logit_kl_ = wants(options, "logit_kl");
    lookahead_ = wants(options, "lookahead");
  }

  void run() {
    for (const char* metric : {"logit_kl", "lookahead"})
      if (wants(options_, metric)) add_empty_table(metric, result_);
    std::vector<std::int64_t> scored;
    for (std::int64_t l = 0; l < n_layers_; ++l) {
      const auto n = static_cast<std::int64_t>(isolated_changes(*result_, model_.layer(l).index, options_, cells_, params_).size());
      if (n == 0) continue;
      scored.push_back(l);
      total_ += n * (end_of(l) - l);
    }
    for (const std::int64_t l : scored) run_layer(l);
  }

 private:
  std::int64_t stop_of(std::int64_t l) const { return std::min(n_layers_, l + options_.lookahead_blocks + 1); }
  std::int64_t end_of(std::int64_t l) const { return logit_kl_ ? n_layers_ : stop_of(l); }

  void run_layer(std::int64_t l) {
    const std::vector<Isolated> changes = isolated_changes(*result_, model_.layer(l).index, options_, cells_, params_);
    DocumentStates runs(documents_, static_cast<std::int64_t>(changes.size()), model_.identity().hidden_size,
                        model::tensor_options(model_.device(), model_.dtype()), options_.hidden_memory_bytes);
    for (std::int64_t m = l; m < end_of(l); ++m) {
      const auto block = model_.load_block(m);
      for (std::size_t c = 0; c < changes.size(); ++c) {
        for (std::size_t d = 0; d < documents_.size(); ++d) {
          const at::Tensor x = m == l ? states_.get(l, d) : runs.get(static_cast<std::int64_t>(c), d);
          runs.put(static_cast<std::int64_t>(c), d, run_block(*block, x, m == l ? &changes[c].change : nullptr, kQueryTile, pool_));
        }
        if (progress_) progress_({logit_kl_ ? "logit_kl" : "lookahead", ++done_, total_});
      }
      if (lookahead_ && m + 1 == stop_of(l)) store(score_lookahead(m + 1, runs, changes), changes, "lookahead");
    }
    if (logit_kl_) store(compare_logits(runs, changes), changes, "logit_kl");
  }

  // Unit rows that `lookahead` compares, of states that leave block `slot` - 1: [T - n_sinks, C] fp32.
  at::Tensor normalised(std::int64_t slot, const at::Tensor& x) const {
    const at::Tensor rows = x.slice(0, options_.n_sinks);
    if (slot == n_layers_) return head_->normalise(rows).to(at::kFloat);
    const at::Tensor wide = rows.to(at::kFloat);
    return wide * wide.square().mean(-1, true).rsqrt();
  }

  Scored score_lookahead(std::int64_t slot, const DocumentStates& runs, const std::vector<Isolated>& changes) const {
    Scored out;
    out.values.resize(changes.size());
    for (std::size_t d = 0; d < documents_.size(); ++d) {
      const at::Tensor u = normalised(slot, states_.get(slot, d)), norms = u.to(at::kDouble).square().sum(-1).to(at::kCPU);
      for (std::int64_t t = 0; t < norms.size(0); ++t) out.add_row(d, options_.n_sinks + t, norms.data_ptr<double>()[t]);
      for (std::size_t c = 0; c < changes.size(); ++c) {
        const at::Tensor change = normalised(slot, runs.get(static_cast<std::int64_t>(c), d)) - u;
        const at::Tensor squares = change.square().sum(-1).to(at::kCPU);
        out.values[c].insert(out.values[c].end(), squares.data_ptr<float>(), squares.data_ptr<float>() + squares.size(0));
      }
    }
    return out;
  }

  Scored compare_logits(const DocumentStates& runs, const std::vector<Isolated>& changes) const {
    Scored out;
    out.values.resize(changes.size());
    std::vector<std::string> names;
    for (const Isolated& c : changes) names.push_back(c.name);
    for (std::size_t d = 0; d < documents_.size(); ++d) {
      const auto end = static_cast<std::int64_t>(documents_[d].ids.size()) - 1;
      std::vector<at::Tensor> finals;
      for (std::size_t c = 0; c < changes.size(); ++c) finals.push_back(runs.get(static_cast<std::int64_t>(c), d));
      const auto rows = compare_final_states(*head_, states_.get(n_layers_, d), finals, names, documents_[d].ids, static_cast<std::int32_t>(d),
                                             options_.n_sinks, end, pool_);
      for (std::int64_t t = options_.n_sinks; t < end; ++t) out.add_row(d, t, 1);
      for (std::size_t c = 0; c < changes.size(); ++c)
        for (const KldRow& row : rows[c]) out.values[c].push_back(static_cast<float>(row.kld));
    }
    return out;
  }

  void store(const Scored& scored, const std::vector<Isolated>& changes, const char* metric) {
    const Bootstrap bootstrap(scored.index, kBootstrapSeed);
    for (std::size_t c = 0; c < changes.size(); ++c)
      store_spread(summarise(scored.index, scored.values[c], bootstrap, result_->n_buckets), changes[c].unit, changes[c].scheme, changes[c].window,
                   metric, result_);
  }

  const model::StreamingModel& model_;
  const std::vector<text::Document>& documents_;
  const DocumentStates& states_;
  const SweepOptions& options_;
  const std::vector<std::uint8_t>& cells_;
  const ParamsProvider& params_;
  ThreadPool& pool_;
  SensResult* result_;
  const SweepProgressFn& progress_;
  std::int64_t n_layers_, total_ = 0, done_ = 0;
  std::unique_ptr<model::Head> head_;
  bool logit_kl_ = false, lookahead_ = false;
};

}  // namespace

void score_isolated(const model::StreamingModel& model, const std::vector<text::Document>& documents, const DocumentStates& states,
                    const SweepOptions& options, const std::vector<std::uint8_t>& cells, const ParamsProvider& params, ThreadPool& pool,
                    SensResult* result, const SweepProgressFn& progress) {
  IsolatedWalk(model, documents, states, options, cells, params, pool, result, progress).run();
}

}  // namespace calib::sens

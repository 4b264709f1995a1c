#include "libcalib/sens/logit_kl.h"

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

std::vector<Isolated> isolated_changes(const SensResult& grid, int layer, const SweepOptions& options, const ParamsProvider& params) {
  std::vector<Isolated> out;
  for (std::size_t u = 0; u < grid.units.size(); ++u) {
    if (grid.units[u].layer != layer) continue;
    for (UnitCandidate& c : unit_candidates(grid, u, params))
      for (std::size_t w = 0; w < options.windows.size(); ++w) {
        Isolated change{u, c.scheme_idx, w, {}, fmt::format("layer {} {} {}", layer, side_name(grid.units[u].side), grid.schemes[c.scheme_idx])};
        change.change.tiers = isolated_tiers(c.scheme, options.n_sinks, options.windows[w]);
        (grid.units[u].side == Side::kK ? change.change.k : change.change.v) = c;
        out.push_back(std::move(change));
      }
  }
  return out;
}

}  // namespace

void score_logit_kl(const model::StreamingModel& model, const std::vector<text::Document>& documents, const DocumentStates& states,
                    const SweepOptions& options, const ParamsProvider& params, ThreadPool& pool, SensResult* result,
                    const SweepProgressFn& progress) {
  ScoreTable& table = result->scores["logit_kl"];
  const std::size_t n = result->units.size() * result->schemes.size() * result->windows.size();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (std::vector<double>* column : {&table.mean, &table.se, &table.p99, &table.max, &table.worst_decile}) column->assign(n, kNaN);
  table.by_bucket.assign(n * static_cast<std::size_t>(result->n_buckets), kNaN);

  const at::TensorOptions tensor_options = model::tensor_options(model.device(), model.dtype());
  const std::int64_t n_layers = model.n_layers();
  std::vector<std::int64_t> scored;
  std::int64_t total = 0, done = 0;
  for (std::int64_t l = 0; l < n_layers; ++l) {
    const std::int64_t n_changes = static_cast<std::int64_t>(isolated_changes(*result, model.layer(l).index, options, params).size());
    if (n_changes == 0) continue;
    scored.push_back(l);
    total += n_changes * (n_layers - l);
  }
  const auto head = model.load_head();
  for (const std::int64_t l : scored) {
    const std::vector<Isolated> changes = isolated_changes(*result, model.layer(l).index, options, params);
    DocumentStates runs(documents, static_cast<std::int64_t>(changes.size()), model.identity().hidden_size, tensor_options, options.hidden_memory_bytes);
    for (std::int64_t m = l; m < n_layers; ++m) {
      const auto block = model.load_block(m);
      for (std::size_t c = 0; c < changes.size(); ++c) {
        for (std::size_t d = 0; d < documents.size(); ++d) {
          const at::Tensor x = m == l ? states.get(l, d) : runs.get(static_cast<std::int64_t>(c), d);
          runs.put(static_cast<std::int64_t>(c), d, run_block(*block, x, m == l ? &changes[c].change : nullptr, kQueryTile, pool));
        }
        if (progress) progress({"logit_kl", ++done, total});
      }
    }
    std::vector<std::string> names;
    for (const Isolated& c : changes) names.push_back(c.name);
    RowIndex index;
    std::vector<std::vector<float>> values(changes.size());
    for (std::size_t d = 0; d < documents.size(); ++d) {
      const auto end = static_cast<std::int64_t>(documents[d].ids.size()) - 1;
      std::vector<at::Tensor> finals;
      for (std::size_t c = 0; c < changes.size(); ++c) finals.push_back(runs.get(static_cast<std::int64_t>(c), d));
      const auto rows = compare_final_states(*head, states.get(n_layers, d), finals, names, documents[d].ids, static_cast<std::int32_t>(d),
                                             options.n_sinks, end, pool);
      for (std::int64_t t = options.n_sinks; t < end; ++t) {
        index.document.push_back(static_cast<std::int32_t>(d));
        index.position.push_back(t);
        index.weight.push_back(1);
        index.denominator.push_back(1);
      }
      for (std::size_t c = 0; c < changes.size(); ++c)
        for (const KldRow& row : rows[c]) values[c].push_back(static_cast<float>(row.kld));
    }
    const Bootstrap bootstrap(index, kBootstrapSeed);
    for (std::size_t c = 0; c < changes.size(); ++c)
      store_spread(summarise(index, values[c], bootstrap, result->n_buckets), changes[c].unit, changes[c].scheme, changes[c].window, "logit_kl", result);
  }
}

}  // namespace calib::sens

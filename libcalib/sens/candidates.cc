#include "libcalib/sens/candidates.h"

#include <algorithm>
#include <set>

#include "kernels/core/layout.h"
#include "kernels/core/plan_constants.h"

namespace calib::sens {
namespace {

void add_once(std::vector<std::string>& list, const std::string& text) {
  if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(text);
}

std::string layer_list(const std::vector<int>& layers) {
  std::string text;
  for (const int l : layers) text += (text.empty() ? "" : ", ") + fmt::format("{}", l);
  return text;
}

double page_bytes(const LayerGeometry& layer, Side side, const kvrt::Scheme& scheme) {
  kvrt::LayerLayout layout;
  layout.n_kv_heads = layer.n_kv_heads;
  layout.head_dim = layer.head_dim;
  (side == Side::kK ? layout.k : layout.v) = scheme;
  layout.tiers = kvrt::finish_tiers(layout.k, layout.v, 0, 0, 0.0);
  layout.sliding_window = layer.sliding_window;
  return kvrt::page_bytes_per_token(layout, side == Side::kK ? kvrt::CacheSide::kK : kvrt::CacheSide::kV);
}

}  // namespace

kvrt::Tiers isolated_tiers(const kvrt::Scheme& scheme, std::int64_t n_sinks, std::int64_t window, double salient_fraction) {
  return kvrt::finish_tiers(scheme, scheme, n_sinks, window, salient_fraction);
}

std::shared_ptr<const quant::SalientTier> salient_tier_of(const SensResult& grid, int layer) {
  if (grid.salient_scheme.empty()) return nullptr;
  const auto factors = grid.saliency.find(layer);
  if (factors == grid.saliency.end()) fail(ErrorKind::kInternal, fmt::format("layer {}", layer), "has no factors to rank tokens by");
  return std::make_shared<const quant::SalientTier>(quant::SalientTier{quant::parse_salient_scheme(grid.salient_scheme, "salient tier"), factors->second});
}

std::size_t layer_position(const ModelIdentity& model, int layer) {
  for (std::size_t i = 0; i < model.layers.size(); ++i)
    if (model.layers[i].index == layer) return i;
  fail(ErrorKind::kInternal, model.name, "layer {} is not among the model's attention layers", layer);
}

void lay_out_grid(const quant::CandidateList& candidates, const std::vector<int>& layers, SensResult* result, const LogSink& log) {
  const ModelIdentity& model = result->model;
  std::set<int> wanted(layers.begin(), layers.end());
  result->units.clear();
  for (const LayerGeometry& layer : model.layers) {
    if (!layers.empty() && wanted.erase(layer.index) == 0) continue;
    result->units.push_back({layer.index, Side::kK});
    result->units.push_back({layer.index, Side::kV});
  }
  if (!layers.empty() && !wanted.empty())
    fail(ErrorKind::kUsage, "--layers", "the model has no attention layer {} (it has {} of them)", *wanted.begin(), model.layers.size());

  // Which (side, scheme) pairs hold on which layers, before the columns are fixed.
  result->schemes.clear();
  std::set<std::pair<std::size_t, std::string>> holds;
  std::set<int> one_frame;
  for (const Side side : {Side::kK, Side::kV})
    for (const std::string& text : side == Side::kK ? candidates.k : candidates.v) {
      const kvrt::Scheme scheme = quant::parse_scheme(text);
      std::vector<int> refused;
      std::string reason;
      std::size_t n_held = 0;
      std::vector<std::string> in_post;
      for (std::size_t u = 0; u < result->units.size(); ++u) {
        if (result->units[u].side != side) continue;
        const LayerGeometry& layer = model.layers[layer_position(model, result->units[u].layer)];
        const kvrt::Scheme here = quant::in_frame_of(scheme, layer);
        const std::string why = kvrt::check_shape(here, layer.head_dim, side == Side::kK);
        if (!why.empty()) {
          refused.push_back(layer.index);
          reason = why;
          continue;
        }
        ++n_held;
        if (here == scheme) {
          holds.insert({u, text});
        } else {
          holds.insert({u, kvrt::to_string(here)});
          in_post.push_back(kvrt::to_string(here));
          one_frame.insert(layer.index);
        }
      }
      if (n_held == 0) {
        log.note(fmt::format("{} left out for {}: {}", text, side_name(side), reason));
        continue;
      }
      if (!refused.empty()) log.note(fmt::format("{} not scored for {} of layers {}: {}", text, side_name(side), layer_list(refused), reason));
      if (in_post.size() < n_held) add_once(result->schemes, text);
      for (const std::string& post : in_post) add_once(result->schemes, post);
    }
  if (!one_frame.empty())
    log.note(fmt::format("layers {} have no RoPE: their keys have one frame, and schemes with `pre` stand there without it",
                         layer_list({one_frame.begin(), one_frame.end()})));
  if (result->schemes.empty()) fail(ErrorKind::kUsage, "--candidates", "no candidate scheme fits this model");

  const std::size_t n = result->schemes.size();
  result->valid.assign(result->units.size() * n, 0);
  result->base_bytes_per_token.assign(result->units.size() * n, std::numeric_limits<double>::quiet_NaN());
  for (std::size_t u = 0; u < result->units.size(); ++u)
    for (std::size_t s = 0; s < n; ++s) {
      if (!holds.contains({u, result->schemes[s]})) continue;
      result->valid[u * n + s] = 1;
      const LayerGeometry& layer = model.layers[layer_position(model, result->units[u].layer)];
      result->base_bytes_per_token[u * n + s] = page_bytes(layer, result->units[u].side, quant::parse_scheme(result->schemes[s]));
    }
}

std::string params_key(const SensResult& grid, std::size_t unit, std::size_t scheme_idx) {
  const UnitId id = grid.units[unit];
  return fmt::format("{:02}/{}/{}", id.layer, id.side == Side::kK ? "k" : "v", grid.schemes[scheme_idx]);
}

void store_params(const UnitCandidate& candidate, std::size_t unit, SensResult* grid) {
  const LayerGeometry& layer = grid->model.layers[layer_position(grid->model, grid->units[unit].layer)];
  std::vector<FittedArray> arrays;
  const std::vector<kvrt::PlanConstant> needed = kvrt::plan_constants(candidate.scheme, layer.n_kv_heads, layer.head_dim);
  for (const auto& [name, values] : candidate.params.arrays())
    for (const kvrt::PlanConstant& constant : needed)
      if (constant.name == name)
        arrays.push_back({std::string(name),
                          constant.shape[1] ? std::vector<std::int64_t>{constant.shape[0], constant.shape[1]} : std::vector<std::int64_t>{constant.shape[0]},
                          *values});
  if (!arrays.empty()) grid->params[params_key(*grid, unit, candidate.scheme_idx)] = std::move(arrays);
}

std::vector<UnitCandidate> unit_candidates(const SensResult& grid, std::size_t unit, const ParamsProvider& params) {
  std::vector<UnitCandidate> out;
  const UnitId id = grid.units[unit];
  const std::size_t layer = layer_position(grid.model, id.layer), n = grid.schemes.size();
  for (std::size_t s = 0; s < n; ++s) {
    if (grid.valid[unit * n + s] == 0) continue;
    UnitCandidate c{s, quant::parse_scheme(grid.schemes[s]), {}};
    if (const auto kept = grid.params.find(params_key(grid, unit, s)); kept != grid.params.end()) {
      for (const FittedArray& array : kept->second) *c.params.find(array.what) = array.values;
    } else if (kvrt::needs_calibration(c.scheme)) {
      c.params = params(layer, id.side, c.scheme, grid.n_sinks);
    }
    out.push_back(std::move(c));
  }
  return out;
}

void add_qnorm_alternatives(std::vector<UnitCandidate>& candidates) {
  const std::size_t n = candidates.size();
  for (std::size_t i = 0; i < n; ++i) {
    if (candidates[i].params.codebook_qnorm.empty()) continue;
    UnitCandidate other = candidates[i];
    other.params.codebook = other.params.codebook_qnorm;
    other.is_alternative = true;
    candidates.push_back(std::move(other));
  }
}

void quantisation_error(const UnitCandidate& candidate, Side side, const LayerGeometry& layer, std::int64_t n_sinks, bool bf16_input,
                        std::int64_t n_tokens, const float* x, float* out, ThreadPool& pool) {
  quant::fake_quant_document(candidate.scheme, side, layer, candidate.params, n_sinks, bf16_input, n_tokens, x, out, pool);
  const std::int64_t row = static_cast<std::int64_t>(layer.n_kv_heads) * layer.head_dim;
  pool.parallel_for(n_tokens, [&](std::int64_t t) {
    for (std::int64_t i = t * row; i < (t + 1) * row; ++i) out[i] -= x[i];
  });
}

}  // namespace calib::sens

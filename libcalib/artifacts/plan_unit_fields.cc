#include "libcalib/artifacts/plan_unit_fields.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "kernels/codec/hadamard_order.h"
#include "kernels/core/plan_constants.h"
#include "libcalib/io/provenance.h"

namespace calib::artifacts {

using nlohmann::ordered_json;

std::string array_name(int layer, Side side, const std::string& what) {
  return fmt::format("layers.{}.{}.{}", layer, side == Side::kK ? "k" : "v", what);
}

std::string saliency_array_name(int layer, const std::string& what) { return fmt::format("layers.{}.saliency.{}", layer, what); }

std::vector<std::int64_t> expected_shape(const std::string& what, const kvrt::Scheme& scheme, const LayerGeometry& layer) {
  for (const kvrt::PlanConstant& c : kvrt::plan_constants(scheme, layer.n_kv_heads, layer.head_dim)) {
    if (c.name != what) continue;
    return c.shape[1] ? std::vector<std::int64_t>{c.shape[0], c.shape[1]} : std::vector<std::int64_t>{c.shape[0]};
  }
  return {};
}

std::vector<UnitArray> unit_arrays(const plan::UnitPlan& unit, Side side, const LayerGeometry& layer) {
  std::vector<UnitArray> arrays;
  const std::vector<kvrt::PlanConstant> needed = kvrt::plan_constants(unit.scheme, layer.n_kv_heads, layer.head_dim);
  for (const auto& [name, values] : unit.params.arrays()) {
    if (values->empty()) continue;
    const std::string what(name);
    const bool integer = std::any_of(needed.begin(), needed.end(), [&](const kvrt::PlanConstant& c) { return c.name == what && c.integer; });
    arrays.push_back({what, array_name(layer.index, side, what), expected_shape(what, unit.scheme, layer), values, integer});
  }
  return arrays;
}

std::int64_t group_size(const kvrt::Scheme& scheme, const LayerGeometry& layer) {
  switch (scheme.granularity) {
    case kvrt::Granularity::kToken: return scheme.group > 0 ? scheme.group : scheme.lowrank > 0 ? scheme.lowrank : layer.head_dim;
    case kvrt::Granularity::kChannel: return scheme.group;
    case kvrt::Granularity::kBuiltIn: return scheme.format == kvrt::Format::kNvfp4 ? 16 : 32;
    default: return 0;
  }
}

ordered_json rotation_json(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer) {
  if (!scheme.had) return nullptr;
  const kvrt::HadamardOrder order = kvrt::is_llamacpp_block(scheme.format) ? kvrt::llamacpp_hadamard_order(layer.head_dim, side == Side::kK)
                                                                           : kvrt::hadamard_order(layer.head_dim);
  return {{"kind", "hadamard"}, {"size", order.size}, {"base", order.base}, {"power", order.power}};
}

double static_scale(const plan::UnitPlan& unit) {
  if (unit.scheme.granularity != kvrt::Granularity::kTensor || unit.params.clip_hi.size() != 1) return 0;
  if (unit.scheme.format == kvrt::Format::kFp8E4m3) return unit.params.clip_hi[0] / 448.0f;
  if (unit.scheme.format == kvrt::Format::kFp8E5m2) return unit.params.clip_hi[0] / 57344.0f;
  return 0;
}

ordered_json rope_classes_json(const ModelIdentity& model) {
  ordered_json classes = ordered_json::array();
  std::vector<bool> done(model.layers.size(), false);
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    if (done[l]) continue;
    const LayerGeometry& first = model.layers[l];
    std::vector<int> members;
    for (std::size_t m = l; m < model.layers.size(); ++m) {
      const LayerGeometry& g = model.layers[m];
      if (done[m] || g.rope_style != first.rope_style || g.rotary_dim != first.rotary_dim || g.attention_factor != first.attention_factor ||
          g.inv_freq != first.inv_freq)
        continue;
      done[m] = true;
      members.push_back(g.index);
    }
    classes.push_back({{"layers", members}, {"layout", io::rope_style_name(first.rope_style)}, {"rotary_width", first.rotary_dim},
                       {"attention_factor", first.attention_factor}, {"inv_freq", first.inv_freq}});
  }
  return classes;
}

}  // namespace calib::artifacts

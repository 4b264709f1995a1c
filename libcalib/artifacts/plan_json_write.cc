#include <cmath>
#include <map>

#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_json.h"
#include "libcalib/artifacts/plan_unit_fields.h"
#include "libcalib/io/provenance.h"

namespace calib::artifacts {
namespace {

using nlohmann::ordered_json;

ordered_json reasons_to_json(const std::vector<plan::Reason>& reasons) {
  ordered_json list = ordered_json::array();
  for (const plan::Reason& r : reasons) {
    // Sorted by name, so that reading and writing again gives the same bytes.
    ordered_json numbers = ordered_json::object();
    for (const auto& [name, value] : std::map<std::string, double>(r.numbers.begin(), r.numbers.end())) numbers[name] = value;
    list.push_back({{"rule", r.rule}, {"text", r.text}, {"numbers", numbers}});
  }
  return list;
}

ordered_json unit_to_json(const plan::UnitPlan& unit, Side side, const LayerGeometry& layer) {
  ordered_json out = {{"scheme", kvrt::to_string(unit.scheme)}, {"bits", kvrt::code_bits(unit.scheme.format)}, {"group", group_size(unit.scheme, layer)}};
  if (side == Side::kK) out["frame"] = unit.scheme.pre ? "pre" : "post";
  out["rotation"] = rotation_json(unit.scheme, side, layer);
  out["chan_perm"] = unit.chan_perm;
  if (!unit.block_order.empty()) out["block_order"] = unit.block_order;
  ordered_json params = ordered_json::object();
  for (const UnitArray& array : unit_arrays(unit, side, layer))
    params[array.what] = {{"tensor", array.name}, {"shape", array.shape}};
  if (const double scale = static_scale(unit); scale > 0) params["scale"] = scale;
  out["params"] = params;
  out["why"] = reasons_to_json(unit.why);
  return out;
}

ordered_json request_to_json(const plan::Request& r) {
  ordered_json out = {{"budget", r.budget}, {"uniform", r.uniform}, {"target", "native"}, {"profile", r.profile}, {"context_tokens", r.context_tokens},
                      {"batch", r.batch}, {"budget_bytes", r.budget_bytes}, {"max_kl", r.max_kl}, {"metric", r.metric}, {"candidates", r.candidates},
                      {"window_per_layer", r.window_per_layer}};
  if (!r.imported.empty()) out["imported"] = r.imported;
  if (const plan::Restrictions& x = r.restrictions; x.any())
    out["restrictions"] = {{"k", x.k}, {"v", x.v}, {"same_kv", x.same_kv}, {"one_pair", x.one_pair}, {"skip_layers", x.skip_layers}, {"arch", x.arch}};
  return out;
}

ordered_json summary_to_json(const plan::Summary& s) {
  ordered_json out = {{"effective_bits", s.effective_bits}, {"bytes", s.bytes}, {"elements", s.elements}, {"bytes_per_token", s.bytes_per_token},
                      {"compression", s.compression}, {"constants_bytes", s.constants_bytes}, {"gap", s.gap}, {"proven", s.proven}};
  if (s.predicted) {
    const plan::Prediction& p = *s.predicted;
    ordered_json predicted = {{"metric", p.metric}, {"score", p.score}, {"se", p.se}, {"in_nats", p.in_nats}};
    if (p.in_nats) {
      predicted["kl"] = p.kl();
      predicted["ppl_ratio"] = std::exp(p.ln_ppl_ratio());
    }
    predicted["unfitted"] = p.unfitted;
    if (p.joint)
      predicted["joint"] = {{"runs", p.joint->n_runs}, {"slope", p.joint->slope}, {"kappa", p.joint->kappa}, {"r2", p.joint->r2}, {"spearman", p.joint->spearman},
                            {"worst_factor", p.joint->worst_factor}, {"reliable", p.joint->reliable()}};
    if (p.isolated)
      predicted["isolated"] = {{"units", p.isolated->n_units}, {"above", p.isolated->above}, {"slope_k", p.isolated->slope_k}, {"slope_v", p.isolated->slope_v}};
    out["predicted"] = predicted;
  }
  if (s.measured) {
    const plan::Measured& m = *s.measured;
    out["measured"] = {{"kl", m.kld}, {"kl_se", m.kld_se}, {"ppl_ratio", m.ppl_ratio}, {"ppl_ratio_se", m.ppl_ratio_se}, {"documents", m.n_documents},
                       {"tokens", m.n_tokens}, {"seq_len", m.seq_len}, {"documents_sha256", m.documents_sha256}};
  }
  if (s.valid_to_position) out["valid_to_position"] = *s.valid_to_position;
  return out;
}

ordered_json monitor_to_json(const plan::Monitor& m) {
  ordered_json out = {{"kl_max", m.kl_max}, {"ppl_ratio_max", m.ppl_ratio_max}, {"ttft_ratio_max", m.ttft_ratio_max}, {"itl_ratio_max", m.itl_ratio_max},
                      {"hit_rate_min", m.hit_rate_min}, {"hbm_utilisation_min", m.hbm_utilisation_min}, {"sm_utilisation_max", m.sm_utilisation_max}};
  if (m.length_limit) out["length_limit"] = *m.length_limit;
  return out;
}

ordered_json fallback_to_json(const std::vector<plan::Rung>& rungs) {
  ordered_json list = ordered_json::array();
  for (const plan::Rung& rung : rungs) {
    ordered_json changes = ordered_json::array();
    for (const plan::RungChange& c : rung.changes)
      changes.push_back({{"layer", c.layer}, {"side", c.side == Side::kK ? "k" : "v"}, {"scheme", kvrt::to_string(c.scheme)}});
    list.push_back({{"effective_bits", rung.effective_bits}, {"bytes", rung.bytes}, {"score", rung.score}, {"changes", changes}});
  }
  return list;
}

std::vector<io::NamedArray> saliency_arrays(const plan::LayerPlan& layer, const LayerGeometry& geometry) {
  if (layer.salient_fraction == 0) return {};
  return {{saliency_array_name(layer.index, "a"), {geometry.n_q_heads, geometry.head_dim}, layer.saliency.a},
          {saliency_array_name(layer.index, "m"), {geometry.n_q_heads, geometry.head_dim, layer.saliency.rank}, layer.saliency.m}};
}

/// Puts the fields back that another version wrote, where their parents still are.
void restore_unknown(ordered_json& document, const plan::Plan& plan) {
  for (const auto& [pointer, text] : plan.unknown_fields) {
    const std::size_t cut = pointer.rfind('/');
    const ordered_json::json_pointer parent(pointer.substr(0, cut));
    if (!document.contains(parent) || !document.at(parent).is_object()) continue;
    document[ordered_json::json_pointer(pointer)] = ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  }
}

}  // namespace

ordered_json plan_to_json(const plan::Plan& plan) {
  CALIB_CHECK(plan.layers.size() == plan.model.layers.size());
  ordered_json out;
  out["model"] = io::model_to_json(plan.model);
  out["provenance"] = io::provenance_to_json(plan.provenance);
  out["request"] = request_to_json(plan.request);
  out["summary"] = summary_to_json(plan.summary);
  out["frontier"] = ordered_json::array();
  for (const plan::FrontierPoint& p : plan.frontier)
    out["frontier"].push_back({{"effective_bits", p.effective_bits}, {"bytes", p.bytes}, {"score", p.score}});
  out["baselines"] = ordered_json::array();
  for (const plan::Baseline& b : plan.baselines) {
    ordered_json item = {{"name", b.name}, {"description", b.description}, {"feasible", b.feasible}, {"effective_bits", b.effective_bits},
                         {"bytes", b.bytes}, {"score", b.score}};
    if (!b.pair.empty()) {
      item["pair"] = b.pair;
      item["window_tokens"] = b.window_tokens;
    }
    if (b.measured_kld) item["measured_kl"] = *b.measured_kld, item["measured_kl_se"] = b.measured_se.value_or(0);
    out["baselines"].push_back(std::move(item));
  }
  out["decision"] = reasons_to_json(plan.decision);
  out["tiers"] = {{"sink_tokens", plan.sink_tokens}, {"window_tokens", plan.window_tokens}, {"salient", nullptr}};
  if (plan.salient) out["tiers"]["salient"] = {{"scheme", kvrt::to_string(plan.salient->scheme)}, {"score", plan.salient->score}};
  out["layers"] = ordered_json::array();
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    const plan::LayerPlan& layer = plan.layers[l];
    const LayerGeometry& geometry = plan.model.layers[l];
    CALIB_CHECK(layer.index == geometry.index);
    ordered_json item = {{"index", layer.index}, {"module", layer.module}, {"salient_fraction", layer.salient_fraction}};
    for (const io::NamedArray& array : saliency_arrays(layer, geometry))
      item["saliency"][array.name.substr(array.name.rfind('.') + 1)] = {{"tensor", array.name}, {"shape", array.shape}};
    if (layer.window_tokens) item["window_tokens"] = *layer.window_tokens;
    item["k"] = unit_to_json(layer.k, Side::kK, geometry);
    item["v"] = unit_to_json(layer.v, Side::kV, geometry);
    out["layers"].push_back(std::move(item));
  }
  out["runtime"] = {{"page_tokens", plan.page_tokens}, {"scale_refresh_tokens", plan.scale_refresh_tokens}, {"rope", rope_classes_json(plan.model)}};
  out["monitor"] = monitor_to_json(plan.monitor);
  out["fallback"] = fallback_to_json(plan.fallback);
  restore_unknown(out, plan);
  return out;
}

std::vector<io::NamedArray> plan_arrays(const plan::Plan& plan) {
  std::vector<io::NamedArray> arrays;
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    for (const Side side : {Side::kK, Side::kV})
      for (const UnitArray& array : unit_arrays(plan.layers[l].unit(side), side, plan.model.layers[l])) {
        if (array.integer) arrays.push_back({array.name, array.shape, std::vector<std::int32_t>(array.values->begin(), array.values->end())});
        else arrays.push_back({array.name, array.shape, *array.values});
      }
    for (io::NamedArray& array : saliency_arrays(plan.layers[l], plan.model.layers[l])) arrays.push_back(std::move(array));
  }
  return arrays;
}

}  // namespace calib::artifacts

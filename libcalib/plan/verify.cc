#include "libcalib/plan/verify.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "kernels/core/plan_constants.h"
#include "libcalib/base/error.h"
#include "libcalib/plan/cost_model.h"

namespace calib::plan {
namespace {

Accounting accounting_of(const Plan& plan) {
  Accounting a;
  a.context_tokens = plan.request.context_tokens;
  a.batch = plan.request.batch;
  a.sink_tokens = plan.sink_tokens;
  a.page_tokens = plan.page_tokens;
  a.scale_refresh_tokens = plan.scale_refresh_tokens;
  return a;
}

void check_unit(const UnitPlan& unit, Side side, const LayerGeometry& layer, std::vector<std::string>& problems) {
  const std::string name = fmt::format("layer {} {}: {}", layer.index, side_name(side), kvrt::to_string(unit.scheme));
  if (const std::string shape = kvrt::check_shape(unit.scheme, layer.head_dim, side == Side::kK); !shape.empty())
    problems.push_back(fmt::format("{}: {}", name, shape));
  const auto check = [&](std::string_view what, const std::vector<float>& values, std::size_t expected, bool positive) {
    if (values.size() != expected) problems.push_back(fmt::format("{}: {} holds {} values, expected {}", name, what, values.size(), expected));
    for (const float v : values)
      if (!std::isfinite(v) || (positive && !(v > 0))) {
        problems.push_back(fmt::format("{}: {} holds {}, expected a finite number{}", name, what, v, positive ? " > 0" : ""));
        break;
      }
  };
  const std::vector<kvrt::PlanConstant> needed = kvrt::plan_constants(unit.scheme, layer.n_kv_heads, layer.head_dim);
  for (const auto& [what, values] : unit.params.arrays()) {
    const auto constant = std::find_if(needed.begin(), needed.end(), [what = what](const kvrt::PlanConstant& c) { return c.name == what; });
    if (constant == needed.end()) check(what, *values, 0, false);
    else check(what, *values, static_cast<std::size_t>(constant->count()), constant->positive);
  }
}

bool close(double a, double b) { return std::fabs(a - b) <= 1e-9 * std::max({1.0, std::fabs(a), std::fabs(b)}); }

}  // namespace

std::vector<std::string> verify_plan(const Plan& plan) {
  std::vector<std::string> problems;
  const std::vector<LayerGeometry>& model = plan.model.layers;
  std::set<int> seen;
  for (const LayerPlan& layer : plan.layers)
    if (!seen.insert(layer.index).second) problems.push_back(fmt::format("layer {} is planned twice", layer.index));
  for (const LayerGeometry& geometry : model)
    if (!seen.count(geometry.index)) problems.push_back(fmt::format("layer {} of the model has no plan", geometry.index));
  if (plan.layers.size() > model.size()) problems.push_back(fmt::format("{} layers are planned, the model has {}", plan.layers.size(), model.size()));
  if (!problems.empty()) return problems;

  const Accounting accounting = accounting_of(plan);
  std::int64_t bytes = 0, constants = 0, elements = 0;
  for (const LayerGeometry& geometry : model) {
    const LayerPlan& layer = *std::find_if(plan.layers.begin(), plan.layers.end(), [&](const LayerPlan& p) { return p.index == geometry.index; });
    check_unit(layer.k, Side::kK, geometry, problems);
    check_unit(layer.v, Side::kV, geometry, problems);
    // Counted from the segments' own layouts rather than through layer_bytes.
    const kvrt::LayerLayout layout = make_layout(geometry, layer.k.scheme, layer.v.scheme, plan.window_of(layer), accounting);
    for (const kvrt::CacheSide side : {kvrt::CacheSide::kK, kvrt::CacheSide::kV})
      bytes += accounting.batch * kvrt::cache_bytes(layout, side, accounting.context_tokens);
    const double floor = unpadded_bytes(layout, accounting.context_tokens) * static_cast<double>(accounting.batch);
    const std::int64_t counted = layer_bytes(geometry, layer.k.scheme, layer.v.scheme, plan.window_of(layer), accounting);
    if (static_cast<double>(counted) < floor - 1) problems.push_back(fmt::format("layer {}: {} bytes are fewer than its tokens need ({:.0f})", geometry.index, counted, floor));
    for (const UnitPlan* unit : {&layer.k, &layer.v})
      for (const auto& array : unit->params.arrays()) constants += 4 * static_cast<std::int64_t>(array.second->size());
    const std::int64_t tokens = geometry.sliding_window > 0 ? std::min(geometry.sliding_window, accounting.context_tokens) : accounting.context_tokens;
    elements += 2 * accounting.batch * tokens * geometry.n_kv_heads * geometry.head_dim;
  }

  const Summary& s = plan.summary;
  if (s.bytes != bytes) problems.push_back(fmt::format("summary states {} bytes, counted {}", s.bytes, bytes));
  if (s.elements != elements) problems.push_back(fmt::format("summary states {} elements, counted {}", s.elements, elements));
  if (s.constants_bytes != constants) problems.push_back(fmt::format("summary states {} bytes of constants, counted {}", s.constants_bytes, constants));
  if (!close(s.effective_bits, effective_bits(bytes, elements)))
    problems.push_back(fmt::format("summary states {:.6f} effective bits, counted {:.6f}", s.effective_bits, effective_bits(bytes, elements)));
  if (plan.request.budget_bytes > 0 && bytes > plan.request.budget_bytes)
    problems.push_back(fmt::format("{} bytes exceed the budget of {}", bytes, plan.request.budget_bytes));

  std::int64_t below = bytes;
  for (std::size_t r = 0; r < plan.fallback.size(); ++r) {
    if (plan.fallback[r].bytes < below) problems.push_back(fmt::format("fallback rung {} holds {} bytes, fewer than the rung below ({})", r, plan.fallback[r].bytes, below));
    below = plan.fallback[r].bytes;
    for (const RungChange& change : plan.fallback[r].changes)
      if (!seen.count(change.layer)) problems.push_back(fmt::format("fallback rung {} names layer {}, which the model does not have", r, change.layer));
  }
  return problems;
}

void check_same_model(const ModelIdentity& a, const std::string& a_name, const ModelIdentity& b, const std::string& b_name) {
  const auto differ = [&](const std::string& field, const std::string& x, const std::string& y) {
    fail(ErrorKind::kMismatch, b_name, "made for another model than {}: {} is {} there and {} here ({} against {})", a_name, field, x, y,
         a.name.empty() ? "unnamed" : a.name, b.name.empty() ? "unnamed" : b.name);
  };
  const auto same = [&](const std::string& field, const auto& x, const auto& y) {
    if (x != y) differ(field, fmt::format("{}", x), fmt::format("{}", y));
  };
  same("architecture", a.architecture, b.architecture);
  same("number of layers", a.n_layers, b.n_layers);
  same("hidden size", a.hidden_size, b.hidden_size);
  same("number of layers with attention", a.layers.size(), b.layers.size());
  for (std::size_t l = 0; l < a.layers.size(); ++l) {
    const LayerGeometry &x = a.layers[l], &y = b.layers[l];
    const std::string layer = fmt::format("layer {} ", x.index);
    same(layer + "number", x.index, y.index);
    same(layer + "query heads", x.n_q_heads, y.n_q_heads);
    same(layer + "KV heads", x.n_kv_heads, y.n_kv_heads);
    same(layer + "head_dim", x.head_dim, y.head_dim);
    same(layer + "rotary width", x.rotary_dim, y.rotary_dim);
    same(layer + "sliding window", x.sliding_window, y.sliding_window);
    if (x.inv_freq != y.inv_freq) differ(layer + "RoPE frequencies", "one set", "another");
  }
  if (a.fast != b.fast)
    differ("identity", a.fast ? "fast (header hash)" : "full (content hash)", b.fast ? "fast (header hash)" : "full (content hash)");
  same("weights sha256", a.weights_sha256, b.weights_sha256);
  same("tokenizer sha256", a.tokenizer_sha256, b.tokenizer_sha256);
}

}  // namespace calib::plan

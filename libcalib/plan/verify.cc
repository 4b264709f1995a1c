#include "libcalib/plan/verify.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "kernels/core/plan_constants.h"
#include "libcalib/base/error.h"
#include "libcalib/base/plural.h"
#include "libcalib/plan/cost_model.h"
#include "libcalib/quant/token_tiers.h"

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

void check_tier(const Plan& plan, const LayerPlan& layer, const LayerGeometry& geometry, std::vector<std::string>& problems) {
  const std::string name = fmt::format("layer {}: ", layer.index);
  const quant::SaliencyFactors& f = layer.saliency;
  if (layer.salient_fraction == 0) {
    if (!f.a.empty() || !f.m.empty()) problems.push_back(name + "holds factors of a salient tier that it does not have");
    return;
  }
  if (!plan.salient) problems.push_back(fmt::format("{}salient_fraction is {:g}, but the plan names no salient tier", name, layer.salient_fraction));
  if (!(layer.salient_fraction > 0 && layer.salient_fraction <= quant::kMostSalient))
    problems.push_back(fmt::format("{}salient_fraction is {:g}, expected 0 to {}", name, layer.salient_fraction, quant::kMostSalient));
  else if (kvrt::finish_tiers(layer.k.scheme, layer.v.scheme, 0, 0, layer.salient_fraction).block_salient == 0)
    problems.push_back(fmt::format("{}salient_fraction {:g} rounds to no token of an exit block", name, layer.salient_fraction));
  if (plan.salient)
    for (const bool key : {true, false})
      if (const std::string shape = kvrt::check_shape(plan.salient->scheme, geometry.head_dim, key); !shape.empty())
        problems.push_back(name + "salient tier: " + shape);
  const std::size_t width = static_cast<std::size_t>(geometry.n_q_heads) * static_cast<std::size_t>(geometry.head_dim);
  if (f.rank < 1 || f.rank > quant::SaliencyFactors::kMostRank || f.a.size() != width || f.m.size() != width * static_cast<std::size_t>(f.rank))
    problems.push_back(fmt::format("{}saliency holds {} and {} values of rank {}, expected {} and {} at rank 1 to {}", name, f.a.size(), f.m.size(), f.rank, width,
                                   width * static_cast<std::size_t>(std::max(f.rank, 1)), quant::SaliencyFactors::kMostRank));
  for (const std::vector<float>* values : {&f.a, &f.m})
    if (!std::all_of(values->begin(), values->end(), [](float x) { return std::isfinite(x); }))
      problems.push_back(name + "saliency holds a value that is not finite");
}

void check_restrictions(const Plan& plan, std::vector<std::string>& problems) {
  const Restrictions& r = plan.request.restrictions;
  const LayerPlan* first = nullptr;
  for (const LayerPlan& layer : plan.layers) {
    const std::string k = kvrt::to_string(layer.k.scheme), v = kvrt::to_string(layer.v.scheme);
    if (std::find(r.skip_layers.begin(), r.skip_layers.end(), layer.index) != r.skip_layers.end()) {
      if (k != "bf16" || v != "bf16") problems.push_back(fmt::format("layer {}: {}:{}, but the request keeps it in bf16", layer.index, k, v));
      continue;
    }
    const auto allowed = [](const std::vector<std::string>& list, const std::string& scheme) {
      return list.empty() || std::find(list.begin(), list.end(), scheme) != list.end();
    };
    if (!allowed(r.k, k)) problems.push_back(fmt::format("layer {} K: {} is not in the request's list", layer.index, k));
    if (!allowed(r.v, v)) problems.push_back(fmt::format("layer {} V: {} is not in the request's list", layer.index, v));
    if (r.same_kv && k != v) problems.push_back(fmt::format("layer {}: K is {} and V is {}, the request wants one scheme", layer.index, k, v));
    for (const UnitPlan* unit : {&layer.k, &layer.v})
      if (plan.request.uniform.empty())
        if (const std::string missing = missing_on_arch(r.arch, unit->scheme.format); !missing.empty())
          problems.push_back(fmt::format("layer {}: {}, but {}", layer.index, kvrt::to_string(unit->scheme), missing));
    if (!first) first = &layer;
    if (r.one_pair && (layer.k.scheme != first->k.scheme || layer.v.scheme != first->v.scheme))
      problems.push_back(fmt::format("layer {}: {}:{} differs from layer {}, the request wants one pair", layer.index, k, v, first->index));
  }
}

void check_ladder(const Plan& plan, std::int64_t bytes, std::vector<std::string>& problems) {
  std::map<std::pair<int, Side>, double> bits;
  for (const LayerGeometry& geometry : plan.model.layers)
    for (const LayerPlan& layer : plan.layers)
      for (const Side side : {Side::kK, Side::kV})
        if (layer.index == geometry.index) bits[{layer.index, side}] = channel_bits(layer.unit(side).scheme, geometry.head_dim);
  const bool tied = plan.request.restrictions.same_kv || plan.request.restrictions.one_pair;
  const std::size_t most = std::max<std::size_t>(1, bits.size() / 10);
  for (std::size_t r = 0; r < plan.fallback.size(); ++r) {
    const Rung& rung = plan.fallback[r];
    if (rung.bytes <= bytes) problems.push_back(fmt::format("fallback rung {} holds {} bytes, not more than what is below it ({})", r, rung.bytes, bytes));
    bytes = rung.bytes;
    if (!tied && rung.changes.size() > most)
      problems.push_back(fmt::format("fallback rung {} changes {}, a tenth is {}", r, counted(rung.changes.size(), "unit"), most));
    std::set<std::pair<int, Side>> changed;
    for (const RungChange& change : rung.changes) {
      const auto unit = bits.find({change.layer, change.side});
      const std::string name = fmt::format("fallback rung {}: layer {} {}", r, change.layer, side_name(change.side));
      if (unit == bits.end()) {
        problems.push_back(name + " is not in the plan");
        continue;
      }
      if (!changed.insert(unit->first).second) problems.push_back(name + " is changed twice");
      if (kvrt::needs_calibration(change.scheme))
        problems.push_back(fmt::format("{}: {} needs constants that the plan does not hold", name, kvrt::to_string(change.scheme)));
      const double to = kvrt::code_bits(change.scheme.format);
      if (to < unit->second) problems.push_back(fmt::format("{} is lowered from {} to {} bits", name, unit->second, to));
      unit->second = to;
    }
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
    check_tier(plan, layer, geometry, problems);
    // Counted from the segments' own layouts rather than through layer_bytes.
    const kvrt::LayerLayout layout = make_layout(geometry, layer.k.scheme, layer.v.scheme, plan.tiers_of(layer), accounting);
    for (const kvrt::CacheSide side : {kvrt::CacheSide::kK, kvrt::CacheSide::kV})
      bytes += accounting.batch * kvrt::cache_bytes(layout, side, accounting.context_tokens);
    const double floor = unpadded_bytes(layout, accounting.context_tokens) * static_cast<double>(accounting.batch);
    const std::int64_t counted = layer_bytes(geometry, layer.k.scheme, layer.v.scheme, plan.tiers_of(layer), accounting);
    if (static_cast<double>(counted) < floor - 1)
      problems.push_back(fmt::format("layer {}: {} bytes are fewer than its tokens need ({:.0f})", geometry.index, counted, floor));
    constants += 4 * static_cast<std::int64_t>(layer.saliency.a.size() + layer.saliency.m.size());
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

  check_restrictions(plan, problems);
  check_ladder(plan, bytes, problems);
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

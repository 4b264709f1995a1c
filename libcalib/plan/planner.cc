#include "libcalib/plan/planner.h"

#include <algorithm>
#include <cmath>

#include "libcalib/plan/baseline.h"
#include "libcalib/plan/decision.h"
#include "libcalib/plan/decision_flow.h"
#include "libcalib/plan/frontier.h"
#include "libcalib/plan/joint.h"
#include "libcalib/plan/ladder.h"
#include "libcalib/quant/token_tiers.h"

namespace calib::plan {
namespace {

UnitPlan make_unit(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer) {
  UnitPlan unit;
  unit.scheme = scheme;
  unit.chan_perm = default_chan_perm(scheme, side, layer);
  unit.block_order = block_order(scheme, side, layer);
  return unit;
}

std::string module_name(int layer) { return fmt::format("model.layers.{}.self_attn", layer); }

void fill_summary(Plan& plan, const Accounting& accounting) {
  Summary& s = plan.summary;
  s.elements = cache_elements(plan.model.layers, accounting);
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    const LayerPlan& layer = plan.layers[l];
    s.bytes += layer_bytes(plan.model.layers[l], layer.k.scheme, layer.v.scheme, plan.tiers_of(layer), accounting);
    if (layer.salient_fraction > 0) s.constants_bytes += saliency_bytes(plan.model.layers[l]);
    for (const Side side : {Side::kK, Side::kV}) s.constants_bytes += constants_bytes(layer.unit(side).scheme, plan.model.layers[l]);
  }
  s.effective_bits = effective_bits(s.bytes, s.elements);
  s.bytes_per_token = static_cast<double>(s.bytes) / (static_cast<double>(accounting.context_tokens) * static_cast<double>(accounting.batch));
  s.compression = s.effective_bits > 0 ? 16.0 / s.effective_bits : 0;
}

void check_accounting(const ModelIdentity& model, std::int64_t window, const Accounting& a) {
  if (a.context_tokens < 1 || a.batch < 1) fail(ErrorKind::kUsage, "--context, --batch", "both must be at least 1");
  if (!countable(model.layers, window, a))
    fail(ErrorKind::kUsage, "--context, --batch", "{} tokens x batch {} with {} sinks and window {} is beyond what can be counted", a.context_tokens, a.batch,
         a.sink_tokens, window);
}

/// Without layers. Sets the accounting's sinks.
Plan empty_plan(const ModelIdentity& model, std::int64_t n_sinks, std::int64_t window, Accounting& accounting) {
  accounting.sink_tokens = n_sinks;
  check_accounting(model, window, accounting);
  Plan plan;
  plan.model = model;
  plan.sink_tokens = n_sinks;
  plan.window_tokens = window;
  plan.page_tokens = accounting.page_tokens;
  plan.scale_refresh_tokens = accounting.scale_refresh_tokens;
  plan.request.context_tokens = accounting.context_tokens;
  plan.request.batch = accounting.batch;
  return plan;
}

LayerPlan empty_layer(const LayerGeometry& geometry) {
  LayerPlan layer;
  layer.index = geometry.index;
  layer.module = module_name(geometry.index);
  return layer;
}

void add_evidence(UnitPlan& unit, Side side, const LayerGeometry& geometry, const EvidenceByLayer& evidence) {
  const auto seen = evidence.find(geometry.index);
  if (seen == evidence.end()) return;
  for (Reason& r : evidence_reasons(unit.scheme, side, seen->second)) unit.why.push_back(std::move(r));
}

/// Request fields that every plan of a search has.
plan::Request request_of(const sens::SensResult& sens, const SearchRequest& request) {
  plan::Request out;
  out.budget = request.limit_text;
  out.profile = request.limits.profile;
  out.context_tokens = request.accounting.context_tokens;
  out.batch = request.accounting.batch;
  out.candidates = sens.candidate_list;
  out.window_per_layer = request.limits.window_per_layer;
  out.restrictions = request.restrictions;
  return out;
}

std::string asked_text(const SearchRequest& request) {
  if (!request.limits.profile.empty()) return "profile " + request.limits.profile;
  return request.limits.budget && request.limits.budget->kind == Budget::Kind::kEffectiveBits ? request.limit_text + " effective bits" : request.limit_text;
}

bool restrictions_allow_bf16(const Restrictions& r) {
  const auto holds = [](const std::vector<std::string>& list) { return list.empty() || std::find(list.begin(), list.end(), "bf16") != list.end(); };
  return holds(r.k) && holds(r.v);
}

/// What a limit that 16 bit fits asks for: bf16 everywhere, and no tiers, which would be bf16 as well.
Plan plan_in_16_bit(const sens::SensResult& sens, const EvidenceByLayer& evidence, const SearchRequest& request, std::int64_t limit_bytes) {
  Plan plan = uniform_plan(sens.model, {"bf16", "bf16", "bf16", 0, 0, "", 0, ""}, request.accounting, evidence, {});
  plan.request = request_of(sens, request);
  plan.request.budget_bytes = limit_bytes;
  for (LayerPlan& layer : plan.layers)
    for (const Side side : {Side::kK, Side::kV}) layer.unit(side).why = {{"bf16", "16 bit fits the budget: nothing needs to be compressed", {}}};
  plan.decision = affordability(sens.model.layers, request.accounting, asked_text(request), limit_bytes);
  plan.decision.push_back({"chosen", fmt::format("bf16 for every unit, {}, {:.3f} effective bits", format_bytes(plan.summary.bytes), plan.summary.effective_bits),
                           {{"bytes", static_cast<double>(plan.summary.bytes)}, {"effective_bits", plan.summary.effective_bits}}});
  return plan;
}

}  // namespace

std::string default_chan_perm(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer) {
  const int pairs = layer.rotary_dim / 2;
  const bool half_split_pre = side == Side::kK && scheme.pre && layer.rope_style == RopeStyle::kHalfSplit;
  // spread<N> cuts N consecutive channels into four lanes of equal width.
  if (!half_split_pre || scheme.lowrank > 0 || pairs == 0 || pairs % 4 != 0 || layer.head_dim % pairs != 0) return "natural";
  return fmt::format("spread{}", pairs);
}

std::string block_order(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer) {
  if (side != Side::kK || !kvrt::is_llamacpp_block(scheme.format)) return "";
  return layer.llamacpp_adjacent_pairs && layer.rope_style == RopeStyle::kHalfSplit ? "adjacent" : "half_split";
}

quant::SchemeParams params_from_sens(const sens::SensResult& sens, const LayerGeometry& layer, Side side, const std::string& scheme) {
  // Writers may pad the layer number.
  const char* letter = side == Side::kK ? "k" : "v";
  const std::string key = fmt::format("{}/{}/{}", layer.index, letter, scheme);
  auto found = sens.params.find(key);
  if (found == sens.params.end()) found = sens.params.find(fmt::format("{:02}/{}/{}", layer.index, letter, scheme));
  if (found == sens.params.end())
    fail(ErrorKind::kMismatch, fmt::format("layer {} {} {}", layer.index, side_name(side), scheme),
         "the scheme needs constants, and sens.h5 has none under /params/{}; run kvsens again", key);
  quant::SchemeParams params;
  for (const sens::FittedArray& array : found->second) {
    if (std::vector<float>* const values = params.find(array.what)) *values = array.values;
    else fail(ErrorKind::kUnsupported, key, "array `{}` belongs to a scheme part that this build does not plan", array.what);
  }
  return params;
}

/// Limits on loss change with the level that the curve of the joint runs is taken at; they settle in two or three.
constexpr int kMostRounds = 6;

Candidates candidates_of(const sens::SensResult& sens, const SearchRequest& request, const LogSink& log) {
  Accounting accounting = request.accounting;
  accounting.sink_tokens = sens.n_sinks;
  for (const std::int64_t window : sens.windows) check_accounting(sens.model, window, accounting);
  return Candidates(sens, accounting, request.metric, log, request.restrictions, request.tiers);
}

Plan search_plan(const sens::SensResult& sens, const EvidenceByLayer& evidence, const SearchRequest& request, const LogSink& log) {
  Candidates candidates = candidates_of(sens, request, log);
  if (request.limits.budget && restrictions_allow_bf16(request.restrictions)) {
    const Accounting& accounting = candidates.accounting();
    const std::int64_t limit = budget_bytes(*request.limits.budget, candidates.elements(), accounting.context_tokens, accounting.batch);
    if (plain_16_bit_bytes(sens.model.layers, accounting) <= limit) return plan_in_16_bit(sens, evidence, request, limit);
  }
  Found found = search(candidates, request.limits);
  for (int round = 0; round < kMostRounds && candidates.predict_near(found.score); ++round) found = search(candidates, request.limits);
  // A limit on loss is met or not: there the margin rule has nothing to trade.
  std::optional<MarginVerdict> margin;
  if (request.limits.budget) margin = apply_margin(candidates, found.limit_bytes, request.limits.window_per_layer, found);
  return plan_of(candidates, found, evidence, request, margin);
}

Plan plan_of(const Candidates& candidates, const Found& found, const EvidenceByLayer& evidence, const SearchRequest& request,
             const std::optional<MarginVerdict>& margin) {
  const sens::SensResult& sens = candidates.sens();
  Plan plan;
  plan.model = sens.model;
  plan.sink_tokens = sens.n_sinks;
  plan.page_tokens = request.accounting.page_tokens;
  plan.scale_refresh_tokens = request.accounting.scale_refresh_tokens;
  plan.request = request_of(sens, request);
  plan.request.budget_bytes = found.limit_bytes;
  plan.request.max_kl = found.limit_score;
  plan.request.metric = candidates.metric();

  // The plan's window is the one that most layers have.
  std::vector<std::size_t> votes(sens.windows.size(), 0);
  for (const LayerOption& o : found.choice)
    ++votes[static_cast<std::size_t>(std::find(sens.windows.begin(), sens.windows.end(), sens.windows[o.tier_class]) - sens.windows.begin())];
  plan.window_tokens = sens.windows[static_cast<std::size_t>(std::max_element(votes.begin(), votes.end()) - votes.begin())];

  for (std::size_t l = 0; l < found.choice.size(); ++l) {
    const LayerOption& choice = found.choice[l];
    const LayerGeometry& geometry = sens.model.layers[l];
    LayerPlan layer;
    layer.index = geometry.index;
    layer.module = module_name(geometry.index);
    if (sens.windows[choice.tier_class] != plan.window_tokens) layer.window_tokens = sens.windows[choice.tier_class];
    if (layer.salient_fraction = sens.salient_fraction(choice.tier_class); layer.salient_fraction > 0) {
      plan.salient = SalientTier{quant::parse_salient_scheme(sens.salient_scheme, "the scores' salient tier"), sens.salient_score};
      const auto factors = sens.saliency.find(geometry.index);
      if (factors == sens.saliency.end())
        fail(ErrorKind::kMismatch, fmt::format("layer {}", geometry.index), "the scores do not hold by what its salient tokens were chosen; run kvsens again");
      layer.saliency = factors->second;
    }
    const auto seen = evidence.find(geometry.index);
    for (const Side side : {Side::kK, Side::kV}) {
      const std::size_t scheme = side == Side::kK ? choice.k : choice.v;
      UnitPlan& unit = layer.unit(side);
      unit = make_unit(candidates.scheme(scheme), side, geometry);
      if (kvrt::needs_calibration(unit.scheme)) unit.params = params_from_sens(sens, geometry, side, sens.schemes[scheme]);
      unit.why = decision_reasons(candidates, l, side, found, seen == evidence.end() ? nullptr : &seen->second);
    }
    plan.layers.push_back(std::move(layer));
  }

  fill_summary(plan, candidates.accounting());
  CALIB_CHECK(plan.summary.bytes == found.bytes);
  const double unfitted = unfitted_score(candidates, found.choice), slope = unfitted > 0 ? found.score / unfitted : 1.0;
  plan.summary.predicted = Prediction{candidates.metric(), unfitted, found.se / slope, candidates.metric_in_nats(), !candidates.fit(), candidates.fit()};
  if (JointFit* fit = plan.summary.predicted->joint ? &*plan.summary.predicted->joint : nullptr) fit->slope = slope, fit->windows.clear();
  if (const sens::IsolatedRuns* runs = candidates.isolated())
    plan.summary.predicted->isolated = {static_cast<std::size_t>(std::count(runs->taken_up.begin(), runs->taken_up.end(), 1)), runs->above, runs->k.value,
                                        runs->v.value};
  plan.summary.gap = found.solution.gap();
  plan.summary.proven = found.solution.proven;
  plan.frontier = frontier(candidates, request.limits.window_per_layer);
  plan.baselines = baselines(candidates, found.limit_bytes > 0 ? found.limit_bytes : found.bytes, request.seed);
  plan.fallback = fallback_ladder(candidates, found.choice);
  plan.decision = affordability(sens.model.layers, candidates.accounting(), asked_text(request), found.limit_bytes);
  for (Reason& step : decision_flow(candidates, found, request.limits.window_per_layer, margin, evidence)) plan.decision.push_back(std::move(step));
  return plan;
}

Plan uniform_plan(const ModelIdentity& model, const quant::Preset& preset, Accounting accounting, const EvidenceByLayer& evidence, const FitUnit& fit,
                  const FitSaliency& saliency) {
  Plan plan = empty_plan(model, preset.n_sinks, preset.window, accounting);
  if (preset.salient_fraction > 0) plan.salient = SalientTier{quant::parse_salient_scheme(preset.salient, preset.name), quant::kTierScore};
  plan.request.uniform = preset.name;
  for (const LayerGeometry& geometry : model.layers) {
    LayerPlan layer = empty_layer(geometry);
    if (plan.salient) {
      for (const Side side : {Side::kK, Side::kV}) quant::check_scheme(plan.salient->scheme, geometry, side);
      layer.salient_fraction = preset.salient_fraction;
      layer.saliency = saliency(geometry);
    }
    for (const Side side : {Side::kK, Side::kV}) {
      const std::string& text = side == Side::kK ? preset.k : preset.v;
      UnitPlan& unit = layer.unit(side);
      unit = make_unit(quant::in_frame_of(quant::parse_scheme(text), geometry), side, geometry);
      quant::check_scheme(unit.scheme, geometry, side);
      std::vector<std::string> notes;
      if (kvrt::needs_calibration(unit.scheme)) unit.params = fit(geometry, side, unit.scheme, &notes);
      unit.why.push_back({"uniform", fmt::format("{} asks for {} on every {}{}", preset.name, text, side_name(side),
                                                 kvrt::to_string(unit.scheme) == text ? "" : "; this layer has no RoPE, so that `pre` is its one frame"), {}});
      for (const std::string& note : notes) unit.why.push_back({"fit", note, {}});
      if (plan.salient)
        unit.why.push_back(
            {"tier",
             fmt::format("{} asks for{} by {}", preset.name, quant::tier_text(preset.salient_fraction, preset.salient).substr(1), plan.salient->score),
             {{"fraction", preset.salient_fraction}}});
      add_evidence(unit, side, geometry, evidence);
    }
    plan.layers.push_back(std::move(layer));
  }
  fill_summary(plan, accounting);
  plan.summary.proven = true;
  return plan;
}

Plan imported_plan(const ModelIdentity& model, const std::string& origin, const std::vector<ImportedLayer>& layers, std::int64_t n_sinks, std::int64_t window,
                   Accounting accounting, const EvidenceByLayer& evidence) {
  CALIB_CHECK(layers.size() == model.layers.size());
  Plan plan = empty_plan(model, n_sinks, window, accounting);
  plan.request.imported = origin;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerGeometry& geometry = model.layers[l];
    LayerPlan layer = empty_layer(geometry);
    for (const Side side : {Side::kK, Side::kV}) {
      UnitPlan& unit = layer.unit(side);
      unit = make_unit(side == Side::kK ? layers[l].k : layers[l].v, side, geometry);
      quant::check_scheme(unit.scheme, geometry, side);
      CALIB_CHECK(!kvrt::needs_calibration(unit.scheme));
      unit.why.push_back({"imported", layers[l].why, {}});
      add_evidence(unit, side, geometry, evidence);
    }
    plan.layers.push_back(std::move(layer));
  }
  fill_summary(plan, accounting);
  return plan;
}

}  // namespace calib::plan

#include "libcalib/plan/decision_flow.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "libcalib/base/plural.h"
#include "libcalib/plan/baseline.h"
#include "libcalib/plan/continuous.h"
#include "libcalib/plan/decision.h"
#include "libcalib/quant/scheme.h"

namespace calib::plan {
namespace {

using SchemeTest = std::function<bool(const kvrt::Scheme&)>;

bool per_channel(const kvrt::Scheme& s) { return s.granularity == kvrt::Granularity::kChannel || s.granularity == kvrt::Granularity::kChannelStatic; }
bool narrow(const kvrt::Scheme& s) { return kvrt::code_bits(s.format) < 8; }

/// Answers "and if every unit had to …" at the plan's bytes.
class Alternatives {
 public:
  Alternatives(const Candidates& c, const Found& found, bool window_per_layer)
      : c_(c), found_(found), window_per_layer_(window_per_layer), limit_(found.limit_bytes > 0 ? found.limit_bytes : found.bytes) {}

  /// Units of the plan (both sides, or keys alone) whose scheme passes.
  std::size_t count(const SchemeTest& test, bool keys_only) const {
    std::size_t n = 0;
    for (const LayerOption& o : found_.choice) n += (test(c_.scheme(o.k)) ? 1u : 0u) + (!keys_only && test(c_.scheme(o.v)) ? 1u : 0u);
    return n;
  }
  /// The margin rule takes calibrated schemes out of every question.
  bool usable(std::size_t scheme) const { return !found_.data_free || !kvrt::needs_calibration(c_.scheme(scheme)); }
  bool among_candidates(const SchemeTest& test, bool keys_only) const {
    for (std::size_t l = 0; l < c_.n_layers(); ++l)
      for (std::size_t s = 0; s < c_.sens().schemes.size(); ++s)
        if (usable(s) && test(c_.scheme(s)) && (c_.allowed(l, Side::kK, s) || (!keys_only && c_.allowed(l, Side::kV, s)))) return true;
    return false;
  }

  /// Adds "NAME score (x times)" to `text` and the score to `numbers`; layers kept in bf16 are left alone.
  void ask(const std::string& name, const SchemeTest& test, bool keys_only, Reason& step) const {
    const Candidates::Filter filter = [&](std::size_t l, Side side, std::size_t s) {
      return c_.skipped(l) || (usable(s) && ((keys_only && side == Side::kV) || test(c_.scheme(s))));
    };
    for (std::size_t l = 0; l < c_.n_layers(); ++l)
      for (const Side side : {Side::kK, Side::kV}) {
        bool any = false;
        for (std::size_t s = 0; s < c_.sens().schemes.size(); ++s) any = any || (c_.allowed(l, side, s) && filter(l, side, s));
        if (!any) return;
      }
    std::optional<Found> other;
    try {
      other = best_within(c_, problems_of(c_, window_per_layer_, filter, false, !found_.data_free), limit_);
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kInfeasible) throw;
      return;  // ties of the restrictions leave nothing
    }
    add(name, other ? std::optional<double>(other->score) : std::nullopt, step);
  }

  /// The same for plans without a salient tier.
  void ask_without_tier(Reason& step) const {
    const Candidates::Filter filter = [&](std::size_t l, Side, std::size_t s) { return c_.skipped(l) || usable(s); };
    const std::optional<Found> other = best_within(c_, problems_of(c_, window_per_layer_, filter, false, false), limit_);
    add("none", other ? std::optional<double>(other->score) : std::nullopt, step);
  }

  void add(const std::string& name, std::optional<double> score, Reason& step) const {
    step.text += fmt::format("; {} ", name);
    if (!score) {
      step.text += "does not fit";
      return;
    }
    step.text += fmt::format("{:.3e}", *score);
    if (found_.score > 0) step.text += fmt::format(" ({:.2f}x)", *score / found_.score);
    step.numbers.emplace_back(name, *score);
  }

  std::int64_t limit() const { return limit_; }

 private:
  const Candidates& c_;
  const Found& found_;
  bool window_per_layer_;
  std::int64_t limit_;
};

Reason outlier_step(const Candidates& c, const std::map<int, quant::UnitEvidence>& evidence) {
  if (evidence.empty()) return {"outliers", "not looked at: give --stats for the channel outliers of keys and values", {}};
  std::size_t post = 0, pre = 0, values = 0;
  double worst = 0, worst_layer = 0;
  for (const LayerGeometry& g : c.sens().model.layers) {
    const auto seen = evidence.find(g.index);
    if (seen == evidence.end()) continue;
    post += seen->second.k_outlier_ratio > kOutlierRatio;
    pre += seen->second.k_pre_outlier_ratio > kOutlierRatio;
    values += seen->second.v_outlier_ratio > kOutlierRatio;
    if (seen->second.k_outlier_ratio > worst) worst = seen->second.k_outlier_ratio, worst_layer = g.index;
  }
  const std::size_t n = c.n_layers();
  return {"outliers",
          fmt::format("layers with a channel above {:.0f} x the median: keys {} of {} after RoPE, {} before, values {}, worst key ratio {:.1f} in layer {:.0f}",
                      kOutlierRatio, post, n, pre, values, worst, worst_layer),
          {{"key_layers_post", static_cast<double>(post)},
           {"key_layers_pre", static_cast<double>(pre)},
           {"value_layers", static_cast<double>(values)},
           {"worst_ratio", worst},
           {"worst_layer", worst_layer}}};
}

Reason window_step(const Candidates& c, const Found& found, const Alternatives& ask, bool window_per_layer) {
  std::set<std::int64_t> used;
  for (const LayerOption& o : found.choice) used.insert(c.sens().windows[o.tier_class]);
  Reason step{"window", fmt::format("{} tokens exact{}", fmt::join(used, ", "), window_per_layer ? ", chosen per layer" : ""), {}};
  const std::vector<std::vector<std::size_t>> sets = class_sets(c, false, !found.data_free);
  if (sets.size() == 1) {
    step.text += "; the only window that was scored";
    return step;
  }
  for (const std::vector<std::size_t>& classes : sets) {
    const std::vector<LayerGroup> groups = c.groups(classes, [&](std::size_t l, Side, std::size_t s) { return c.skipped(l) || ask.usable(s); });
    const std::optional<Solution> s = solve(knapsack(groups), ask.limit());
    ask.add(fmt::format("window {}", c.sens().windows[classes.front()]), s ? std::optional<double>(s->score) : std::nullopt, step);
  }
  return step;
}

/// Layers by their share of salient tokens, and what the plan without any would score; empty where no tier was scored.
std::optional<Reason> tier_step(const Candidates& c, const Found& found, const Alternatives& ask) {
  if (c.sens().salient_scheme.empty()) return std::nullopt;
  std::map<double, std::size_t> layers;
  std::size_t n_allowed = 0, n_layers = 0;
  for (std::size_t l = 0; l < c.n_layers(); ++l) {
    if (const double fraction = c.sens().salient_fraction(found.choice[l].tier_class); fraction > 0) ++layers[fraction], ++n_layers;
    bool may = false;
    for (std::size_t w = 0; w < c.sens().windows.size(); ++w) may = may || (c.sens().salient_fraction(w) > 0 && c.class_allowed(l, w));
    n_allowed += may;
  }
  Reason step{"tier", fmt::format("a salient tier at {} in {} of {} layers", c.sens().salient_scheme, n_layers, c.n_layers()),
              {{"layers", static_cast<double>(n_layers)}, {"layers_allowed", static_cast<double>(n_allowed)}}};
  std::string shares;
  for (const auto& [fraction, n] : layers) shares += fmt::format("{}{:g} in {}", shares.empty() ? " (" : ", ", fraction, n);
  if (!shares.empty()) step.text += shares + ")";
  if (n_allowed == 0) step.text += "; no layer may have one: kvplan --saliency says where it pays";
  else if (n_allowed < c.n_layers()) step.text += fmt::format("; {} may not have one", counted(c.n_layers() - n_allowed, "layer"));
  if (n_layers > 0) ask.ask_without_tier(step);
  return step;
}

/// Widths against what the damage curves alone would ask for, at the plan's mean width.
std::optional<Reason> continuous_step(const Candidates& c, const Found& found) {
  std::vector<std::vector<std::pair<double, double>>> points;
  double mean = 0, plan_k = 0, plan_v = 0;
  for (std::size_t l = 0; l < c.n_layers(); ++l)
    for (const Side side : {Side::kK, Side::kV}) {
      std::map<int, double> best;  // 8 bits and more lie on the floor of the exact tokens, off the curve
      for (std::size_t s = 0; s < c.sens().schemes.size(); ++s) {
        if (!c.allowed(l, side, s) || !narrow(c.scheme(s)) || c.scheme(s).lowrank > 0) continue;
        const double score = c.score(l, side, s, found.choice[l].tier_class);
        const auto [at, fresh] = best.emplace(kvrt::code_bits(c.scheme(s).format), score);
        if (!fresh) at->second = std::min(at->second, score);
      }
      points.emplace_back(best.begin(), best.end());
      const double bits = kvrt::code_bits(c.scheme(side == Side::kK ? found.choice[l].k : found.choice[l].v).format);
      (side == Side::kK ? plan_k : plan_v) += bits / static_cast<double>(c.n_layers());
    }
  mean = (plan_k + plan_v) / 2;
  const std::optional<DamageCurves> curves = fit_damage_curves(points);
  if (!curves) return std::nullopt;
  const std::vector<double> bits = continuous_bits(*curves, mean);
  double k = 0, v = 0;
  for (std::size_t u = 0; u < bits.size(); ++u) (u % 2 == 0 ? k : v) += bits[u] / static_cast<double>(c.n_layers());
  return Reason{
      "curves",
      fmt::format(
          "a bit more divides the loss by {:.2f}; with continuous widths K would take {:.2f} and V {:.2f} bits on average, the plan has {:.2f} and {:.2f}",
          curves->base, k, v, plan_k, plan_v),
      {{"base", curves->base}, {"k_bits", k}, {"v_bits", v}, {"plan_k_bits", plan_k}, {"plan_v_bits", plan_v}}};
}

}  // namespace

std::optional<MarginVerdict> apply_margin(const Candidates& c, std::int64_t limit_bytes, bool window_per_layer, Found& found) {
  bool calibrated = false;
  for (const LayerOption& o : found.choice)  // a tier ranks tokens by calibrated statistics
    calibrated = calibrated || kvrt::needs_calibration(c.scheme(o.k)) || kvrt::needs_calibration(c.scheme(o.v)) || c.sens().salient_fraction(o.tier_class) > 0;
  if (!calibrated) return std::nullopt;
  std::optional<Found> free = best_data_free(c, limit_bytes, window_per_layer);
  if (!free || free->bytes > limit_bytes) return std::nullopt;
  MarginVerdict verdict{found.score, free->score, 0, false};
  for (std::size_t l = 0; l < c.n_layers(); ++l) {
    const LayerOption &a = found.choice[l], &b = free->choice[l];
    for (const Side side : {Side::kK, Side::kV}) {
      const std::size_t x = side == Side::kK ? a.k : a.v, y = side == Side::kK ? b.k : b.v;
      if (x == y && a.tier_class == b.tier_class) continue;
      verdict.se += std::hypot(c.standard_error(l, side, x, a.tier_class), c.standard_error(l, side, y, b.tier_class));
    }
  }
  if (verdict.data_free - verdict.calibrated <= 2 * verdict.se) {
    verdict.data_free_taken = free->data_free = true;
    free->limit_bytes = found.limit_bytes;
    free->limit_score = found.limit_score;
    found = std::move(*free);
  }
  return verdict;
}

std::int64_t plain_16_bit_bytes(const std::vector<LayerGeometry>& layers, Accounting accounting) {
  accounting.sink_tokens = 0;
  const kvrt::Scheme bf16 = quant::parse_scheme("bf16");
  std::int64_t bytes = 0;
  for (const LayerGeometry& g : layers) bytes += layer_bytes(g, bf16, bf16, 0, accounting);
  return bytes;
}

std::vector<Reason> affordability(const std::vector<LayerGeometry>& layers, const Accounting& accounting, const std::string& asked, std::int64_t limit_bytes) {
  const std::int64_t plain = plain_16_bit_bytes(layers, accounting), elements = cache_elements(layers, accounting);
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  std::vector<Reason> steps;
  steps.push_back({"asked", fmt::format("{} at {} x batch {}{}", asked, counted(accounting.context_tokens, "token"), accounting.batch,
                                        limit_bytes > 0 ? fmt::format(": {} for K and V", format_bytes(limit_bytes)) : ": the fewest bytes that hold it"),
                   {{"context_tokens", number(accounting.context_tokens)}, {"batch", number(accounting.batch)}, {"limit_bytes", number(limit_bytes)}}});
  const double bits = effective_bits(plain, elements);
  std::string verdict = "no byte limit asks for less";
  if (limit_bytes > 0)
    verdict = plain <= limit_bytes ? "affordable: nothing needs to be compressed"
                                   : fmt::format("{:.2f} times the budget: not affordable", number(plain) / number(limit_bytes));
  steps.push_back(
      {"bf16", fmt::format("16 bit takes {} ({:.2f} bits), {}", format_bytes(plain), bits, verdict), {{"bytes", number(plain)}, {"effective_bits", bits}}});
  return steps;
}

std::vector<Reason> decision_flow(const Candidates& c, const Found& found, bool window_per_layer, const std::optional<MarginVerdict>& margin,
                                  const std::map<int, quant::UnitEvidence>& evidence) {
  const Alternatives ask(c, found, window_per_layer);
  const std::size_t n = c.n_layers();
  std::vector<Reason> steps;
  if (c.restrictions().any()) {
    Reason step{"restrictions", restrictions_text(c.restrictions()), {}};
    std::map<std::string, std::set<std::string>> by_rule;
    for (const auto& [scheme, why] : c.excluded()) by_rule[why].insert(c.sens().schemes[scheme]);
    for (const auto& [why, schemes] : by_rule) step.text += fmt::format("; {} ({})", fmt::join(schemes, " "), why);
    steps.push_back(std::move(step));
  }
  steps.push_back({"candidates",
                   fmt::format("{} of list {} and {}, scored by {}", counted(c.sens().schemes.size(), "scheme"), c.sens().candidate_list,
                               counted(class_sets(c, false).size(), "window"), c.metric()),
                   {{"schemes", static_cast<double>(c.sens().schemes.size())}, {"windows", static_cast<double>(class_sets(c, false).size())}}});
  if (const sens::IsolatedRuns* runs = c.isolated())
    steps.push_back({"isolated",
                     c.isolated_summary(),
                     {{"units", static_cast<double>(std::count(runs->taken_up.begin(), runs->taken_up.end(), 1))},
                      {"above", runs->above},
                      {"slope_k", runs->k.value},
                      {"slope_v", runs->v.value},
                      {"pairs_k", static_cast<double>(runs->k.n_pairs)},
                      {"pairs_v", static_cast<double>(runs->v.n_pairs)}}});
  steps.push_back(outlier_step(c, evidence));

  const auto question = [&](const char* rule, std::string chosen, const std::vector<std::pair<std::string, SchemeTest>>& options, bool keys_only) {
    Reason step{rule, std::move(chosen), {}};
    std::size_t known = 0;
    for (const auto& [name, test] : options) known += ask.among_candidates(test, keys_only);
    if (known < 2) return;  // nothing to choose between
    for (const auto& [name, test] : options) ask.ask(name, test, keys_only, step);
    steps.push_back(std::move(step));
  };
  const SchemeTest pre = [](const kvrt::Scheme& s) { return s.pre; }, post = [](const kvrt::Scheme& s) { return !s.pre; };
  question("frame", fmt::format("keys before RoPE in {} of {} layers", ask.count(pre, true), n), {{"all before", pre}, {"all after", post}}, true);
  const SchemeTest token = [](const kvrt::Scheme& s) { return !per_channel(s); };
  question("ranges", fmt::format("keys per channel in {} of {} layers", ask.count(per_channel, true), n),
           {{"all per channel", per_channel}, {"all per token", token}}, true);

  std::set<int> widths, groups;
  for (std::size_t s = 0; s < c.sens().schemes.size(); ++s) {
    widths.insert(kvrt::code_bits(c.scheme(s).format));
    if (narrow(c.scheme(s)) && c.scheme(s).granularity != kvrt::Granularity::kBuiltIn) groups.insert(c.scheme(s).group);
  }
  std::vector<std::pair<std::string, SchemeTest>> options;
  std::string used;
  for (const int b : widths) {
    const SchemeTest test = [b](const kvrt::Scheme& s) { return kvrt::code_bits(s.format) == b; };
    options.emplace_back(fmt::format("all {} bits", b), test);
    if (const std::size_t units = ask.count(test, false)) used += fmt::format("{}{} bits in {}", used.empty() ? "" : ", ", b, units);
  }
  question("bits", fmt::format("{} of {} units", used, 2 * n), options, false);
  options.clear();
  used.clear();
  for (const int g : groups) {
    const SchemeTest test = [g](const kvrt::Scheme& s) { return !narrow(s) || s.group == g; };
    const std::string name = g == 0 ? "whole vectors" : fmt::format("groups of {}", g);
    options.emplace_back(name, test);
    if (const std::size_t units = ask.count([g](const kvrt::Scheme& s) { return narrow(s) && s.group == g; }, false))
      used += fmt::format("{}{} in {}", used.empty() ? "" : ", ", name, units);
  }
  if (used.empty()) used = "no unit below 8 bits";
  question("group", used, options, false);
  const SchemeTest had = [](const kvrt::Scheme& s) { return s.had; }, no_had = [](const kvrt::Scheme& s) { return !s.had; };
  question("rotation", fmt::format("{} of {} units rotated", ask.count(had, false), 2 * n), {{"none", no_had}, {"all", had}}, false);
  const SchemeTest center = [](const kvrt::Scheme& s) { return s.center || s.smooth; }, no_center = [](const kvrt::Scheme& s) { return !s.center && !s.smooth; };
  if (ask.among_candidates(center, false)) {
    Reason step{"transforms", fmt::format("{} of {} units centred or smoothed", ask.count(center, false), 2 * n), {}};
    if (ask.count(center, false) > 0) ask.ask("none", no_center, false, step);
    steps.push_back(std::move(step));
  }
  const SchemeTest ef = [](const kvrt::Scheme& s) { return s.ef; }, no_ef = [](const kvrt::Scheme& s) { return !s.ef; };
  if (ask.among_candidates(ef, false)) {
    Reason step{"feedback", fmt::format("error feedback in {} of {} layers' keys", ask.count(ef, true), n), {}};
    if (ask.count(ef, true) > 0) ask.ask("none", no_ef, false, step);
    steps.push_back(std::move(step));
  }
  if (!c.low_rank().empty()) {
    const SchemeTest low_rank = [](const kvrt::Scheme& s) { return s.lowrank > 0; }, full_rank = [](const kvrt::Scheme& s) { return s.lowrank == 0; };
    Reason step{"lowrank", fmt::format("a basis in {} of {} units; {}", ask.count(low_rank, false), 2 * n, c.low_rank_summary()), {}};
    for (const bool accepted : {true, false})
      step.numbers.emplace_back(
          accepted ? "accepted" : "left out",
          static_cast<double>(std::count_if(c.low_rank().begin(), c.low_rank().end(), [&](const LowRankVerdict& v) { return v.accepted == accepted; })));
    if (ask.count(low_rank, false) > 0) ask.ask("none", full_rank, false, step);
    steps.push_back(std::move(step));
  }
  steps.push_back(window_step(c, found, ask, window_per_layer));
  if (std::optional<Reason> tier = tier_step(c, found, ask)) steps.push_back(std::move(*tier));
  if (std::optional<Reason> curves = continuous_step(c, found)) steps.push_back(std::move(*curves));

  if (margin) {
    const double gain = margin->data_free - margin->calibrated;
    steps.push_back({"margin",
                     fmt::format("calibrated {:.3e} against data-free {:.3e}: {:.3e} less, {} than 2 SE ({:.1e}); {}", margin->calibrated, margin->data_free,
                                 gain, margin->data_free_taken ? "not more" : "more", 2 * margin->se,
                                 margin->data_free_taken ? "the data-free plan is taken" : "calibration pays"),
                     {{"calibrated", margin->calibrated}, {"data_free", margin->data_free}, {"se", margin->se}}});
  }
  steps.push_back(
      {"chosen",
       fmt::format("{}, {:.3f} effective bits, predicted {} {:.4e} +- {:.1e}, {}", format_bytes(found.bytes), effective_bits(found.bytes, c.elements()),
                   c.metric(), found.score, found.se,
                   found.solution.proven ? "proven optimal" : fmt::format("within {:.1e} of the optimum", found.solution.gap())),
       {{"bytes", static_cast<double>(found.bytes)}, {"effective_bits", effective_bits(found.bytes, c.elements())}, {"score", found.score}, {"se", found.se}}});
  return steps;
}

}  // namespace calib::plan

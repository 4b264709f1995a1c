#include "libcalib/plan/candidate.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "libcalib/base/plural.h"
#include "libcalib/plan/joint.h"
#include "libcalib/plan/two_stage.h"
#include "libcalib/quant/scheme.h"

namespace calib::plan {
namespace {

constexpr const char* kMetricOrder[] = {"logit_kl", "fisher_softmax", "fisher_vec", "lookahead", "fisher", "attn_out"};
constexpr std::size_t kNoUnit = static_cast<std::size_t>(-1);

std::string unit_name(const sens::UnitId& unit) { return fmt::format("layer {} {}", unit.layer, side_name(unit.side)); }

std::string choose_metric(const sens::SensResult& sens, const std::string& asked) {
  std::vector<std::string> names;
  for (const auto& entry : sens.scores) names.push_back(entry.first);
  const std::string present = fmt::format("{}", fmt::join(names, ", "));
  if (!asked.empty()) {
    if (asked == "attn_kl")
      fail(ErrorKind::kUsage, "--metric attn_kl", "it is 0 for every V unit, so it cannot rank them; use fisher_softmax or another of: {}", present);
    if (!sens.scores.count(asked)) fail(ErrorKind::kUsage, "--metric " + asked, "the scores hold {}", present.empty() ? "no scores" : present);
    if (sens.isolated && asked != sens.isolated->metric)
      fail(ErrorKind::kUsage, "--metric " + asked,
           "the scores hold isolated runs in place of {0} where it fails, and no other; use --metric {0}, or the file from before kvsens isolate",
           sens.isolated->metric);
    return asked;
  }
  if (sens.isolated) {
    if (!sens.scores.count(sens.isolated->metric))
      fail(ErrorKind::kMismatch, "the scores", "hold isolated runs in place of {}, and {} only; run kvsens isolate again", sens.isolated->metric, present);
    return sens.isolated->metric;
  }
  for (const char* name : kMetricOrder)
    if (sens.scores.count(name)) return name;
  fail(ErrorKind::kMismatch, "the scores", "holds {}, none of which ranks K and V units together; run kvsens with --metric fisher_softmax",
       present.empty() ? "no scores" : present);
}

/// K base width that wide query groups keep (METHODS.md 8, GQA-conservative margin).
bool below_wide_group_floor(const kvrt::Scheme& scheme, int head_dim) {
  const double bits = channel_bits(scheme, head_dim);
  const bool channel = scheme.granularity == kvrt::Granularity::kChannel || scheme.granularity == kvrt::Granularity::kChannelStatic;
  return bits < (channel ? 3 : 4);
}

void check_sizes(const sens::SensResult& sens, const sens::ScoreTable& table, const std::string& metric) {
  const std::size_t cells = sens.units.size() * sens.schemes.size();
  if (sens.valid.size() != cells)
    fail(ErrorKind::kMismatch, "the scores", "/valid holds {} entries, expected {} units x {} schemes", sens.valid.size(), sens.units.size(),
         sens.schemes.size());
  if (sens.windows.empty()) fail(ErrorKind::kMismatch, "the scores", "/windows is empty");
  if (!sens.salient_fractions.empty() && sens.salient_fractions.size() != sens.windows.size())
    fail(ErrorKind::kMismatch, "the scores", "/salient_fraction holds {} entries, /windows {}", sens.salient_fractions.size(), sens.windows.size());
  for (const std::int64_t window : sens.windows) {
    bool plain = false;
    for (std::size_t w = 0; w < sens.windows.size(); ++w) plain = plain || (sens.windows[w] == window && sens.salient_fraction(w) == 0);
    if (!plain) fail(ErrorKind::kMismatch, "the scores", "window {} was scored with a salient tier only; run kvsens again", window);
  }
  if (table.mean.size() != cells * sens.windows.size() || table.se.size() != table.mean.size())
    fail(ErrorKind::kMismatch, "the scores", "/score/{} holds {} means and {} standard errors, expected {}", metric, table.mean.size(),
         table.se.size(), cells * sens.windows.size());
}

}  // namespace

Candidates::Candidates(const sens::SensResult& sens, const Accounting& accounting, const std::string& metric, const LogSink& log,
                       const Restrictions& restrictions, const TierRules& tiers)
    : sens_(sens), accounting_(accounting), restrictions_(restrictions), tier_rules_(tiers), metric_(choose_metric(sens, metric)) {
  const sens::ScoreTable& table = sens.scores.at(metric_);
  check_sizes(sens, table, metric_);
  mean_ = table.mean, se_ = table.se;
  if (!sens.salient_scheme.empty()) salient_ = quant::parse_scheme(sens.salient_scheme);
  accounting_.sink_tokens = sens.n_sinks;
  std::set<std::string> seen;
  for (const std::string& text : sens.schemes) {
    if (!seen.insert(text).second) fail(ErrorKind::kUsage, text, "two candidates of sens.h5 have this string; a scheme may be listed once");
    schemes_.push_back(quant::parse_scheme(text));
  }

  const std::vector<LayerGeometry>& layers = sens.model.layers;
  if (layers.empty()) fail(ErrorKind::kMismatch, "the scores", "names a model without layers");
  unit_of_.assign(2 * layers.size(), kNoUnit);
  for (std::size_t u = 0; u < sens.units.size(); ++u) {
    const auto layer = std::find_if(layers.begin(), layers.end(), [&](const LayerGeometry& g) { return g.index == sens.units[u].layer; });
    if (layer == layers.end()) fail(ErrorKind::kMismatch, unit_name(sens.units[u]), "a unit of sens.h5 that its model does not have");
    std::size_t& slot = unit_of_[2 * static_cast<std::size_t>(layer - layers.begin()) + (sens.units[u].side == Side::kK ? 0 : 1)];
    if (slot != kNoUnit) fail(ErrorKind::kMismatch, unit_name(sens.units[u]), "listed twice in sens.h5");
    slot = u;
  }
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < unit_of_.size(); ++i)
    if (unit_of_[i] == kNoUnit) missing.push_back(unit_name({layers[i / 2].index, i % 2 == 0 ? Side::kK : Side::kV}));
  if (!missing.empty())
    throw Error(ErrorKind::kMismatch, missing.front(),
                fmt::format("sens.h5 has no scores for {} of {} units of its model; run kvsens again", missing.size(), unit_of_.size()), missing);

  allowed_.assign(unit_of_.size() * schemes_.size(), 0);
  std::vector<std::string> held_back, not_finite;
  for (std::size_t i = 0; i < unit_of_.size(); ++i) {
    const LayerGeometry& layer = layers[i / 2];
    const Side side = i % 2 == 0 ? Side::kK : Side::kV;
    const bool wide = layer.n_kv_heads > 0 && layer.n_q_heads / layer.n_kv_heads >= 4;
    wide_groups_ = wide_groups_ || wide;
    for (std::size_t s = 0; s < schemes_.size(); ++s) {
      if (!sens.valid[unit_of_[i] * schemes_.size() + s]) continue;
      quant::check_scheme(schemes_[s], layer, side);
      for (std::size_t w = 0; w < sens.windows.size(); ++w)
        if (!std::isfinite(mean_[sens.index(unit_of_[i], s, w)]))
          not_finite.push_back(fmt::format("layer {} {} {} {}", layer.index, side_name(side), sens.schemes[s], class_text(w)));
      if (side == Side::kK && wide && below_wide_group_floor(schemes_[s], layer.head_dim)) {
        if (std::find(held_back.begin(), held_back.end(), sens.schemes[s]) == held_back.end()) held_back.push_back(sens.schemes[s]);
        continue;
      }
      allowed_[i * schemes_.size() + s] = 1;
    }
  }
  if (!not_finite.empty())
    throw Error(ErrorKind::kNumeric, not_finite.front(),
                fmt::format("{} scores of metric {} are not finite although their scheme is valid there; run kvsens again", not_finite.size(), metric_),
                not_finite);
  if (!held_back.empty())
    log.note(fmt::format("4 or more query heads per KV head: K keeps at least 4 bits (token groups) or 3 (channel groups); left out: {}",
                         fmt::join(held_back, " ")));
  elements_ = cache_elements(layers, accounting_);
  std::vector<std::uint8_t> unknown;
  if (sens.isolated) {
    StagedScores staged = staged_scores(sens, *sens.isolated);
    mean_ = std::move(staged.mean), se_ = std::move(staged.se), unknown = std::move(staged.unknown);
    log.note(isolated_summary());
  }
  fit_predictions();
  if (fit_ && !fit_->reliable())
    log.warning(
        fmt::format("predictions are unreliable: {} joint runs give a slope of {:.2f} and a rank correlation of {:.2f}; measure the plan (kvsens refine)",
                    fit_->n_runs, fit_->slope, fit_->spearman));
  else if (fit_)
    for (const WindowSlope& w : fit_->windows)
      if (JointFit own = *fit_; own.slope = w.slope, !own.reliable())
        log.note(fmt::format("joint runs with window {} lose {:.2f} times what their scores add up to; its scores are multiplied by that", w.window, w.slope));
  count_bytes();
  for (const char* metric : {"attn_out", "attn_kl"})
    if (const auto entry = sens.scores.find(metric); entry != sens.scores.end()) check_sizes(sens, entry->second, metric);
  judge_low_rank(log);
  if (sens.isolated) leave_out(unknown, log);
  restrict(log);
}

/// Takes schemes out of `allowed_` whose scores nothing is known of in some tier class (`unknown`: index as ScoreTable).
void Candidates::leave_out(const std::vector<std::uint8_t>& unknown, const LogSink& log) {
  std::vector<std::string> names;
  for (std::size_t l = 0; l < n_layers(); ++l)
    for (const Side side : {Side::kK, Side::kV})
      for (std::size_t s = 0; s < schemes_.size(); ++s) {
        bool known = true;
        for (std::size_t w = 0; w < sens_.windows.size(); ++w) known = known && !unknown[sens_.index(unit(l, side), s, w)];
        if (known || !allowed(l, side, s)) continue;
        allowed_[(2 * l + (side == Side::kK ? 0 : 1)) * schemes_.size() + s] = 0;
        names.push_back(fmt::format("{} {}", unit_name({sens_.model.layers[l].index, side}), sens_.schemes[s]));
      }
  if (!names.empty())
    log.note(fmt::format("{} left out, first {}: kvsens isolate took the unit up and did not measure it", counted(names.size(), "option"), names.front()));
}

std::string Candidates::isolated_summary() const {
  const sens::IsolatedRuns& runs = *sens_.isolated;
  const auto n = std::count(runs.taken_up.begin(), runs.taken_up.end(), 1);
  std::string text = fmt::format("{} of {} by isolated runs, where {} passes {:g} nats", n, counted(sens_.units.size(), "unit"), runs.metric, runs.above);
  if (n == 0) return text;
  const auto slope = [](const sens::IsolatedRuns::Slope& s) { return fmt::format("{:.2f} ({})", s.value, counted(s.n_pairs, "pair")); };
  const bool alike = runs.k.value == runs.v.value && runs.k.n_pairs == runs.v.n_pairs;
  return text + fmt::format(" ({}); their score is logit_kl over {}", units_taken_up(sens_, runs),
                            alike ? slope(runs.k) : fmt::format("{} for K, {} for V", slope(runs.k), slope(runs.v)));
}

/// The slope between what the joint runs of sens.h5 lost and what this metric's sums predict.
void Candidates::fit_predictions() {
  if (!sens_.joint || !metric_in_nats()) return;
  const sens::JointRuns& joint = *sens_.joint;
  CALIB_CHECK(joint.n_layers == n_layers());
  std::vector<JointRun> runs;
  for (std::size_t r = 0; r < joint.size(); ++r) {
    double predicted = 0;
    std::int64_t window = sens_.windows[static_cast<std::size_t>(joint.tier_class[r * n_layers()])];
    for (std::size_t l = 0; l < n_layers(); ++l) {
      const std::size_t i = r * n_layers() + l;
      const auto tiers = static_cast<std::size_t>(joint.tier_class[i]);
      if (sens_.windows[tiers] != window) window = -1;
      predicted += score(l, Side::kK, static_cast<std::size_t>(joint.k[i]), tiers) + score(l, Side::kV, static_cast<std::size_t>(joint.v[i]), tiers);
    }
    if (predicted > 0 && joint.kld[r] > 0) runs.push_back({predicted, joint.kld[r], joint.ln_ppl_ratio[r], window, joint.kld_se[r]});
  }
  if (runs.size() >= kLeastJointRuns) fit_ = fit_joint(runs);
}

bool Candidates::predict_near(double score) {
  if (!fit_ || !(score > 0)) return false;
  const double before = level_;
  level_ = fit_->level(score / before);
  return std::fabs(level_ / before - 1) > 1e-3;
}

/// Takes what the target does not allow out of `allowed_`.
void Candidates::restrict(const LogSink& log) {
  const std::vector<LayerGeometry>& layers = sens_.model.layers;
  const Restrictions& r = restrictions_;
  check_arch(r.arch);
  const std::pair<const char*, const std::vector<std::string>*> lists[] = {{"--allow-k", &r.k}, {"--allow-v", &r.v}};
  for (const auto& [option, list] : lists)
    for (const std::string& text : *list)
      if (std::find(sens_.schemes.begin(), sens_.schemes.end(), text) == sens_.schemes.end())
        fail(ErrorKind::kUsage, fmt::format("{} {}", option, text), "no candidate of the scores; they hold {}", fmt::join(sens_.schemes, " "));
  skipped_.assign(layers.size(), 0);
  for (const int index : r.skip_layers) {
    const auto layer = std::find_if(layers.begin(), layers.end(), [&](const LayerGeometry& g) { return g.index == index; });
    if (layer == layers.end())
      fail(ErrorKind::kUsage, fmt::format("--skip-layers {}", index), "the model has no such layer with attention; its layers are {} to {}", layers.front().index,
           layers.back().index);
    skipped_[static_cast<std::size_t>(layer - layers.begin())] = 1;
  }
  const auto reason = [&](std::size_t l, Side side, std::size_t s) -> std::string {
    const kvrt::Format format = schemes_[s].format;
    if (skipped_[l]) return format == kvrt::Format::kBf16 && !schemes_[s].pre ? "" : fmt::format("--skip-layers keeps layer {} in bf16", layers[l].index);
    const std::vector<std::string>& list = side == Side::kK ? r.k : r.v;
    if (!list.empty() && std::find(list.begin(), list.end(), sens_.schemes[s]) == list.end()) return side == Side::kK ? "not in --allow-k" : "not in --allow-v";
    return missing_on_arch(r.arch, format);
  };
  for (std::size_t l = 0; l < layers.size(); ++l)
    for (const Side side : {Side::kK, Side::kV}) {
      std::string last;
      std::size_t n_left = 0;
      for (std::size_t s = 0; s < schemes_.size(); ++s) {
        if (!allowed(l, side, s)) continue;
        const std::string why = reason(l, side, s);
        if (why.empty()) {
          ++n_left;
          continue;
        }
        allowed_[(2 * l + (side == Side::kK ? 0 : 1)) * schemes_.size() + s] = 0;
        last = why;
        const auto same = [&](const auto& e) { return e.first == s && e.second == why; };
        if (!skipped_[l] && std::none_of(excluded_.begin(), excluded_.end(), same)) excluded_.emplace_back(s, why);
      }
      if (n_left > 0) continue;
      for (const LowRankVerdict& v : low_rank_)
        if (v.layer == l && v.side == side && !v.accepted) last += (last.empty() ? "" : "; ") + v.text;
      fail(ErrorKind::kInfeasible, unit_name({layers[l].index, side}), "no candidate scheme is left ({}); allow more, or score more with kvsens --candidates{}",
           last.empty() ? "none was scored" : last, skipped_[l] ? " default,bf16" : "");
    }
  for (const auto& [scheme, why] : excluded_)
    if (!missing_on_arch(r.arch, schemes_[scheme].format).empty()) log.note(fmt::format("{}: left out, {}", sens_.schemes[scheme], why));
}

/// Bytes of every scheme on its side with every exit block that a partner may impose, once per geometry.
void Candidates::count_bytes() {
  for (const kvrt::Scheme& s : schemes_) exits_.push_back(kvrt::finish_tiers(s, s, 0, 0, 0.0).block_base);
  std::vector<std::int64_t> of_scheme = exits_;
  std::sort(exits_.begin(), exits_.end());
  exits_.erase(std::unique(exits_.begin(), exits_.end()), exits_.end());
  for (const std::int64_t e : of_scheme) exit_class_.push_back(static_cast<std::size_t>(std::lower_bound(exits_.begin(), exits_.end(), e) - exits_.begin()));

  const std::vector<LayerGeometry>& layers = sens_.model.layers;
  const auto alike = [](const LayerGeometry& a, const LayerGeometry& b) {
    return a.n_kv_heads == b.n_kv_heads && a.head_dim == b.head_dim && a.sliding_window == b.sliding_window;
  };
  side_bytes_.assign(layers.size() * 2 * schemes_.size() * sens_.windows.size() * exits_.size(), 0);
  constants_.assign(layers.size() * schemes_.size(), 0);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    geometry_of_.push_back(static_cast<std::size_t>(
        std::find_if(layers.begin(), layers.begin() + static_cast<std::ptrdiff_t>(l), [&](const LayerGeometry& g) { return alike(g, layers[l]); }) -
        layers.begin()));
    if (geometry_of_[l] != l) continue;
    for (std::size_t s = 0; s < schemes_.size(); ++s)
      for (const Side side : {Side::kK, Side::kV}) {
        if (!kvrt::check_shape(schemes_[s], layers[l].head_dim, side == Side::kK).empty()) continue;
        constants_[l * schemes_.size() + s] = constants_bytes(schemes_[s], layers[l]);
        for (std::size_t w = 0; w < sens_.windows.size(); ++w)
          for (std::size_t e = exit_class_[s]; e < exits_.size(); ++e)
            side_bytes_[cost_index(l, side, s, w, e)] = side_bytes(layers[l], schemes_[s], side, exits_[e], tier_class(w), accounting_);
      }
  }
}

std::size_t Candidates::cost_index(std::size_t layer, Side side, std::size_t scheme, std::size_t tier_class, std::size_t exit_class) const {
  return (((2 * layer + (side == Side::kK ? 0 : 1)) * schemes_.size() + scheme) * sens_.windows.size() + tier_class) * exits_.size() + exit_class;
}

std::string Candidates::class_text(std::size_t i) const {
  return fmt::format("window {}{}", sens_.windows[i], quant::tier_text(sens_.salient_fraction(i), sens_.salient_scheme));
}

bool Candidates::class_allowed(std::size_t layer, std::size_t tier_class) const {
  const double fraction = sens_.salient_fraction(tier_class);
  if (fraction == 0) return true;
  const auto rules = tier_rules_.layers.find(sens_.model.layers[layer].index);
  return rules != tier_rules_.layers.end() && rules->second.hit_rate.count(fraction) > 0;
}

bool Candidates::any_tier() const {
  for (std::size_t l = 0; l < n_layers(); ++l)
    for (std::size_t w = 0; w < sens_.windows.size(); ++w)
      if (sens_.salient_fraction(w) > 0 && class_allowed(l, w)) return true;
  return false;
}

bool Candidates::metric_in_nats() const {
  return metric_ == "logit_kl" || metric_ == "fisher_softmax" || metric_ == "fisher_vec" || metric_ == "fisher" || metric_ == "fisher_dir";
}

bool Candidates::allowed(std::size_t layer, Side side, std::size_t scheme) const {
  return allowed_[(2 * layer + (side == Side::kK ? 0 : 1)) * schemes_.size() + scheme] != 0;
}

double Candidates::score(std::size_t layer, Side side, std::size_t scheme, std::size_t tier_class) const {
  return slope(tier_class) * mean_[sens_.index(unit(layer, side), scheme, tier_class)];
}

double Candidates::estimate(std::size_t layer, Side side, std::size_t scheme, std::size_t tier_class) const {
  return slope(tier_class) * sens_.scores.at(metric_).mean[sens_.index(unit(layer, side), scheme, tier_class)];
}

double Candidates::standard_error(std::size_t layer, Side side, std::size_t scheme, std::size_t tier_class) const {
  const double se = se_[sens_.index(unit(layer, side), scheme, tier_class)];
  return std::isfinite(se) ? slope(tier_class) * se : 0.0;
}

std::int64_t Candidates::bytes(std::size_t layer, std::size_t k, std::size_t v, std::size_t tier_class) const {
  const std::size_t l = geometry_of_[layer], e = std::max(exit_class_[k], exit_class_[v]);
  return side_bytes_[cost_index(l, Side::kK, k, tier_class, e)] + side_bytes_[cost_index(l, Side::kV, v, tier_class, e)];
}

LayerOption Candidates::option(std::size_t layer, std::size_t k, std::size_t v, std::size_t tier_class) const {
  const std::size_t l = geometry_of_[layer] * schemes_.size();
  const std::int64_t factors = sens_.salient_fraction(tier_class) > 0 ? saliency_bytes(sens_.model.layers[layer]) : 0;
  return {k, v, tier_class, bytes(layer, k, v, tier_class), constants_[l + k] + constants_[l + v] + factors,
          score(layer, Side::kK, k, tier_class) + score(layer, Side::kV, v, tier_class)};
}

}  // namespace calib::plan

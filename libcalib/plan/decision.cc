#include "libcalib/plan/decision.h"

#include <cmath>
#include <optional>

#include "libcalib/quant/token_tiers.h"

namespace calib::plan {
namespace {

constexpr double kMeanRatio = 1.0;     // the mean holds as much energy as the variation

/// Best allowed option of one side with fewer (or more) bytes than the choice, the tier class fixed; the other side is fixed too, or
/// follows under `same_kv`.
std::optional<LayerOption> neighbour(const Candidates& c, std::size_t layer, Side side, const Found& found, bool cheaper) {
  const LayerOption& choice = found.choice[layer];
  std::optional<LayerOption> best;
  for (std::size_t s = 0; s < c.sens().schemes.size(); ++s) {
    const bool both = c.restrictions().same_kv;
    if (found.data_free && kvrt::needs_calibration(c.scheme(s))) continue;
    if (c.sens().salient_fraction(choice.tier_class) > 0 && !quant::takes_tier(c.scheme(s))) continue;
    if (!c.allowed(layer, side, s) || (both && !c.allowed(layer, side == Side::kK ? Side::kV : Side::kK, s))) continue;
    const LayerOption o = c.option(layer, side == Side::kK || both ? s : choice.k, side == Side::kV || both ? s : choice.v, choice.tier_class);
    if (cheaper) {
      if (o.bytes >= choice.bytes) continue;
      if (!best || o.score < best->score || (o.score == best->score && o.bytes < best->bytes)) best = o;
    } else {
      if (o.bytes <= choice.bytes || o.score >= choice.score) continue;
      // The step up with the best exchange, which is the one the search turned down last.
      const auto price = [&](const LayerOption& a) { return (choice.score - a.score) / static_cast<double>(a.bytes - choice.bytes); };
      if (!best || price(o) > price(*best)) best = o;
    }
  }
  return best;
}

}  // namespace

namespace {

/// The layer's salient tier against the same schemes without one; both sides together.
std::optional<Reason> tier_reason(const Candidates& c, std::size_t layer, const LayerOption& choice) {
  if (c.sens().salient_scheme.empty()) return std::nullopt;
  const auto rules = c.tier_rules().layers.find(c.sens().model.layers[layer].index);
  const double fraction = c.sens().salient_fraction(choice.tier_class);
  if (fraction == 0) {
    if (rules == c.tier_rules().layers.end() || rules->second.abstains.empty()) return std::nullopt;
    return Reason{"tier", "no salient tier: " + rules->second.abstains, {}};
  }
  std::size_t plain = 0;
  while (c.sens().windows[plain] != c.sens().windows[choice.tier_class] || c.sens().salient_fraction(plain) > 0) ++plain;
  const LayerOption without = c.option(layer, choice.k, choice.v, plain);
  Reason r{"tier", fmt::format("{:g} of the coded tokens at {} by {}", fraction, c.sens().salient_scheme, c.sens().salient_score), {{"fraction", fraction}}};
  const auto hit = rules == c.tier_rules().layers.end() ? 0.0 : rules->second.hit_rate.at(fraction);
  if (hit > 0) r.text += fmt::format(" (hit rate {:.3f})", hit), r.numbers.emplace_back("hit_rate", hit);
  r.text += fmt::format(": {} bytes for {:.3e} less, {:.3e} without", choice.bytes - without.bytes, without.score - choice.score, without.score);
  r.numbers.insert(r.numbers.end(), {{"bytes", static_cast<double>(choice.bytes - without.bytes)}, {"score_without", without.score}, {"score", choice.score}});
  return r;
}

}  // namespace

std::vector<Reason> evidence_reasons(const kvrt::Scheme& scheme, Side side, const quant::UnitEvidence& evidence) {
  const bool channel = scheme.granularity == kvrt::Granularity::kChannel || scheme.granularity == kvrt::Granularity::kChannelStatic;
  const bool key = side == Side::kK;
  const double outlier = !key ? evidence.v_outlier_ratio : scheme.pre ? evidence.k_pre_outlier_ratio : evidence.k_outlier_ratio;
  const double mean = !key ? evidence.v_mean_ratio : scheme.pre ? evidence.k_pre_mean_ratio : evidence.k_mean_ratio;
  const char* name = key ? "key" : "value";
  const char* frame = !key ? "" : scheme.pre ? ", pre-RoPE" : ", post-RoPE";
  std::string remedy = "ranges per token";
  if (channel) remedy = "ranges per channel keep them apart";
  else if (scheme.had) remedy = "the rotation spreads them";
  else if (scheme.lowrank > 0) remedy = "the basis spreads them";
  else if (scheme.smooth) remedy = "the factors of `smooth` shrink them";
  else if (scheme.outlier_per_mille > 0) remedy = "the farthest values stand beside the codes";
  else if (kvrt::code_bits(scheme.format) >= 8) remedy = "8 bits and more bear them";
  std::vector<Reason> reasons;
  reasons.push_back({"outlier_ratio",
                     fmt::format("{} channel outlier ratio {:.1f} {} {:.0f}{}: {}", name, outlier, outlier > kOutlierRatio ? ">" : "<=",
                                 kOutlierRatio, frame, outlier > kOutlierRatio ? remedy : "no channel stands out"),
                     {{"ratio", outlier}, {"threshold", kOutlierRatio}}});
  std::string handled = scheme.center || scheme.lowrank > 0 ? "subtracted" : channel ? "absorbed by the channels' minima" : "part of every range";
  reasons.push_back({"mean_ratio",
                     fmt::format("{} mean is {:.2f} of the deviation{}: {}", name, mean, frame, mean > kMeanRatio ? handled : "small"),
                     {{"ratio", mean}, {"threshold", kMeanRatio}}});
  return reasons;
}

std::vector<Reason> decision_reasons(const Candidates& c, std::size_t layer, Side side, const Found& found, const quant::UnitEvidence* evidence) {
  const LayerOption& choice = found.choice[layer];
  const std::size_t scheme = side == Side::kK ? choice.k : choice.v;
  const double score = c.score(layer, side, scheme, choice.tier_class), se = c.standard_error(layer, side, scheme, choice.tier_class);
  const double share = found.score > 0 ? score / found.score : 0;
  std::vector<Reason> reasons;
  reasons.push_back({"score",
                     fmt::format("{} {:.3e} +- {:.1e}, {:.1f} % of the plan's sum", c.metric(), score, se, 100 * share),
                     {{"score", score}, {"se", se}, {"share", share}}});
  if (c.taken_up(layer, side)) {
    const double estimate = c.estimate(layer, side, scheme, choice.tier_class);
    const bool measured = c.isolated()->measured(c.sens().index(c.unit(layer, side), scheme, choice.tier_class));
    reasons.push_back({"isolated",
                       fmt::format("{}; the estimate was {:.3e}",
                                   measured ? "measured by an isolated run" : "not measured, moved with the option that dominates it", estimate),
                       {{"estimate", estimate}}});
  }
  if (std::optional<Reason> tier = tier_reason(c, layer, choice)) reasons.push_back(std::move(*tier));
  const Restrictions& r = c.restrictions();
  const bool tied = r.one_pair && !c.skipped(layer);
  if (c.skipped(layer)) reasons.push_back({"restricted", "--skip-layers keeps this layer in bf16", {}});
  if (tied) reasons.push_back({"restricted", "--one-pair: all layers share this choice", {}});
  else if (r.same_kv && !c.skipped(layer)) reasons.push_back({"restricted", "--same-kv: K and V share this scheme", {}});
  for (const auto& [excluded, why] : c.excluded())
    if (!c.skipped(layer) && c.sens().valid[c.sens().schemes.size() * c.unit(layer, side) + excluded] && !c.allowed(layer, side, excluded) &&
        !missing_on_arch(r.arch, c.scheme(excluded).format).empty())
      reasons.push_back({"restricted", fmt::format("{} left out: {}", c.sens().schemes[excluded], why), {}});
  for (const LowRankVerdict& v : c.low_rank())
    if (v.layer == layer && v.side == side) reasons.push_back({"lowrank", v.text, v.numbers});
  for (const bool cheaper : {true, false}) {
    if (tied) break;
    const std::optional<LayerOption> o = neighbour(c, layer, side, found, cheaper);
    if (!o) continue;
    const std::size_t other = side == Side::kK ? o->k : o->v;
    const double other_score = c.score(layer, side, other, o->tier_class);
    const std::int64_t difference = cheaper ? choice.bytes - o->bytes : o->bytes - choice.bytes;
    reasons.push_back({cheaper ? "cheaper" : "dearer",
                       fmt::format("{} would {} {} bytes and score {:.3e}", c.sens().schemes[other], cheaper ? "save" : "cost", difference, other_score),
                       {{"bytes", static_cast<double>(difference)}, {"score", other_score},
                        {"score_per_byte", (cheaper ? other_score - score : score - other_score) / static_cast<double>(difference)}}});
  }
  if (const double price = found.solution.lambda; price > 0)
    reasons.push_back({"price", fmt::format("at this budget a byte is worth {:.3e} of {}", price, c.metric()), {{"score_per_byte", price}}});
  if (evidence)
    for (Reason& r : evidence_reasons(c.scheme(scheme), side, *evidence)) reasons.push_back(std::move(r));
  return reasons;
}

}  // namespace calib::plan

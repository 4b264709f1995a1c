#include "libcalib/plan/tier_rules.h"

#include <algorithm>
#include <set>

#include "libcalib/plan/plan.h"

namespace calib::plan {
namespace {

void note_differences(const sens::SensResult& sens, const sens::SaliencySettings& s, const LogSink& log) {
  if (s.salient != sens.salient_scheme)
    log.note(fmt::format("hit rates were measured beside a tier at {}, scores with {}: hit rates do not depend on it", s.salient, sens.salient_scheme));
  for (const std::string& base : std::set<std::string>{s.base_k, s.base_v})
    if (std::find(sens.schemes.begin(), sens.schemes.end(), base) == sens.schemes.end())
      log.note(fmt::format("hit rates were measured beside the base scheme {}, which is no candidate: hit rates do not depend on it", base));
  if (std::find(sens.windows.begin(), sens.windows.end(), s.window) == sens.windows.end())
    log.note(fmt::format("hit rates were measured behind a window of {}, scores with {}", s.window,
                         fmt::join(std::set<std::int64_t>(sens.windows.begin(), sens.windows.end()), ", ")));
}

}  // namespace

TierRules tier_rules(const sens::SensResult& sens, const sens::SaliencyVerdicts& verdicts, const LogSink& log) {
  TierRules rules;
  if (sens.salient_scheme.empty()) return rules;
  if (verdicts.settings.n_sinks != sens.n_sinks)
    fail(ErrorKind::kMismatch, "sinks", "the token saliency was measured past {} of them, the scores past {}; run kvsens saliency with --sinks {}",
         verdicts.settings.n_sinks, sens.n_sinks, sens.n_sinks);
  note_differences(sens, verdicts.settings, log);
  std::set<double> shares(sens.salient_fractions.begin(), sens.salient_fractions.end());
  shares.erase(0.0);
  for (const double share : shares) {
    const auto judged = std::find_if(verdicts.fractions.begin(), verdicts.fractions.end(), [&](const auto& f) { return f.requested == share; });
    if (judged == verdicts.fractions.end()) {
      log.note(fmt::format("salient {:g} is left out: the token saliency was not measured for it (kvsens saliency --fraction)", share));
      continue;
    }
    const auto of_score = judged->layers.find(sens.salient_score);
    if (of_score == judged->layers.end()) fail(ErrorKind::kMismatch, "token saliency", "does not hold {}, by which the scores placed tokens", sens.salient_score);
    for (const sens::SaliencyVerdicts::Layer& layer : of_score->second) {
      TierRules::Layer& rule = rules.layers[layer.index];
      if (layer.abstain.empty()) rule.hit_rate[share] = layer.hit_rate;
      else rule.abstains += fmt::format("{}{:g}: {}", rule.abstains.empty() ? "" : ", ", share, fmt::join(layer.abstain, ", "));
    }
  }
  return rules;
}

TierRules tier_rules(const Plan& plan) {
  TierRules rules;
  for (const LayerPlan& layer : plan.layers)
    if (layer.salient_fraction > 0) rules.layers[layer.index].hit_rate[layer.salient_fraction] = 0;
  return rules;
}

}  // namespace calib::plan

#pragma once
// Where a salient tier may stand: what `kvsens saliency` measured, or a plan that has one.

#include <map>
#include <string>

#include "libcalib/base/error.h"
#include "libcalib/sens/saliency_result.h"
#include "libcalib/sens/sens_result.h"

namespace calib::plan {

struct Plan;

/// Layers that are not listed do without.
struct TierRules {
  struct Layer {
    std::map<double, double> hit_rate;  ///< by share of the coded tokens: those that it may take, with the attention they catch; 0 = not known
    std::string abstains;               ///< why it may not take the others
  };
  std::map<int, Layer> layers;  ///< by layer number
};

/// Shares that both files hold, at layers that do not abstain there with the score by which sens.h5 placed tokens. Notes what differs but
/// has no bearing on hit rates (schemes, windows), and shares that were not judged.
/// Throws kMismatch if they keep other sinks, or that score was not judged. Requires: one model.
TierRules tier_rules(const sens::SensResult& sens, const sens::SaliencyVerdicts& verdicts, const LogSink& log = {});

/// No tier, or the one that the plan has there.
TierRules tier_rules(const Plan& plan);

}  // namespace calib::plan

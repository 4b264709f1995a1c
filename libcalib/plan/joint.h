#pragma once
// Whether isolated scores add up: combinations to measure jointly, and the regression of what was measured on what was predicted
// (METHODS.md 7, "Additivity").

#include <cstdint>
#include <span>
#include <vector>

#include "libcalib/plan/candidate.h"
#include "libcalib/plan/plan.h"

namespace calib::plan {

/// One combination, predicted as the sum of its units' scores, and measured.
struct JointRun {
  double predicted = 0;     ///< nats
  double kld = 0;           ///< measured mean KL, nats
  double ln_ppl_ratio = 0;  ///< measured ln of the perplexity ratio
  std::int64_t window = 0;  ///< of all its layers; -1 if they differ
  double kld_se = 0;        ///< standard error of kld
};

inline constexpr std::size_t kLeastJointRuns = 3, kLeastCurveRuns = 12;
inline constexpr double kMostBend = 0.25;
inline constexpr double kScatter = 0.05;  ///< of ln measured about the curve, beyond sampling error

/// Runs weigh by their standard error and kScatter. A window with kLeastJointRuns runs gets a slope of its own; the exponent is 1 with fewer than
/// kLeastCurveRuns, and within kMostBend of 1. Requires: at least kLeastJointRuns runs, all predicted and measured numbers > 0.
JointFit fit_joint(std::span<const JointRun> runs);

/// n combinations of the tier classes with one window (that of `tier_class`): the dual's frontier at up to 8 effective bit rates, evenly spread between its
/// ends (at most 8 bits), and for each of them copies in which a sixth of the layers takes another of its undominated options. Seeded; equal combinations are
/// left out.
std::vector<std::vector<LayerOption>> joint_samples(const Candidates& candidates, std::size_t tier_class, std::size_t n, std::uint64_t seed);

/// Sum of scores, as Candidates gives them.
double predicted_score(const std::vector<LayerOption>& choice);
/// The same before any fit: the sum that sens.h5 holds.
double unfitted_score(const Candidates& candidates, const std::vector<LayerOption>& choice);

/// The option of every layer that a plan names. Throws: kMismatch naming layer, side and scheme (or the window) that the scores do not have.
std::vector<LayerOption> choice_of(const Candidates& candidates, const Plan& plan);

}  // namespace calib::plan

#pragma once
// Whole choices of a planner, measured on text that nothing was fitted on: for kvsens refine and kvsens joint.

#include <optional>
#include <string>
#include <vector>

#include "libcalib/base/thread_pool.h"
#include "libcalib/plan/candidate.h"
#include "libcalib/plan/plan.h"
#include "libcalib/sens/damage_curve.h"
#include "libcalib/sens/evaluate.h"
#include "tools/kvsens/inputs.h"

namespace calib::tools {

/// What a runtime would keep of these options, one a layer. Throws kInfeasible if no token of the text would be coded.
sens::Contender contender_of(const plan::Candidates& candidates, const std::vector<plan::LayerOption>& choice, const std::string& name, const text::Corpus& corpus);

/// Throws kMismatch if the text is that of the statistics or of the scores.
void check_disjoint(const Inputs& in, const sens::SensResult& sens);

/// References must outlive it.
class JointVerifier {
 public:
  JointVerifier(const Inputs& in, const plan::Candidates& candidates, std::int64_t hidden_memory_bytes, double ppl_ratio_max, const Invocation& call,
                Progress& progress, std::uint64_t seed, const LogSink& log)
      : in_(in), candidates_(candidates), call_(call), progress_(progress), log_(log), pool_(call.n_threads()), ppl_ratio_max_(ppl_ratio_max) {
    settings_.hidden_memory_bytes = hidden_memory_bytes;
    settings_.seed = seed;
  }

  /// The damage curve of the first documents; empty if none is long enough. Measured on the first call.
  const std::optional<sens::DamageGate>& gate();
  /// What it predicts of each choice; nothing is rejected without one.
  std::vector<sens::EvalDamage> judge(const std::vector<std::vector<plan::LayerOption>>& choices);

  /// One result a choice, all on the same rows. `phase`: for the progress line.
  std::vector<plan::Measured> measure(const std::vector<std::vector<plan::LayerOption>>& choices, const std::string& phase);
  std::vector<sens::EvalContender> measure(const std::vector<sens::Contender>& contenders, const std::string& phase);
  plan::Measured measured(const sens::EvalContender& result) const;

 private:
  std::vector<sens::EvalContender> measure(const std::vector<sens::Contender>& contenders, const std::string& phase,
                                           const sens::EvaluateOptions& settings);

  const Inputs& in_;
  const plan::Candidates& candidates_;
  const Invocation& call_;
  Progress& progress_;
  const LogSink& log_;
  ThreadPool pool_;
  sens::EvaluateOptions settings_;
  std::optional<sens::DamageGate> gate_;
  bool gate_tried_ = false;
  double ppl_ratio_max_;
};

}  // namespace calib::tools

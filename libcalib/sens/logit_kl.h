#pragma once
// INTERNAL to sens/: logit KL of isolated units, by running the model on from the changed unit's cached hidden state. No estimate:
// the truth for the other metrics, at the cost of (L - l)/L forward passes a score.

#include <vector>

#include "libcalib/sens/joint_run.h"
#include "libcalib/sens/sweep.h"

namespace calib::sens {

/// Adds the table "logit_kl": mean over rows n_sinks ... T - 2. `states` holds, in slot l, what enters block l, and the final states last.
void score_logit_kl(const model::StreamingModel& model, const std::vector<text::Document>& documents, const DocumentStates& states,
                    const SweepOptions& options, const ParamsProvider& params, ThreadPool& pool, SensResult* result,
                    const SweepProgressFn& progress);

}  // namespace calib::sens

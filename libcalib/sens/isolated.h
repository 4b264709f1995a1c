#pragma once
// INTERNAL to sens/: isolated units run on from the changed layer's cached hidden state. logit_kl goes to the end: no estimate, the truth
// for the other metrics, at the cost of (L - l)/L forward passes a score. lookahead stops after a few blocks.

#include <vector>

#include "libcalib/sens/joint_run.h"
#include "libcalib/sens/sweep.h"

namespace calib::sens {

/// Adds the tables "logit_kl" (mean over rows n_sinks ... T - 2) and "lookahead" (sum |u - u^|^2 / sum |u|^2 over rows n_sinks ... T - 1;
/// u = hidden states that leave block l + lookahead_blocks over their root mean square, or the final norm's output past the last block:
/// METHODS.md 7), those that are asked for. `cells`: which of them, index as ScoreTable; empty = all valid. `states` holds, in slot l, what enters block l, and
/// the final states last.
void score_isolated(const model::StreamingModel& model, const std::vector<text::Document>& documents, const DocumentStates& states,
                    const SweepOptions& options, const std::vector<std::uint8_t>& cells, const ParamsProvider& params, ThreadPool& pool,
                    SensResult* result, const SweepProgressFn& progress);

}  // namespace calib::sens

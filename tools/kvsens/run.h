#pragma once
// kvsens: model + statistics + text -> sens.h5; kvsens evaluate: plans + text -> eval.json; kvsens drift: statistics + fresh text -> decision;
// kvsens isolate: scores + text -> scores, replaced by measured losses where they fail; kvsens joint: scores + text -> scores with joint runs; kvsens saliency:
// statistics + text -> saliency.json.

#include "tools/kvsens/options.h"

namespace calib::tools {

/// Returns 0, or what run_drift() does. Throws calib::Error; nothing is left under the output name unless the run was complete.
int run_kvsens(const KvsensOptions& options, const Invocation& call);

int run_grid(const GridOptions& options, const Invocation& call);
/// Returns 1 if the decision is step_up or recalibrate.
int run_drift(const DriftCommand& options, const Invocation& call);
int run_saliency(const SaliencyCommand& options, const Invocation& call);
int run_refine(const RefineCommand& options, const Invocation& call);
int run_isolate(const IsolateCommand& options, const Invocation& call);
int run_joint(const JointCommand& options, const Invocation& call);
int run_evaluate(const EvaluateCommand& options, const Invocation& call);

}  // namespace calib::tools

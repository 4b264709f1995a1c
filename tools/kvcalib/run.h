#pragma once
// kvcalib: model + text -> stats.h5.

#include "tools/kvcalib/options.h"

namespace calib::tools {

/// Returns 0. Throws calib::Error; nothing is left under the output name unless the run was complete.
int run_kvcalib(const KvcalibOptions& options, const Invocation& call);

}  // namespace calib::tools

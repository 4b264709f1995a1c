#pragma once
// The fallback ladder: nested steps up in precision that a runtime can take without new calibration (METHODS.md 8).

#include <vector>

#include "libcalib/plan/candidate.h"
#include "libcalib/plan/plan.h"

namespace calib::plan {

/// Rungs above `choice` (one option per layer), rising bytes. Each raises at most a tenth of the units (at least one, or one set
/// of units that the restrictions tie), those with the largest fall in score per byte, and lowers none; raised units take schemes
/// without constants. The top rung has every unit at 8 bits or more, or at the widest such scheme among its candidates.
std::vector<Rung> fallback_ladder(const Candidates& candidates, const std::vector<LayerOption>& choice);

}  // namespace calib::plan

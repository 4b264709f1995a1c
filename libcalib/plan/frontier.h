#pragma once
// Bytes against loss: the vertices of the dual over all windows, thinned for reading.

#include <vector>

#include "libcalib/plan/candidate.h"
#include "libcalib/plan/plan.h"

namespace calib::plan {

/// At most `n_points` (>= 2) points, ascending bytes and falling score, ends included, evenly spread over effective bits.
/// Every point is the optimum of its own byte count among the dual's vertices.
std::vector<FrontierPoint> frontier(const Candidates& candidates, bool window_per_layer, std::size_t n_points = 32);

}  // namespace calib::plan

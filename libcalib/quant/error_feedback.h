#pragma once
// Constants of error feedback (METHODS.md 4.11) from the query moment that keys meet.

#include <cstdint>
#include <vector>

#include "kernels/core/scheme.h"
#include "libcalib/quant/scheme_params.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::quant {

/// What an error of one stored key costs: E[sum over the group of (q . error)^2], in the coordinates in which `scheme` stores keys.
/// Keys after RoPE: the query moment. Keys before RoPE: the mean over 64 distances, log-uniform on 1..max_distance, of the moment of
/// queries turned by that distance. `smooth`: [D] factors of this head, empty without. [D, D] row-major.
std::vector<double> key_error_moment(const stats::LayerStats& layer, int head, const kvrt::Scheme& scheme, const float* smooth,
                                     std::int64_t max_distance);

/// One head: channels by descending moment, and the upper triangle U (by rows, in that order) with (H + 0.1 mean diagonal I)^-1 = U^T U.
struct FeedbackTriangle {
  std::vector<float> u;
  std::vector<float> order;
};
/// moment: [dim, dim] symmetric, positive semi-definite; all zeros gives the identity. Throws kNumeric if it is neither.
FeedbackTriangle feedback_triangle(std::vector<double> moment, int dim);

}  // namespace calib::quant

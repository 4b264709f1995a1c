#pragma once
// Second moments of one unit in the coordinates of its scheme: what an error costs, and how stored values vary.
// Legend: H KV heads, D head_dim. Matrices are [D, D] row-major.

#include <cstdint>
#include <vector>

#include "kernels/core/scheme.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::quant {

/// What an error e of one stored row costs, e^T M e, in the coordinates in which `scheme` stores rows (pre, smooth and had of it).
/// Keys after RoPE: E[sum over the group of q q^T]. Keys before RoPE: its mean over 64 distances, log-uniform on 1..max_distance, of
/// queries turned by that distance. Values: sum over the group of W_o^T W_o. `smooth`: [D] factors of this head, null without.
/// Throws kVersion for values where the statistics do not hold the moment of the output projection.
std::vector<double> error_moment(const stats::LayerStats& layer, Side side, int head, const kvrt::Scheme& scheme, const float* smooth,
                                 std::int64_t max_distance);

/// [H, D] the diagonals of error_moment() in the model's own coordinates and the scheme's frame; ones where all are 0.
std::vector<double> channel_weights(const stats::LayerStats& layer, Side side, const kvrt::Scheme& scheme, std::int64_t max_distance);

/// Covariance of the rows that `scheme` stores, of tokens that are no sinks. Keys after RoPE: from keys before it, over positions
/// 0..max_distance - 1. `smooth`: as above. Requires: no `pre` with `had`.
std::vector<double> stored_covariance(const stats::LayerStats& layer, Side side, int head, const kvrt::Scheme& scheme, const float* smooth,
                                      std::int64_t max_distance);

}  // namespace calib::quant

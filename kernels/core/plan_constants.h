#pragma once
// Which arrays a plan stores beside a scheme string, with their shapes: the one list for loaders, planners and checks.

#include <cstdint>
#include <vector>

#include "kernels/core/scheme.h"

namespace kvrt {

/// Legend: H KV heads, D head_dim, r rank.
///   mean      [H, D]        center
///   smooth    [H, D]        smooth, > 0
///   clip_lo   [1] tensor, [H] head, [H, D] channel.static: lower thresholds of int*, sint*, nuq*
///   clip_hi   the same: upper thresholds; fp8 and nvfp4 ([1]): absmax to cover, > 0, and no clip_lo
///   clip_alpha [1]         clip over token and channel groups: in (0, 1]; static ranges hold what is left in clip_lo and clip_hi
///   codebook  [2^b]         nuq*: ascending entries
///   basis_mean [H, D]       lowrank: mean row
///   basis_in  [H, D r]      lowrank: [D, r] a head; coefficients = (row - basis_mean) basis_in
///   basis     [H, r D]      lowrank: [r, D] a head; row = basis_mean + coefficients basis
///   ef_u      [H, D(D+1)/2] ef: upper triangle by rows, in the order of ef_order
///   ef_order  [H, D]        ef: channels in the order of feedback, integers
struct PlanConstant {
  const char* name;
  std::int64_t shape[2];   ///< shape[1] = 0: one axis
  bool positive;           ///< every value must be > 0
  bool integer;            ///< int32 in files
  std::int64_t count() const { return shape[0] * (shape[1] ? shape[1] : 1); }
};

/// Empty for data-free schemes. Requires: a scheme that check_shape() accepts.
std::vector<PlanConstant> plan_constants(const Scheme& scheme, int n_kv_heads, int head_dim);

}  // namespace kvrt

#pragma once
// One run of fake_quant's vector path: rows in scratch, and reductions over a row. Internal linkage, like cpu/simd.h.

#include "kernels/cpu/rounding.h"
#include "kernels/cpu/simd.h"
#include "kernels/write/fake_quant_job.h"

namespace kvrt {
namespace {

/// Rows in scratch: [n][D], dense.
struct Run {
  const FakeQuantJob* job;
  StaticGrids grids;
  const float* ef_u;              ///< of this head; null without ef
  const std::int32_t* ef_order;
  float* rows;
  float* lo;     ///< per group: min, then the stored lo
  float* scale;  ///< per group: max or absmax, then the stored scale
  float* lanes;  ///< ef: room for 4 D vectors
  float* ranged; ///< what ranges are taken from: the rows, or without their outliers
  const std::uint16_t* picks;  ///< outliers: row * D + channel, ascending
  float* rests;                ///< of each outlier, what was to be coded
  int n_picks;
  int n, d;
  Counts counts;
};

struct MinOp {
  template <class V>
  V operator()(V a, V b) const { return minimum(a, b); }
};
struct MaxOp {
  template <class V>
  V operator()(V a, V b) const { return maximum(a, b); }
};
struct AddOp {
  template <class V>
  V operator()(V a, V b) const { return a + b; }
};

KVRT_INLINE float group_absmax(const float* x, int n) {
  float absmax = 0;
  int i = 0;
  if (n >= kLanes) {
    F most = magnitude(load<F>(x));
    for (i = kLanes; i + kLanes <= n; i += kLanes) most = maximum(magnitude(load<F>(x + i)), most);
    absmax = across(most, MaxOp{});
  }
  for (; i < n; ++i) absmax = maximum(magnitude(x[i]), absmax);
  return absmax;
}

struct Extent {
  float min, max;
};
KVRT_INLINE Extent group_extent(const float* x, int n) {
  float min = x[0], max = x[0];
  int i = 0;
  if (n >= kLanes) {
    F lo = load<F>(x), hi = lo;
    for (i = kLanes; i + kLanes <= n; i += kLanes) {
      const F v = load<F>(x + i);
      lo = minimum(v, lo), hi = maximum(v, hi);
    }
    min = across(lo, MinOp{}), max = across(hi, MaxOp{});
  }
  for (; i < n; ++i) min = minimum(x[i], min), max = maximum(x[i], max);
  return {min, max};
}

/// Sum of op(x) in the order of sum_of_lanes(): 32 partial sums, then halves onto halves.
template <class Op>
KVRT_INLINE float lane_sum(const float* x, int n, Op op) {
  float lanes[32] = {};
  constexpr int kVectors = 32 / kLanes;
  F sums[kVectors] = {};
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int v = 0; v < kVectors; ++v) {
      sums[v] += op(load<F>(x + i + v * kLanes));
    }
  }
  for (int v = 0; v < kVectors; ++v) store(lanes + v * kLanes, sums[v]);
  for (int l = 0; i + l < n; ++l) lanes[l] += op(x[i + l]);
  for (int half = 16; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}
struct SquareOp {
  template <class V>
  V operator()(V v) const { return v * v; }
};
KVRT_INLINE float sum_of_squares(const float* x, int n) { return lane_sum(x, n, SquareOp{}); }
struct SameOp {
  template <class V>
  V operator()(V v) const { return v; }
};

/// clipped() of codec/group_range.h.
KVRT_INLINE void clip_range(float* min, float* max, float sum, int n, float alpha) {
  float mean = sum / static_cast<float>(n);
  mean = mean < *min ? *min : mean > *max ? *max : mean;
  const float below = alpha * (mean - *min), above = alpha * (*max - mean), lower = mean - below, upper = mean + above;
  *min = lower > *min ? lower : *min, *max = upper < *max ? upper : *max;
}

/// pair and clip on ranges (lo, hi) of n_groups groups of n values each. sum(g): of group g alone.
template <class Sum>
static void shape_ranges(const Run& run, float* lo, float* hi, int n_groups, int n, Sum sum) {
  const float alpha = run.job->clip_alpha;
  const std::int32_t* const partners = run.grids.partner;
  for (int g = 0; g < n_groups; ++g) {
    const int partner = partners ? partners[g] : g;
    if (partner < g) {  // was shaped with it
      lo[g] = lo[partner], hi[g] = hi[partner];
      continue;
    }
    if (partner > g) lo[g] = minimum(lo[partner], lo[g]), hi[g] = maximum(hi[partner], hi[g]);
    if (alpha != 1.0f) clip_range(lo + g, hi + g, partner > g ? sum(g) + sum(partner) : sum(g), partner > g ? 2 * n : n, alpha);
  }
}

}  // namespace
}  // namespace kvrt

#pragma once
// Range of one group before its parameters are rounded: `pair` takes the range of both channels of a RoPE pair, `clip` shrinks it about
// the mean of the group by one factor a unit (METHODS.md 4.8, 4.9). One order of operations on every path.

#include "kernels/codec/codebook.h"
#include "kernels/codec/range.h"

namespace kvrt {

/// Channel that RoPE turns together with d; d itself where it turns none. rotary_dim: rotated channels, the first ones.
KVRT_HOST_DEVICE constexpr int rope_partner(int rotary_dim, bool interleaved, int d) {
  if (d >= rotary_dim) return d;
  if (interleaved) return d % 2 == 0 ? d + 1 : d - 1;
  return d < rotary_dim / 2 ? d + rotary_dim / 2 : d - rotary_dim / 2;
}

/// Token groups under `pair`: whether the partners of every group of N channels are one group.
KVRT_HOST_DEVICE constexpr bool pairs_map_groups(int rotary_dim, bool interleaved, int head_dim, int group) {
  for (int d = 0; d < head_dim; ++d) {
    if (rope_partner(rotary_dim, interleaved, d) / group != rope_partner(rotary_dim, interleaved, d / group * group) / group) return false;
  }
  return true;
}

/// `sum` is over all values of the group, in the order of sum_of_lanes(); set only where there is a clip.
struct GroupRange {
  float min = 0.0f, max = 0.0f, sum = 0.0f;
};

/// Of value(0..n-1), finite.
template <class Value>
KVRT_HOST_DEVICE inline GroupRange group_range(int n, bool with_sum, Value value) {
  GroupRange r;
  r.min = r.max = value(0);
  KVRT_ROLLED
  for (int i = 1; i < n; ++i) {
    const float v = value(i);
    if (v < r.min) r.min = v;
    if (v > r.max) r.max = v;
  }
  if (with_sum) r.sum = sum_of_lanes(n, value);
  return r;
}

KVRT_HOST_DEVICE inline GroupRange joined(GroupRange a, GroupRange b) {
  return {b.min < a.min ? b.min : a.min, b.max > a.max ? b.max : a.max, a.sum + b.sum};
}

/// alpha in (0, 1], 1 = as it is; n: values in the sum. Never wider than before, also where the sum leaves fp32.
KVRT_HOST_DEVICE inline GroupRange clipped(GroupRange r, int n, float alpha) {
  if (alpha == 1.0f) return r;
  float mean = r.sum / static_cast<float>(n);
  mean = mean < r.min ? r.min : mean > r.max ? r.max : mean;
  const float below = alpha * (mean - r.min), above = alpha * (r.max - mean);
  const float min = mean - below, max = mean + above;
  return {min > r.min ? min : r.min, max < r.max ? max : r.max, r.sum};
}

}  // namespace kvrt

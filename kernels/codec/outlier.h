#pragma once
// Outliers of `out<p>`: values that leave the range of their group and come back as an fp16 delta beside the codes (METHODS.md 4.6,
// KERNELS.md 3.3). An entry is 4 bytes: uint16 slot * D + stored channel, fp16 delta = x - value of its code; a delta of 0 is no entry.
//   token, tensor, head, channel.static  [P][k] entries, k = ceil(p D / 100) of each slot
//   channel.g<N>  16 bytes of starts, then entries sorted by slot: start i (uint16) is the first entry at or behind slot 16 i.
//                 Group r owns entries [ceil(r p N D / 100), ceil((r + 1) p N D / 100)), and always fills them.

#include <cstdint>

#include "kernels/codec/half.h"
#include "kernels/codec/int_codec.h"
#include "kernels/codec/range.h"

namespace kvrt {

inline constexpr int kMaxOutlierDim = 512;      ///< largest head_dim of schemes with out<p>: 128 slots * D fit a uint16
inline constexpr int kMaxGroupTokens = 128;
inline constexpr int kMaxTokenOutliers = 11;    ///< 2 % of 512
inline constexpr int kMaxGroupOutliers = 1311;  ///< 2 % of 128 * 512
inline constexpr int kOutlierStarts = 16;       ///< bytes of starts

KVRT_HOST_DEVICE constexpr int token_outliers(int per_mille, int head_dim) { return (per_mille * head_dim + 999) / 1000; }
/// Entries before group r of channel.g<N>; with r = P / N, those of the page.
KVRT_HOST_DEVICE constexpr int group_outliers_before(int per_mille, int group_tokens, int head_dim, int r) {
  return (r * per_mille * group_tokens * head_dim + 999) / 1000;
}

namespace detail {

/// k-th smallest from 0 of v[0..n), which is reordered: nothing before place k is larger than v[k].
KVRT_HOST_DEVICE inline float kth_smallest(float* v, int n, int k) {
  int left = 0, right = n - 1;
  while (left < right) {
    const float pivot = v[left + (right - left) / 2];
    int i = left, j = right;
    while (i <= j) {
      while (v[i] < pivot) ++i;
      while (pivot < v[j]) --j;
      if (i > j) break;
      const float t = v[i];
      v[i++] = v[j], v[j--] = t;
    }
    if (k <= j) right = j;
    else if (k >= i) left = i;
    else break;
  }
  return v[k];
}

/// Median, the mean of the two middle values for an even count. Reorders v.
KVRT_HOST_DEVICE inline float median(float* v, int n) {
  const float upper = kth_smallest(v, n, n / 2);
  if (n % 2 != 0) return upper;
  float lower = v[0];
  for (int i = 1; i < n / 2; ++i) lower = v[i] > lower ? v[i] : lower;
  return lower * 0.5f + upper * 0.5f;
}

/// The k entries of [0, n) with the largest distance(i) above `floor`, ties to the lower index, in ascending order. Returns how many.
/// picks, distances: room for k.
template <class Distance>
KVRT_HOST_DEVICE inline int pick_farthest(int n, int k, float floor, Distance distance, std::uint16_t* picks, float* distances) {
  int count = 0;
  for (int i = 0; i < n; ++i) {  // kept by falling distance, then by index
    const float d = distance(i);
    if (!(d > floor) || (count == k && !(d > distances[k - 1]))) continue;
    int at = count < k ? count++ : k - 1;
    for (; at > 0 && d > distances[at - 1]; --at) distances[at] = distances[at - 1], picks[at] = picks[at - 1];
    distances[at] = d, picks[at] = static_cast<std::uint16_t>(i);
  }
  for (int i = 1; i < count; ++i) {
    const std::uint16_t pick = picks[i];
    int at = i;
    for (; at > 0 && picks[at - 1] > pick; --at) picks[at] = picks[at - 1];
    picks[at] = pick;
  }
  return count;
}

KVRT_HOST_DEVICE inline float distance_of(float a, float b) { return a < b ? b - a : a - b; }

/// Replaces the picks of y[0..n) by their median, moved into the range of the other values, so that they widen no range. The picks of
/// y are those in picks[0..n_picks) whose index, less `first`, lies in [0, n); stride: between elements of y.
KVRT_HOST_DEVICE inline void fill_picks(float* y, int n, const std::uint16_t* picks, int n_picks, int first, float median) {
  bool any = false;
  float min = median, max = median;
  int at = 0;
  while (at < n_picks && picks[at] < first) ++at;
  const int begin = at;
  for (int i = 0; i < n; ++i) {
    if (at < n_picks && picks[at] == first + i) {
      ++at;
      continue;
    }
    min = any && min < y[i] ? min : y[i], max = any && max > y[i] ? max : y[i];
    any = true;
  }
  const float fill = median < min ? min : median > max ? max : median;
  for (int i = begin; i < at; ++i) y[picks[i] - first] = fill;
}

}  // namespace detail

/// The k values of one vector farthest from its median. x: [n] finite. Returns k, or n if that is less.
KVRT_HOST_DEVICE inline int pick_vector_outliers(const float* x, int n, int k, std::uint16_t* picks, float* median) {
  float copy[kMaxOutlierDim] = {}, distances[kMaxTokenOutliers];
  for (int i = 0; i < n; ++i) copy[i] = x[i];
  const float middle = *median = detail::median(copy, n);
  return detail::pick_farthest(n, k, -1.0f, [&](int i) { return detail::distance_of(x[i], middle); }, picks, distances);
}

/// channel.static: up to k values beyond their thresholds [min, max], largest excess in steps of their channel first. range(i): its
/// StaticRange.
template <class RangeOf>
KVRT_HOST_DEVICE inline int pick_static_outliers(const float* x, int n, int k, RangeOf range, std::uint16_t* picks) {
  float distances[kMaxTokenOutliers];
  const auto excess = [&](int i) {
    const auto r = range(i);
    return (x[i] > r.max ? x[i] - r.max : x[i] < r.min ? r.min - x[i] : 0.0f) / r.scale;
  };
  return detail::pick_farthest(n, k, 0.0f, excess, picks, distances);
}

/// One group of channel.g<N>: its quota of k values farthest from the median of their own channel. value(t, d): finite. Picks are
/// t * D + d. medians: [D] out.
template <class ValueAt>
KVRT_HOST_DEVICE inline int pick_group_outliers(ValueAt value, int n_tokens, int head_dim, int k, std::uint16_t* picks, float* medians) {
  float distances[kMaxGroupOutliers];
  for (int d = 0; d < head_dim; ++d) {
    float column[kMaxGroupTokens] = {};
    for (int t = 0; t < n_tokens; ++t) column[t] = value(t, d);
    medians[d] = detail::median(column, n_tokens);
  }
  return detail::pick_farthest(
      n_tokens * head_dim, k, -1.0f, [&](int i) { return detail::distance_of(value(i / head_dim, i % head_dim), medians[i % head_dim]); }, picks, distances);
}

/// One vector of a token: ranges of groups of `group` channels are those of what is left in y.
KVRT_HOST_DEVICE inline void fill_vector_outliers(float* y, int head_dim, int group, const std::uint16_t* picks, int n_picks, float median) {
  for (int begin = 0; begin < head_dim; begin += group) detail::fill_picks(y + begin, group, picks, n_picks, begin, median);
}

/// Channel d of a group of channel.g<N>. column: [N] its values.
KVRT_HOST_DEVICE inline void fill_channel_outliers(float* column, int n_tokens, int head_dim, int d, const std::uint16_t* picks, int n_picks, float median) {
  std::uint16_t tokens[kMaxGroupTokens];
  int n = 0;
  for (int i = 0; i < n_picks; ++i) {
    if (picks[i] % head_dim == d) tokens[n++] = static_cast<std::uint16_t>(picks[i] / head_dim);
  }
  if (n > 0) detail::fill_picks(column, n_tokens, tokens, n, 0, median);
}

/// fp16 bits of x - value; beyond 65504 it saturates and is counted.
KVRT_HOST_DEVICE inline std::uint16_t outlier_delta(float x, float value, EncodeCounters* counters) {
  const std::uint16_t h = f32_to_f16_rne(x - value);
  if ((h & 0x7FFFu) < 0x7C00u) return h;
  ++counters->saturated;
  return static_cast<std::uint16_t>((h & 0x8000u) | 0x7BFFu);
}

KVRT_HOST_DEVICE inline void store_outlier(std::uint8_t* entry, int index, std::uint16_t delta) {
  store_le16(entry, static_cast<std::uint16_t>(index));
  store_le16(entry + 2, delta);
}
struct OutlierEntry {
  int index;
  std::uint16_t delta;
};
KVRT_HOST_DEVICE inline OutlierEntry load_outlier(const std::uint8_t* entry) { return {load_le16(entry), load_le16(entry + 2)}; }

}  // namespace kvrt

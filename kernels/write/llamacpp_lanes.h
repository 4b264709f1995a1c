#pragma once
// The blocks of llama.cpp on vector lanes, as codec/llamacpp_blocks.h has them. Internal linkage, like cpu/simd.h.

#include "kernels/codec/llamacpp_blocks.h"
#include "kernels/write/lane_run.h"

namespace kvrt {
namespace {

// Result of coding a block:

/// The values that the codes stand for.
struct BlockValues {
  static constexpr bool kIsCode = false;
  KVRT_INLINE void keep(Run*, int, float, float) {}
};
/// The codes as numbers from 0 up, negative ones of q8_0 as bytes; fp16 scale and minimum of the block to run->scale and run->lo.
struct BlockCodes {
  static constexpr bool kIsCode = true;
  KVRT_INLINE void keep(Run* run, int block, float scale, float lo) { run->scale[block] = scale, run->lo[block] = lo; }
};

KVRT_INLINE float block_scale(Run* run, float d) {  // the stored fp16 of a llama.cpp block
  const float stored = f16_nearest<float>(d);
  Tally::add_to(&run->counts.saturated, magnitude(stored) > kF16Max);
  return minimum(maximum(stored, -kF16Max), kF16Max);
}
KVRT_INLINE float block_inverse(float d) {
  const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
  return magnitude(inverse) <= 0x1.FFFFFEp127f ? inverse : 0.0f;
}

template <class Result>
static void q8_0_blocks(Run* run) {
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    const float d = group_absmax(x, 32) / 127.0f, inverse = block_inverse(d), stored = block_scale(run, d);
    Result::keep(run, begin / 32, stored, 0.0f);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V y = load<V>(x + i) * inverse, a = magnitude(y), whole = truncated(a);
      const V code = a - whole >= 0.5f ? whole + 1.0f : whole;  // halves away from zero
      const V signed_code = bits_as<V>(bits_as<IntOf<V>>(code) | (bits_as<IntOf<V>>(y) & INT32_MIN)) + 0.0f;  // an integer has no -0
      store(x + i, Result::kIsCode ? (signed_code < 0.0f ? signed_code + 256.0f : signed_code) : signed_code * stored);
    });
  }
}

/// q4_0 (half = 8) and q5_0 (half = 16).
template <class Result>
static void signed_blocks(Run* run, float half) {
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    F lo = load<F>(x), hi = lo;
    for (int i = kLanes; i < 32; i += kLanes) lo = minimum(load<F>(x + i), lo), hi = maximum(load<F>(x + i), hi);
    const float min = across(lo, MinOp{}), max = across(hi, MaxOp{});
    float extreme = max > -min ? max : min;
    if (max == -min) {  // both signs reach it: the first one counts; a block of zeros has +0
      int i = 0;
      extreme = 0.0f;
      while (magnitude(x[i]) != max) ++i;
      if (max != 0.0f) extreme = x[i];
    }
    const float d = extreme / -half, inverse = block_inverse(d), stored = block_scale(run, d);
    Result::keep(run, begin / 32, stored, 0.0f);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V code = minimum(truncated(load<V>(x + i) * inverse + (half + 0.5f)), splat<V>(2.0f * half - 1.0f));
      store(x + i, Result::kIsCode ? code : (code - half) * stored);
    });
  }
}

/// q4_1 (top = 15) and q5_1 (top = 31).
template <class Result>
static void offset_blocks(Run* run, float top) {
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    F lo = load<F>(x), hi = lo;
    for (int i = kLanes; i < 32; i += kLanes) lo = minimum(load<F>(x + i), lo), hi = maximum(load<F>(x + i), hi);
    float min = across(lo, MinOp{});
    const float max = across(hi, MaxOp{});
    if (min == 0.0f) {  // stored with the sign of the first zero
      int i = 0;
      while (x[i] != 0.0f) ++i;
      min = x[i];
    }
    const float d = (max - min + 0.0f) / top, inverse = block_inverse(d);  // zeros of both signs are no -0 apart
    const float scale = block_scale(run, d), offset = block_scale(run, min);
    Result::keep(run, begin / 32, scale, offset);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V steps = maximum((load<V>(x + i) - min) * inverse, splat<V>(0.0f));
      const V code = minimum(truncated(steps + 0.5f), splat<V>(top));
      store(x + i, Result::kIsCode ? code : code * scale + offset);
    });
  }
}

/// Index of the nearest level by comparison with the midpoints, halves upward.
template <class V>
KVRT_INLINE V nearest_iq4_nl_index(V y) {
  constexpr Iq4NlLevels kTable;
  V index = splat<V>(0.0f);
  for (int i = 0; i < 15; ++i) index = y >= (kTable.level[i] + kTable.level[i + 1]) * 0.5f ? splat<V>(static_cast<float>(i + 1)) : index;
  return index;
}

template <class Result>
static void iq4_nl_blocks(Run* run) {
  constexpr Iq4NlLevels kTable;
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    float index[32], level[32], numerator = 0, denominator = 0;
    const float absmax = group_absmax(x, 32);
    if (absmax < kIq4NlSmallest) {  // code 0 under a scale of 0
      Result::keep(run, begin / 32, 0.0f, 0.0f);
      for (int i = 0; i < 32; ++i) x[i] = Result::kIsCode ? 0.0f : kTable.level[0] * 0.0f;
      continue;
    }
    int first = 0;
    while (magnitude(x[first]) != absmax) ++first;
    const float d0 = x[first] / -127.0f, inverse = 1.0f / d0;
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      store(index + i, nearest_iq4_nl_index<V>(inverse * load<V>(x + i)));
    });
    for (int i = 0; i < 32; ++i) {
      level[i] = kTable.level[static_cast<int>(index[i])];
      const float weighted = x[i] * x[i] * level[i];
      numerator += weighted * x[i];
      denominator += weighted * level[i];
    }
    const float d = numerator / denominator, stored = block_scale(run, magnitude(d) <= 0x1.FFFFFEp127f ? d : d0);
    Result::keep(run, begin / 32, stored, 0.0f);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, Result::kIsCode ? load<V>(index + i) : load<V>(level + i) * stored);
    });
  }
}

/// All formats.
template <class Result>
static void llamacpp_blocks(Run* run) {
  switch (run->job->scheme.format) {
    case Format::kQ8_0: return q8_0_blocks<Result>(run);
    case Format::kQ4_0: return signed_blocks<Result>(run, 8.0f);
    case Format::kQ5_0: return signed_blocks<Result>(run, 16.0f);
    case Format::kQ4_1: return offset_blocks<Result>(run, 15.0f);
    case Format::kQ5_1: return offset_blocks<Result>(run, 31.0f);
    default: return iq4_nl_blocks<Result>(run);
  }
}

}  // namespace
}  // namespace kvrt

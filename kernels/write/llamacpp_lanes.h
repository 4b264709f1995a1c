#pragma once
// The blocks of llama.cpp on vector lanes: the values that codec/llamacpp_blocks.h gives. Internal linkage, like cpu/simd.h.

#include "kernels/write/lane_run.h"

namespace kvrt {
namespace {

KVRT_INLINE float block_scale(Run* run, float d) {  // the stored fp16 of a llama.cpp block
  const float stored = f16_nearest<float>(d);
  Tally::add_to(&run->counts.saturated, magnitude(stored) > kF16Max);
  return minimum(maximum(stored, -kF16Max), kF16Max);
}
KVRT_INLINE float block_inverse(float d) {
  const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
  return magnitude(inverse) <= 0x1.FFFFFEp127f ? inverse : 0.0f;
}

static void q8_0_blocks(Run* run) {
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    const float d = group_absmax(x, 32) / 127.0f, inverse = block_inverse(d), stored = block_scale(run, d);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V y = load<V>(x + i) * inverse, a = magnitude(y), whole = truncated(a);
      const V code = a - whole >= 0.5f ? whole + 1.0f : whole;  // halves away from zero
      const V signed_code = bits_as<V>(bits_as<IntOf<V>>(code) | (bits_as<IntOf<V>>(y) & INT32_MIN)) + 0.0f;  // an integer has no -0
      store(x + i, signed_code * stored);
    });
  }
}

/// q4_0 (half = 8) and q5_0 (half = 16).
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
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V code = truncated(load<V>(x + i) * inverse + (half + 0.5f));
      store(x + i, (minimum(code, splat<V>(2.0f * half - 1.0f)) - half) * stored);
    });
  }
}

/// q4_1 (top = 15) and q5_1 (top = 31).
static void offset_blocks(Run* run, float top) {
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    F lo = load<F>(x), hi = lo;
    for (int i = kLanes; i < 32; i += kLanes) lo = minimum(load<F>(x + i), lo), hi = maximum(load<F>(x + i), hi);
    const float min = across(lo, MinOp{}), max = across(hi, MaxOp{});
    const float d = (max - min) / top, inverse = block_inverse(d);
    const float scale = block_scale(run, d), offset = block_scale(run, min);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V steps = maximum((load<V>(x + i) - min) * inverse, splat<V>(0.0f));
      const V code = minimum(truncated(steps + 0.5f), splat<V>(top));
      store(x + i, code * scale + offset);
    });
  }
}

/// Entry of a table of 16 by comparison with its midpoints, halves upward.
template <class V>
KVRT_INLINE V nearest_iq4_nl_level(V y) {
  constexpr float kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  V level = splat<V>(kLevels[0]);
  for (int i = 0; i < 15; ++i) level = y >= (kLevels[i] + kLevels[i + 1]) * 0.5f ? splat<V>(kLevels[i + 1]) : level;
  return level;
}

static void iq4_nl_blocks(Run* run) {
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    float level[32], numerator = 0, denominator = 0;
    const float absmax = group_absmax(x, 32);
    if (absmax < 1e-15f) {
      for (int i = 0; i < 32; ++i) x[i] = -127.0f * 0.0f;  // code 0 under a scale of 0
      continue;
    }
    int first = 0;
    while (magnitude(x[first]) != absmax) ++first;
    const float d0 = x[first] / -127.0f, inverse = 1.0f / d0;
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      store(level + i, nearest_iq4_nl_level<V>(inverse * load<V>(x + i)));
    });
    for (int i = 0; i < 32; ++i) {
      const float weighted = x[i] * x[i] * level[i];
      numerator += weighted * x[i];
      denominator += weighted * level[i];
    }
    const float d = numerator / denominator, stored = block_scale(run, magnitude(d) <= 0x1.FFFFFEp127f ? d : d0);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, load<V>(level + i) * stored);
    });
  }
}

}  // namespace
}  // namespace kvrt

#pragma once
// Parameters of one group from its extremes (KERNELS.md 4.1, METHODS.md 4.1-4.3). Parameters are rounded to their stored type
// first; codes are computed with the stored values. Minimum rounds down and scale up, so parameter rounding never clips.

#include <cstdint>

#include "kernels/codec/half.h"

namespace kvrt {

/// What an encoder meets and survives.
struct EncodeCounters {
  std::int64_t non_finite = 0;  ///< values stored as 0
  std::int64_t saturated = 0;   ///< parameters past fp16, values past a static threshold or past the format
  std::int64_t floored = 0;     ///< groups whose range is below qmax * 2^-14
};

/// fp16 bits, as stored.
struct AffineParams {
  std::uint16_t scale = 0, lo = 0;
};

inline constexpr float kScaleFloor = 0x1p-14f;          ///< of integer formats: the smallest normal fp16
inline constexpr float kFp8ScaleFloor = 0x1p-24f;       ///< of fp8 token scales: the smallest positive fp16
inline constexpr float kStaticScaleFloor = 0x1p-126f;   ///< of fp32 scales: the smallest normal fp32

/// Rounds to the nearest integer, ties to even. Requires |x| < 2^22 and the default rounding mode.
KVRT_HOST_DEVICE inline float round_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

/// Non-finite values are stored as 0 and counted.
KVRT_HOST_DEVICE inline float finite_or_zero(float x, EncodeCounters* counters) {
  if (f32_is_finite(x)) return x;
  ++counters->non_finite;
  return 0.0f;
}

/// lo, scale of codes 0..qmax over [min, max]. Requires: finite, min <= max. Exact: scale is a normal fp16 > 0.
KVRT_HOST_DEVICE inline AffineParams affine_params(float min, float max, int qmax, EncodeCounters* counters) {
  AffineParams p;
  p.lo = f32_to_f16_down(min + 0.0f);  // -0 becomes +0: one spelling of zero in the bytes
  if (min < -kF16Max || min > kF16Max) ++counters->saturated;
  const float step = (max - f16_to_f32(p.lo)) / static_cast<float>(qmax);
  if (step > kF16Max) ++counters->saturated;
  p.scale = f32_to_f16_up(step);
  if (!(f16_to_f32(p.scale) >= kScaleFloor)) {
    p.scale = f32_to_f16_rne(kScaleFloor);
    ++counters->floored;
  }
  return p;
}

/// code = clamp(rne((x - lo) / scale), 0, qmax); clamping first is the same, since the bounds are integers.
KVRT_HOST_DEVICE inline std::uint8_t affine_code(float x, float scale, float lo, int qmax) {
  const float y = (x - lo) / scale, top = static_cast<float>(qmax);
  return static_cast<std::uint8_t>(round_even(y < 0.0f ? 0.0f : y > top ? top : y));
}

/// code * scale + lo. Under an fp16 scale the product is exact in fp32, so this is fma(code, scale, lo).
KVRT_HOST_DEVICE inline float affine_value(std::uint8_t code, float scale, float lo) {
  const float product = static_cast<float>(code) * scale;
  return product + lo;
}

/// fp16 bits of the scale of one group of codes -m..m: f16 up (absmax / m), at least 2^-14.
KVRT_HOST_DEVICE inline std::uint16_t symmetric_scale(float absmax, int m, EncodeCounters* counters) {
  const float step = absmax / static_cast<float>(m);
  if (step > kF16Max) ++counters->saturated;
  const std::uint16_t scale = f32_to_f16_up(step);
  if (f16_to_f32(scale) >= kScaleFloor) return scale;
  ++counters->floored;
  return f32_to_f16_rne(kScaleFloor);
}

/// Signed code clamp(rne(x / scale), -m, m).
KVRT_HOST_DEVICE inline int symmetric_code(float x, float scale, int m) {
  const float y = x / scale, top = static_cast<float>(m);
  return static_cast<int>(round_even(y < -top ? -top : y > top ? top : y));
}

/// fp16 bits of the scale of one fp8 token group: f16 up (absmax / max of the format), 1 for a group of zeros.
KVRT_HOST_DEVICE inline std::uint16_t fp8_token_scale(float absmax, float format_max, EncodeCounters* counters) {
  if (absmax == 0.0f) return f32_to_f16_rne(1.0f);
  const float step = absmax / format_max;
  if (step > kF16Max) ++counters->saturated;
  return f32_to_f16_up(step < kFp8ScaleFloor ? kFp8ScaleFloor : step);
}

/// fp16 bits of a norm, to nearest; beyond 65504 it saturates and is counted.
KVRT_HOST_DEVICE inline std::uint16_t norm_scale(float norm, EncodeCounters* counters) {
  const std::uint16_t h = f32_to_f16_rne(norm);
  if (h != 0x7C00u) return h;
  ++counters->saturated;
  return 0x7BFFu;
}

/// fp32 scale of a static fp8 unit that covers [-absmax, absmax]; 1 if absmax is 0.
KVRT_HOST_DEVICE inline float fp8_static_scale(float absmax, float format_max) {
  if (absmax == 0.0f) return 1.0f;
  const float step = absmax / format_max;
  return step < kStaticScaleFloor ? kStaticScaleFloor : step;
}

/// bf16 of a finite value stays finite: the last half step below 2^128 keeps the largest bf16.
KVRT_HOST_DEVICE inline std::uint16_t f32_to_bf16_finite(float x) {
  const std::uint16_t b = f32_to_bf16(x);
  return (b & 0x7FFFu) == 0x7F80u ? static_cast<std::uint16_t>(b - 1u) : b;
}

}  // namespace kvrt

#pragma once
// 8-bit floats in software, bit-identical to hardware conversion with saturation (METHODS.md 4.3).
//   E4M3  bias 7, max 448, min normal 2^-6, min subnormal 2^-9; 0x7F and 0xFF are NaN, no infinity
//   E5M2  bias 15, max 57344, min normal 2^-14, min subnormal 2^-16; exponent 31 is infinity or NaN
// Encoders round to nearest even, saturate at the maximum (infinity too), give 0 for NaN, and never emit a NaN or infinity code.

#include <cstdint>

#include "kernels/codec/half.h"

namespace kvrt {

inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kE5m2Max = 57344.0f;

namespace detail {

template <int kMantissa, int kBias>
KVRT_HOST_DEVICE inline std::uint8_t fp8_encode(float x, float max) {
  const std::uint32_t u = f32_bits(x);
  std::uint32_t a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return 0;
  const std::uint32_t sign = (u >> 24) & 0x80u, top = f32_bits(max);
  if (a > top) a = top;
  constexpr std::uint32_t kMinNormal = static_cast<std::uint32_t>(127 - kBias + 1) << 23;
  constexpr int kDrop = 23 - kMantissa;
  if (a >= kMinNormal) {  // the carry of the mantissa moves into the exponent, as it should
    const std::uint32_t rounded = a + ((1u << (kDrop - 1)) - 1u) + ((a >> kDrop) & 1u);
    return static_cast<std::uint8_t>(sign | ((rounded >> kDrop) - (static_cast<std::uint32_t>(127 - kBias) << kMantissa)));
  }
  // Subnormal codes count steps of 2^(1 - bias - mantissa); adding 2^23 leaves the nearest even count in the low bits.
  const float steps = f32_from_bits(a) * f32_from_bits(static_cast<std::uint32_t>(127 + kBias - 1 + kMantissa) << 23);
  return static_cast<std::uint8_t>(sign | (f32_bits(steps + 0x1p23f) & 0xFFu));
}

template <int kMantissa, int kBias>
KVRT_HOST_DEVICE inline float fp8_decode_finite(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t exponent = (code & 0x7Fu) >> kMantissa, mantissa = code & ((1u << kMantissa) - 1u);
  if (exponent == 0) {
    const float step = f32_from_bits(static_cast<std::uint32_t>(127 - kBias + 1 - kMantissa) << 23);
    return f32_from_bits(sign | f32_bits(static_cast<float>(mantissa) * step));
  }
  return f32_from_bits(sign | ((exponent + 127u - kBias) << 23) | (mantissa << (23 - kMantissa)));
}

}  // namespace detail

KVRT_HOST_DEVICE inline std::uint8_t f32_to_e4m3(float x) { return detail::fp8_encode<3, 7>(x, kE4m3Max); }
KVRT_HOST_DEVICE inline std::uint8_t f32_to_e5m2(float x) { return detail::fp8_encode<2, 15>(x, kE5m2Max); }

KVRT_HOST_DEVICE inline float e4m3_to_f32(std::uint8_t code) {
  if ((code & 0x7Fu) == 0x7Fu) return f32_from_bits(0x7FC00000u);
  return detail::fp8_decode_finite<3, 7>(code);
}
KVRT_HOST_DEVICE inline float e5m2_to_f32(std::uint8_t code) {
  if ((code & 0x7Cu) == 0x7Cu) return f32_from_bits((static_cast<std::uint32_t>(code & 0x80u) << 24) | 0x7F800000u | ((code & 3u) ? 0x400000u : 0u));
  return detail::fp8_decode_finite<2, 15>(code);
}

}  // namespace kvrt

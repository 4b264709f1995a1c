#pragma once
// 16-bit floats by integer arithmetic: the same bits on every host and device, whatever its rounding or denormal mode.
//   fp16  1 sign, 5 exponent (bias 15), 10 mantissa; max 65504, min normal 2^-14, min subnormal 2^-24
//   bf16  1 sign, 8 exponent (bias 127), 7 mantissa
// NaN stays NaN (quiet) and keeps its sign; infinities stay infinite.

#include <cstdint>
#include <cstring>

#include "kernels/core/host_device.h"

namespace kvrt {

inline constexpr float kF16Max = 65504.0f;
inline constexpr float kF16MinNormal = 0x1p-14f;

KVRT_HOST_DEVICE inline std::uint32_t f32_bits(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
KVRT_HOST_DEVICE inline float f32_from_bits(std::uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}
KVRT_HOST_DEVICE inline bool f32_is_finite(float x) { return (f32_bits(x) & 0x7F800000u) != 0x7F800000u; }

/// Exact.
KVRT_HOST_DEVICE inline float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3FFu;
  if (exponent == 31) return f32_from_bits(sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  if (exponent != 0) return f32_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // exact, also under flush-to-zero: a normal fp32
  return f32_from_bits(sign | f32_bits(magnitude));
}

namespace detail {

enum class F16Rounding { kNearestEven, kDown, kUp };

KVRT_HOST_DEVICE inline std::uint16_t f32_to_f16(float x, F16Rounding rounding) {
  const std::uint32_t u = f32_bits(x), a = u & 0x7FFFFFFFu;
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  if (a >= 0x7F800000u) return static_cast<std::uint16_t>(sign | (a > 0x7F800000u ? 0x7E00u : 0x7C00u));
  const bool nearest = rounding == F16Rounding::kNearestEven;
  const bool away = rounding == (sign ? F16Rounding::kDown : F16Rounding::kUp);
  if (a > 0x477FE000u) {  // beyond 65504: directed rounding saturates, nearest follows IEEE
    return static_cast<std::uint16_t>(sign | (nearest && a >= 0x477FF000u ? 0x7C00u : 0x7BFFu));
  }
  std::uint32_t q, rest, half;  // truncated magnitude, the bits below it, and their midpoint
  if (a >= 0x38800000u) {
    q = (a - 0x38000000u) >> 13, rest = a & 0x1FFFu, half = 0x1000u;
  } else {
    const std::uint32_t exponent = a >> 23, shift = exponent >= 102u ? 126u - exponent : 31u;  // below 2^-25: q = 0 anyway
    const std::uint32_t m = exponent ? (a & 0x7FFFFFu) | 0x800000u : a;
    q = m >> shift, rest = m & ((1u << shift) - 1u), half = 1u << (shift - 1u);
  }
  if (nearest ? (rest > half || (rest == half && (q & 1u))) : (away && rest != 0)) ++q;
  return static_cast<std::uint16_t>(sign | q);
}

}  // namespace detail

/// IEEE: round to nearest, ties to even; 65520 and above give infinity.
KVRT_HOST_DEVICE inline std::uint16_t f32_to_f16_rne(float x) { return detail::f32_to_f16(x, detail::F16Rounding::kNearestEven); }
/// Toward minus infinity; finite input below -65504 gives -65504.
KVRT_HOST_DEVICE inline std::uint16_t f32_to_f16_down(float x) { return detail::f32_to_f16(x, detail::F16Rounding::kDown); }
/// Toward plus infinity; finite input above 65504 gives 65504.
KVRT_HOST_DEVICE inline std::uint16_t f32_to_f16_up(float x) { return detail::f32_to_f16(x, detail::F16Rounding::kUp); }

/// Exact.
KVRT_HOST_DEVICE inline float bf16_to_f32(std::uint16_t b) { return f32_from_bits(static_cast<std::uint32_t>(b) << 16); }

/// IEEE: round to nearest, ties to even; the largest finite fp32 values give infinity.
KVRT_HOST_DEVICE inline std::uint16_t f32_to_bf16(float x) {
  const std::uint32_t u = f32_bits(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace kvrt

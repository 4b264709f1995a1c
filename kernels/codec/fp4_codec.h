#pragma once
// 4-bit floats in blocks (METHODS.md 4.4).
//   E2M1   sign, 2 exponent bits, 1 mantissa bit: 0 .5 1 1.5 2 3 4 6. Nearest, ties to the even code, saturating at 6, NaN gives 0.
//   nvfp4  blocks of 16 channels with an E4M3 scale, times one fp32 scale of the unit: gamma = clip / (6 * 448)
//   mxfp4  blocks of 32 channels with an E8M0 scale: byte e is 2^(e - 127); 0xFF (NaN) is never written

#include <cstdint>

#include "kernels/codec/fp8_codec.h"
#include "kernels/core/scheme.h"

namespace kvrt {

KVRT_HOST_DEVICE constexpr bool is_fp4(Format f) { return f == Format::kNvfp4 || f == Format::kMxfp4; }
KVRT_HOST_DEVICE constexpr int fp4_block(Format f) { return f == Format::kNvfp4 ? 16 : 32; }
inline constexpr float kE2m1Max = 6.0f;

KVRT_HOST_DEVICE inline std::uint8_t f32_to_e2m1(float x) {
  const std::uint32_t u = f32_bits(x);
  const float a = f32_from_bits(u & 0x7FFFFFFFu);
  // Halfway cases go to the even code: up at .75, 1.75 and 3.5, down at .25, 1.25, 2.5 and 5. Every comparison is false for NaN.
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return a == a ? static_cast<std::uint8_t>((u >> 28 & 8u) | static_cast<std::uint32_t>(code)) : std::uint8_t{0};
}
KVRT_HOST_DEVICE inline float e2m1_to_f32(std::uint8_t code) {
  const std::uint32_t sign = (code & 8u) << 28, exponent = code >> 1 & 3u, mantissa = code & 1u;
  if (exponent == 0) return f32_from_bits(sign | (mantissa ? 0x3F000000u : 0u));
  return f32_from_bits(sign | (exponent + 126u) << 23 | mantissa << 22);
}

/// E4M3 code of the scale of an nvfp4 block: blockmax / (6 gamma), at least 2^-9 unless the block is zero, saturating at 448.
KVRT_HOST_DEVICE inline std::uint8_t nvfp4_scale(float block_max, float gamma) {
  const std::uint8_t code = f32_to_e4m3(block_max / (kE2m1Max * gamma));
  return code == 0 && block_max > 0 ? std::uint8_t{1} : code;
}
/// E8M0 code of the scale of an mxfp4 block: 2^(floor(log2 blockmax) - 2), at least 2^-127.
KVRT_HOST_DEVICE inline std::uint8_t mxfp4_scale(float block_max) {
  const std::uint32_t exponent = f32_bits(block_max) >> 23;
  return static_cast<std::uint8_t>(exponent > 2u ? exponent - 2u : 0u);
}
KVRT_HOST_DEVICE inline float e8m0_to_f32(std::uint8_t code) {
  return f32_from_bits(code == 0 ? 0x00400000u : static_cast<std::uint32_t>(code) << 23);
}

}  // namespace kvrt

#pragma once
// Blocks of 32 values of llama.cpp, byte for byte those of its reference row quantisers.
//   q8_0  34 bytes: fp16 d, 32 int8.   d = absmax / 127, code = round(x / d), halves away from zero
//   q4_0  18 bytes: fp16 d, 16 bytes, byte j = code j | code (j + 16) << 4.   d = (signed value of largest magnitude, the first
//         on ties) / -8, code = min(15, trunc(x / d + 8.5)), value (code - 8) * d
// `x / d` is x times the fp32 inverse of d before it is rounded to fp16; product and sum round separately. Two cases that break the
// reference are defined here: d beyond 65504 saturates (and is counted), and a block so small that 1/d is not finite holds zeros.

#include <cmath>
#include <cstdint>

#include "kernels/codec/int_codec.h"
#include "kernels/codec/range.h"

namespace kvrt {

inline constexpr int kLlamaBlock = 32;
inline constexpr int kQ8_0Bytes = 34;
inline constexpr int kQ4_0Bytes = 18;

namespace detail {

/// fp16 bits of d, finite.
KVRT_HOST_DEVICE inline std::uint16_t llama_scale(float d, EncodeCounters* counters) {
  const std::uint16_t h = f32_to_f16_rne(d);
  if ((h & 0x7FFFu) != 0x7C00u) return h;
  ++counters->saturated;
  return static_cast<std::uint16_t>(h - 1u);
}
KVRT_HOST_DEVICE inline float llama_inverse(float d) {
  const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
  return f32_is_finite(inverse) ? inverse : 0.0f;
}

}  // namespace detail

KVRT_HOST_DEVICE inline void encode_q8_0(const float* x, std::uint8_t* block, EncodeCounters* counters) {
  float absmax = 0;
  for (int i = 0; i < kLlamaBlock; ++i) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    if (a > absmax) absmax = a;
  }
  const float d = absmax / 127.0f, inverse = detail::llama_inverse(d);
  store_le16(block, detail::llama_scale(d, counters));
  for (int i = 0; i < kLlamaBlock; ++i) {
    block[2 + i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(roundf(x[i] * inverse)));
  }
}
KVRT_HOST_DEVICE inline float decode_q8_0(const std::uint8_t* block, int i) {
  return static_cast<float>(static_cast<std::int8_t>(block[2 + i])) * f16_to_f32(load_le16(block));
}

KVRT_HOST_DEVICE inline void encode_q4_0(const float* x, std::uint8_t* block, EncodeCounters* counters) {
  float absmax = 0, extreme = 0;
  for (int i = 0; i < kLlamaBlock; ++i) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    if (a > absmax) absmax = a, extreme = x[i];
  }
  const float d = extreme / -8.0f, inverse = detail::llama_inverse(d);
  store_le16(block, detail::llama_scale(d, counters));
  std::uint8_t codes[kLlamaBlock];
  for (int i = 0; i < kLlamaBlock; ++i) {
    const float steps = x[i] * inverse;
    const int code = static_cast<int>(steps + 8.5f);
    codes[i] = static_cast<std::uint8_t>(code > 15 ? 15 : code);
  }
  for (int i = 0; i < 16; ++i) block[2 + i] = static_cast<std::uint8_t>(codes[i] | codes[i + 16] << 4);
}
KVRT_HOST_DEVICE inline float decode_q4_0(const std::uint8_t* block, int i) {
  const int code = i < 16 ? block[2 + i] & 15 : block[2 + i - 16] >> 4;
  return static_cast<float>(code - 8) * f16_to_f32(load_le16(block));
}

}  // namespace kvrt

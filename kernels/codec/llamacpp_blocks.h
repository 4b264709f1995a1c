#pragma once
// Blocks of 32 values of llama.cpp, byte for byte those of its reference row quantisers.
//   q8_0  34 bytes: fp16 d, 32 int8.   d = absmax / 127, code = round(x / d), halves away from zero
//   q4_0  18 bytes: fp16 d, 16 bytes, byte j = code j | code (j + 16) << 4.   d = (signed value of largest magnitude, the first
//         on ties) / -8, code = min(15, trunc(x / d + 8.5)), value (code - 8) * d
//   q4_1  20 bytes: fp16 d, fp16 m, 16 bytes.   d = (max - min) / 15, m = min, code = min(15, trunc((x - min) / d + 0.5)), value code * d + m
//   q5_0  22 bytes: fp16 d, 32 bits with bit 4 of each code, 16 bytes with bits 0-3.   As q4_0 with -16, 16.5 and 31
//   q5_1  24 bytes: fp16 d, fp16 m, 32 bits, 16 bytes.   As q4_1 with 31
//   iq4_nl  18 bytes: fp16 d, 16 bytes as q4_0; value kIq4NlLevels[code] * d.   d0 = extreme / -127; code = level nearest to x / d0, halves
//         upward; d = sum(x^2 level x) / sum(x^2 level^2), summed in order. A block below 1e-15 has d = 0 and codes 0
// `x / d` is x times the fp32 inverse of d before it is rounded to fp16; product and sum round separately. Cases that break the
// reference are defined here: d beyond 65504 saturates (and is counted), also where the sums of iq4_nl leave fp32, and a block so small
// that 1/d is not finite holds zeros.

#include <cmath>
#include <cstdint>

#include "kernels/codec/int_codec.h"
#include "kernels/codec/range.h"
#include "kernels/core/scheme.h"

namespace kvrt {

inline constexpr int kLlamaBlock = 32;
inline constexpr int kQ8_0Bytes = 34;
inline constexpr int kQ4_0Bytes = 18;
inline constexpr int kQ4_1Bytes = 20;
inline constexpr int kQ5_0Bytes = 22;
inline constexpr int kQ5_1Bytes = 24;
inline constexpr int kIq4NlBytes = 18;

/// Bytes of one block; 0 for a format without a codec here.
KVRT_HOST_DEVICE constexpr int llama_block_bytes(Format f) {
  return f == Format::kQ8_0 ? kQ8_0Bytes : f == Format::kQ4_0 ? kQ4_0Bytes : f == Format::kQ4_1 ? kQ4_1Bytes
         : f == Format::kQ5_0 ? kQ5_0Bytes : f == Format::kQ5_1 ? kQ5_1Bytes : f == Format::kIq4Nl ? kIq4NlBytes : 0;
}

/// Levels of iq4_nl, as llama.cpp defines them.
struct Iq4NlLevels {
  float level[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};
inline constexpr float kIq4NlSmallest = 1e-15f;  ///< blocks below it are coded as zeros

namespace detail {

/// fp16 bits of d or m, finite.
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
  KVRT_ROLLED
  for (int i = 0; i < kLlamaBlock; ++i) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    if (a > absmax) absmax = a;
  }
  const float d = absmax / 127.0f, inverse = detail::llama_inverse(d);
  store_le16(block, detail::llama_scale(d, counters));
  KVRT_ROLLED
  for (int i = 0; i < kLlamaBlock; ++i) {
    block[2 + i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(roundf(x[i] * inverse)));
  }
}
KVRT_HOST_DEVICE inline float decode_q8_0(const std::uint8_t* block, int i) {
  return static_cast<float>(static_cast<std::int8_t>(block[2 + i])) * f16_to_f32(load_le16(block));
}

namespace detail {

/// Bits 0-3 of 32 codes, two a byte.
KVRT_HOST_DEVICE inline void pack_nibbles(const std::uint8_t* codes, std::uint8_t* out) {
  for (int i = 0; i < 16; ++i) out[i] = static_cast<std::uint8_t>((codes[i] & 15) | (codes[i + 16] & 15) << 4);
}
KVRT_HOST_DEVICE inline void pack_fifth_bits(const std::uint8_t* codes, std::uint8_t* out) {
  std::uint32_t word = 0;
  KVRT_ROLLED
  for (int i = 0; i < kLlamaBlock; ++i) word |= static_cast<std::uint32_t>(codes[i] >> 4) << i;
  store_le32(out, word);
}
KVRT_HOST_DEVICE inline int nibble(const std::uint8_t* packed, int i) { return i < 16 ? packed[i] & 15 : packed[i - 16] >> 4; }
KVRT_HOST_DEVICE inline int fifth_bit(const std::uint8_t* packed, int i) { return static_cast<int>(load_le32(packed) >> i & 1u) << 4; }

/// q4_0 (half = 8) and q5_0 (half = 16): codes around half, scale in the first two bytes.
KVRT_HOST_DEVICE inline void signed_codes(const float* x, int half, std::uint8_t* block, std::uint8_t* codes, EncodeCounters* counters) {
  float absmax = 0, extreme = 0;
  KVRT_ROLLED
  for (int i = 0; i < kLlamaBlock; ++i) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    if (a > absmax) absmax = a, extreme = x[i];
  }
  const float d = extreme / static_cast<float>(-half), inverse = llama_inverse(d);
  store_le16(block, llama_scale(d, counters));
  KVRT_ROLLED
  for (int i = 0; i < kLlamaBlock; ++i) {
    const float steps = x[i] * inverse;
    const int code = static_cast<int>(steps + (static_cast<float>(half) + 0.5f));
    codes[i] = static_cast<std::uint8_t>(code > 2 * half - 1 ? 2 * half - 1 : code);
  }
}
/// q4_1 (top = 15) and q5_1 (top = 31): codes from the minimum, scale and minimum in the first four bytes.
KVRT_HOST_DEVICE inline void offset_codes(const float* x, int top, std::uint8_t* block, std::uint8_t* codes, EncodeCounters* counters) {
  float min = x[0], max = x[0];
  KVRT_ROLLED
  for (int i = 1; i < kLlamaBlock; ++i) {
    if (x[i] < min) min = x[i];
    if (x[i] > max) max = x[i];
  }
  const float d = (max - min) / static_cast<float>(top), inverse = llama_inverse(d);
  store_le16(block, llama_scale(d, counters));
  store_le16(block + 2, llama_scale(min, counters));
  KVRT_ROLLED
  for (int i = 0; i < kLlamaBlock; ++i) {
    const float steps = (x[i] - min) * inverse;
    const int code = steps > 0 ? static_cast<int>(steps + 0.5f) : 0;  // not a number where max - min leaves fp32: 0
    codes[i] = static_cast<std::uint8_t>(code > top ? top : code);
  }
}

/// Index of the nearest level, halves to the upper one. Midpoints of the levels are exact in fp32.
KVRT_HOST_DEVICE inline std::uint8_t nearest_iq4_nl(float y) {
  const Iq4NlLevels table;
  int code = 0;
  for (int i = 0; i < 15; ++i) code += y >= (table.level[i] + table.level[i + 1]) * 0.5f ? 1 : 0;
  return static_cast<std::uint8_t>(code);
}
KVRT_HOST_DEVICE inline void iq4_nl_codes(const float* x, std::uint8_t* block, std::uint8_t* codes, EncodeCounters* counters) {
  const Iq4NlLevels table;
  float absmax = 0, extreme = 0;
  KVRT_ROLLED
  for (int i = 0; i < kLlamaBlock; ++i) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    if (a > absmax) absmax = a, extreme = x[i];
  }
  const bool is_zero = absmax < kIq4NlSmallest;
  const float d0 = extreme / -127.0f, inverse = is_zero ? 0.0f : 1.0f / d0;
  float numerator = 0, denominator = 0;
  KVRT_ROLLED
  for (int i = 0; i < kLlamaBlock; ++i) {
    codes[i] = is_zero ? std::uint8_t{0} : nearest_iq4_nl(inverse * x[i]);
    const float level = table.level[codes[i]], weighted = x[i] * x[i] * level;
    numerator += weighted * x[i];
    denominator += weighted * level;
  }
  const float d = is_zero ? 0.0f : numerator / denominator;
  store_le16(block, llama_scale(f32_is_finite(d) ? d : d0, counters));
}

}  // namespace detail

/// Encodes 32 finite values into llama_block_bytes(f) bytes.
KVRT_HOST_DEVICE inline void encode_llama_block(Format f, const float* x, std::uint8_t* block, EncodeCounters* counters) {
  std::uint8_t codes[kLlamaBlock];
  switch (f) {
    case Format::kQ8_0: return encode_q8_0(x, block, counters);
    case Format::kQ4_0:
      detail::signed_codes(x, 8, block, codes, counters);
      return detail::pack_nibbles(codes, block + 2);
    case Format::kQ5_0:
      detail::signed_codes(x, 16, block, codes, counters);
      detail::pack_fifth_bits(codes, block + 2);
      return detail::pack_nibbles(codes, block + 6);
    case Format::kIq4Nl:
      detail::iq4_nl_codes(x, block, codes, counters);
      return detail::pack_nibbles(codes, block + 2);
    case Format::kQ4_1:
      detail::offset_codes(x, 15, block, codes, counters);
      return detail::pack_nibbles(codes, block + 4);
    default:  // q5_1
      detail::offset_codes(x, 31, block, codes, counters);
      detail::pack_fifth_bits(codes, block + 4);
      return detail::pack_nibbles(codes, block + 8);
  }
}

/// Value i of a block.
KVRT_HOST_DEVICE inline float decode_llama_block(Format f, const std::uint8_t* block, int i) {
  const float d = f16_to_f32(load_le16(block));
  switch (f) {
    case Format::kQ8_0: return decode_q8_0(block, i);
    case Format::kQ4_0: return static_cast<float>(detail::nibble(block + 2, i) - 8) * d;
    case Format::kQ5_0: return static_cast<float>((detail::nibble(block + 6, i) | detail::fifth_bit(block + 2, i)) - 16) * d;
    case Format::kIq4Nl: return Iq4NlLevels{}.level[detail::nibble(block + 2, i)] * d;
    default: break;
  }
  const int code = f == Format::kQ4_1 ? detail::nibble(block + 4, i) : detail::nibble(block + 8, i) | detail::fifth_bit(block + 4, i);
  const float product = static_cast<float>(code) * d;
  return product + f16_to_f32(load_le16(block + 2));
}

}  // namespace kvrt

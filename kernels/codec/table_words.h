#pragma once
// Words of codebook and fp8 rows as words and pairs that the products take (KERNELS.md 4.3). Codebook codes become bytes
// level + 128 by byte permutes of a table, four to a word, and are read like 8-bit integers with zero 128; E4M3 becomes fp16.

#include <cstdint>

#include "kernels/codec/codebook.h"
#include "kernels/codec/half.h"
#include "kernels/cuda/mma.h"

namespace kvrt {

inline constexpr int kTableWords = 4;        ///< of 16 levels
inline constexpr float kLevelZero = 128.0f;  ///< byte = level + 128

/// Step of a codebook: entries are whole multiples of largest / 127.
KVRT_HOST_DEVICE inline float codebook_step(const Codebook& book) {
  float largest = 0;
  for (int i = 0; i < book.size; ++i) largest = fmaxf(largest, fabsf(book.entries[i]));
  return largest * (1.0f / 127.0f);
}
/// Bytes of entries 4 word .. 4 word + 3.
KVRT_DEVICE std::uint32_t table_word(const Codebook& book, float step, int word) {
  const float per_step = step > 0 ? cuda::reciprocal_approx(step) : 0.0f;
  std::uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const int entry = 4 * word + i;
    const float level = entry < book.size ? book.entries[entry] * per_step + kLevelZero : kLevelZero;
    bytes |= static_cast<std::uint32_t>(level + 0.5f) << (8 * i);
  }
  return bytes;
}

/// 4 bits: word -> bytes of channels 0..3 (part 0) or 4..7 (part 1).
KVRT_HOST_DEVICE inline std::uint32_t expand4(std::uint32_t word, const std::uint32_t (&table)[kTableWords], int part) {
  const std::uint32_t low = (word & 0x77777777u) >> (16 * part), top = (0x32103210u | (word & 0x88888888u) >> 1) >> (16 * part);
  return cuda::byte_permute(cuda::byte_permute(table[0], table[1], low), cuda::byte_permute(table[2], table[3], low), top);
}
/// 2 bits, 16 codes: part j -> bytes of channels 8 (j / 2) + j % 2 + {0, 2, 4, 6}.
KVRT_HOST_DEVICE constexpr int expanded_channel(int part, int byte) { return 8 * (part / 2) + 2 * byte + part % 2; }
KVRT_HOST_DEVICE inline std::uint32_t expand2(std::uint32_t word, const std::uint32_t (&table)[kTableWords], int part) {
  return cuda::byte_permute(table[0], table[0], (word >> 2 * (part % 2) & 0x33333333u) >> (16 * (part / 2)));
}
/// 3 bits, 16 codes: their word of plane A, the cell's word of plane B shifted right by 2 for the upper 16; parts as of 2 bits.
KVRT_HOST_DEVICE inline std::uint32_t expand3(std::uint32_t low, std::uint32_t high, const std::uint32_t (&table)[kTableWords], int part) {
  const std::uint32_t selector = (low >> 2 * (part % 2) & 0x33333333u) | (high << (2 - part % 2) & 0x44444444u);
  return cuda::byte_permute(table[0], table[1], selector >> (16 * (part / 2)));
}

/// E4M3 bytes 0 and 1 (index 0) or 2 and 3 of a word as fp16. Exact; the same bits on every target but for the NaN codes, which
/// encoders never emit.
KVRT_HOST_DEVICE inline std::uint32_t e4m3_pair_portable(std::uint32_t word, int index) {
  const std::uint32_t wide = cuda::byte_permute(word, 0, index == 0 ? 0x1404u : 0x3424u);
  return (wide & 0x80008000u) | (wide >> 1 & 0x3F803F80u);  // 2^-8 of the value
}
KVRT_DEVICE std::uint32_t e4m3_pair(std::uint32_t word, int index) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return cuda::e4m3x2_to_f16x2(static_cast<std::uint16_t>(index == 0 ? word : word >> 16));
#else
  return cuda::fma_f16x2(e4m3_pair_portable(word, index), 0x5C005C00u, 0x80008000u);
#endif
}

}  // namespace kvrt

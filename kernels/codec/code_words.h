#pragma once
// Words of a coded row as pairs of fp16 numbers, without a conversion instruction (KERNELS.md 4.3): code bits are placed under the
// exponent of a power of two, so that a pair holds bias + code exactly. Order of codes in a word: codec/int_codec.h.
// For sums with weights of one sign the bias must not add up: the alternating forms give bias + code in the low half and
// code - (bias + 15 or 255) in the high half, at no cost.

#include <cstdint>

#include "kernels/cuda/portable.h"

namespace kvrt {

/// 4-bit codes of one word w, pairs (c, c + 4): low_pair holds (0, 4), high_pair (1, 5); the same of w >> 8 hold (2, 6) and (3, 7).
namespace int4_words {
inline constexpr float kLowBias = 1024.0f, kHighBias = 64.0f;
inline constexpr float kLowOddBias = -1039.0f, kHighOddBias = -79.0f;
inline constexpr std::uint32_t kMinusLowBias = 0xE400E400u, kMinusHighBias = 0xD400D400u;  ///< pairs of -1024, of -64

/// Word for the pairs of step 0 or 1.
KVRT_HOST_DEVICE inline std::uint32_t step_word(std::uint32_t word, int step) { return word >> (8 * step); }
KVRT_HOST_DEVICE inline std::uint32_t low_pair(std::uint32_t word) { return (word & 0x000F000Fu) | 0x64006400u; }
KVRT_HOST_DEVICE inline std::uint32_t high_pair(std::uint32_t word) { return (word & 0x00F000F0u) | 0x54005400u; }
KVRT_HOST_DEVICE inline std::uint32_t low_pair_alternating(std::uint32_t word) { return (word & 0x000F000Fu) ^ 0xE40F6400u; }
KVRT_HOST_DEVICE inline std::uint32_t high_pair_alternating(std::uint32_t word) { return (word & 0x00F000F0u) ^ 0xD4F05400u; }

/// Channel, inside a word, of half `half` of the low (reg 0) or high (reg 1) pair of a step.
KVRT_HOST_DEVICE constexpr int channel(int step, int reg, int half) { return 2 * step + reg + 4 * half; }
/// The words of two tokens as a word whose pairs are (token a, token b) of one channel: channels 0..3 (part 0) or 4..7 (part 1).
KVRT_HOST_DEVICE inline std::uint32_t token_pair(std::uint32_t a, std::uint32_t b, int part) {
  return cuda::byte_permute(a, b, part == 0 ? 0x5410u : 0x7632u);
}
}  // namespace int4_words

/// 8-bit codes of one word: pair 0 holds channels (0, 1), pair 1 channels (2, 3).
namespace int8_words {
inline constexpr float kBias = 1024.0f, kOddBias = -1279.0f;
inline constexpr std::uint32_t kMinusBias = 0xE400E400u;

KVRT_HOST_DEVICE inline std::uint32_t pair(std::uint32_t word, int index) {
  return cuda::byte_permute(word, 0x64646464u, index == 0 ? 0x4140u : 0x4342u);
}
KVRT_HOST_DEVICE inline std::uint32_t alternating(std::uint32_t biased_pair) { return biased_pair ^ 0x80FF0000u; }
/// Bytes (a.c, b.c, a.c+1, b.c+1) of two tokens: channels 0 1 (part 0) or 2 3 (part 1). pair() of it holds (token a, token b).
KVRT_HOST_DEVICE inline std::uint32_t token_pair(std::uint32_t a, std::uint32_t b, int part) {
  return cuda::byte_permute(a, b, part == 0 ? 0x5140u : 0x7362u);
}
}  // namespace int8_words

/// 3-bit codes of a cell of three words: pair r holds channels (r, r + 16). Words that hold one half of a cell for two tokens, token a
/// in their low halves, give the pair (token a, token b) of the half's channel r.
namespace int3_words {
KVRT_HOST_DEVICE constexpr int field(int r) { return r == 15 ? 0 : r % 5 % 3; }
KVRT_HOST_DEVICE constexpr std::uint32_t magic(int field) { return field == 0 ? 0x6400u : field == 1 ? 0x5800u : 0x4C00u; }
KVRT_HOST_DEVICE constexpr float field_bias(int field) { return field == 0 ? 1024.0f : field == 1 ? 128.0f : 16.0f; }
KVRT_HOST_DEVICE constexpr float bias(int r) { return field_bias(field(r)); }
KVRT_HOST_DEVICE constexpr float odd_bias(int r) { return -bias(r) - 7.0f; }
KVRT_HOST_DEVICE constexpr std::uint32_t minus_bias(int r) { return (magic(field(r)) | 0x8000u) * 0x10001u; }

/// Code bits of field `f` (0..4) of both halves of a word, at bits 0, 3 or 6.
KVRT_HOST_DEVICE inline std::uint32_t field_bits(std::uint32_t word, int f) {
  return (f < 3 ? word : word >> 9) & ((7u << 3 * (f % 3)) * 0x10001u);
}
/// The same, at bit 0.
KVRT_HOST_DEVICE inline std::uint32_t field_at_zero(std::uint32_t word, int f) { return word >> 3 * f & 0x00070007u; }
/// Codes 15 of both halves, at bit 0.
KVRT_HOST_DEVICE inline std::uint32_t last_bits(const std::uint32_t (&w)[3]) {
  return (w[0] >> 15 & 0x00010001u) | (w[1] >> 14 & 0x00020002u) | (w[2] >> 13 & 0x00040004u);
}
/// Pair r.
KVRT_HOST_DEVICE inline std::uint32_t bits(const std::uint32_t (&w)[3], int r) { return r == 15 ? last_bits(w) : field_bits(w[r / 5], r % 5); }
KVRT_HOST_DEVICE inline std::uint32_t biased(std::uint32_t bits, int field) { return bits | magic(field) * 0x10001u; }
KVRT_HOST_DEVICE inline std::uint32_t alternating(std::uint32_t bits, int field) {
  return bits ^ (magic(field) | (0x8000u | magic(field) | 7u << 3 * field) << 16);
}

/// One half of a cell, alone: pairs 0..4 hold channels (p, 5 + p), then (10, 11), (12, 13), (14, 15).
KVRT_HOST_DEVICE constexpr int half_cell_channel(int p, int half) { return p < 5 ? p + 5 * half : 2 * p + half; }
KVRT_HOST_DEVICE constexpr int half_cell_field(int p) { return p < 5 ? p % 3 : p == 6 ? 2 : 0; }
/// cell: the three words; is_upper: which half.
KVRT_HOST_DEVICE inline std::uint32_t half_cell_bits(const std::uint32_t (&cell)[3], bool is_upper, int p) {
  const std::uint32_t first = cuda::byte_permute(cell[0], cell[1], is_upper ? 0x7632u : 0x5410u);
  if (p < 5) return field_bits(first, p);
  const std::uint32_t third = is_upper ? cell[2] >> 16 : cell[2] & 0xFFFFu;
  if (p < 7) return field_bits(third | third >> 3 << 16, p == 5 ? 0 : 2);
  return (third >> 12 & 7u) | (((first >> 15 & 1u) | (first >> 30 & 2u) | (third >> 13 & 4u)) << 16);
}

/// One half of a cell as pairs of channels that are RoPE pairs with those 8 behind: registers i = 0..2 hold the channels (2 + i, 5 + i),
/// i = 3 holds (0, 1), member 1 the ones 8 further.
KVRT_HOST_DEVICE constexpr int half_cell_pair_channel(int i, int half) { return i < 3 ? 2 + i + 3 * half : half; }
KVRT_HOST_DEVICE constexpr int half_cell_pair_field(int i) { return i < 3 ? i : 0; }
KVRT_HOST_DEVICE inline std::uint32_t half_cell_pair_bits(const std::uint32_t (&w)[3], bool is_upper, int i, int member) {
  const std::uint32_t select = is_upper ? 0x7632u : 0x5410u;
  std::uint32_t word;
  if (i < 3 && member == 0) {
    word = cuda::byte_permute(w[0] >> 6, w[1], select);
  } else if (i < 3) {
    const std::uint32_t last = (w[0] >> 9 & 0x00400040u) | (w[1] >> 8 & 0x00800080u) | (w[2] >> 7 & 0x01000100u);
    word = cuda::byte_permute(w[2], (w[2] >> 9 & 0x003F003Fu) | last, select);
  } else {
    word = member == 0 ? cuda::byte_permute(w[0], w[0] >> 3, select) : cuda::byte_permute(w[1] >> 9, w[1] >> 12, select);
  }
  return word & ((7u << 3 * half_cell_pair_field(i)) * 0x10001u);
}
}  // namespace int3_words

/// 2-bit codes of a word: pair c (0..7) holds channels (c, c + 8); of two tokens' interleaved halves, (token a, token b).
namespace int2_words {
KVRT_HOST_DEVICE constexpr std::uint32_t magic(int c) { return 0x6400u - 0x800u * static_cast<std::uint32_t>(c % 4); }
KVRT_HOST_DEVICE constexpr float bias(int c) { return c % 4 == 0 ? 1024.0f : c % 4 == 1 ? 256.0f : c % 4 == 2 ? 64.0f : 16.0f; }
KVRT_HOST_DEVICE constexpr float odd_bias(int c) { return -bias(c) - 3.0f; }
KVRT_HOST_DEVICE constexpr std::uint32_t minus_bias(int c) { return (magic(c) | 0x8000u) * 0x10001u; }
KVRT_HOST_DEVICE inline std::uint32_t bits(std::uint32_t word, int c) { return (word >> 8 * (c / 4)) & ((3u << 2 * (c % 4)) * 0x10001u); }
KVRT_HOST_DEVICE inline std::uint32_t pair(std::uint32_t word, int c) { return bits(word, c) | magic(c) * 0x10001u; }
KVRT_HOST_DEVICE inline std::uint32_t alternating(std::uint32_t word, int c) {
  return bits(word, c) ^ (magic(c) | (0x8000u | magic(c) | 3u << 2 * (c % 4)) << 16);
}
}  // namespace int2_words

/// 16-bit values of one word of two tokens as the pair (token a, token b) of channel 0 or 1 of the word.
KVRT_HOST_DEVICE inline std::uint32_t token_pair16(std::uint32_t a, std::uint32_t b, int channel) {
  return cuda::byte_permute(a, b, channel == 0 ? 0x5410u : 0x7632u);
}

}  // namespace kvrt

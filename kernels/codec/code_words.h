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

/// 16-bit values of one word of two tokens as the pair (token a, token b) of channel 0 or 1 of the word.
KVRT_HOST_DEVICE inline std::uint32_t token_pair16(std::uint32_t a, std::uint32_t b, int channel) {
  return cuda::byte_permute(a, b, channel == 0 ? 0x5410u : 0x7632u);
}

}  // namespace kvrt

#pragma once
// Device code of the decode kernels, part 5: coded rows of values as operand pairs. Lane 4g + q reads the channels
// [g D/8, (g + 1) D/8) of its four tokens; register `reg` of D/8 holds one of them for two tokens, (even, odd). Families give
//   kWords, load()           a lane's part of one token's row
//   channel(g, reg)          channel of the row that a register holds
//   raw(even, odd, ...)      code bits of two tokens, in place
//   biased(raw, reg)         pair of bias + code;   minus_bias(reg)
//   alternating(raw, reg)    the same for the even token, code - odd bias for the odd one: weights have one sign, and a bias of one
//                            sign would add up (KERNELS.md 4.3)
//   bias(reg, is_odd)        what the alternating form adds to the code
// and the constants of decode_key_codes.h; kCanBeNan: bytes nobody wrote may decode to NaN.

#include "kernels/read/decode_key_codes.h"

namespace kvrt {

template <int D, int kBits, bool kIsPadded>
struct WordColumns {
  static constexpr int kChannels = D / 8, kAllBits = kChannels * kBits;
  static constexpr bool kIsPart = kAllBits < 32;  ///< two lanes share a word
  static constexpr int kWords = kIsPart ? 1 : kAllBits / 32;
  KVRT_DEVICE static void load(const SideView& view, const std::uint8_t* block, int row, int g, std::uint32_t (&words)[kWords]) {
    const int row_words = kIsPadded ? cuda::reread(view.row_words) : D * kBits / 32;
    load_words<kIsPadded, kWords>(block + row * (4 * row_words), kIsPart ? g * kAllBits / 32 : g * kWords, row_words, words);
  }
};

/// 8-bit codes, or bytes of codebook levels, of two tokens.
struct ByteColumns {
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int) { return int8_words::kMinusBias; }
  KVRT_DEVICE static constexpr float bias(int, bool is_odd) { return is_odd ? int8_words::kOddBias : int8_words::kBias; }
  KVRT_DEVICE static std::uint32_t biased(std::uint32_t raw, int) { return raw; }
  KVRT_DEVICE static std::uint32_t alternating(std::uint32_t raw, int) { return int8_words::alternating(raw); }
  /// byte: of the two tokens' words.
  KVRT_DEVICE static std::uint32_t byte_pair(std::uint32_t even, std::uint32_t odd, int byte) {
    return int8_words::pair(int8_words::token_pair(even, odd, byte / 2), byte % 2);
  }
};

template <int D, bool kIsPadded>
struct Int8ValueCodes : WordColumns<D, 8, kIsPadded>, ByteColumns {
  static constexpr bool kIsTable = false, kHasZero = true, kHasChannelGroups = true, kHalvesValues = true, kCanBeNan = false;
  static constexpr int kParamBytes = 0;
  KVRT_DEVICE static constexpr int channel(int g, int reg) { return g * (D / 8) + reg; }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], const Table&, int, int reg) {
    return byte_pair(even[reg / 4], odd[reg / 4], reg % 4);
  }
};

template <int D, bool kIsPadded>
struct Int4ValueCodes : WordColumns<D, 4, kIsPadded> {
  static constexpr bool kIsTable = false, kHasZero = true, kHasChannelGroups = true, kHalvesValues = true, kCanBeNan = false;
  static constexpr int kParamBytes = 0;
  KVRT_DEVICE static constexpr int channel(int g, int reg) { return g * (D / 8) + reg; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int reg) { return reg % 2 == 0 ? int4_words::kMinusLowBias : int4_words::kMinusHighBias; }
  KVRT_DEVICE static constexpr float bias(int reg, bool is_odd) {
    return reg % 2 == 0 ? (is_odd ? int4_words::kLowOddBias : int4_words::kLowBias) : (is_odd ? int4_words::kHighOddBias : int4_words::kHighBias);
  }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], const Table&, int, int reg) {
    return int4_words::step_word(int4_words::token_pair(even[reg / 8], odd[reg / 8], reg % 8 / 4), reg % 4 / 2);
  }
  KVRT_DEVICE static std::uint32_t biased(std::uint32_t raw, int reg) { return reg % 2 == 0 ? int4_words::low_pair(raw) : int4_words::high_pair(raw); }
  KVRT_DEVICE static std::uint32_t alternating(std::uint32_t raw, int reg) {
    return reg % 2 == 0 ? int4_words::low_pair_alternating(raw) : int4_words::high_pair_alternating(raw);
  }
};

template <int D, bool kIsPadded>
struct Int2ValueCodes : WordColumns<D, 2, kIsPadded> {
  using Row = WordColumns<D, 2, kIsPadded>;
  static constexpr bool kIsTable = false, kHasZero = false, kHasChannelGroups = true, kHalvesValues = true, kCanBeNan = false;
  static constexpr int kParamBytes = 4;
  KVRT_DEVICE static constexpr int channel(int g, int reg) { return g * (D / 8) + reg; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int reg) { return int2_words::minus_bias(reg % 8); }
  KVRT_DEVICE static constexpr float bias(int reg, bool is_odd) { return is_odd ? int2_words::odd_bias(reg % 8) : int2_words::bias(reg % 8); }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], const Table&, int g, int reg) {
    const bool is_upper = Row::kIsPart ? g % 2 != 0 : reg % 16 / 8 != 0;
    return is_upper ? high_halves(even[reg / 16], odd[reg / 16]) : low_halves(even[reg / 16], odd[reg / 16]);
  }
  KVRT_DEVICE static std::uint32_t biased(std::uint32_t raw, int reg) { return int2_words::pair(raw, reg % 8); }
  KVRT_DEVICE static std::uint32_t alternating(std::uint32_t raw, int reg) { return int2_words::alternating(raw, reg % 8); }
};

/// Three-word cells. D 128: a lane has one half of a cell, D 64: a quarter.
template <int D, bool kIsPadded>
struct CellColumns {
  static constexpr int kCells = D / 8 < 32 ? 1 : D / 8 / 32, kWords = 3 * kCells;
  static constexpr bool kIsHalf = D / 8 == 16, kIsQuarter = D / 8 == 8;
  KVRT_DEVICE static void load(const SideView& view, const std::uint8_t* block, int row, int g, std::uint32_t (&words)[kWords]) {
    const int plane_words = kIsPadded ? cuda::reread(view.row_words) : D / 16, first = kIsQuarter ? g / 4 : kIsHalf ? g / 2 : g * kCells;
    const std::uint8_t* high = block + cuda::reread(view.plane_b) + row * (2 * plane_words);
    KVRT_UNROLL
    for (int c = 0; c < kCells; ++c) {
      load_words<kIsPadded, 2>(block + row * (4 * plane_words), 2 * (first + c), plane_words, words, 3 * c);
      load_words<kIsPadded, 1>(high, first + c, plane_words / 2, words, 3 * c + 2);
    }
  }
  /// Which half of its cell a register is of.
  KVRT_DEVICE static int half_of(int g, int reg) { return kIsQuarter ? g / 2 % 2 : kIsHalf ? g % 2 : reg / 16 % 2; }
};

template <int D, bool kIsPadded>
struct Int3ValueCodes : CellColumns<D, kIsPadded> {
  using Row = CellColumns<D, kIsPadded>;
  static constexpr bool kIsTable = false, kHasZero = false, kHasChannelGroups = true, kHalvesValues = true, kCanBeNan = false;
  static constexpr int kParamBytes = 4;
  // A quarter takes codes 0..4, 5, 6, 7 (even lanes) or 10..14, 8, 9, 15 of its half.
  KVRT_DEVICE static constexpr int quarter_code(int g, int reg) { return g % 2 == 0 ? reg : reg < 5 ? 10 + reg : reg < 7 ? 3 + reg : 15; }
  KVRT_DEVICE static constexpr int channel(int g, int reg) {
    return Row::kIsQuarter ? 16 * (g / 2) + quarter_code(g, reg) : g * (D / 8) + reg;
  }
  KVRT_DEVICE static constexpr int field(int reg) {
    return Row::kIsQuarter ? (reg < 5 ? reg % 3 : reg == 7 ? 0 : reg - 5) : int3_words::field(reg % 16);
  }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int reg) { return (int3_words::magic(field(reg)) | 0x8000u) * 0x10001u; }
  KVRT_DEVICE static constexpr float bias(int reg, bool is_odd) { return is_odd ? -int3_words::field_bias(field(reg)) - 7.0f : int3_words::field_bias(field(reg)); }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], const Table&, int g, int reg) {
    const int at = 3 * (reg / 32);
    const bool is_upper = Row::half_of(g, reg) != 0;
    std::uint32_t w[3];
    KVRT_UNROLL
    for (int i = 0; i < 3; ++i) w[i] = is_upper ? high_halves(even[at + i], odd[at + i]) : low_halves(even[at + i], odd[at + i]);
    if (!Row::kIsQuarter) return int3_words::bits(w, reg % 16);
    const bool is_odd_lane = g % 2 != 0;
    if (reg < 5) return int3_words::field_bits(is_odd_lane ? w[2] : w[0], reg);
    if (reg < 7) return is_odd_lane ? int3_words::field_bits(w[1], reg - 2) : int3_words::field_bits(w[1], reg - 5);
    return is_odd_lane ? int3_words::last_bits(w) : int3_words::field_at_zero(w[1], 2);
  }
  KVRT_DEVICE static std::uint32_t biased(std::uint32_t raw, int reg) { return int3_words::biased(raw, field(reg)); }
  KVRT_DEVICE static std::uint32_t alternating(std::uint32_t raw, int reg) { return int3_words::alternating(raw, field(reg)); }
};

struct TableValueCodes : ByteColumns {
  static constexpr bool kIsTable = true, kHasZero = false, kHasChannelGroups = false, kHalvesValues = false, kCanBeNan = false;
  static constexpr int kParamBytes = 0;
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int) { return TableKeyCodes::minus_bias(0, 0); }
};
template <int D, bool kIsPadded>
struct Code4ValueCodes : WordColumns<D, 4, kIsPadded>, TableValueCodes {
  KVRT_DEVICE static constexpr int channel(int g, int reg) { return g * (D / 8) + reg; }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], const Table& table, int, int reg) {
    return byte_pair(expand4(even[reg / 8], table, reg % 8 / 4), expand4(odd[reg / 8], table, reg % 8 / 4), reg % 4);
  }
};
/// Registers in the order of expanded bytes: of 16 codes, or of the 8 that a lane takes of a word (D 64).
template <int D>
KVRT_DEVICE constexpr int expanded_column(int g, int reg) {
  return D / 8 == 8 ? 16 * (g / 2) + expanded_channel(2 * (g % 2) + reg / 4, reg % 4) : g * (D / 8) + 16 * (reg / 16) + expanded_channel(reg % 16 / 4, reg % 4);
}
template <int D, bool kIsPadded>
struct Code2ValueCodes : WordColumns<D, 2, kIsPadded>, TableValueCodes {
  using Row = WordColumns<D, 2, kIsPadded>;
  KVRT_DEVICE static constexpr int channel(int g, int reg) { return expanded_column<D>(g, reg); }
  KVRT_DEVICE static std::uint32_t expand(std::uint32_t word, const Table& table, int g, int reg) {
    return expand2(Row::kIsPart ? word >> (16 * (g % 2)) : word, table, reg % 16 / 4);
  }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], const Table& table, int g, int reg) {
    return byte_pair(expand(even[reg / 16], table, g, reg), expand(odd[reg / 16], table, g, reg), reg % 4);
  }
};
template <int D, bool kIsPadded>
struct Code3ValueCodes : TableValueCodes {
  using Row = CellColumns<D, kIsPadded>;
  static constexpr int kLow = Row::kIsHalf || Row::kIsQuarter ? 1 : 2, kWords = kLow + 1;  ///< words of plane A that hold a lane's codes, and the one of plane B
  KVRT_DEVICE static void load(const SideView& view, const std::uint8_t* block, int row, int g, std::uint32_t (&words)[kWords]) {
    const int plane_words = kIsPadded ? cuda::reread(view.row_words) : D / 16, first = g * (D / 8);
    load_words<kIsPadded, kLow>(block + row * (4 * plane_words), first / 16, plane_words, words);
    load_words<kIsPadded, 1>(block + cuda::reread(view.plane_b) + row * (2 * plane_words), first / 32, plane_words / 2, words, kLow);
  }
  KVRT_DEVICE static constexpr int channel(int g, int reg) { return expanded_column<D>(g, reg); }
  template <int W>
  KVRT_DEVICE static std::uint32_t expand(const std::uint32_t (&words)[W], const Table& table, int g, int reg) {
    const int half = Row::half_of(g, reg), shift = Row::kIsQuarter ? 16 * (g % 2) : 0;
    return expand3(words[kLow == 1 ? 0 : half] >> shift, words[kLow] >> (2 * half) >> shift, table, reg % 16 / 4);
  }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], const Table& table, int g, int reg) {
    return byte_pair(expand(even, table, g, reg), expand(odd, table, g, reg), reg % 4);
  }
};

/// E4M3 as fp16.
template <int D, bool kIsPadded>
struct Fp8ValueCodes : WordColumns<D, 8, kIsPadded> {
  static constexpr bool kIsTable = false, kHasZero = false, kHasChannelGroups = false, kHalvesValues = false, kCanBeNan = true;
  static constexpr int kParamBytes = 2;
  KVRT_DEVICE static constexpr int channel(int g, int reg) { return g * (D / 8) + reg; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int) { return 0x80008000u; }
  KVRT_DEVICE static constexpr float bias(int, bool) { return 0.0f; }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], const Table&, int, int reg) {
    return e4m3_pair(int8_words::token_pair(even[reg / 4], odd[reg / 4], reg % 4 / 2), reg % 2);
  }
  KVRT_DEVICE static std::uint32_t biased(std::uint32_t raw, int) { return raw; }
  KVRT_DEVICE static std::uint32_t alternating(std::uint32_t raw, int) { return raw; }
};

}  // namespace kvrt

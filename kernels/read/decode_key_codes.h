#pragma once
// Device code of the decode kernels, part 2: coded rows of keys as operand pairs. Quad lane q reads the stored positions
// [q D/4, (q + 1) D/4) of a row; step s of D/16 takes four of them in two registers, in the order that unpacking leaves them.
// Each family gives, for one lane:
//   kWords          words of its part of a row; load() reads them
//   channel(...)    position, inside the part, of half `half` of register `reg` of a step
//   bias(...)       what the register holds above the code; minus_bias(...) the same as a pair
//   biased(...)     the register: pairs of bias + code
//   kIsTable        codebook: code -> level + 128; kHasZero: codes may stand for code - zero
//   kParamBytes     stored parameters: 4 scale and lo, 2 scale, 0 either
//   kHasChannelGroups    channel.g<N> is among its granularities
//   kHalvesValues   values in fp16 are halved, since scale * code + lo reaches twice fp16's range

#include "kernels/codec/code_words.h"
#include "kernels/read/decode_view.h"

namespace kvrt {

using Table = std::uint32_t[kTableWords];

/// Rows of whole words a lane.
template <int D, int kBits, bool kIsPadded>
struct WordRow {
  static constexpr int kWords = D / 4 * kBits / 32;
  KVRT_DEVICE static void load(const SideView& view, const std::uint8_t* block, int row, int quad, std::uint32_t (&words)[kWords]) {
    const int row_words = kIsPadded ? cuda::reread(view.row_words) : 4 * kWords;
    load_words<kIsPadded, kWords>(block + row * (4 * row_words), quad * kWords, row_words, words);
  }
};

template <int D, bool kIsPadded>
struct Int8KeyCodes : WordRow<D, 8, kIsPadded> {
  static constexpr bool kIsTable = false, kHasZero = true, kHasChannelGroups = true, kHalvesValues = true;
  static constexpr int kParamBytes = 0;
  KVRT_DEVICE static constexpr int channel(int step, int reg, int half) { return 4 * step + 2 * reg + half; }
  KVRT_DEVICE static constexpr float bias(int, int) { return int8_words::kBias; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int, int) { return int8_words::kMinusBias; }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], const Table&, int, int step, int reg) {
    return int8_words::pair(words[step], reg);
  }
};

template <int D, bool kIsPadded>
struct Int4KeyCodes : WordRow<D, 4, kIsPadded> {
  static constexpr bool kIsTable = false, kHasZero = true, kHasChannelGroups = true, kHalvesValues = true;
  static constexpr int kParamBytes = 0;
  KVRT_DEVICE static constexpr int channel(int step, int reg, int half) { return 8 * (step / 2) + int4_words::channel(step % 2, reg, half); }
  KVRT_DEVICE static constexpr float bias(int, int reg) { return reg == 0 ? int4_words::kLowBias : int4_words::kHighBias; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int, int reg) { return reg == 0 ? int4_words::kMinusLowBias : int4_words::kMinusHighBias; }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], const Table&, int, int step, int reg) {
    const std::uint32_t w = int4_words::step_word(words[step / 2], step % 2);
    return reg == 0 ? int4_words::low_pair(w) : int4_words::high_pair(w);
  }
};

template <int D, bool kIsPadded>
struct Int2KeyCodes : WordRow<D, 2, kIsPadded> {
  static constexpr bool kIsTable = false, kHasZero = false, kHasChannelGroups = true, kHalvesValues = true;
  static constexpr int kParamBytes = 4;
  KVRT_DEVICE static constexpr int pair_of(int step, int reg) { return 2 * (step % 4) + reg; }
  KVRT_DEVICE static constexpr int channel(int step, int reg, int half) { return 16 * (step / 4) + pair_of(step, reg) + 8 * half; }
  KVRT_DEVICE static constexpr float bias(int step, int reg) { return int2_words::bias(pair_of(step, reg)); }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int step, int reg) { return int2_words::minus_bias(pair_of(step, reg)); }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], const Table&, int, int step, int reg) {
    return int2_words::pair(words[step / 4], pair_of(step, reg));
  }
};

/// Rows of three-word cells in two planes. D 64: two lanes share a cell, each reads all of it.
template <int D, bool kIsPadded>
struct CellRow {
  static constexpr int kCells = D / 4 < 32 ? 1 : D / 4 / 32, kWords = 3 * kCells;
  static constexpr bool kIsHalfCell = D / 4 < 32;
  /// Words 3 c .. 3 c + 2: cell c.
  KVRT_DEVICE static void load(const SideView& view, const std::uint8_t* block, int row, int quad, std::uint32_t (&words)[kWords]) {
    const int plane_words = kIsPadded ? cuda::reread(view.row_words) : D / 16, first = kIsHalfCell ? quad / 2 : quad * kCells;
    const std::uint8_t* high = block + cuda::reread(view.plane_b) + row * (2 * plane_words);
    KVRT_UNROLL
    for (int c = 0; c < kCells; ++c) {
      load_words<kIsPadded, 2>(block + row * (4 * plane_words), 2 * (first + c), plane_words, words, 3 * c);
      load_words<kIsPadded, 1>(high, first + c, plane_words / 2, words, 3 * c + 2);
    }
  }
};

template <int D, bool kIsPadded>
struct Int3KeyCodes : CellRow<D, kIsPadded> {
  using Row = CellRow<D, kIsPadded>;
  static constexpr bool kIsTable = false, kHasZero = false, kHasChannelGroups = true, kHalvesValues = true;
  static constexpr int kParamBytes = 4;
  KVRT_DEVICE static constexpr int pair_of(int step, int reg) { return 2 * (step % 8) + reg; }
  KVRT_DEVICE static constexpr int field(int step, int reg) {
    return Row::kIsHalfCell ? int3_words::half_cell_field(pair_of(step, reg)) : int3_words::field(pair_of(step, reg));
  }
  KVRT_DEVICE static constexpr int channel(int step, int reg, int half) {
    return Row::kIsHalfCell ? int3_words::half_cell_channel(pair_of(step, reg), half) : 32 * (step / 8) + pair_of(step, reg) + 16 * half;
  }
  KVRT_DEVICE static constexpr float bias(int step, int reg) { return int3_words::field_bias(field(step, reg)); }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int step, int reg) { return (int3_words::magic(field(step, reg)) | 0x8000u) * 0x10001u; }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], const Table&, int quad, int step, int reg) {
    const int at = 3 * (step / 8);
    const std::uint32_t cell[3] = {words[at], words[at + 1], words[at + 2]};
    const std::uint32_t bits = Row::kIsHalfCell ? int3_words::half_cell_bits(cell, quad % 2 != 0, pair_of(step, reg)) : int3_words::bits(cell, pair_of(step, reg));
    return int3_words::biased(bits, field(step, reg));
  }
};

/// Codebooks, once their bytes are expanded: read like 8-bit integers of zero 128.
struct TableKeyCodes {
  static constexpr bool kIsTable = true, kHasZero = false, kHasChannelGroups = false, kHalvesValues = false;
  static constexpr int kParamBytes = 0;
  KVRT_DEVICE static constexpr float bias(int, int) { return int8_words::kBias; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int, int) { return 0xE480E480u; }  // -(1024 + 128)
};
template <int D, bool kIsPadded>
struct Code4KeyCodes : WordRow<D, 4, kIsPadded>, TableKeyCodes {
  KVRT_DEVICE static constexpr int channel(int step, int reg, int half) { return 4 * step + 2 * reg + half; }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], const Table& table, int, int step, int reg) {
    return int8_words::pair(expand4(words[step / 2], table, step % 2), reg);
  }
};
template <int D, bool kIsPadded>
struct Code2KeyCodes : WordRow<D, 2, kIsPadded>, TableKeyCodes {
  KVRT_DEVICE static constexpr int channel(int step, int reg, int half) { return 16 * (step / 4) + expanded_channel(step % 4, 2 * reg + half); }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], const Table& table, int, int step, int reg) {
    return int8_words::pair(expand2(words[step / 4], table, step % 4), reg);
  }
};
template <int D, bool kIsPadded>
struct Code3KeyCodes : CellRow<D, kIsPadded>, TableKeyCodes {
  using Row = CellRow<D, kIsPadded>;
  KVRT_DEVICE static constexpr int channel(int step, int reg, int half) { return 16 * (step / 4) + expanded_channel(step % 4, 2 * reg + half); }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], const Table& table, int quad, int step, int reg) {
    const int at = 3 * (step / 8), upper = Row::kIsHalfCell ? quad % 2 : step / 4 % 2;
    const std::uint32_t low = Row::kIsHalfCell ? (upper != 0 ? words[1] : words[0]) : words[at + upper];
    return int8_words::pair(expand3(low, words[at + 2] >> (2 * upper), table, step % 4), reg);
  }
};

/// E4M3 as fp16: no bias, no offset.
template <int D, bool kIsPadded>
struct Fp8KeyCodes : WordRow<D, 8, kIsPadded> {
  static constexpr bool kIsTable = false, kHasZero = false, kHasChannelGroups = false, kHalvesValues = false;
  static constexpr int kParamBytes = 2;
  KVRT_DEVICE static constexpr int channel(int step, int reg, int half) { return 4 * step + 2 * reg + half; }
  KVRT_DEVICE static constexpr float bias(int, int) { return 0.0f; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int, int) { return 0x80008000u; }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], const Table&, int, int step, int reg) {
    return e4m3_pair(words[step], reg);
  }
};

}  // namespace kvrt

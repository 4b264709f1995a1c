#pragma once
// Where the two channels of a RoPE pair are in the registers of a lane that reads coded keys (decode_key_codes.h). The lane's quarter
// of a stored row holds both channels of a pair `Distance` positions apart: D/8 in `spread<D/2>`, less in the spread of a partial
// rotation, 1 in natural order with interleaved pairs. Lane pair i, 0 <= i < D/16, is two registers `first` and `second` whose
// halves are two RoPE pairs, or channels that are not rotated.

#include "kernels/codec/channel_order.h"
#include "kernels/codec/rope.h"
#include "kernels/read/decode_key_codes.h"

namespace kvrt {

/// Stored channel order in which a lane has pairs at this distance: 0 = natural.
KVRT_HOST_DEVICE constexpr int spread_of_distance(int distance) { return distance == 1 ? 0 : 4 * distance; }

/// Registers e = 2 step + reg of Codes; the positions of their lower halves are sums of powers of two, one for each bit of e.
template <class Codes, int D, int Distance>
struct LanePairs {
  static constexpr int kPairs = D / 16;
  static constexpr int kHalf = Codes::channel(0, 0, 1);
  /// Both channels of a pair are in one register: two registers are taken apart and joined by member.
  static constexpr bool kIsMerged = Distance == kHalf;
  static constexpr int step_of_distance() {
    int f = kPairs;
    while (!kIsMerged && f > 1 && Codes::channel(f / 2, f % 2, 0) != Distance) f /= 2;
    return f;
  }
  static constexpr int kStep = step_of_distance();  ///< from the register of one member to that of the other
  static_assert(kIsMerged || Codes::channel(kStep / 2, kStep % 2, 0) == Distance, "a lane holds both channels of a pair");

  KVRT_HOST_DEVICE static constexpr int reg(int i, int member) { return i / kStep * (2 * kStep) + i % kStep + member * kStep; }
  /// Position in the lane's part of a stored row.
  KVRT_HOST_DEVICE static constexpr int position(int i, int member, int half) {
    const int e = reg(i, kIsMerged ? half : member);
    return Codes::channel(e / 2, e % 2, 0) + (kIsMerged ? member : half) * kHalf;
  }
  /// The codes of pair i as fp16 integers, less minus_zero.
  template <int W>
  KVRT_DEVICE static void codes(const std::uint32_t (&words)[W], const Table& table, std::uint32_t minus_zero, int quad, int i, std::uint32_t (&out)[2]) {
    std::uint32_t v[2];
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int e = reg(i, j);
      const std::uint32_t bias = Codes::minus_bias(e / 2, e % 2);
      v[j] = cuda::add_f16x2(Codes::biased(words, table, quad, e / 2, e % 2), Codes::kHasZero ? cuda::add_f16x2(bias, minus_zero) : bias);
    }
    out[0] = kIsMerged ? low_halves(v[0], v[1]) : v[0];
    out[1] = kIsMerged ? high_halves(v[0], v[1]) : v[1];
  }
};

/// int3 at D 64: a lane has half a cell, whose fields are put beside their partners first.
template <bool kIsPadded>
struct LanePairs<Int3KeyCodes<64, kIsPadded>, 64, 8> {
  static constexpr int kPairs = 4;
  KVRT_HOST_DEVICE static constexpr int position(int i, int member, int half) { return int3_words::half_cell_pair_channel(i, half) + 8 * member; }
  KVRT_DEVICE static void codes(const std::uint32_t (&words)[3], const Table&, std::uint32_t, int quad, int i, std::uint32_t (&out)[2]) {
    KVRT_UNROLL
    for (int member = 0; member < 2; ++member) {
      const int field = int3_words::half_cell_pair_field(i);
      const std::uint32_t bits = int3_words::half_cell_pair_bits(words, quad % 2 != 0, i, member);
      out[member] = cuda::add_f16x2(int3_words::biased(bits, field), (int3_words::magic(field) | 0x8000u) * 0x10001u);
    }
  }
};

/// RoPE pair of the first channel of a lane pair, -1 where channels are not rotated.
KVRT_HOST_DEVICE inline int rope_pair(const RopeTables& rope, int first_channel) {
  if (rope.interleaved) return first_channel < 2 * rope.n_pairs ? first_channel / 2 : -1;
  return first_channel < rope.n_pairs ? first_channel : -1;
}

}  // namespace kvrt

#pragma once
// Where the two channels of a RoPE pair are in the registers of a lane that reads coded keys. Register e of a lane holds the codes of
// two channels as fp16 numbers (codec/code_words.h). The lane's part of a stored row holds both channels of a pair `Distance`
// positions apart: D/8 of them in `spread<D/2>`, 1 in natural order with interleaved pairs. Lane pair i, 0 <= i < D/16, is two
// registers `first` and `second` whose halves are two RoPE pairs.

#include "kernels/codec/channel_order.h"
#include "kernels/codec/rope.h"
#include "kernels/cuda/mma.h"

namespace kvrt {

/// Stored channel order in which a lane has pairs at this distance: 0 = natural.
KVRT_HOST_DEVICE constexpr int spread_of_distance(int distance) { return distance == 1 ? 0 : 4 * distance; }

/// Codes gives: words<D>() a lane; kHalf, the distance of the two channels of a register; position(e) of the lower one;
/// biased(words, e), minus_bias(e).
template <class Codes, int D, int Distance>
struct LanePairs {
  static constexpr int kPairs = D / 16;
  static constexpr int kSpread = spread_of_distance(Distance);
  /// Both channels of a pair are in one register: two registers are taken apart and joined by member.
  static constexpr bool kIsMerged = Distance == Codes::kHalf;
  static constexpr int kStep = kIsMerged ? kPairs : Distance > Codes::kHalf ? Distance / 2 : Distance;
  static_assert(kPairs % kStep == 0, "both registers of a pair are the lane's");

  KVRT_HOST_DEVICE static constexpr int reg(int i, int member) { return i / kStep * (2 * kStep) + i % kStep + member * kStep; }
  /// Position in the lane's part of the row.
  KVRT_HOST_DEVICE static constexpr int position(int i, int member, int half) {
    return kIsMerged ? Codes::position(reg(i, half)) + member * Codes::kHalf : Codes::position(reg(i, member)) + half * Codes::kHalf;
  }
  KVRT_HOST_DEVICE static constexpr int stored(int quad, int i, int member, int half) { return quad * (D / 4) + position(i, member, half); }
  KVRT_HOST_DEVICE static constexpr int channel(int quad, int i, int member, int half) {
    return stored_channel(kSpread, D, stored(quad, i, member, half));
  }

  /// The codes of pair i as fp16 integers.
  template <int W>
  KVRT_DEVICE static void codes(const std::uint32_t (&words)[W], int i, std::uint32_t (&out)[2]) {
    std::uint32_t v[2];
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) v[j] = cuda::add_f16x2(Codes::biased(words, reg(i, j)), Codes::minus_bias(reg(i, j)));
    out[0] = kIsMerged ? cuda::byte_permute(v[0], v[1], 0x5410u) : v[0];
    out[1] = kIsMerged ? cuda::byte_permute(v[0], v[1], 0x7632u) : v[1];
  }
};

/// RoPE pair of the first channel of a lane pair, -1 where channels are not rotated.
KVRT_HOST_DEVICE inline int rope_pair(const RopeTables& rope, int first_channel) {
  if (rope.interleaved) return first_channel < 2 * rope.n_pairs ? first_channel / 2 : -1;
  return first_channel < rope.n_pairs ? first_channel : -1;
}

/// Whether channels (first, second) of a lane pair are a RoPE pair, or not rotated at all.
KVRT_HOST_DEVICE inline bool is_lane_pair(const RopeTables& rope, int first, int second) {
  const int pair = rope_pair(rope, first);
  if (pair < 0) return first >= 2 * rope.n_pairs && second >= 2 * rope.n_pairs;
  return rope_first(rope, pair) == first && rope_second(rope, pair) == second;
}

}  // namespace kvrt

#pragma once
// Device code of the decode kernels: scores of bf16 keys that are stored before RoPE, in natural order (sinks, window). Each key is
// rotated in fp32 by its own position and rounded to bf16 again. The loop is not unrolled: these pages are few.

#include "kernels/read/decode_keys_pre.h"

namespace kvrt {

/// What a lane reads of a row: D/16 pieces of two words. Half-split: the words (t, t + 1) and (t + n, t + n + 1) of the 2 n rotated
/// channels, then four consecutive ones; interleaved: always four consecutive ones.
struct ExactPiece {
  int first, second;  ///< channels of the two words
  int pair;           ///< RoPE pair of the first channel, the next one follows; -1: not rotated
};
template <int D>
KVRT_DEVICE ExactPiece exact_piece(const RopeTables& rope, int quad, int i) {
  const int t = quad * (D / 8) + 2 * i;
  const bool is_split = !rope.interleaved && t < rope.n_pairs;
  return {is_split ? t : 2 * t, is_split ? t + rope.n_pairs : 2 * t + 2, t < rope.n_pairs ? t : -1};
}

template <int N>
struct PreExactQuery {
  float scale[N][2];       ///< as in QueryFragments
  const std::uint64_t* b;  ///< [N][piece][lane] operands B
};

template <int D>
struct PreExactKeys;
template <int D>
inline constexpr int kMaxStepTiles<PreExactKeys<D>> = 1;

/// In the shared memory of the coded keys of the same kernel.
template <int D>
struct PreExactKeys {
  template <int N>
  using Query = PreExactQuery<N>;

  template <int N>
  KVRT_DEVICE static void load(const SideView&, const PreShared<D>& shared, const QueryMemory& memory, const float* q, int n_heads, Query<N>& query) {
    const int quad = cuda::lane_index() % 4;
    query.b = share_queries<std::uint64_t, D>(memory, q, n_heads, query.scale, [&](int i, auto value) {
      const ExactPiece piece = exact_piece<D>(shared.rope, quad, i);
      const auto word = [&](int c) { return cuda::pack_bf16(value(c), value(c + 1)); };
      return two_words(word(piece.first), word(piece.second));
    });
  }
  template <int N>
  KVRT_DEVICE static float add(const Query<N>&, int, int) { return 0.0f; }

  template <int N>
  KVRT_DEVICE static void score(const SideView&, const PreShared<D>& shared, const TilePlace& place, const Query<N>& query, float (&s)[N][4]) {
    const std::uint8_t* const block = place.k;
    const int slot = place.slot;
    const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
    const std::uint8_t* const header = block - cuda::reread(shared.block_offset);
    std::int64_t position[2];
    KVRT_UNROLL
    for (int r = 0; r < 2; ++r) position[r] = slot_position(shared, header, slot + g + 8 * r);
    for_scores<N>([&](int n, int i) { s[n][i] = 0; });
    KVRT_UNROLL_BY(1)
    for (int i = 0; i < D / 16; ++i) {
      const ExactPiece piece = exact_piece<D>(shared.rope, quad, i);
      std::uint32_t a[4];
      KVRT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const std::uint8_t* const row = block + (slot + g + 8 * r) * (2 * D);
        const std::uint32_t words[2] = {cuda::load_shared_word(row + 2 * piece.first), cuda::load_shared_word(row + 2 * piece.second)};
        rotate(shared.rope, piece.pair, position[r], words, &a[r], &a[2 + r]);
      }
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        std::uint32_t operand[2];
        split_words(query.b[(n * (D / 16) + i) * cuda::kWarp + lane], &operand[0], &operand[1]);
        cuda::mma_bf16(s[n], a, operand);
      }
    }
    for_scores<N>([&](int n, int i) { s[n][i] *= query.scale[n][i % 2]; });
  }

 private:
  /// A page of the ring is rewritten slot by slot: what the header puts behind the newest token is one turn of the ring older.
  KVRT_DEVICE static std::int64_t slot_position(const PreShared<D>& shared, const std::uint8_t* header, int slot) {
    const std::int64_t first = cuda::load(reinterpret_cast<const std::int64_t*>(header)), last = shared.last_position;
    std::int64_t position = first + cuda::load(reinterpret_cast<const std::uint16_t*>(header + kSlotOffsets) + slot);
    if (position > last) position -= shared.ring_slots;
    return position < 0 || position > last ? last : position;  // of a dead slot: anything
  }

  KVRT_DEVICE static void rotate(const RopeTables& rope, int pair, std::int64_t position, const std::uint32_t (&words)[2], std::uint32_t* first,
                                 std::uint32_t* second) {
    *first = words[0], *second = words[1];
    if (pair < 0) return;
    float x[2][2] = {{cuda::low_bf16(words[0]), cuda::high_bf16(words[0])}, {cuda::low_bf16(words[1]), cuda::high_bf16(words[1])}};
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      float cosine, sine;
      rope_factors(rope, position, pair + j, &cosine, &sine);
      const float p = rope.interleaved ? x[j][0] : x[0][j], q = rope.interleaved ? x[j][1] : x[1][j];
      const float rotated_p = p * cosine - q * sine, rotated_q = p * sine + q * cosine;
      if (rope.interleaved) x[j][0] = rotated_p, x[j][1] = rotated_q;
      else x[0][j] = rotated_p, x[1][j] = rotated_q;
    }
    *first = cuda::pack_bf16(x[0][0], x[0][1]), *second = cuda::pack_bf16(x[1][0], x[1][1]);
  }
};

}  // namespace kvrt

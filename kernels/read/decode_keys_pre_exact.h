#pragma once
// Device code of the fused decode kernel: scores of bf16 keys that are stored before RoPE, in natural order (sinks, window). Each key
// is rotated in fp32 by its own position and rounded to bf16: the few tokens of these pages cost what one more page of the others does.

#include "kernels/read/decode_keys_pre.h"

namespace kvrt {

/// What a lane reads: D/16 pieces of two words, four channels. Half-split: the words (a, a + 1) and (a + n, a + n + 1) of the rotated
/// channels, then four consecutive ones; interleaved: always four consecutive ones.
struct ExactPiece {
  int first, second;  ///< channels of the two words
  int pair;           ///< RoPE pair of the first channel, the next one follows; -1: not rotated
};
template <int D>
KVRT_DEVICE ExactPiece exact_piece(const RopeTables& rope, int quad, int i) {
  const int t = quad * (D / 8) + 2 * i;  // two pairs, rotated or not
  const bool is_split = !rope.interleaved && t < rope.n_pairs;
  return {is_split ? t : 2 * t, is_split ? t + rope.n_pairs : 2 * t + 2, t < rope.n_pairs ? t : -1};
}

/// Where the tokens of a segment stand, and the RoPE tables.
struct PreExactShared {
  RopeTables rope;
  std::int64_t first_position;
  std::int32_t first_slot, n_tokens, n_slots;
};
template <int D, int N>
struct PreExactQuery : QueryFragments<D, N> {
  PreExactShared* shared;
  int tile_slot;  ///< slot in the page list of the tile
};

template <int D>
struct PreExactKeys {
  static constexpr bool kIsBf16 = true;
  KVRT_DEVICE static constexpr float bias(int) { return 0.0f; }

  template <int N>
  KVRT_DEVICE static void start(const DecodeArgs& args, const float* q, const Segment& segment, PreExactShared& shared, PreExactQuery<D, N>& query) {
    query.shared = &shared;
    if (cuda::thread_index() == 0) {
      shared.rope = args.rope, shared.first_position = segment.first_position;
      shared.first_slot = static_cast<std::int32_t>(segment.first_slot), shared.n_tokens = static_cast<std::int32_t>(segment.n_tokens);
      shared.n_slots = static_cast<std::int32_t>(segment.n_slots);
    }
    load_query<PreExactKeys>(q, args.n_query_heads, query, [&](int quad, int step, int reg, int half) {
      const ExactPiece piece = exact_piece<D>(args.rope, quad, step);
      return (reg == 0 ? piece.first : piece.second) + half;
    });
    cuda::block_barrier();
  }

  template <int N>
  KVRT_DEVICE static void score(const SideView&, const std::uint8_t* block, int slot, PreExactQuery<D, N>& query, float (&s)[N][4]) {
    const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
    const PreExactShared& shared = *query.shared;
    std::int64_t position[2];
    KVRT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int first = cuda::reread(shared.first_slot), last = cuda::reread(shared.n_tokens) - 1;
      const int listed = query.tile_slot + g + 8 * r, age = listed - first + (listed < first ? cuda::reread(shared.n_slots) : 0);
      position[r] = cuda::reread(shared.first_position) + (age < last ? age : last);  // a dead slot has none
    }
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] = 0;
    }
    KVRT_UNROLL
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
      for (int n = 0; n < N; ++n) cuda::mma_bf16(s[n], a, query.b[n][i]);
    }
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] *= query.scale[n][i % 2];
    }
  }

 private:
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

/// Of both families in one kernel.
template <int D>
struct PreKernelShared {
  PreShared<D> coded;
  PreExactShared exact;
};

template <class Codes, int D, int Distance>
struct ExactKeysOf<PreKeys<Codes, D, Distance>, D> {
  using type = PreExactKeys<D>;
};
template <class Codes, int D, int Distance, int N>
struct KeyTraits<PreKeys<Codes, D, Distance>, D, N> {
  using Query = PreQuery<D, N>;
  using Shared = PreKernelShared<D>;
  template <class BlockShared>
  KVRT_DEVICE static void start(const DecodeArgs& args, const float* q, const Segment& segment, BlockShared& shared, Query& query) {
    static_assert(sizeof(shared.o) == sizeof(cuda::Words4) * N * (D / 16) * cuda::kWarp, "queries lie where the outputs will be");
    PreKeys<Codes, D, Distance>::template start<N>(args, q, segment, &shared.o[0][0], shared.coded, query);
  }
  KVRT_DEVICE static void enter_tile(int, Query&) {}
};
template <int D, int N>
struct KeyTraits<PreExactKeys<D>, D, N> {
  using Query = PreExactQuery<D, N>;
  using Shared = PreKernelShared<D>;
  template <class BlockShared>
  KVRT_DEVICE static void start(const DecodeArgs& args, const float* q, const Segment& segment, BlockShared& shared, Query& query) {
    PreExactKeys<D>::template start<N>(args, q, segment, shared.exact, query);
  }
  KVRT_DEVICE static void enter_tile(int tile_slot, Query& query) { query.tile_slot = tile_slot; }
};

}  // namespace kvrt

#pragma once
// Device code of the fused decode kernel: scores of keys that are stored before RoPE. With p0 the position of a page's first slot and
// j a token's offset from it, q . R(p0 + j) k = (R(-p0) q) . (R(j) k): queries are rotated once a page in fp32, keys one by one in fp16,
// by a table of cosines and sines of offsets in shared memory. Scales stay with the keys, since the rotation mixes channels.
//
// Rounding, u = 2^-11: with v1, v2 the values of a pair and c, s its factors, a rotated key v1 c - v2 s carries the roundings of the
// values (u each), of the table (u), of one product (u) and of the sum (u): at most 4 u (|v1 c| + |v2 s|), and the query adds u.
// Values are halved, so that what rounds below fp16's normal range is at most 2^-25 a step, 2^-24 of the value.

#include "kernels/codec/page_header.h"
#include "kernels/read/decode_cuda.h"
#include "kernels/read/decode_keys.h"
#include "kernels/read/key_pairs.h"

namespace kvrt {

/// In shared memory. Per-warp parts hold what belongs to the page that the warp is in.
template <int D>
struct PreShared {
  RopeTables rope;
  std::int64_t block_offset;              ///< of a head block in its page: the header is at its start
  std::int32_t n_offsets;                 ///< rows of the table
  std::int32_t group_shift;               ///< channel.g<N>: log2 N; token.g<N>: log2 of channels
  bool by_channel;
  const StaticRange* ranges;              ///< channel.static: [D], else null
  const std::uint8_t* block[kDecodeWarps];   ///< page whose position the fragments have
  const std::uint8_t* params[kDecodeWarps];  ///< parameters in `scales`
  cuda::Words4 factors[kDecodeWarps][D / 4];  ///< [pair][quad]: cosines of the two halves, sines
  cuda::Words4 scales[kDecodeWarps][D / 4];   ///< [pair][quad]: fp16 pairs scale, minimum of `first`, of `second`, halved
};

template <int D, int N>
struct PreQuery : QueryFragments<D, N> {
  PreShared<D>* shared;
  const cuda::Words4* q;      ///< [N][pair][lane]: first (2 halves), second, fp32 times the guard
  const cuda::Words4* table;  ///< [offset][pair / 2][quad], see table_index()
};

/// Bytes of the table of offsets.
KVRT_HOST_DEVICE constexpr std::size_t pre_table_bytes(int head_dim, int n_offsets) { return static_cast<std::size_t>(head_dim) * 2 * n_offsets; }

/// Cosines and sines of two lane pairs. Rows of odd offsets are exchanged by twos, so that the lanes of two rows meet in no bank.
template <int D>
KVRT_DEVICE int table_index(int offset, int i, int quad) {
  return (offset * (D / 32) + ((i / 2) ^ (offset & 1))) * 4 + quad;
}

/// 4 and 8 bits: a register is a pair of codec/code_words.h.
struct Int4PairCodes {
  static constexpr int kHalf = 4;
  template <int D>
  KVRT_HOST_DEVICE static constexpr int words() { return D / 32; }
  KVRT_HOST_DEVICE static constexpr int position(int e) { return e / 4 * 8 + e % 4; }
  template <int D, int W>
  KVRT_DEVICE static void load(const SideView&, const std::uint8_t* block, int row, int quad, std::uint32_t (&out)[W]) {
    load_row(block + row * (16 * W) + quad * (4 * W), out);
  }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], int e) {
    const std::uint32_t w = int4_words::step_word(words[e / 4], e % 4 / 2);
    return e % 2 == 0 ? int4_words::low_pair(w) : int4_words::high_pair(w);
  }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int e) { return e % 2 == 0 ? int4_words::kMinusLowBias : int4_words::kMinusHighBias; }
};
struct Int8PairCodes {
  static constexpr int kHalf = 1;
  template <int D>
  KVRT_HOST_DEVICE static constexpr int words() { return D / 16; }
  KVRT_HOST_DEVICE static constexpr int position(int e) { return 2 * e; }
  template <int D, int W>
  KVRT_DEVICE static void load(const SideView&, const std::uint8_t* block, int row, int quad, std::uint32_t (&out)[W]) {
    load_row(block + row * (16 * W) + quad * (4 * W), out);
  }
  template <int W>
  KVRT_DEVICE static std::uint32_t biased(const std::uint32_t (&words)[W], int e) { return int8_words::pair(words[e / 2], e % 2); }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int) { return int8_words::kMinusBias; }
};

template <class Codes, int D, int Distance>
struct PreKeys {
  static constexpr bool kIsBf16 = false;
  using Pairs = LanePairs<Codes, D, Distance>;
  static constexpr int kPairs = Pairs::kPairs;
  static constexpr int kWords = Codes::template words<D>();
  /// Positions that lie in one group of channels, whatever the group.
  static constexpr int kBlock = Distance > 1 ? Distance : D / 4 < 32 ? D / 4 : 32;
  static constexpr int kBlocks = D / 4 / kBlock;

  /// One block of threads, once: queries to shared memory, the table of offsets. q: [G, D].
  template <int N>
  KVRT_DEVICE static void start(const DecodeArgs& args, const float* q, const Segment& segment, float* q_shared, PreShared<D>& shared,
                                PreQuery<D, N>& query) {
    auto* const table = static_cast<cuda::Words4*>(cuda::dynamic_shared());
    query.shared = &shared, query.table = table, query.q = reinterpret_cast<const cuda::Words4*>(q_shared);
    if (cuda::thread_index() == 0) {
      const PageCodec& codec = segment.k.codec;
      shared.rope = args.rope, shared.n_offsets = args.rope_offsets, shared.block_offset = segment.k.block_offset;
      shared.by_channel = codec.granularity == Granularity::kChannel || codec.granularity == Granularity::kChannelStatic;
      shared.ranges = codec.granularity == Granularity::kChannelStatic ? codec.channel_ranges : nullptr;
      int shift = 0;
      while ((1 << shift) < codec.group) ++shift;
      shared.group_shift = shift;
      for (int w = 0; w < kDecodeWarps; ++w) shared.block[w] = nullptr, shared.params[w] = nullptr;
    }
    fill_table(args.rope, args.rope_offsets, table);
    load_heads(q, args.n_query_heads, q_shared, query);
    cuda::block_barrier();
  }

  /// s: scores (base 2) of tokens slot + g (s[n][0..1]) and slot + g + 8 (s[n][2..3]).
  template <int N>
  KVRT_DEVICE static void score(const SideView& view, const std::uint8_t* block, int slot, PreQuery<D, N>& query, float (&s)[N][4]) {
    const int lane = cuda::lane_index(), quad = lane % 4, row = slot + lane / 4;
    const PreShared<D>& shared = *query.shared;
    std::uint32_t words[2][kWords];
    int offset[2];
    KVRT_UNROLL
    for (int r = 0; r < 2; ++r) Codes::template load<D>(view, block, row + 8 * r, quad, words[r]);
    const std::uint8_t* const header = block - cuda::reread(shared.block_offset);
    KVRT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int last = cuda::reread(shared.n_offsets) - 1, stored = load_slot_offset(header, row + 8 * r);
      offset[r] = stored < last ? stored : last;  // of a dead slot: 255
    }
    enter_page(header, block, query);
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] = 0;
    }
    if (cuda::reread(shared.by_channel)) {
      enter_group(view, block, slot, query);
      const cuda::Words4* const scales = shared.scales[cuda::warp_index()] + quad;
      add_products(query, words, offset, s, [&](int i, std::uint32_t (&scale)[2][2], std::uint32_t (&lo)[2][2]) {
        const cuda::Words4 p = scales[4 * i];
        KVRT_UNROLL
        for (int r = 0; r < 2; ++r) scale[r][0] = p.x, lo[r][0] = p.y, scale[r][1] = p.z, lo[r][1] = p.w;
      });
    } else {
      std::uint32_t params[2][kBlocks];
      KVRT_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        const int group = stored_channel(Pairs::kSpread, D, quad * (D / 4) + b * kBlock) >> cuda::reread(shared.group_shift);
        KVRT_UNROLL
        for (int r = 0; r < 2; ++r) {
          const std::uint8_t* const p = block + cuda::reread(view.params) + 4 * ((row + 8 * r) * cuda::reread(view.n_groups) + group);
          params[r][b] = cuda::fma_f16x2(cuda::load_shared_word(p), kHalfPair, 0x80008000u);
        }
      }
      add_products(query, words, offset, s, [&](int i, std::uint32_t (&scale)[2][2], std::uint32_t (&lo)[2][2]) {
        KVRT_UNROLL
        for (int member = 0; member < 2; ++member) {
          const int low = Pairs::position(i, member, 0) / kBlock, high = Pairs::position(i, member, 1) / kBlock;
          KVRT_UNROLL
          for (int r = 0; r < 2; ++r) {
            scale[r][member] = cuda::byte_permute(params[r][low], params[r][high], 0x5410u);
            lo[r][member] = cuda::byte_permute(params[r][low], params[r][high], 0x7632u);
          }
        }
      });
    }
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] *= kUndoHalf * query.scale[n][i % 2];
    }
  }

 private:
  /// params_of(i, scale, lo) gives the parameters of [row][member] of pair i.
  template <int N, class Params>
  KVRT_DEVICE static void add_products(const PreQuery<D, N>& query, const std::uint32_t (&words)[2][kWords], const int (&offset)[2],
                                       float (&s)[N][4], Params params_of) {
    const int quad = cuda::lane_index() % 4;
    cuda::Words4 factors[2];
    KVRT_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      std::uint32_t scale[2][2], lo[2][2], a[4];
      params_of(i, scale, lo);
      KVRT_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (i % 2 == 0) factors[r] = query.table[table_index<D>(offset[r], i, quad)];
        const std::uint32_t cosine = i % 2 == 0 ? factors[r].x : factors[r].z, sine = i % 2 == 0 ? factors[r].y : factors[r].w;
        std::uint32_t v[2];
        Pairs::codes(words[r], i, v);
        KVRT_UNROLL
        for (int member = 0; member < 2; ++member) v[member] = cuda::fma_f16x2(v[member], scale[r][member], lo[r][member]);
        a[r] = cuda::fma_f16x2(cuda::negate_f16x2(v[1]), sine, cuda::mul_f16x2(v[0], cosine));
        a[2 + r] = cuda::fma_f16x2(v[0], sine, cuda::mul_f16x2(v[1], cosine));
      }
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) cuda::mma_f16(s[n], a, query.b[n][i]);
    }
  }

  /// Query fragments at the page's position.
  template <int N>
  KVRT_DEVICE static void enter_page(const std::uint8_t* header, const std::uint8_t* block, PreQuery<D, N>& query) {
    PreShared<D>& shared = *query.shared;
    const int lane = cuda::lane_index(), warp = cuda::warp_index();
    if (cuda::reread(shared.block[warp]) == block) return;
    cuda::warp_barrier();
    const std::int64_t position = load_page_position(header);
    for (int e = lane; e < D / 4; e += cuda::kWarp) {
      float cosine[2], sine[2];
      KVRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int pair = rope_pair(shared.rope, Pairs::channel(e % 4, e / 4, 0, half));
        cosine[half] = 1, sine[half] = 0;
        if (pair >= 0) rope_factors(shared.rope, position, pair, &cosine[half], &sine[half]);
      }
      shared.factors[warp][e] = {f32_bits(cosine[0]), f32_bits(cosine[1]), f32_bits(sine[0]), f32_bits(sine[1])};
    }
    if (lane == 0) shared.block[warp] = block;
    cuda::warp_barrier();
    KVRT_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const cuda::Words4 f = shared.factors[warp][4 * i + lane % 4];
      const float cosine[2] = {f32_from_bits(f.x), f32_from_bits(f.y)}, sine[2] = {f32_from_bits(f.z), f32_from_bits(f.w)};
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        const cuda::Words4 w = query.q[(n * kPairs + i) * cuda::kWarp + lane];
        const float first[2] = {f32_from_bits(w.x), f32_from_bits(w.y)}, second[2] = {f32_from_bits(w.z), f32_from_bits(w.w)};
        float rotated[2][2];
        KVRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          rotated[0][half] = first[half] * cosine[half] + second[half] * sine[half];
          rotated[1][half] = second[half] * cosine[half] - first[half] * sine[half];
        }
        query.b[n][i][0] = cuda::pack_f16(rotated[0][0], rotated[0][1]);
        query.b[n][i][1] = cuda::pack_f16(rotated[1][0], rotated[1][1]);
      }
    }
  }

  /// Parameters of the channels, for the group of tokens that `slot` is in.
  template <int N>
  KVRT_DEVICE static void enter_group(const SideView& view, const std::uint8_t* block, int slot, PreQuery<D, N>& query) {
    PreShared<D>& shared = *query.shared;
    const int lane = cuda::lane_index(), warp = cuda::warp_index();
    const StaticRange* const ranges = cuda::reread(shared.ranges);
    const std::uint8_t* const params = ranges ? reinterpret_cast<const std::uint8_t*>(ranges)
                                              : block + cuda::reread(view.params) + 4 * D * (slot >> cuda::reread(shared.group_shift));
    if (cuda::reread(shared.params[warp]) == params) return;
    cuda::warp_barrier();
    for (int e = lane; e < D / 4; e += cuda::kWarp) {
      std::uint32_t scale[2], lo[2];
      KVRT_UNROLL
      for (int member = 0; member < 2; ++member) {
        if (ranges) {
          const StaticRange& a = ranges[Pairs::channel(e % 4, e / 4, member, 0)];
          const StaticRange& b = ranges[Pairs::channel(e % 4, e / 4, member, 1)];
          scale[member] = cuda::pack_f16(0.5f * a.scale, 0.5f * b.scale), lo[member] = cuda::pack_f16(0.5f * a.lo, 0.5f * b.lo);
        } else {
          const std::uint32_t a = cuda::load_shared_word(params + 4 * Pairs::stored(e % 4, e / 4, member, 0));
          const std::uint32_t b = cuda::load_shared_word(params + 4 * Pairs::stored(e % 4, e / 4, member, 1));
          scale[member] = cuda::mul_f16x2(cuda::byte_permute(a, b, 0x5410u), kHalfPair);
          lo[member] = cuda::mul_f16x2(cuda::byte_permute(a, b, 0x7632u), kHalfPair);
        }
      }
      shared.scales[warp][e] = {scale[0], lo[0], scale[1], lo[1]};
    }
    if (lane == 0) shared.params[warp] = params;
    cuda::warp_barrier();
  }

  KVRT_DEVICE static void fill_table(const RopeTables& rope, int n_offsets, cuda::Words4* table) {
    for (int e = cuda::thread_index(); e < n_offsets * (D / 8); e += kDecodeThreads) {
      const int offset = e / (D / 8), i = e / 4 % (D / 32) * 2, quad = e % 4;
      std::uint32_t words[2][2];
      KVRT_UNROLL
      for (int j = 0; j < 2; ++j) {
        float cosine[2], sine[2];
        KVRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int pair = rope_pair(rope, Pairs::channel(quad, i + j, 0, half));
          const float* const row = rope.fine + static_cast<std::int64_t>(offset) * 2 * rope.n_pairs;
          cosine[half] = pair < 0 ? 1.0f : cuda::load(row + pair);
          sine[half] = pair < 0 ? 0.0f : cuda::load(row + rope.n_pairs + pair);
        }
        words[j][0] = cuda::pack_f16(cosine[0], cosine[1]), words[j][1] = cuda::pack_f16(sine[0], sine[1]);
      }
      table[table_index<D>(offset, i, quad)] = {words[0][0], words[0][1], words[1][0], words[1][1]};
    }
  }

  /// Heads beyond G are zero. Every warp finds the guards; each writes its part of the queries.
  template <int N>
  KVRT_DEVICE static void load_heads(const float* q, int n_heads, float* q_shared, PreQuery<D, N>& query) {
    const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
    auto* const out = reinterpret_cast<cuda::Words4*>(q_shared);
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      const bool is_head = 8 * n + g < n_heads;
      const float* const head = q + static_cast<std::int64_t>(is_head ? 8 * n + g : 0) * D;
      float largest = 0;
      for (int c = 0; c < D / 4; ++c) largest = fmaxf(largest, is_head ? fabsf(cuda::load(head + quad * (D / 4) + c)) : 0.0f);
      largest = fmaxf(largest, cuda::shuffle_xor(largest, 1));
      largest = fmaxf(largest, cuda::shuffle_xor(largest, 2));
      const float guard = query_guard(largest);
      for (int i = cuda::warp_index(); i < kPairs; i += kDecodeWarps) {
        std::uint32_t w[4];
        KVRT_UNROLL
        for (int j = 0; j < 4; ++j) w[j] = f32_bits(is_head ? cuda::load(head + Pairs::channel(quad, i, j / 2, j % 2)) * guard : 0.0f);
        out[(n * kPairs + i) * cuda::kWarp + lane] = {w[0], w[1], w[2], w[3]};
      }
      const float scale = inverse_of_power(guard);
      KVRT_UNROLL
      for (int j = 0; j < 2; ++j) query.scale[n][j] = cuda::shuffle(scale, 4 * (2 * quad + j));
    }
  }

  KVRT_DEVICE static std::int64_t load_page_position(const std::uint8_t* header) { return cuda::load(reinterpret_cast<const std::int64_t*>(header)); }
  KVRT_DEVICE static int load_slot_offset(const std::uint8_t* header, int slot) { return cuda::load(header + kSlotOffsets + slot); }
};

}  // namespace kvrt

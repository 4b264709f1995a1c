#pragma once
// Device code of the decode kernels: scores of coded keys that are stored before RoPE. With p0 the position of a page's first slot and
// j a token's offset from it, q . R(p0 + j) k = (R(-p0) q) . (R(j) k): queries are rotated once a page in fp32, keys one by one in fp16,
// by a table of the cosines and sines of offsets in shared memory. Scales stay with the keys, since the rotation mixes channels.
//
// Rounding, u = 2^-11, of one score: a value v of a key carries u |s n + lo|, with stored fp16 parameters exactly that; fp32 constants
// and `center` add u (|s n| + |lo| + |mean|). Its rotation v1 c - v2 s adds u for the table, u for one product and u for the sum, each
// of at most |v1 c| + |v2 s|, and the query u. Values are halved: what falls below fp16's normal range is off by 2^-24 a rounding.

#include "kernels/codec/page_header.h"
#include "kernels/read/decode_keys.h"
#include "kernels/read/key_pairs.h"

namespace kvrt {

/// In shared memory. Parts of a warp belong to the page that the warp is in.
template <int D>
struct PreShared {
  RopeTables rope;
  std::int64_t block_offset;              ///< of a head block in its page, whose header is at its start
  std::int64_t last_position;             ///< exact pages: of the newest live token
  std::int32_t ring_slots;                ///< exact pages: slots of the page list
  std::int32_t n_offsets;                 ///< rows of the table
  bool by_channel;                        ///< parameters differ along the row, and not from token to token
  mutable const std::uint8_t* block[kDecodeWarps];    ///< page that the fragments are rotated to
  mutable std::int32_t group[kDecodeWarps];           ///< its group of tokens whose parameters are in `scales`
  mutable cuda::Words4 factors[kDecodeWarps][D / 4];  ///< [pair][quad]: cosines of the two halves, sines
  mutable cuda::Words4 scales[kDecodeWarps][D / 4];   ///< [pair][quad]: fp16 scale, offset of `first`, of `second`
  cuda::Words2 means[D / 4];                          ///< [pair][quad]: fp16 mean of `first`, of `second`
};

/// What a launch needs of dynamic shared memory: the table of offsets, then the query fragments of each warp.
KVRT_HOST_DEVICE constexpr std::size_t pre_table_bytes(int head_dim, int n_offsets) {
  return static_cast<std::size_t>(head_dim) * 2 * static_cast<std::size_t>(n_offsets);
}
KVRT_HOST_DEVICE constexpr std::size_t pre_shared_bytes(int head_dim, int head_tiles, int n_offsets) {
  return pre_table_bytes(head_dim, n_offsets) + static_cast<std::size_t>(head_dim) * 16 * static_cast<std::size_t>(head_tiles * kDecodeWarps);
}
/// Two registers that one instruction moves.
KVRT_DEVICE std::uint64_t two_words(std::uint32_t low, std::uint32_t high) { return low | static_cast<std::uint64_t>(high) << 32; }
KVRT_DEVICE void split_words(std::uint64_t both, std::uint32_t* low, std::uint32_t* high) {
  *low = static_cast<std::uint32_t>(both), *high = static_cast<std::uint32_t>(both >> 32);
}

/// Of one offset, of lane pairs i and i + 1, i even: fp16 cosines of both halves, sines above them.
struct alignas(16) OffsetFactors {
  std::uint64_t pair[2];
};
/// Where those of pair i are. Rows of odd offsets are exchanged by twos, so that the lanes of two rows meet
/// in no bank.
template <int D>
KVRT_DEVICE int table_index(int offset, int i, int quad) {
  return (offset * (D / 32) + ((i / 2) ^ (offset & 1))) * 4 + quad;
}

/// Guard of the head whose lanes call, and the scales 1 / guard of the heads whose scores a lane gets.
template <int D>
KVRT_DEVICE float head_guard(const float* head, bool is_head, float (&scale)[2]) {
  const int quad = cuda::lane_index() % 4;
  float largest = 0;
  for (int c = quad; c < D; c += 4) largest = fmaxf(largest, is_head ? fabsf(cuda::load(head + c)) : 0.0f);
  const float guard = query_guard(quad_max(largest)), inverse = inverse_of_power(guard);
  KVRT_UNROLL
  for (int j = 0; j < 2; ++j) scale[j] = cuda::shuffle(inverse, 4 * (2 * quad + j));
  return guard;
}

/// The queries of a CTA to memory.scratch, [N][D / 16][lane]: piece i of a head is make(i, value), value(c): channel c times the guard.
/// Heads beyond G are zero. Every warp finds the guards and makes its part of the pieces; a barrier stands behind.
template <class Piece, int D, int N, class Make>
KVRT_DEVICE const Piece* share_queries(const QueryMemory& memory, const float* q, int n_heads, float (&scale)[N][2], Make make) {
  const int lane = cuda::lane_index(), g = lane / 4;
  auto* const out = reinterpret_cast<Piece*>(memory.scratch);
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    const bool is_head = 8 * n + g < n_heads;
    const float* const head = q + static_cast<std::int64_t>(is_head ? 8 * n + g : 0) * D;
    const float guard = head_guard<D>(head, is_head, scale[n]);
    const auto value = [&](int c) { return is_head ? cuda::load(head + c) * guard : 0.0f; };
    for (int i = cuda::warp_index(); i < D / 16; i += kDecodeWarps) out[(n * (D / 16) + i) * cuda::kWarp + lane] = make(i, value);
  }
  cuda::block_barrier();
  return out;
}

template <class Codes, int D, int Distance>
struct PreKeys;
template <class Codes, int D, int Distance>
inline constexpr int kVisitTiles<PreKeys<Codes, D, Distance>> = 4;  // 64 tokens, the usual page
template <class Codes, int D, int Distance>
inline constexpr int kMaxStepTiles<PreKeys<Codes, D, Distance>> = 1;

template <int D, int N>
struct PreQuery {
  float scale[N][2];        ///< as in QueryFragments
  const cuda::Words4* q;    ///< [N][pair][lane]: first (2 halves), second, fp32 times the guard
};

template <class Codes, int D, int Distance>
struct PreKeys {
  static constexpr bool kIsBf16 = false, kOwnFragments = false;
  using Pairs = LanePairs<Codes, D, Distance>;
  using Shared = PreShared<D>;
  template <int N>
  using Query = PreQuery<D, N>;
  static constexpr int kPairs = D / 16;
  static constexpr int kSpread = spread_of_distance(Distance);
  /// Positions of a lane that lie in one group of channels.
  static constexpr int kBlock = Distance > 1 ? Distance : D / 4 < 32 ? D / 4 : 32;
  static constexpr int kBlocks = D / 4 / kBlock;

  KVRT_DEVICE static void prepare(const DecodeArgs& args, const Segment& segment, Shared& shared) {
    const int thread = cuda::thread_index();
    for (int e = thread; e < args.rope_offsets * (D / 8); e += kDecodeThreads) fill_table(*args.rope, e);
    for (int e = thread; e < D / 4; e += kDecodeThreads) {
      float m[2][2] = {{0, 0}, {0, 0}};
      for (int i = 0; segment.k.mean != nullptr && i < 4; ++i)
        m[i / 2][i % 2] = value_factor<Codes>() * cuda::load(segment.k.mean + stored(e % 4, e / 4, i / 2, i % 2));
      shared.means[e] = {cuda::pack_f16(m[0][0], m[0][1]), cuda::pack_f16(m[1][0], m[1][1])};
    }
    if (thread < kDecodeWarps) shared.block[thread] = nullptr, shared.group[thread] = -1;
    if (thread != 0) return;
    shared.rope = *args.rope, shared.n_offsets = args.rope_offsets, shared.block_offset = segment.k.block_offset;
    shared.last_position = segment.first_position + segment.n_tokens - 1;
    shared.ring_slots = static_cast<std::int32_t>(segment.n_slots);
    shared.by_channel = segment.k.codec.granularity != Granularity::kToken;
  }

  template <int N>
  KVRT_DEVICE static void load(const SideView&, const Shared&, const QueryMemory& memory, const float* q, int n_heads, Query<N>& query) {
    const int quad = cuda::lane_index() % 4;
    query.q = share_queries<cuda::Words4, D>(memory, q, n_heads, query.scale, [&](int i, auto value) {
      const auto word = [&](int member, int half) { return f32_bits(value(stored(quad, i, member, half))); };
      return cuda::Words4{word(0, 0), word(0, 1), word(1, 0), word(1, 1)};
    });
  }
  template <int N>
  KVRT_DEVICE static float add(const Query<N>&, int, int) { return 0.0f; }

  /// s: scores (base 2) of tokens slot + g (s[n][0..1]) and slot + g + 8 (s[n][2..3]).
  template <int N>
  KVRT_DEVICE static void score(const SideView& view, const Shared& shared, const TilePlace& place, const Query<N>& query, float (&s)[N][4]) {
    const std::uint8_t* const block = place.k;
    const int slot = place.slot;
    const int lane = cuda::lane_index(), quad = lane % 4, row = slot + lane / 4;
    std::uint32_t words[2][Codes::kWords];
    int offset[2];
    const std::uint8_t* const header = block - cuda::reread(shared.block_offset);
    KVRT_UNROLL
    for (int r = 0; r < 2; ++r) {
      load_row(view, block, row + 8 * r, quad, words[r]);
      const int last = cuda::reread(shared.n_offsets) - 1, stored_offset = cuda::load(header + kSlotOffsets + row + 8 * r);
      offset[r] = stored_offset < last ? stored_offset : last;  // of a dead slot: 255
    }
    if (cuda::reread(shared.block[cuda::warp_index()]) != block) enter_page(shared, header, block, query);
    for_scores<N>([&](int n, int i) { s[n][i] = 0; });
    if (cuda::reread(shared.by_channel)) {
      const int channel_group = cuda::reread(view.channel_group), group = channel_group != 0 ? slot / channel_group : 0;
      if (cuda::reread(shared.group[cuda::warp_index()]) != group) enter_group(view, shared, block, group);
      add_products<N>(view, shared, words, offset, s, [&](int i, std::uint32_t (&scale)[2][2], std::uint32_t (&lo)[2][2]) {
        const cuda::Words4 p = shared.scales[cuda::warp_index()][4 * i + quad];
        KVRT_UNROLL
        for (int r = 0; r < 2; ++r) scale[r][0] = p.x, lo[r][0] = p.y, scale[r][1] = p.z, lo[r][1] = p.w;
      });
    } else {
      const TokenParams<Codes> of_rows[2] = {{view, block, row}, {view, block, row + 8}};
      std::uint32_t params[2][kBlocks];
      KVRT_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        const int group = cuda::reread(view.group[quad * (D / 4) + b * kBlock]);
        KVRT_UNROLL
        for (int r = 0; r < 2; ++r) params[r][b] = value_params<Codes>(view, of_rows[r].of_group(group));
      }
      add_products<N>(view, shared, words, offset, s, [&](int i, std::uint32_t (&scale)[2][2], std::uint32_t (&lo)[2][2]) {
        const cuda::Words2 mean = shared.means[4 * i + quad];
        KVRT_UNROLL
        for (int member = 0; member < 2; ++member) {
          const int low = Pairs::position(i, member, 0) / kBlock, high = Pairs::position(i, member, 1) / kBlock;
          KVRT_UNROLL
          for (int r = 0; r < 2; ++r) {
            scale[r][member] = low_halves(params[r][low], params[r][high]);
            lo[r][member] = cuda::add_f16x2(high_halves(params[r][low], params[r][high]), member == 0 ? mean.x : mean.y);
          }
        }
      });
    }
    for_scores<N>([&](int n, int i) { s[n][i] *= undo_value_factor<Codes>() * query.scale[n][i % 2]; });
  }

 private:
  KVRT_HOST_DEVICE static constexpr int stored(int quad, int i, int member, int half) { return quad * (D / 4) + Pairs::position(i, member, half); }
  KVRT_HOST_DEVICE static constexpr int first_channel(int quad, int i, int half) { return stored_channel(kSpread, D, stored(quad, i, 0, half)); }
  /// Operands of [head tile][pair], one lane's.
  KVRT_DEVICE static std::uint64_t* fragments(const Shared& shared, int n_tiles) {
    auto* const after_table = static_cast<std::uint8_t*>(cuda::dynamic_shared()) + pre_table_bytes(D, cuda::reread(shared.n_offsets));
    return reinterpret_cast<std::uint64_t*>(after_table) + cuda::warp_index() * n_tiles * kPairs * cuda::kWarp + cuda::lane_index();
  }

  template <int W>
  KVRT_DEVICE static void load_row(const SideView& view, const std::uint8_t* block, int row, int quad, std::uint32_t (&words)[W]) {
    if constexpr (W >= 8) {  // by twos, as the pairs need them: registers
      KVRT_UNROLL
      for (int i = 0; i < W; i += 2) load_words<false, 2>(block + row * (16 * W), quad * W + i, 4 * W, words, i);
    } else {
      Codes::load(view, block, row, quad, words);
    }
  }

  /// params_of(i, scale, lo) gives the parameters of [row][member] of pair i.
  template <int N, class Params>
  KVRT_DEVICE static void add_products(const SideView& view, const Shared& shared, const std::uint32_t (&words)[2][Codes::kWords], const int (&offset)[2],
                                       float (&s)[N][4], Params params_of) {
    const int quad = cuda::lane_index() % 4;
    const auto* const offsets = static_cast<const OffsetFactors*>(cuda::dynamic_shared());
    const std::uint64_t* const b = fragments(shared, N);
    const std::uint32_t minus_zero = Codes::kHasZero ? cuda::reread(view.minus_zero) : 0u;
    Table table;
    for (int i = 0; Codes::kIsTable && i < kTableWords; ++i) table[i] = cuda::reread(view.table[i]);
    OffsetFactors factors[2];
    KVRT_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      std::uint32_t scale[2][2], lo[2][2], a[4];
      params_of(i, scale, lo);
      KVRT_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (i % 2 == 0) factors[r] = offsets[table_index<D>(offset[r], i, quad)];
        // One by one where the codes need the registers.
        const std::uint64_t both = Codes::kWords < 8 ? factors[r].pair[i % 2] : cuda::reread(offsets[table_index<D>(offset[r], i, quad)].pair[i % 2]);
        std::uint32_t cosine, sine, v[2];
        split_words(both, &cosine, &sine);
        Pairs::codes(words[r], table, minus_zero, quad, i, v);
        KVRT_UNROLL
        for (int member = 0; member < 2; ++member) v[member] = cuda::fma_f16x2(v[member], scale[r][member], lo[r][member]);
        a[r] = cuda::fma_f16x2(cuda::negate_f16x2(v[1]), sine, cuda::mul_f16x2(v[0], cosine));
        a[2 + r] = cuda::fma_f16x2(v[0], sine, cuda::mul_f16x2(v[1], cosine));
      }
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        std::uint32_t operand[2];
        split_words(b[(n * kPairs + i) * cuda::kWarp], &operand[0], &operand[1]);
        cuda::mma_f16(s[n], a, operand);
      }
    }
  }

  /// The warp's query fragments, rotated back by the page's position.
  template <int N>
  KVRT_DEVICE static void enter_page(const Shared& shared, const std::uint8_t* header, const std::uint8_t* block, const Query<N>& query) {
    const int lane = cuda::lane_index(), warp = cuda::warp_index();
    const std::int64_t position = cuda::load(reinterpret_cast<const std::int64_t*>(header));
    cuda::warp_barrier();
    for (int e = lane; e < D / 4; e += cuda::kWarp) {
      float cosine[2], sine[2];
      KVRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int pair = rope_pair(shared.rope, first_channel(e % 4, e / 4, half));
        cosine[half] = 1, sine[half] = 0;
        if (pair >= 0) rope_factors(shared.rope, position, pair, &cosine[half], &sine[half]);
      }
      shared.factors[warp][e] = {f32_bits(cosine[0]), f32_bits(cosine[1]), f32_bits(sine[0]), f32_bits(sine[1])};
    }
    if (lane == 0) shared.block[warp] = block, shared.group[warp] = -1;
    cuda::warp_barrier();
    std::uint64_t* const b = fragments(shared, N);
    KVRT_UNROLL_BY(1)
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
        b[(n * kPairs + i) * cuda::kWarp] = two_words(cuda::pack_f16(rotated[0][0], rotated[0][1]), cuda::pack_f16(rotated[1][0], rotated[1][1]));
      }
    }
  }

  /// Parameters that do not change inside a group of tokens (or at all), `center` added to the offsets.
  KVRT_DEVICE static void enter_group(const SideView& view, const Shared& shared, const std::uint8_t* block, int group) {
    const int lane = cuda::lane_index(), warp = cuda::warp_index();
    cuda::warp_barrier();
    for (int e = lane; e < D / 4; e += cuda::kWarp) {
      std::uint32_t scale[2], lo[2];
      KVRT_UNROLL
      for (int member = 0; member < 2; ++member) {
        float grid[2][2];
        KVRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int at = stored(e % 4, e / 4, member, half);
          const float mean = view.mean != nullptr ? cuda::load(view.mean + at) : 0.0f;
          if (view.channel_group != 0) {
            const std::uint32_t params = cuda::load_shared_word(block + view.params + 4 * (group * D + at));
            grid[half][0] = value_scale<Codes>(view, params), grid[half][1] = value_lo<Codes>(view, params) + mean;
          } else {
            const ChannelGrid constant = view.ranges != nullptr ? channel_grid(view, at) : ChannelGrid{view.scale, view.lo};
            grid[half][0] = constant.scale, grid[half][1] = constant.lo + mean;
          }
        }
        scale[member] = cuda::pack_f16(grid[0][0] * value_factor<Codes>(), grid[1][0] * value_factor<Codes>());
        lo[member] = cuda::pack_f16(grid[0][1] * value_factor<Codes>(), grid[1][1] * value_factor<Codes>());
      }
      shared.scales[warp][e] = {scale[0], lo[0], scale[1], lo[1]};
    }
    if (lane == 0) shared.group[warp] = group;
    cuda::warp_barrier();
  }

  /// Entry e of the table of offsets.
  KVRT_DEVICE static void fill_table(const RopeTables& rope, int e) {
    const int offset = e / (D / 8), i = e / 4 % (D / 32) * 2, quad = e % 4;
    OffsetFactors factors;
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      float cosine[2], sine[2];
      KVRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int pair = rope_pair(rope, first_channel(quad, i + j, half));
        const float* const fine = rope.fine + static_cast<std::int64_t>(offset) * 2 * rope.n_pairs;
        cosine[half] = pair < 0 ? 1.0f : cuda::load(fine + pair);
        sine[half] = pair < 0 ? 0.0f : cuda::load(fine + rope.n_pairs + pair);
      }
      factors.pair[j] = two_words(cuda::pack_f16(cosine[0], cosine[1]), cuda::pack_f16(sine[0], sine[1]));
    }
    static_cast<OffsetFactors*>(cuda::dynamic_shared())[table_index<D>(offset, i, quad)] = factors;
  }
};

}  // namespace kvrt

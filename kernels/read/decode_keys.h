#pragma once
// Device code of the decode kernels, part 4: scores of 16 tokens from the pages of each key family. Keys are the A operand; lane
// 4g + q reads rows g and g + 8.
//
// A key type K<D> (D: width of the products, at least head_dim) gives
//   K::Shared                        what it keeps in shared memory besides the view; filled by prepare(args, segment, shared), which all
//                                    threads call
//   K::template Query<N>             what a warp carries of the queries
//   K::kOwnFragments                 whether it needs QueryMemory::fragments
//   K::load(view, shared, memory, q, n_heads, query)
//   K::score(view, shared, place, query, s)          s[n][0..1]: scores (base 2) of token slot + g, s[n][2..3]: of slot + g + 8,
//                                                    without query.add and soft cap, for heads 8 n + 2 q and 8 n + 2 q + 1
//   K::add(query, n, j)              what is added to every score

#include "kernels/read/decode_key_codes.h"
#include "kernels/read/decode_query.h"

namespace kvrt {

/// Where the slots of a tile are.
struct TilePlace {
  const std::uint8_t *k, *v;  ///< head blocks
  int slot;                   ///< first slot of the tile in them
  int tile;                   ///< number of the tile in the segment, as a DecodeChunk counts
};
struct NothingShared {};

/// visit(n, i) for each score s[n][i] of a lane.
template <int N, class Visit>
KVRT_DEVICE void for_scores(Visit visit) {
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    KVRT_UNROLL
    for (int i = 0; i < 4; ++i) visit(n, i);
  }
}

/// Tiles that a warp takes one after the other before it passes those of the other warps: a page, where to enter one costs.
template <class Keys>
inline constexpr int kVisitTiles = 1;
/// At most so many tiles at a time: fewer registers.
template <class Keys>
inline constexpr int kMaxStepTiles = 4;
/// The tile after `tile`, of a warp that takes kStep at a time; chunk_begin: first tile of the chunk.
template <class Keys, int kStep>
KVRT_DEVICE int next_tile(int tile, int chunk_begin) {
  constexpr int kVisit = kVisitTiles<Keys> > kStep ? kVisitTiles<Keys> : kStep;
  const int next = tile + kStep;
  return (next - chunk_begin) % kVisit == 0 ? next + kVisit * (kDecodeWarps - 1) : next;
}
template <class Keys, int kStep>
KVRT_DEVICE int first_tile(int chunk_begin) {
  return chunk_begin + (kVisitTiles<Keys> > kStep ? kVisitTiles<Keys> : kStep) * cuda::warp_index();
}

/// (scale', lo') pairs of fp16 for the two halves of a register.
struct ValuePairs {
  std::uint32_t scale, lo;
};
KVRT_DEVICE ValuePairs value_pairs(std::uint32_t low, std::uint32_t high) { return {low_halves(low, high), high_halves(low, high)}; }

/// One lane's part of the coded rows row and row + 8 of a tile, and their parameters.
template <class Codes>
struct KeyTile {
  std::uint32_t words[2][Codes::kWords];
  std::uint32_t params[2];  ///< as stored: of the rows (kRow), of the lane's group (kGroups)
  Table table;

  KVRT_DEVICE void load(const SideView& view, const std::uint8_t* block, int row, int quad) {
    const ParamMode mode = cuda::reread(view.mode);
    const bool has_params = mode == ParamMode::kGroups || (mode == ParamMode::kRow && cuda::reread(view.n_groups) != 0);
    const int group = mode == ParamMode::kGroups ? quad >> cuda::reread(view.lane_shift) : 0;
    KVRT_UNROLL
    for (int r = 0; r < 2; ++r) {
      Codes::load(view, block, row + 8 * r, quad, words[r]);
      params[r] = has_params ? TokenParams<Codes>(view, block, row + 8 * r).of_group(group) : 0u;
    }
    if (Codes::kIsTable) {
      KVRT_UNROLL
      for (int i = 0; i < kTableWords; ++i) table[i] = cuda::reread(view.table[i]);
    }
  }

  /// Operand A of a step: bias + code.
  KVRT_DEVICE void biased(int quad, int step, std::uint32_t (&a)[4]) const {
    KVRT_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = Codes::biased(words[i % 2], table, quad, step, i / 2);
  }
  /// One register of row r: code - zero, exactly.
  KVRT_DEVICE std::uint32_t code(std::uint32_t minus_zero, int quad, int r, int step, int reg) const {
    std::uint32_t minus = Codes::minus_bias(step, reg);
    if (Codes::kHasZero) minus = cuda::add_f16x2(minus, minus_zero);
    return cuda::add_f16x2(Codes::biased(words[r], table, quad, step, reg), minus);
  }
};

/// What keys stored after RoPE share. Keys: the type itself, with channel(quad, step, reg, half) and bias(step, reg) of its operands.
template <class Keys, int D>
struct PostRopeKeys {
  using Shared = NothingShared;
  template <int N>
  using Query = QueryFragments<D, N>;
  KVRT_DEVICE static void prepare(const DecodeArgs&, const Segment&, Shared&) {}
  template <int N>
  KVRT_DEVICE static void load(const SideView& view, const Shared&, const QueryMemory& memory, const float* q, int n_heads, Query<N>& query) {
    load_query<Keys>(view, memory, q, n_heads, query);
  }
  template <int N>
  KVRT_DEVICE static float add(const Query<N>& query, int n, int j) { return query.column(Column::kAdd, n, j); }
};

/// Post-RoPE keys of any coded family. kIsPadded: head_dim may be less than D, and token groups of any size.
template <class Codes, int D, bool kIsPadded>
struct CodedKeys : PostRopeKeys<CodedKeys<Codes, D, kIsPadded>, D> {
  static constexpr bool kIsBf16 = false, kOwnFragments = Codes::kHasChannelGroups;
  template <int N>
  using Query = QueryFragments<D, N>;
  KVRT_DEVICE static int channel(int quad, int step, int reg, int half) { return quad * (D / 4) + Codes::channel(step, reg, half); }
  KVRT_DEVICE static constexpr float bias(int step, int reg) { return Codes::bias(step, reg); }

  template <int N>
  KVRT_DEVICE static void score(const SideView& view, const NothingShared&, const TilePlace& place, const Query<N>& query, float (&s)[N][4]) {
    const int lane = cuda::lane_index(), quad = lane % 4, row = place.slot + lane / 4;
    KeyTile<Codes> tile;
    tile.load(view, place.k, row, quad);
    const ParamMode mode = cuda::reread(view.mode);
    if (mode == ParamMode::kRow) {
      add_codes<N>(tile, quad, query, s, [&](int n, int step, std::uint32_t (&b)[2]) { b[0] = query.b[n][step][0], b[1] = query.b[n][step][1]; });
      const bool is_stored = cuda::reread(view.n_groups) != 0;
      KVRT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float scale = is_stored ? value_scale<Codes>(view, tile.params[r]) : cuda::reread(view.scale);
        const float lo = is_stored ? value_lo<Codes>(view, tile.params[r]) : cuda::reread(view.lo);
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) {
          KVRT_UNROLL
          for (int j = 0; j < 2; ++j) s[n][2 * r + j] = scale * query.column(Column::kScale, n, j) * s[n][2 * r + j] + lo * query.column(Column::kSum, n, j);
        }
      }
      return;
    }
    if (Codes::kHasChannelGroups && mode == ParamMode::kChannel) {
      const std::uint8_t* const params = channel_params(view, place.k, place.slot);
      if (cuda::reread(query.warp->group) != params) scale_query<CodedKeys, Codes>(view, params, query);
      add_codes<N>(tile, quad, query, s, [&](int n, int step, std::uint32_t (&b)[2]) { cuda::reread_pair(query.fragment(n, step), b); });
      for_scores<N>([&](int n, int i) { s[n][i] = query.column(Column::kScale, n, i % 2) * s[n][i] + query.column(Column::kLo, n, i % 2); });
      return;
    }
    // token.g<N>: scales differ along the row; the values themselves, in fp16.
    const std::uint32_t minus_zero = Codes::kHasZero ? cuda::reread(view.minus_zero) : 0u;
    if (!kIsPadded || mode == ParamMode::kGroups) {
      ValuePairs of_rows[2];
      KVRT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t w = value_params<Codes>(view, tile.params[r]);
        of_rows[r] = value_pairs(w, w);
      }
      add_values<N>(view, tile, minus_zero, quad, query, s, [&](int, int, ValuePairs (&p)[2]) { p[0] = of_rows[0], p[1] = of_rows[1]; });
    } else {
      const TokenParams<Codes> of_rows[2] = {{view, place.k, row}, {view, place.k, row + 8}};
      add_values<N>(view, tile, minus_zero, quad, query, s, [&](int step, int reg, ValuePairs (&p)[2]) {
        KVRT_UNROLL
        for (int r = 0; r < 2; ++r) {
          std::uint32_t w[2];
          KVRT_UNROLL
          for (int half = 0; half < 2; ++half) {
            const int group = cuda::reread(view.group[channel(quad, step, reg, half)]);
            w[half] = value_params<Codes>(view, of_rows[r].of_group(group));
          }
          p[r] = value_pairs(w[0], w[1]);
        }
      });
    }
  }

 private:
  /// Whether any lane's positions of a register are in the row (decode_values.h: has_channel).
  KVRT_DEVICE static bool has_position(const SideView& view, int step, int reg) { return !kIsPadded || channel(0, step, reg, 0) < cuda::reread(view.head_dim); }
  /// operand(n, step, b) gives operand B.
  template <int N, class Operand>
  KVRT_DEVICE static void add_codes(const KeyTile<Codes>& tile, int quad, const Query<N>& query, float (&s)[N][4], Operand operand) {
    for_scores<N>([&](int n, int i) { s[n][i] = query.column(Column::kStart, n, i % 2); });
    KVRT_UNROLL
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t a[4];
      tile.biased(quad, step, a);
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        std::uint32_t b[2];
        operand(n, step, b);
        cuda::mma_f16(s[n], a, b);
      }
    }
  }
  /// pairs_of(step, reg, p) gives the parameters of both rows.
  template <int N, class PairsOf>
  KVRT_DEVICE static void add_values(const SideView& view, const KeyTile<Codes>& tile, std::uint32_t minus_zero, int quad, const Query<N>& query,
                                     float (&s)[N][4], PairsOf pairs_of) {
    for_scores<N>([&](int n, int i) { s[n][i] = 0; });
    KVRT_UNROLL
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t a[4] = {0, 0, 0, 0};
      KVRT_UNROLL
      for (int reg = 0; reg < 2; ++reg) {
        if (!has_position(view, step, reg)) continue;
        ValuePairs p[2];
        pairs_of(step, reg, p);
        KVRT_UNROLL
        for (int r = 0; r < 2; ++r) a[2 * reg + r] = cuda::fma_f16x2(tile.code(minus_zero, quad, r, step, reg), p[r].scale, p[r].lo);
      }
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) cuda::mma_f16(s[n], a, query.b[n][step]);
    }
    for_scores<N>([&](int n, int i) { s[n][i] *= undo_value_factor<Codes>() * query.column(Column::kScale, n, i % 2); });
  }
};

/// bf16 or fp16 rows. Quad lane q reads 16 bytes at 64 j + 16 q: channels 32 j + 8 q .. + 7, two steps of 4.
template <int D, bool IsBf16, bool kIsPadded>
struct PlainKeys : PostRopeKeys<PlainKeys<D, IsBf16, kIsPadded>, D> {
  static constexpr bool kIsBf16 = IsBf16, kOwnFragments = false;
  template <int N>
  using Query = QueryFragments<D, N>;
  KVRT_DEVICE static int channel(int quad, int step, int reg, int half) {
    return 32 * (step / 2) + 8 * quad + 4 * (step % 2) + 2 * reg + half;
  }
  KVRT_DEVICE static constexpr float bias(int, int) { return 0.0f; }

  template <int N>
  KVRT_DEVICE static void score(const SideView& view, const NothingShared&, const TilePlace& place, const Query<N>& query, float (&s)[N][4]) {
    const int lane = cuda::lane_index(), quad = lane % 4, row = place.slot + lane / 4;
    const int row_words = kIsPadded ? cuda::reread(view.row_words) : D / 2;
    for_scores<N>([&](int n, int i) { s[n][i] = 0; });
    KVRT_UNROLL
    for (int piece = 0; piece < D / 32; ++piece) {
      if (kIsPadded && 16 * piece >= cuda::reread(view.row_words)) break;
      std::uint32_t words[2][4];
      KVRT_UNROLL
      for (int r = 0; r < 2; ++r) load_words<kIsPadded, 4>(place.k + (row + 8 * r) * (4 * row_words), 16 * piece + 4 * quad, row_words, words[r]);
      KVRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t a[4] = {words[0][2 * half], words[1][2 * half], words[0][2 * half + 1], words[1][2 * half + 1]};
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) {
          if (IsBf16) cuda::mma_bf16(s[n], a, query.b[n][2 * piece + half]);
          else cuda::mma_f16(s[n], a, query.b[n][2 * piece + half]);
        }
      }
    }
    for_scores<N>([&](int n, int i) { s[n][i] *= query.column(Column::kScale, n, i % 2); });
  }
};

}  // namespace kvrt

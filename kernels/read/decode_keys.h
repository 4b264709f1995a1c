#pragma once
// Device code of the decode kernels, part 4: scores of 16 tokens from the pages of each key family. Keys are the A operand; lane
// 4g + q reads rows g and g + 8.
//
// A key type K<D> (D: width of the products, at least head_dim) gives
//   K::Shared                        what it keeps in shared memory besides the view; filled by prepare(args, segment, shared), which all
//                                    threads call
//   K::template Query<N>             what a warp carries of the queries
//   K::load(view, shared, scratch, q, n_heads, query)    scratch: [8 N, D] floats of shared memory, the type's own until the loop ends
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

/// One lane's part of the coded rows row and row + 8 of a tile, and their parameters.
template <class Codes>
struct KeyTile {
  std::uint32_t words[2][Codes::kWords];
  std::uint32_t params[2];  ///< as stored: of the rows (kRow), of the lane's group (kGroups)
  Table table;

  KVRT_DEVICE void load(const SideView& view, const std::uint8_t* block, int row, int quad, int lane_channels) {
    const ParamMode mode = cuda::reread(view.mode);
    const bool has_params = mode == ParamMode::kGroups || (mode == ParamMode::kRow && cuda::reread(view.n_groups) != 0);
    const int group = mode == ParamMode::kGroups ? cuda::reread(view.group[quad * lane_channels]) : 0;
    KVRT_UNROLL
    for (int r = 0; r < 2; ++r) {
      Codes::load(view, block, row + 8 * r, quad, words[r]);
      params[r] = has_params ? load_token_params<Codes>(view, block, row + 8 * r, group) : 0u;
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

  /// (scale', lo') pairs of fp16 for one register: row r of the tile, channels of both halves.
  struct Pairs {
    std::uint32_t scale, lo;
  };
  /// row: of the block. position: of the lane's part in a stored row. kMayBeStatic: grids may be constants of the plan; where those
  /// have no offset (fp8, sint) the scale is left to the caller: static_scale().
  template <bool kMayBeStatic>
  KVRT_DEVICE Pairs value_pairs(const SideView& view, const std::uint8_t* block, int row, int r, int position, int step, int reg) const {
    const ParamMode mode = cuda::reread(view.mode);
    if (kMayBeStatic && mode == ParamMode::kRow && cuda::reread(view.n_groups) == 0) {
      if (cuda::reread(view.ranges) == nullptr) {
        const std::uint32_t p = cuda::pack_f16(has_static_scale(view) ? 1.0f : cuda::reread(view.scale) * value_factor<Codes>(), cuda::reread(view.lo) * value_factor<Codes>());
        return {low_halves(p, p), high_halves(p, p)};
      }
      std::uint32_t p[2];
      KVRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int last = cuda::reread(view.head_dim) - 1, wanted = position + Codes::channel(step, reg, half);
        const ChannelGrid grid = channel_grid(view, wanted < last ? wanted : last);
        p[half] = cuda::pack_f16(grid.scale * value_factor<Codes>(), grid.lo * value_factor<Codes>());
      }
      return {low_halves(p[0], p[1]), high_halves(p[0], p[1])};
    }
    if (mode == ParamMode::kRow || mode == ParamMode::kGroups) {
      const std::uint32_t p = value_params<Codes>(view, params[r]);
      return {low_halves(p, p), high_halves(p, p)};
    }
    std::uint32_t p[2];
    KVRT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int last = cuda::reread(view.head_dim) - 1, wanted = position + Codes::channel(step, reg, half), at = wanted < last ? wanted : last;
      p[half] = value_params<Codes>(view, mode == ParamMode::kChannel ? load_channel_params<Codes>(view, block, row, at)
                                                                      : load_token_params<Codes>(view, block, row + 8 * r, cuda::reread(view.group[at])));
    }
    return {low_halves(p[0], p[1]), high_halves(p[0], p[1])};
  }

  /// What values() left out: the scale of tensor and head where the format has no offset.
  KVRT_DEVICE static bool has_static_scale(const SideView& view) {
    return Codes::kParamBytes != 4 && cuda::reread(view.lo) == 0.0f && cuda::reread(view.n_groups) == 0 && cuda::reread(view.ranges) == nullptr;
  }

  /// Operand A of a step: the values themselves in fp16, to be multiplied by undo_value_factor().
  template <bool kMayBeStatic>
  KVRT_DEVICE void values(const SideView& view, const std::uint8_t* block, int row, int quad, int position, int step, std::uint32_t (&a)[4]) const {
    KVRT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Pairs p = value_pairs<kMayBeStatic>(view, block, row, i % 2, position, step, i / 2);
      a[i] = cuda::fma_f16x2(code(view, quad, i % 2, step, i / 2), p.scale, p.lo);
    }
  }

  /// One register: code - zero, exactly.
  KVRT_DEVICE std::uint32_t code(const SideView& view, int quad, int r, int step, int reg) const {
    std::uint32_t minus = Codes::minus_bias(step, reg);
    if (Codes::kHasZero) minus = cuda::add_f16x2(minus, cuda::reread(view.minus_zero));
    return cuda::add_f16x2(Codes::biased(words[r], table, quad, step, reg), minus);
  }
};

/// Post-RoPE keys of any coded family.
template <class Codes, int D>
struct CodedKeys {
  static constexpr bool kIsBf16 = false;
  using Shared = NothingShared;
  template <int N>
  using Query = QueryFragments<D, N>;
  KVRT_DEVICE static int channel(int quad, int step, int reg, int half) { return quad * (D / 4) + Codes::channel(step, reg, half); }
  KVRT_DEVICE static constexpr float bias(int step, int reg) { return Codes::bias(step, reg); }
  KVRT_DEVICE static void prepare(const DecodeArgs&, const Segment&, Shared&) {}
  template <int N>
  KVRT_DEVICE static void load(const SideView& view, const Shared&, float*, const float* q, int n_heads, Query<N>& query) {
    load_query<CodedKeys>(view, q, n_heads, query);
  }
  template <int N>
  KVRT_DEVICE static float add(const Query<N>& query, int n, int j) { return query.add[n][j]; }

  template <int N>
  KVRT_DEVICE static void score(const SideView& view, const Shared&, const TilePlace& place, const Query<N>& query, float (&s)[N][4]) {
    const int lane = cuda::lane_index(), quad = lane % 4, row = place.slot + lane / 4;
    KeyTile<Codes> tile;
    tile.load(view, place.k, row, quad, D / 4);
    const bool by_row = cuda::reread(view.mode) == ParamMode::kRow;
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] = by_row ? query.start[n][i % 2] : 0.0f;
    }
    if (by_row) {
      KVRT_UNROLL
      for (int step = 0; step < D / 16; ++step) {
        std::uint32_t a[4];
        tile.biased(quad, step, a);
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) cuda::mma_f16(s[n], a, query.b[n][step]);
      }
      const bool is_stored = cuda::reread(view.n_groups) != 0;
      KVRT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float scale = is_stored ? value_scale<Codes>(view, tile.params[r]) : cuda::reread(view.scale);
        const float lo = is_stored ? value_lo<Codes>(view, tile.params[r]) : cuda::reread(view.lo);
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) {
          KVRT_UNROLL
          for (int j = 0; j < 2; ++j) s[n][2 * r + j] = scale * query.scale[n][j] * s[n][2 * r + j] + lo * query.sum[n][j];
        }
      }
    } else {  // scales differ along the row
      KVRT_UNROLL
      for (int step = 0; step < D / 16; ++step) {
        std::uint32_t a[4];
        tile.template values<false>(view, place.k, row, quad, quad * (D / 4), step, a);
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) cuda::mma_f16(s[n], a, query.b[n][step]);
      }
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        KVRT_UNROLL
        for (int i = 0; i < 4; ++i) s[n][i] *= undo_value_factor<Codes>() * query.scale[n][i % 2];
      }
    }
  }
};

/// bf16 or fp16 rows. Quad lane q reads 16 bytes at 64 j + 16 q: channels 32 j + 8 q .. + 7, two steps of 4.
template <int D, bool IsBf16, bool kIsPadded>
struct PlainKeys {
  static constexpr bool kIsBf16 = IsBf16;
  using Shared = NothingShared;
  template <int N>
  using Query = QueryFragments<D, N>;
  KVRT_DEVICE static int channel(int quad, int step, int reg, int half) {
    return 32 * (step / 2) + 8 * quad + 4 * (step % 2) + 2 * reg + half;
  }
  KVRT_DEVICE static constexpr float bias(int, int) { return 0.0f; }
  KVRT_DEVICE static void prepare(const DecodeArgs&, const Segment&, Shared&) {}
  template <int N>
  KVRT_DEVICE static void load(const SideView& view, const Shared&, float*, const float* q, int n_heads, Query<N>& query) {
    load_query<PlainKeys>(view, q, n_heads, query);
  }
  template <int N>
  KVRT_DEVICE static float add(const Query<N>& query, int n, int j) { return query.add[n][j]; }

  template <int N>
  KVRT_DEVICE static void score(const SideView& view, const Shared&, const TilePlace& place, const Query<N>& query, float (&s)[N][4]) {
    const int lane = cuda::lane_index(), quad = lane % 4, row = place.slot + lane / 4;
    const int row_words = kIsPadded ? cuda::reread(view.row_words) : D / 2;
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] = 0;
    }
    KVRT_UNROLL
    for (int piece = 0; piece < D / 32; ++piece) {
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
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] *= query.scale[n][i % 2];
    }
  }
};

}  // namespace kvrt

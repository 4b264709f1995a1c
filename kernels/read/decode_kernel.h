#pragma once
// Device code of the fused decode kernel, part 4: the loop over tiles, the running softmax and the merge of the warps.
// 4 warps a CTA; each takes steps of 4 tiles (64 slots; 2 tiles where the outputs need the registers). No shared memory and no barrier
// inside the loop.

#include "kernels/read/decode_cuda.h"
#include "kernels/read/decode_values.h"

namespace kvrt {

inline constexpr int kDecodeThreads = 128;
inline constexpr int kDecodeWarps = kDecodeThreads / cuda::kWarp;
KVRT_HOST_DEVICE constexpr int decode_step_tiles(int head_dim, int head_tiles) { return head_dim * head_tiles <= 64 ? 4 : 2; }
/// CTAs an SM must hold: caps registers at 128, 168 and 255.
KVRT_HOST_DEVICE constexpr int decode_min_blocks(int head_dim, int head_tiles) {
  return head_tiles == 1 ? 4 : head_dim <= 64 ? 3 : 2;
}

template <int D, int N>
struct DecodeShared {
  SideView k, v;
  const std::int32_t* pages;
  std::int32_t page_shift;  ///< log2 of the tokens of a page
  float m[kDecodeWarps][8 * N], l[kDecodeWarps][8 * N];
  float o[8 * N][D];
};

/// What a warp carries from step to step. Per lane: sums over its own tokens (l, z, w), outputs over all tokens.
template <int D, int N>
struct RunningSoftmax {
  float m[N][2], l[N][2];
  float z[N][2];               ///< Σ p lo
  float w[N][2];               ///< Σ of rounded weights P'
  float o[N][D / 16][4];
  float weight_scale;          ///< 2^e of the weights
};

template <int D, int N>
KVRT_DEVICE void start_softmax(RunningSoftmax<D, N>& r) {
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) r.m[n][j] = kNoScore, r.l[n][j] = 0, r.z[n][j] = 0, r.w[n][j] = 0;
    KVRT_UNROLL
    for (int i = 0; i < D / 16; ++i) {
      KVRT_UNROLL
      for (int j = 0; j < 4; ++j) r.o[n][i][j] = 0;
    }
  }
  r.weight_scale = kWeightScale;
}

/// Reduction over the eight row lanes of a column.
KVRT_DEVICE float column_max(float x) {
  KVRT_UNROLL
  for (int mask = 4; mask < cuda::kWarp; mask *= 2) x = fmaxf(x, cuda::shuffle_xor(x, mask));
  return x;
}
KVRT_DEVICE float column_sum(float x) {
  KVRT_UNROLL
  for (int mask = 4; mask < cuda::kWarp; mask *= 2) x += cuda::shuffle_xor(x, mask);
  return x;
}

/// 2^e that brings the largest scale into [2^9, 2^10). It moves only when the largest scale has grown by 2^4, since that costs
/// a pass over the outputs; fp16 has room for it.
KVRT_DEVICE float next_weight_scale(float now, float largest, bool is_first) {
  if (largest == 0.0f || (!is_first && largest * now < 0x1p14f)) return now;
  const int exponent = static_cast<int>(f32_bits(largest) >> 23) - 127;
  return f32_from_bits(static_cast<std::uint32_t>(9 - exponent + 127) << 23);
}

/// Everything depends on new maxima or a new weight scale; the outputs are touched only if one changed.
template <int D, int N>
KVRT_DEVICE void rescale(RunningSoftmax<D, N>& r, const float (&m)[N][2], float weight_scale) {
  bool has_changed = weight_scale != r.weight_scale;
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) has_changed |= m[n][0] > r.m[n][0] || m[n][1] > r.m[n][1];
  if (!cuda::warp_any(has_changed)) return;
  const float step = weight_scale * inverse_of_power(r.weight_scale);
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      const float shrink = cuda::exp2_approx(r.m[n][j] - m[n][j]), factor = shrink * step;
      r.m[n][j] = m[n][j];
      r.l[n][j] *= shrink, r.z[n][j] *= shrink, r.w[n][j] *= factor;
      KVRT_UNROLL
      for (int i = 0; i < D / 16; ++i) r.o[n][i][j] *= factor, r.o[n][i][j + 2] *= factor;
    }
  }
  r.weight_scale = weight_scale;
}

/// Which slots are live: the ring interval of n_tokens from first_slot. Tiles are counted from that of first_slot.
struct LiveSlots {
  int first_slot, n_tokens, n_slots;
  KVRT_DEVICE int tile_slot(int tile) const {
    const int slot = (first_slot / kTileSlots + tile) * kTileSlots;
    return slot - (slot >= n_slots ? n_slots : 0);
  }
  KVRT_DEVICE bool is_live(int slot) const {
    const int offset = slot - first_slot + (slot < first_slot ? n_slots : 0);
    return offset < n_tokens;
  }
};

/// One warp's share of a chunk.
template <class Keys, class Values, int D, int N>
KVRT_DEVICE void decode_tiles(const Segment& segment, const DecodeChunk& chunk, const DecodeShared<D, N>& shared,
                              const QueryFragments<D, N>& query, RunningSoftmax<D, N>& r) {
  const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
  const LiveSlots slots{static_cast<int>(segment.first_slot), static_cast<int>(segment.n_tokens), static_cast<int>(segment.n_slots)};
  const bool folds_scale = Values::kMayFold && Values::folds_scale(shared.v);
  bool is_first = true;
  constexpr int kStepTiles = decode_step_tiles(D, N);
  const int end = static_cast<int>(chunk.tile_end);
  for (int begin = static_cast<int>(chunk.tile_begin) + kStepTiles * cuda::warp_index(); begin < end; begin += kStepTiles * kDecodeWarps) {
    float s[kStepTiles][N][4];
    std::uint32_t params[kStepTiles][2];  // of the values of rows g and g + 8
    float m[N][2], largest = 0;
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) m[n][0] = r.m[n][0], m[n][1] = r.m[n][1];
    KVRT_UNROLL
    for (int t = 0; t < kStepTiles; ++t) {
      params[t][0] = params[t][1] = 0;
      if (begin + t >= end) continue;
      const int tile_slot = slots.tile_slot(begin + t), shift = cuda::reread(shared.page_shift), slot = tile_slot & ((1 << shift) - 1);
      const std::int64_t page = cuda::load(cuda::reread(shared.pages) + (tile_slot >> shift));
      Keys::template score<N>(shared.k, page_block(shared.k, page), slot, query, s[t]);
      KVRT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const bool live = slots.is_live(tile_slot + g + 8 * i);
        if (folds_scale) {
          const std::uint32_t stored = Values::row_params(shared.v, page_block(shared.v, page), slot + g + 8 * i);
          params[t][i] = live ? stored : 0u;
          largest = fmaxf(largest, cuda::low_f16(params[t][i]));
        }
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) {
          KVRT_UNROLL
          for (int j = 0; j < 2; ++j) {
            float& score = s[t][n][2 * i + j];
            score = live ? score : kNoScore;
            m[n][j] = fmaxf(m[n][j], score);
          }
        }
      }
    }
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int j = 0; j < 2; ++j) m[n][j] = column_max(m[n][j]);
    }
    float weight_scale = r.weight_scale;
    if (folds_scale) weight_scale = next_weight_scale(weight_scale, column_max(largest), is_first);
    is_first = false;
    rescale(r, m, weight_scale);

    KVRT_UNROLL
    for (int t = 0; t < kStepTiles; ++t) {
      if (begin + t >= end) continue;
      const int tile_slot = slots.tile_slot(begin + t), shift = cuda::reread(shared.page_shift), slot = tile_slot & ((1 << shift) - 1);
      const std::int64_t page = cuda::load(cuda::reread(shared.pages) + (tile_slot >> shift));
      std::uint32_t weights[N][2];
      KVRT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const bool live = slots.is_live(tile_slot + g + 8 * i);
        const float scale = (folds_scale ? cuda::low_f16(params[t][i]) : 1.0f) * r.weight_scale;
        const float lo = folds_scale ? cuda::high_f16(params[t][i]) : 0.0f;
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) {
          float p[2];
          KVRT_UNROLL
          for (int j = 0; j < 2; ++j) {
            p[j] = live ? cuda::exp2_approx(s[t][n][2 * i + j] - r.m[n][j]) : 0.0f;
            r.l[n][j] += p[j];
            if (folds_scale) r.z[n][j] += p[j] * lo;
          }
          const std::uint32_t pair = Values::kIsBf16 ? cuda::pack_bf16(p[0] * scale, p[1] * scale) : cuda::pack_f16(p[0] * scale, p[1] * scale);
          if (folds_scale) r.w[n][0] += cuda::low_f16(pair), r.w[n][1] += cuda::high_f16(pair);
          weights[n][i] = cuda::transpose_8x8(pair);
        }
      }
      bool live[4];
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) live[i] = slots.is_live(tile_slot + value_token(quad, i));
      Values::template accumulate<N>(shared.v, page_block(shared.v, page), slot, live, weights, r.o);
    }
  }
}

/// Warps merge through shared memory, in order; the partial result goes out.
template <class Values, int D, int N>
KVRT_DEVICE void merge_warps(const DecodeArgs& args, RunningSoftmax<D, N>& r, DecodeShared<D, N>& shared) {
  const int lane = cuda::lane_index(), warp = cuda::warp_index(), g = lane / 4, quad = lane % 4;
  const bool is_odd = g % 2 != 0;  // parity of the lane's tokens g and g + 8
  float bias[N][2][2];
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      r.l[n][j] = column_sum(r.l[n][j]);
      r.z[n][j] = column_sum(r.z[n][j]);
      KVRT_UNROLL
      for (int row = 0; row < 2; ++row) bias[n][row][j] = column_sum(r.w[n][j] * Values::bias(row, is_odd));
      if (g == 0) shared.m[warp][8 * n + 2 * quad + j] = r.m[n][j], shared.l[warp][8 * n + 2 * quad + j] = r.l[n][j];
    }
  }
  cuda::block_barrier();
  const float scale = Values::undo(shared.v) * inverse_of_power(r.weight_scale);
  float factor[N][2];
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      float top = kNoScore;
      KVRT_UNROLL
      for (int x = 0; x < kDecodeWarps; ++x) top = fmaxf(top, shared.m[x][8 * n + 2 * quad + j]);
      factor[n][j] = cuda::exp2_approx(r.m[n][j] - top);
    }
  }
  KVRT_UNROLL
  for (int x = 0; x < kDecodeWarps; ++x) {
    if (x == warp) {
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        KVRT_UNROLL
        for (int i = 0; i < D / 16; ++i) {
          KVRT_UNROLL
          for (int c = 0; c < 4; ++c) {
            float& sum = shared.o[8 * n + 2 * quad + c % 2][g * (D / 8) + 2 * i + c / 2];
            const float value = ((r.o[n][i][c] - bias[n][c / 2][c % 2]) * scale + r.z[n][c % 2]) * factor[n][c % 2];
            sum = x == 0 ? value : sum + value;
          }
        }
      }
    }
    cuda::block_barrier();
  }
  const int n_heads = args.n_query_heads;
  const std::int64_t first = static_cast<std::int64_t>(cuda::block_index()) * n_heads;
  for (int i = cuda::thread_index(); i < n_heads * D; i += kDecodeThreads) cuda::store(args.partials.o + first * D + i, shared.o[i / D][i % D]);
  for (int head = cuda::thread_index(); head < n_heads; head += kDecodeThreads) {
    float top = kNoScore, sum = 0;
    for (int x = 0; x < kDecodeWarps; ++x) top = fmaxf(top, shared.m[x][head]);
    for (int x = 0; x < kDecodeWarps; ++x) sum += shared.l[x][head] * cuda::exp2_approx(shared.m[x][head] - top);
    cuda::store(args.partials.m + first + head, top);
    cuda::store(args.partials.l + first + head, sum);
  }
}

template <class Keys, class Values, int D, int N>
KVRT_DEVICE void decode_chunk(const DecodeArgs& args, const DecodeChunk& chunk, const Segment& segment, DecodeShared<D, N>& shared) {
  QueryFragments<D, N> query;
  load_query<Keys>(args.q + static_cast<std::int64_t>(chunk.row) * args.n_query_heads * D, args.n_query_heads, query);
  RunningSoftmax<D, N> r;
  start_softmax(r);
  decode_tiles<Keys, Values>(segment, chunk, shared, query, r);
  merge_warps<Values>(args, r, shared);
}

/// One CTA a chunk. Coded pages as the families say; segments of bf16 pages (sinks, window) in the same launch.
template <class Keys, class Values, int D, int N>
KVRT_KERNEL(kDecodeThreads, decode_min_blocks(D, N)) decode_kernel(const DecodeArgs args) {
  using Shared = DecodeShared<D, N>;
  KVRT_SHARED(Shared, shared);
  const DecodeChunk& chunk = args.chunks[cuda::block_index()];
  const Segment& segment = args.segments[chunk.segment];
  if (cuda::thread_index() == 0) {
    shared.k = view_side(segment.k), shared.v = view_side(segment.v);
    shared.pages = segment.pages;
    int shift = 0;
    while ((1 << shift) < segment.k.codec.page_tokens) ++shift;
    shared.page_shift = shift;
  }
  cuda::block_barrier();
  if (segment.k.codec.format == Format::kBf16 && segment.v.codec.format == Format::kBf16) {
    decode_chunk<PlainKeys<D, true>, PlainValues<D, true>, D, N>(args, chunk, segment, shared);
  } else {
    decode_chunk<Keys, Values, D, N>(args, chunk, segment, shared);
  }
}

}  // namespace kvrt

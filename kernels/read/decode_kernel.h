#pragma once
// Device code of the decode kernels, part 7: the loop over tiles, the running softmax and the merge of the warps.
// 4 warps a CTA; each takes steps of 4 tiles (64 slots; 2 tiles where the outputs need the registers). No shared memory and no barrier
// inside the loop.

#include "kernels/read/decode_cuda.h"
#include "kernels/read/decode_keys.h"
#include "kernels/read/decode_values.h"

namespace kvrt {

KVRT_HOST_DEVICE constexpr int decode_step_tiles(int head_dim, int head_tiles) { return head_dim * head_tiles <= 64 ? 4 : 2; }
/// CTAs an SM must hold: caps registers at 128, 168 and 255.
KVRT_HOST_DEVICE constexpr int decode_min_blocks(int head_dim, int head_tiles) {
  return head_tiles == 1 && head_dim <= 128 ? 4 : head_dim <= 64 ? 3 : 2;
}

/// The CTA's share of the work: a chunk and a tile of 8 N heads.
struct DecodeWork {
  std::int64_t chunk;
  int first_head;
};

/// D: width of the products; rows and outputs have args.head_dim <= D channels.
template <class Keys, int D, int N>
struct DecodeShared {
  SideView k, v;
  DecodeWork work;
  std::int32_t tile_begin, tile_end;                ///< of the chunk
  std::int32_t first_slot, n_tokens, n_slots;       ///< of the segment
  typename Keys::Shared keys;
  const std::int32_t* pages;
  std::int32_t page_shift;  ///< log2 of the tokens of a page
  float soft_cap;
  float m[kDecodeWarps][8 * N], l[kDecodeWarps][8 * N];
  WarpQuery queries[kDecodeWarps];
  float o[8 * N][D];
  cuda::Words2 fragments[Keys::kOwnFragments ? kDecodeWarps * N * (D / 16) * cuda::kWarp : 1];

  KVRT_DEVICE QueryMemory query_memory() { return {&o[0][0], queries, reinterpret_cast<std::uint32_t*>(fragments)}; }
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
KVRT_DEVICE void start_softmax(bool folds_scale, RunningSoftmax<D, N>& r) {
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
  r.weight_scale = folds_scale ? kFirstWeightScale : kWeightScale;
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
KVRT_DEVICE float next_weight_scale(float now, float largest) {
  if (largest == 0.0f || largest * now < 0x1p14f) return now;
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

/// The slots of one tile: tiles are counted from that of the segment's first slot, whose first tile may hold both ends of a ring.
struct TileSlots {
  int tile_slot;  ///< of row 0
  int behind;     ///< how many slots behind the segment's first one row 0 is
  int n_tokens, n_slots;
  KVRT_DEVICE bool is_live(int row) const {
    const int of_row = behind + row, offset = of_row + (of_row < 0 ? n_slots : 0);
    return offset < n_tokens;
  }
};
template <class Shared>
KVRT_DEVICE TileSlots slots_of_tile(const Shared& shared, int tile) {
  const int first = cuda::reread(shared.first_slot), n_slots = cuda::reread(shared.n_slots), slot = (first / kTileSlots + tile) * kTileSlots;
  return {slot - (slot >= n_slots ? n_slots : 0), tile * kTileSlots - first % kTileSlots, cuda::reread(shared.n_tokens), n_slots};
}

/// Score with `add` and the soft cap c: c tanh(score / c), which is c - 2 c / (1 + e^(2 score / c)).
KVRT_DEVICE float capped_score(float score, float soft_cap) {
  if (soft_cap == 0.0f) return score;
  constexpr float kTwoLog2e = 2.88539008177792682f;
  const float x = score * cuda::reciprocal_approx(soft_cap) * kTwoLog2e;
  return soft_cap - 2.0f * soft_cap * cuda::reciprocal_approx(1.0f + cuda::exp2_approx(x < 126.0f ? x : 126.0f));
}

template <class Shared>
KVRT_DEVICE TilePlace place_tile(const Shared& shared, int tile, int tile_slot) {
  const int shift = cuda::reread(shared.page_shift);
  const std::int64_t page = cuda::load(cuda::reread(shared.pages) + (tile_slot >> shift));
  return {page_block(shared.k, page), page_block(shared.v, page), tile_slot & ((1 << shift) - 1), tile};
}

/// One warp's share of a chunk.
template <class Keys, class Values, class Shared, int D, int N>
KVRT_DEVICE void decode_tiles(const Shared& shared, const typename Keys::template Query<N>& query, RunningSoftmax<D, N>& r) {
  const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
  const bool folds_scale = Values::kMayFold && Values::folds_scale(shared.v);
  constexpr int kStepTiles = decode_step_tiles(D, N) < kMaxStepTiles<Keys> ? decode_step_tiles(D, N) : kMaxStepTiles<Keys>;
  for (int begin = first_tile<Keys, kStepTiles>(shared.tile_begin); begin < cuda::reread(shared.tile_end);
       begin = next_tile<Keys, kStepTiles>(begin, cuda::reread(shared.tile_begin))) {
    float s[kStepTiles][N][4];
    std::uint32_t params[kStepTiles][2];  // of the values of rows g and g + 8
    float m[N][2], largest = 0;
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) m[n][0] = r.m[n][0], m[n][1] = r.m[n][1];
    KVRT_UNROLL
    for (int t = 0; t < kStepTiles; ++t) {
      params[t][0] = params[t][1] = 0;
      if (begin + t >= cuda::reread(shared.tile_end)) continue;
      const TileSlots slots = slots_of_tile(shared, begin + t);
      const TilePlace place = place_tile(shared, begin + t, slots.tile_slot);
      Keys::template score<N>(shared.k, shared.keys, place, query, s[t]);
      const float soft_cap = cuda::reread(shared.soft_cap);
      KVRT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const bool live = slots.is_live(g + 8 * i);
        if (folds_scale) {
          const std::uint32_t stored = Values::row_params(shared.v, place.v, place.slot + g + 8 * i);
          params[t][i] = live ? stored : 0u;
          largest = fmaxf(largest, Values::row_scale(shared.v, params[t][i]));
        }
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) {
          KVRT_UNROLL
          for (int j = 0; j < 2; ++j) {
            float& score = s[t][n][2 * i + j];
            score = live ? capped_score(score + Keys::add(query, n, j), soft_cap) : kNoScore;
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
    if (folds_scale) weight_scale = next_weight_scale(weight_scale, column_max(largest));
    rescale(r, m, weight_scale);

    KVRT_UNROLL
    for (int t = 0; t < kStepTiles; ++t) {
      if (begin + t >= cuda::reread(shared.tile_end)) continue;
      const TileSlots slots = slots_of_tile(shared, begin + t);
      const TilePlace place = place_tile(shared, begin + t, slots.tile_slot);
      std::uint32_t weights[N][2];
      KVRT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const bool live = slots.is_live(g + 8 * i);
        const float scale = (folds_scale ? Values::row_scale(shared.v, params[t][i]) : 1.0f) * r.weight_scale;
        const float lo = folds_scale ? Values::row_lo(shared.v, params[t][i]) : 0.0f;
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
          if (Values::kIsBiased) r.w[n][0] += cuda::low_f16(pair), r.w[n][1] += cuda::high_f16(pair);
          weights[n][i] = cuda::transpose_8x8(pair);
        }
      }
      bool live[4];
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) live[i] = slots.is_live(value_token(quad, i));
      Values::template accumulate<N>(shared.v, place.v, place.slot, live, weights, r.o);
    }
  }
}

/// Warps merge through shared memory, in order; the partial result goes out.
template <class Values, class Shared, int D, int N>
KVRT_DEVICE void merge_warps(const DecodeArgs& args, RunningSoftmax<D, N>& r, Shared& shared) {
  const int lane = cuda::lane_index(), warp = cuda::warp_index(), g = lane / 4, quad = lane % 4;
  const bool is_odd = g % 2 != 0;  // parity of the lane's tokens g and g + 8
  const bool has_bias = Values::has_bias(shared.v);
  float even[N][2], odd[N][2];  // Σ of rounded weights of even and of odd tokens
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      r.l[n][j] = column_sum(r.l[n][j]);
      r.z[n][j] = column_sum(r.z[n][j]);
      even[n][j] = column_sum(is_odd ? 0.0f : r.w[n][j]);
      odd[n][j] = column_sum(is_odd ? r.w[n][j] : 0.0f);
      if (g == 0) shared.m[warp][8 * n + 2 * quad + j] = r.m[n][j], shared.l[warp][8 * n + 2 * quad + j] = r.l[n][j];
    }
  }
  cuda::block_barrier();
  const float undo = inverse_of_power(r.weight_scale);
  float factor[N][2];
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      float top = kNoScore;
      KVRT_UNROLL
      for (int x = 0; x < kDecodeWarps; ++x) top = fmaxf(top, shared.m[x][8 * n + 2 * quad + j]);
      factor[n][j] = cuda::exp2_approx(r.m[n][j] - top);
      // To all channels of the head alike: offsets of folded scales, and what the zero of codes added.
      r.z[n][j] = (r.z[n][j] - undo * shared.v.zero * (has_bias ? even[n][j] + odd[n][j] : 0.0f)) * factor[n][j];
      if (!has_bias) even[n][j] = odd[n][j] = 0;
      factor[n][j] *= undo;
    }
  }
  KVRT_UNROLL
  for (int reg = 0; reg < D / 8; ++reg) {
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int j = 0; j < 2; ++j) {
        float& o = r.o[n][reg / 2][2 * (reg % 2) + j];
        o = (o - even[n][j] * Values::bias(reg, false) - odd[n][j] * Values::bias(reg, true)) * factor[n][j] + r.z[n][j];
      }
    }
  }
  KVRT_UNROLL_BY(1)
  for (int x = 0; x < kDecodeWarps; ++x) {
    if (x == warp) {
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        KVRT_UNROLL
        for (int i = 0; i < D / 4; ++i) {
          float& sum = shared.o[8 * n + 2 * quad + i % 2][Values::channel(g, i / 2)];
          const float value = r.o[n][i / 4][i % 4];
          sum = x == 0 ? value : sum + value;
        }
      }
    }
    cuda::block_barrier();
  }
  const int first_head = cuda::reread(shared.work.first_head), rest = args.n_query_heads - first_head, n_heads = rest < 8 * N ? rest : 8 * N, dim = args.head_dim;
  const std::int64_t first = cuda::reread(shared.work.chunk) * args.n_query_heads + first_head;
  KVRT_UNROLL_BY(1)
  for (int head = 0; head < n_heads; ++head) {
    float top = kNoScore, sum = 0;
    KVRT_UNROLL
    for (int x = 0; x < kDecodeWarps; ++x) top = fmaxf(top, shared.m[x][head]);
    KVRT_UNROLL
    for (int x = 0; x < kDecodeWarps; ++x) sum += shared.l[x][head] * cuda::exp2_approx(shared.m[x][head] - top);
    KVRT_UNROLL_BY(1)
    for (int c = cuda::thread_index(); c < dim; c += kDecodeThreads) {
      const ChannelGrid grid = Values::grid(shared.v, c);
      const float mean = shared.v.mean != nullptr ? cuda::load(shared.v.mean + c) : 0.0f;
      cuda::store(args.partials.o + (first + head) * dim + c, shared.o[head][c] * grid.scale + (grid.lo + mean) * sum);
    }
    if (cuda::thread_index() == 0) cuda::store(args.partials.m + first + head, top), cuda::store(args.partials.l + first + head, sum);
  }
}

/// Fills the shared memory of a CTA; a barrier must follow.
template <class Keys, int D, int N>
KVRT_DEVICE void share_segment(const DecodeArgs& args, const DecodeWork& work, const DecodeChunk& chunk, const Segment& segment, DecodeShared<Keys, D, N>& shared) {
  const int thread = cuda::thread_index();
  view_side(segment.k, D, 4, thread, kDecodeThreads, &shared.k);
  view_side(segment.v, D, 8, thread, kDecodeThreads, &shared.v);
  Keys::prepare(args, segment, shared.keys);
  if (thread != 0) return;
  shared.work = work;
  shared.tile_begin = static_cast<std::int32_t>(chunk.tile_begin), shared.tile_end = static_cast<std::int32_t>(chunk.tile_end);
  shared.first_slot = static_cast<std::int32_t>(segment.first_slot), shared.n_tokens = static_cast<std::int32_t>(segment.n_tokens);
  shared.n_slots = static_cast<std::int32_t>(segment.n_slots);
  shared.pages = segment.pages;
  shared.soft_cap = args.soft_cap;
  int shift = 0;
  while ((1 << shift) < segment.k.codec.page_tokens) ++shift;
  shared.page_shift = shift;
}

/// What a CTA starts from.
struct DecodeTask {
  const DecodeChunk& chunk;
  const Segment& segment;
  int first_head;
};
/// Finds the CTA's task and fills its shared memory. A barrier stands behind.
template <class Keys, int D, int N>
KVRT_DEVICE DecodeTask start_task(const DecodeArgs& args, DecodeShared<Keys, D, N>& shared) {
  const int head_tiles = (args.n_query_heads + 8 * N - 1) / (8 * N), block = cuda::block_index();
  const DecodeWork work = {block / head_tiles, block % head_tiles * (8 * N)};
  const DecodeChunk& chunk = args.chunks[work.chunk];
  const Segment& segment = args.segments[chunk.segment];
  share_segment(args, work, chunk, segment, shared);
  cuda::block_barrier();
  return {chunk, segment, work.first_head};
}

template <class Keys, class Shared, int N>
KVRT_DEVICE void load_queries(const DecodeArgs& args, const DecodeTask& task, Shared& shared, typename Keys::template Query<N>& query) {
  const float* const q = args.q + (task.chunk.row * std::int64_t{args.n_query_heads} + task.first_head) * args.head_dim;
  Keys::template load<N>(shared.k, shared.keys, shared.query_memory(), q, args.n_query_heads - task.first_head, query);
}

/// The chunk's tiles, with scores that `query` leads to.
template <class Keys, class Values, class Shared, int D, int N>
KVRT_DEVICE void attend(const DecodeArgs& args, const typename Keys::template Query<N>& query, Shared& shared) {
  RunningSoftmax<D, N> r;
  start_softmax(Values::kMayFold && Values::folds_scale(shared.v), r);
  decode_tiles<Keys, Values, Shared, D, N>(shared, query, r);
  merge_warps<Values, Shared, D, N>(args, r, shared);
}

template <class Keys, class Values, class Shared, int D, int N>
KVRT_DEVICE void decode_chunk(const DecodeArgs& args, const DecodeTask& task, Shared& shared) {
  typename Keys::template Query<N> query;
  load_queries<Keys, Shared, N>(args, task, shared, query);
  attend<Keys, Values, Shared, D, N>(args, query, shared);
}

KVRT_DEVICE bool is_exact_segment(const Segment& s) { return s.k.codec.format == Format::kBf16 && s.v.codec.format == Format::kBf16; }

/// One CTA a chunk and head tile. Coded pages as the families say; segments of bf16 pages (sinks, window) in the same launch.
template <class Keys, class Values, class ExactKeys, int D, int N>
KVRT_KERNEL(kDecodeThreads, decode_min_blocks(D, N)) decode_kernel(const DecodeArgs args) {
  using Shared = DecodeShared<Keys, D, N>;
  KVRT_SHARED(Shared, shared);
  const DecodeTask task = start_task(args, shared);
  if (is_exact_segment(task.segment)) decode_chunk<ExactKeys, PlainValues<D, true, false>, Shared, D, N>(args, task, shared);
  else decode_chunk<Keys, Values, Shared, D, N>(args, task, shared);
}

}  // namespace kvrt

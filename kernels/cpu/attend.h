#pragma once
// Arithmetic of decode attention on one tile: rotation, scores of all query heads, one running base-2 maximum, sums of p and of p v.
// Query heads are taken in blocks of 8, 4, 2 and 1, so that every accumulator of a block stays in a register.
// Internal linkage, like simd.h.

#include "kernels/cpu/tile.h"

namespace kvrt {
namespace {

constexpr float kNoScore = -1e30f;  ///< of masked tokens, and the maximum of nothing

/// Query heads of the next block when `left` are left; 3 and 7 are rounded up, their last column is zero.
KVRT_INLINE int query_block(int left) { return left >= 7 ? 8 : left >= 3 ? 4 : left; }

/// body(Size<B>, first head): for each block of query heads.
template <int kN>
struct Size {
  static constexpr int n = kN;
};
template <class Body>
KVRT_INLINE void for_query_blocks(int n_queries, Body body) {
  for (int g = 0; g < n_queries;) {
    const int block = query_block(n_queries - g);
    if (block == 8) body(Size<8>{}, g);
    else if (block == 4) body(Size<4>{}, g);
    else if (block == 2) body(Size<2>{}, g);
    else body(Size<1>{}, g);
    g += block;
  }
}

/// Scores of kB queries against kV vectors of tokens. tile: [d][kTile], from the first token; q: [d][kB]; scores: [kB][kTile].
template <int kB, int kV>
KVRT_INLINE void dot_tokens(const float* tile, int d, const float* q, float* scores) {
  constexpr int kChains = kB * kV >= 8 ? 1 : 8 / (kB * kV);  // independent sums that hide the latency of an addition
  F sum[kChains][kB][kV] = {};
  for (int c = 0; c < d; c += kChains) {  // d is a multiple of 8
    for (int j = 0; j < kChains; ++j) {
      F k[kV];
      for (int v = 0; v < kV; ++v) k[v] = load<F>(tile + static_cast<std::int64_t>(c + j) * kTile + v * kLanes);
      for (int g = 0; g < kB; ++g) {
        const F b = splat<F>(q[(c + j) * kB + g]);
        for (int v = 0; v < kV; ++v) sum[j][g][v] += b * k[v];
      }
    }
  }
  for (int g = 0; g < kB; ++g) {
    for (int v = 0; v < kV; ++v) {
      F total = sum[0][g][v];
      for (int j = 1; j < kChains; ++j) total += sum[j][g][v];
      store(scores + g * kTile + v * kLanes, total);
    }
  }
}

/// Scores of a tile of n_rows tokens (garbage where a slot is not live).
template <int kB>
static void dot_tile(const float* tile, int d, int n_rows, const float* q, float* scores) {
  constexpr int kV = kLanes == 16 ? 2 : kB == 8 ? 1 : kB == 4 ? 2 : 4;
  int t = 0;
  for (; t + kV * kLanes <= n_rows; t += kV * kLanes) dot_tokens<kB, kV>(tile + t, d, q, scores + t);
  for (; t < n_rows; t += kLanes) dot_tokens<kB, 1>(tile + t, d, q, scores + t);
}

/// cap * tanh(score / cap).
KVRT_INLINE F capped(F score, float cap) {
  const F e = exp2_lanes(magnitude(score) * (-2.0f * 1.4426950408889634f / cap)), value = (1.0f - e) / (1.0f + e) * cap;
  return bits_as<F>(bits_as<I>(value) | (bits_as<I>(score) & INT32_MIN));
}

struct Softmax {
  float m;
  F l;   ///< sum of p, lane by lane
  F lo;  ///< the same of p times the token's minimum, where values are summed as codes
};

struct MaxScore {
  template <class V>
  V operator()(V a, V b) const { return maximum(a, b); }
};

/// Scores of one query head to p = 2^(score - m); tokens outside [begin, end) get p = 0. Returns the factor of earlier sums of p v.
static float softmax_tile(Softmax* s, int begin, int end, int n_rows, float* scores) {
  F most = splat<F>(kNoScore);
  for (int t = 0; t < n_rows; t += kLanes) {
    const I token = lane_index() + t;
    const F score = load<F>(scores + t);
    const F masked = token < begin ? splat<F>(kNoScore) : token >= end ? splat<F>(kNoScore) : score;
    store(scores + t, masked);
    most = maximum(most, masked);
  }
  const float top = across(most, MaxScore{});
  float factor = 1.0f;
  if (top > s->m) {
    factor = exp2_lanes(splat<F>(s->m - top))[0];
    s->m = top, s->l *= factor, s->lo *= factor;
  }
  const F m = splat<F>(s->m);
  for (int t = 0; t < n_rows; t += kLanes) {
    const F score = load<F>(scores + t);
    const F p = score <= kNoScore ? F{} : exp2_lanes(score - m);
    store(scores + t, p);
    s->l += p;
  }
  return factor;
}

/// o += p v of tokens [begin, end) and columns [c, c + kC vectors). tile: [kTile][d]; p: [kB][kTile]; o: [kB][d].
template <int kB, int kC>
KVRT_INLINE void accumulate_columns(const float* tile, int d, int begin, int end, const float* p, float* o) {
  F sum[kB][kC];
  for (int g = 0; g < kB; ++g) {
    for (int c = 0; c < kC; ++c) sum[g][c] = load<F>(o + static_cast<std::int64_t>(g) * d + c * kLanes);
  }
  for (int t = begin; t < end; ++t) {
    F v[kC];
    for (int c = 0; c < kC; ++c) v[c] = load<F>(tile + static_cast<std::int64_t>(t) * d + c * kLanes);
    for (int g = 0; g < kB; ++g) {
      const F b = splat<F>(p[g * kTile + t]);
      for (int c = 0; c < kC; ++c) sum[g][c] += b * v[c];
    }
  }
  for (int g = 0; g < kB; ++g) {
    for (int c = 0; c < kC; ++c) store(o + static_cast<std::int64_t>(g) * d + c * kLanes, sum[g][c]);
  }
}

template <int kB>
static void accumulate_tile(const float* tile, int d, int begin, int end, const float* p, float* o) {
  constexpr int kC = kLanes == 16 ? (kB == 8 ? 2 : 4) : kB == 8 ? 1 : kB == 4 ? 2 : 4;
  int c = 0;
  for (; c + kC * kLanes <= d; c += kC * kLanes) accumulate_columns<kB, kC>(tile + c, d, begin, end, p, o + c);
  for (; c < d; c += kLanes) accumulate_columns<kB, 1>(tile + c, d, begin, end, p, o + c);
}

/// Rotates one pair of columns, kV vectors of tokens, by the position of each token inside the tile.
template <int kV>
KVRT_INLINE void rotate_pair(float* x, float* y, const float* cosine, const float* sine) {
  for (int v = 0; v < kV; ++v) {
    const int t = v * kLanes;
    const F a = load<F>(x + t), b = load<F>(y + t), c = load<F>(cosine + t), s = load<F>(sine + t);
    store(x + t, a * c - b * s);
    store(y + t, a * s + b * c);
  }
}

}  // namespace
}  // namespace kvrt

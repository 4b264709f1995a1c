#pragma once
// Device code of the decode kernels, part 3: query heads as the B operand of the score products.

#include "kernels/read/decode_view.h"

namespace kvrt {

inline constexpr int kDecodeThreads = 128;
inline constexpr int kDecodeWarps = kDecodeThreads / cuda::kWarp;
inline constexpr float kNoScore = -1e30f;  ///< of masked tokens; finite, so that differences of maxima are

/// What a head's scores need besides the products: [8 N] of each for a warp, in shared memory, read again for every tile.
enum class Column {
  kScale,  ///< score = scale * (accumulated sum) + add
  kSum,    ///< scale * Σ Q'
  kStart,  ///< -Σ (bias + zero) Q': value from which the sum of biased codes starts
  kAdd,    ///< Q . (mean, offsets of channel.static)
  kLo,     ///< channel.g<N>: Q . offsets of the group
};
inline constexpr int kColumns = 5;

/// What a warp keeps of its queries in shared memory, read again for every tile.
struct WarpQuery {
  float columns[kColumns * 16];
  const float* q;             ///< [heads, head_dim]
  std::int32_t n_heads;
  const std::uint8_t* group;  ///< channel.g<N>: the parameters that are in the fragments
  std::uint32_t* fragments;   ///< [N][D / 16][lane][2]
};

/// Shared memory of a key type. N tiles of 8 heads, D channels.
struct QueryMemory {
  float* scratch;             ///< [8 N, D], until the loop ends
  WarpQuery* warps;           ///< [warp]
  std::uint32_t* fragments;   ///< [warp][N][D / 16][lane][2] where the type asks for it (kOwnFragments), else null
};

/// Queries of one warp. Lane 4g + q holds, of head 8 n + g, the channels that the key family assigns to quad lane q; of the scores it
/// gets heads 8 n + 2 q and 8 n + 2 q + 1.
template <int D, int N>
struct QueryFragments {
  std::uint32_t b[N][D / 16][2];
  WarpQuery* warp;

  KVRT_DEVICE float column(Column kind, int n, int j) const {
    return cuda::reread(warp->columns[static_cast<int>(kind) * 16 + 8 * n + 2 * (cuda::lane_index() % 4) + j]);
  }
  /// head: 8 n + g.
  KVRT_DEVICE void set_column(Column kind, int head, float value) const { warp->columns[static_cast<int>(kind) * 16 + head] = value; }
  KVRT_DEVICE std::uint32_t* fragment(int n, int step) const {
    return cuda::reread(warp->fragments) + ((n * (D / 16) + step) * cuda::kWarp + cuda::lane_index()) * 2;
  }
};

/// Power of two that brings the largest magnitude of a head into [8, 16), far from fp16's ends.
KVRT_DEVICE float query_guard(float largest) {
  const int exponent = static_cast<int>(f32_bits(largest) >> 23);
  const int shift = 3 - (exponent - 127);
  return f32_from_bits(static_cast<std::uint32_t>((shift < -100 ? -100 : shift > 100 ? 100 : shift) + 127) << 23);
}

/// 1 / x of a power of two, 2^-126 <= x <= 2^126.
KVRT_DEVICE float inverse_of_power(float x) { return f32_from_bits((254u << 23) - f32_bits(x)); }

KVRT_DEVICE float quad_sum(float x) {
  x += cuda::shuffle_xor(x, 1);
  return x + cuda::shuffle_xor(x, 2);
}

/// Scale' and lo' of channel.static for the channel stored at a position.
struct ChannelGrid {
  float scale, lo;
};
KVRT_DEVICE ChannelGrid channel_grid(const SideView& view, int position) {
  const StaticRange* r = view.ranges + stored_channel(view.spread, view.head_dim, position);
  const float scale = cuda::load(&r->scale);
  return {scale * view.step, cuda::load(&r->lo) + scale * view.unit};
}

KVRT_DEVICE float quad_max(float x) {
  x = fmaxf(x, cuda::shuffle_xor(x, 1));
  return fmaxf(x, cuda::shuffle_xor(x, 2));
}

KVRT_DEVICE float warp_sum(float x) {
  x = quad_sum(x);
  KVRT_UNROLL
  for (int mask = 4; mask < cuda::kWarp; mask *= 2) x += cuda::shuffle_xor(x, mask);
  return x;
}
KVRT_DEVICE float warp_max(float x) {
  x = quad_max(x);
  KVRT_UNROLL
  for (int mask = 4; mask < cuda::kWarp; mask *= 2) x = fmaxf(x, cuda::shuffle_xor(x, mask));
  return x;
}

/// Operand B of head `head`, which the quad shares: value(p) is Q' of the channel stored at position p, in fp16's range; the pairs go to
/// put(step, reg, pair). Sets the columns that follow from the rounded operand. guard: what Q' was multiplied by.
template <class Keys, int kUnroll, int D, int N, class Value, class Put>
KVRT_DEVICE void put_head(const SideView& view, int head, float guard, const QueryFragments<D, N>& f, Value value, Put put) {
  const int quad = cuda::lane_index() % 4;
  float sum = 0, bias = 0;
  KVRT_UNROLL_BY(kUnroll)
  for (int step = 0; step < D / 16; ++step) {
    KVRT_UNROLL
    for (int reg = 0; reg < 2; ++reg) {
      const float x0 = value(Keys::channel(quad, step, reg, 0)), x1 = value(Keys::channel(quad, step, reg, 1));
      const std::uint32_t pair = Keys::kIsBf16 ? cuda::pack_bf16(x0, x1) : cuda::pack_f16(x0, x1);
      put(step, reg, pair);
      if (Keys::kIsBf16) continue;
      const float rounded = cuda::low_f16(pair) + cuda::high_f16(pair);
      sum += rounded;
      bias += rounded * Keys::bias(step, reg);
    }
  }
  sum = quad_sum(sum), bias = quad_sum(bias);
  if (quad != 0) return;
  const float scale = inverse_of_power(guard);
  f.set_column(Column::kScale, head, scale);
  f.set_column(Column::kSum, head, scale * sum);
  f.set_column(Column::kStart, head, -(bias + cuda::reread(view.zero) * sum));
}

/// q: [G, head_dim] of one row. Heads beyond G and channels beyond head_dim are zero. Scales of channel.static go into Q'. All threads.
template <class Keys, int D, int N>
KVRT_DEVICE void load_query(const SideView& view, const QueryMemory& memory, const float* q, int n_heads, QueryFragments<D, N>& f) {
  const int lane = cuda::lane_index(), g = lane / 4, warp = cuda::warp_index(), n_warps = kDecodeThreads / cuda::kWarp;
  f.warp = memory.warps + warp;
  if (lane == 0) {
    f.warp->q = q, f.warp->n_heads = n_heads, f.warp->group = nullptr;
    f.warp->fragments = memory.fragments + warp * (N * D / 16) * cuda::kWarp * 2;
  }
  // A warp a head: Q' times its guard to scratch, what is the same for all warps to the columns.
  const int dim = view.head_dim;
  KVRT_UNROLL_BY(1)
  for (int head = warp; head < 8 * N; head += n_warps) {
    float largest = 0, add = 0;
    KVRT_UNROLL_BY(1)
    for (int p = lane; p < D; p += cuda::kWarp) {
      float x = head < n_heads && p < dim ? cuda::load(q + static_cast<std::int64_t>(head) * dim + p) : 0.0f;
      if (view.mean != nullptr && p < dim) add += x * cuda::load(view.mean + p);
      if (view.ranges != nullptr && p < dim) {
        const ChannelGrid grid = channel_grid(view, p);
        add += x * grid.lo, x *= grid.scale;
      }
      memory.scratch[head * D + p] = x;
      largest = fmaxf(largest, fabsf(x));
    }
    largest = warp_max(largest), add = warp_sum(add);
    if (lane < n_warps) {
      memory.warps[lane].columns[static_cast<int>(Column::kScale) * 16 + head] = query_guard(largest);
      memory.warps[lane].columns[static_cast<int>(Column::kAdd) * 16 + head] = add;
    }
  }
  cuda::block_barrier();
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    const int head = 8 * n + g;
    const float guard = f.warp->columns[static_cast<int>(Column::kScale) * 16 + head];
    cuda::warp_barrier();
    put_head<Keys, D / 16>(view, head, guard, f, [&](int p) { return memory.scratch[head * D + p] * guard; },
                           [&](int step, int reg, std::uint32_t pair) { f.b[n][step][reg] = pair; });
  }
  cuda::warp_barrier();
}

/// channel.g<N>: operand B with the scales of a group of tokens in it, to shared memory. params: of the group. One warp.
template <class Keys, class Codes, int D, int N>
KVRT_DEVICE void scale_query(const SideView& view, const std::uint8_t* params, const QueryFragments<D, N>& f) {
  const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
  cuda::warp_barrier();
  KVRT_UNROLL_BY(1)
  for (int n = 0; n < N; ++n) {
    const int head = 8 * n + g, dim = cuda::reread(view.head_dim), n_channels = head < cuda::reread(f.warp->n_heads) ? dim : 0;
    const float* const q = cuda::reread(f.warp->q) + static_cast<std::int64_t>(n_channels ? head : 0) * dim;
    float lo = 0, largest = 0;
    KVRT_UNROLL_BY(1)
    for (int p = quad; p < n_channels; p += 4) {
      const float x = cuda::load(q + p);
      const std::uint32_t w = cuda::load_shared_word(params + 4 * p);
      lo += x * value_lo<Codes>(view, w), largest = fmaxf(largest, fabsf(x * value_scale<Codes>(view, w)));
    }
    lo = quad_sum(lo);
    const float guard = query_guard(quad_max(largest));
    if (quad == 0) f.set_column(Column::kLo, head, lo);
    put_head<Keys, 1>(view, head, guard, f,
                      [&](int p) { return p < n_channels ? cuda::load(q + p) * (guard * value_scale<Codes>(view, cuda::load_shared_word(params + 4 * p))) : 0.0f; },
                      [&](int step, int reg, std::uint32_t pair) { f.fragment(n, step)[reg] = pair; });
  }
  if (lane == 0) f.warp->group = params;
  cuda::warp_barrier();
}

}  // namespace kvrt

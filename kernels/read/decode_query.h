#pragma once
// Device code of the decode kernels, part 3: query heads as the B operand of the score products.

#include "kernels/read/decode_view.h"

namespace kvrt {

inline constexpr int kDecodeThreads = 128;
inline constexpr int kDecodeWarps = kDecodeThreads / cuda::kWarp;
inline constexpr float kNoScore = -1e30f;  ///< of masked tokens; finite, so that differences of maxima are

/// Queries of one warp: N tiles of 8 heads, D channels. Lane 4g + q holds, of head 8 n + g, the channels that the key family
/// assigns to quad lane q; of the scores it gets heads 8 n + 2 q and 8 n + 2 q + 1, for which the column constants are.
template <int D, int N>
struct QueryFragments {
  std::uint32_t b[N][D / 16][2];
  float scale[N][2];  ///< score = scale * (accumulated sum) + add
  float sum[N][2];    ///< scale * Σ Q'
  float start[N][2];  ///< -Σ (bias + zero) Q': value from which the sum of biased codes starts
  float add[N][2];    ///< Q . (mean, offsets of channel.static)
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

/// q: [G, head_dim] of one row. Heads beyond G and channels beyond head_dim are zero. Scales of channel.static go into Q'.
template <class Keys, int D, int N>
KVRT_DEVICE void load_query(const SideView& view, const float* q, int n_heads, QueryFragments<D, N>& f) {
  const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4, dim = view.head_dim;
  const bool has_grid = view.ranges != nullptr;
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    const bool is_head = 8 * n + g < n_heads;
    const float* head = q + static_cast<std::int64_t>(is_head ? 8 * n + g : 0) * dim;
    float largest = 0, add = 0;
    for (int p = quad * (D / 4); p < (quad + 1) * (D / 4); ++p) {
      if (!is_head || p >= dim) continue;
      const float x = cuda::load(head + p);
      if (view.mean != nullptr) add += x * cuda::load(view.mean + p);
      ChannelGrid grid{1.0f, 0.0f};
      if (has_grid) grid = channel_grid(view, p), add += x * grid.lo;
      largest = fmaxf(largest, fabsf(x * grid.scale));
    }
    largest = fmaxf(largest, cuda::shuffle_xor(largest, 1));
    largest = fmaxf(largest, cuda::shuffle_xor(largest, 2));
    const float guard = query_guard(largest);
    float sum = 0, bias = 0;
    KVRT_UNROLL
    for (int step = 0; step < D / 16; ++step) {
      KVRT_UNROLL
      for (int reg = 0; reg < 2; ++reg) {
        float x[2];
        KVRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int p = Keys::channel(quad, step, reg, half);
          x[half] = is_head && p < dim ? cuda::load(head + p) * guard : 0.0f;
          if (has_grid && is_head && p < dim) x[half] *= channel_grid(view, p).scale;
        }
        const std::uint32_t pair = Keys::kIsBf16 ? cuda::pack_bf16(x[0], x[1]) : cuda::pack_f16(x[0], x[1]);
        f.b[n][step][reg] = pair;
        if (!Keys::kIsBf16) {
          const float rounded = cuda::low_f16(pair) + cuda::high_f16(pair);
          sum += rounded;
          bias += rounded * (Keys::bias(step, reg) + view.zero);
        }
      }
    }
    sum = quad_sum(sum), bias = quad_sum(bias), add = quad_sum(add);
    const float scale = inverse_of_power(guard);
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int source = 4 * (2 * quad + j);
      f.scale[n][j] = cuda::shuffle(scale, source);
      f.sum[n][j] = f.scale[n][j] * cuda::shuffle(sum, source);
      f.start[n][j] = -cuda::shuffle(bias, source);
      f.add[n][j] = cuda::shuffle(add, source);
    }
  }
}

}  // namespace kvrt

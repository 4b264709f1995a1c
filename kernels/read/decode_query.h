#pragma once
// Device code of the fused decode kernel, part 1: query heads as the B operand of the score products.

#include "kernels/cuda/memory.h"
#include "kernels/cuda/mma.h"
#include "kernels/read/segment.h"

namespace kvrt {

inline constexpr float kNoScore = -1e30f;  ///< of masked tokens; finite, so that differences of maxima are

/// What the loop over tiles needs of one side of a segment. Lives in shared memory and is read again for every tile, since registers
/// are what limits the loop.
struct SideView {
  const std::uint8_t* first;  ///< head block of page p: first + p * page_bytes
  std::int64_t page_bytes;
  std::int32_t params;        ///< offset of the parameters in a block
  std::int32_t n_groups;      ///< D / N of token.g<N>
};
KVRT_DEVICE SideView view_side(const SegmentSide& side) {
  const PageCodec& c = side.codec;
  return {side.pool + side.block_offset, side.page_bytes, static_cast<std::int32_t>(c.params),
          c.granularity == Granularity::kToken ? c.head_dim / c.group : 1};
}
KVRT_DEVICE const std::uint8_t* page_block(const SideView& view, std::int64_t page) {
  return cuda::reread(view.first) + page * cuda::reread(view.page_bytes);
}

/// Queries of one warp: N tiles of 8 heads, D channels. Lane 4g + q holds, of head 8 n + g, the channels that the key family
/// assigns to quad lane q; of the scores it gets heads 8 n + 2 q and 8 n + 2 q + 1, for which the column constants are.
template <int D, int N>
struct QueryFragments {
  std::uint32_t b[N][D / 16][2];
  float scale[N][2];  ///< score = scale * (accumulated sum)
  float sum[N][2];    ///< scale * Σ Q'
  float start[N][2];  ///< -Σ bias Q': value from which the sum of biased codes starts
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

/// q: [G, D] of one row. Heads beyond G are zero.
template <class Keys, int D, int N>
KVRT_DEVICE void load_query(const float* q, int n_heads, QueryFragments<D, N>& f) {
  const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
  KVRT_UNROLL
  for (int n = 0; n < N; ++n) {
    const bool is_head = 8 * n + g < n_heads;
    const float* head = q + static_cast<std::int64_t>(is_head ? 8 * n + g : 0) * D;
    float largest = 0;
    for (int c = 0; c < D / 4; ++c) {
      const float x = is_head ? cuda::load(head + quad * (D / 4) + c) : 0.0f;
      largest = fmaxf(largest, fabsf(x));
    }
    largest = fmaxf(largest, cuda::shuffle_xor(largest, 1));
    largest = fmaxf(largest, cuda::shuffle_xor(largest, 2));
    const float guard = query_guard(largest);
    float sum = 0, bias = 0;
    KVRT_UNROLL
    for (int step = 0; step < D / 16; ++step) {
      KVRT_UNROLL
      for (int reg = 0; reg < 2; ++reg) {
        const float x0 = is_head ? cuda::load(head + Keys::channel(quad, step, reg, 0)) * guard : 0.0f;
        const float x1 = is_head ? cuda::load(head + Keys::channel(quad, step, reg, 1)) * guard : 0.0f;
        const std::uint32_t pair = Keys::kIsBf16 ? cuda::pack_bf16(x0, x1) : cuda::pack_f16(x0, x1);
        f.b[n][step][reg] = pair;
        if (!Keys::kIsBf16) {
          const float rounded = cuda::low_f16(pair) + cuda::high_f16(pair);
          sum += rounded;
          bias += rounded * Keys::bias(reg);
        }
      }
    }
    sum = quad_sum(sum), bias = quad_sum(bias);
    const float scale = inverse_of_power(guard);
    KVRT_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int source = 4 * (2 * quad + j);
      f.scale[n][j] = cuda::shuffle(scale, source);
      f.sum[n][j] = f.scale[n][j] * cuda::shuffle(sum, source);
      f.start[n][j] = -cuda::shuffle(bias, source);
    }
  }
}

}  // namespace kvrt

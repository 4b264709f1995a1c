#pragma once
// Collective operations of one warp. Always all 32 lanes: a call that some lanes skip is an error (the executor reports it).

#include "kernels/codec/half.h"
#include "kernels/cuda/portable.h"

namespace kvrt::cuda {

KVRT_DEVICE int lane_index() { return thread_index() % kWarp; }
KVRT_DEVICE int warp_index() { return thread_index() / kWarp; }

/// Value of the lane whose index differs in the bits of `mask`.
KVRT_DEVICE float shuffle_xor(float value, int mask) {
#if defined(__CUDACC__)
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
#else
  const std::uint32_t word = f32_bits(value);
  return f32_from_bits(executor::exchange("shuffle_xor", &word, 1)[(lane_index() ^ mask) * executor::kMaxWords]);
#endif
}

/// Value of lane `source`, which may differ from lane to lane.
KVRT_DEVICE float shuffle(float value, int source) {
#if defined(__CUDACC__)
  return __shfl_sync(0xFFFFFFFFu, value, source);
#else
  const std::uint32_t word = f32_bits(value);
  return f32_from_bits(executor::exchange("shuffle", &word, 1)[(source % kWarp) * executor::kMaxWords]);
#endif
}

/// Waits for the other lanes; what they wrote to memory before is seen behind it.
KVRT_DEVICE void warp_barrier() {
#if defined(__CUDACC__)
  __syncwarp();
#else
  executor::exchange("warp_barrier", nullptr, 0);
#endif
}

/// True if `predicate` holds in any lane.
KVRT_DEVICE bool warp_any(bool predicate) {
#if defined(__CUDACC__)
  return __any_sync(0xFFFFFFFFu, predicate);
#else
  const std::uint32_t word = predicate ? 1u : 0u;
  const std::uint32_t* words = executor::exchange("any", &word, 1);
  bool result = false;
  for (int i = 0; i < kWarp; ++i) result |= words[i * executor::kMaxWords] != 0;
  return result;
#endif
}

}  // namespace kvrt::cuda

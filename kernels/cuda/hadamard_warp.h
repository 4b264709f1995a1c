#pragma once
// Hadamard rotation of a row in shared memory by one warp: the operations of codec/hadamard.h on every value, in their order.

#include "kernels/codec/hadamard_order.h"
#include "kernels/cuda/warp.h"

namespace kvrt::cuda {

/// x <- H x, [n]. rows: those of the Paley factor (transposed ones undo). scale: hadamard_scale(). spare: [n]. All lanes; a barrier
/// stands before the first read and behind the last write.
KVRT_DEVICE void hadamard_rotate(const HadamardOrder& order, const std::uint64_t* rows, float scale, float* x, int n, float* spare) {
  for (int step = 1; step < order.power; step *= 2) {
    warp_barrier();
    for (int pair = lane_index(); pair < n / 2; pair += kWarp) {
      const int i = pair / step * (2 * step) + pair % step;
      const float a = x[i], b = x[i + step];
      x[i] = a + b, x[i + step] = a - b;
    }
  }
  if (order.base > 1) {
    warp_barrier();
    for (int at = lane_index(); at < n; at += kWarp) {
      const int begin = at / order.size * order.size, i = (at - begin) / order.power, c = (at - begin) % order.power;
      const std::uint64_t row = rows[i];
      float sum = (row & 1u) ? -x[begin + c] : x[begin + c];
      for (int j = 1; j < order.base; ++j) sum += ((row >> j) & 1u) ? -x[begin + j * order.power + c] : x[begin + j * order.power + c];
      spare[at] = sum;
    }
    warp_barrier();
    for (int at = lane_index(); at < n; at += kWarp) x[at] = spare[at];
  }
  warp_barrier();
  for (int i = lane_index(); i < n; i += kWarp) x[i] *= scale;
  warp_barrier();
}

}  // namespace kvrt::cuda

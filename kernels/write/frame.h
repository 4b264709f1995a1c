#pragma once
// Between a row in the unit's frame (model channels, after or before RoPE) and the row that the page codec stores: non-finite to 0,
// bf16 rounding, llama.cpp's channel order, center, smooth, had, in this order (KERNELS.md 4.1).

#include <cstdint>

#include "kernels/codec/page_codec.h"
#include "kernels/write/fake_quant_job.h"

namespace kvrt {

/// x of one head, [D] -> the encoder's input y, [D].
inline void to_frame(const FakeQuantJob& job, int head, const float* x, float* y, EncodeCounters* counters) {
  const int n = job.head_dim;
  for (int p = 0; p < n; ++p) {
    const int d = job.block_order ? job.block_order[p] : p;
    float v = finite_or_zero(x[d], counters);  // before any sum, so that one NaN stays one value
    if (job.round_input_to_bf16) v = bf16_to_f32(f32_to_bf16_finite(v));
    if (job.mean) v = v - job.mean[head * n + d];
    y[p] = job.smooth ? v / job.smooth[head * n + d] : v;
  }
  if (job.had.size) hadamard_rotate(job.had, y, n, false);
}

/// Decoded values y, [D], which are overwritten -> the model's own coordinates, [D]. out may not overlap y.
inline void from_frame(const FakeQuantJob& job, int head, float* y, float* out) {
  const int n = job.head_dim;
  if (job.had.size) hadamard_rotate(job.had, y, n, true);
  for (int p = 0; p < n; ++p) {
    const int d = job.block_order ? job.block_order[p] : p;
    const float v = job.smooth ? y[p] * job.smooth[head * n + d] : y[p];
    out[d] = job.mean ? v + job.mean[head * n + d] : v;
  }
}

}  // namespace kvrt

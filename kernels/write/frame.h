#pragma once
// Between a row in the unit's frame (model channels, after or before RoPE) and the row that the page codec stores: non-finite to 0,
// bf16 rounding, llama.cpp's channel order, center, smooth, had or lowrank, in this order (KERNELS.md 4.1).

#include <cstdint>
#include <vector>

#include "kernels/codec/low_rank.h"
#include "kernels/codec/page_codec.h"
#include "kernels/write/fake_quant_job.h"

namespace kvrt {

/// Constants: FakeQuantJob, or the same fields on a device (core/device_layer.h).

/// Place p of the encoder's input y before `had`, from x of one head, [D].
template <class Constants>
KVRT_HOST_DEVICE inline float frame_value(const Constants& job, int head, const float* x, int p, EncodeCounters* counters) {
  const int n = job.head_dim, d = job.block_order ? job.block_order[p] : p;
  float v = finite_or_zero(x[d], counters);  // before any sum, so that one NaN stays one value
  if (job.round_input_to_bf16) v = bf16_to_f32(f32_to_bf16_finite(v));
  if (job.mean) v = v - job.mean[head * n + d];
  return job.smooth ? v / job.smooth[head * n + d] : v;
}
/// Channel of place p, and its value from y after `had` was undone.
template <class Constants>
KVRT_HOST_DEVICE inline float unframed_value(const Constants& job, int head, const float* y, int p, int* channel) {
  const int n = job.head_dim, d = *channel = job.block_order ? job.block_order[p] : p;
  const float v = job.smooth ? y[p] * job.smooth[head * n + d] : y[p];
  return job.mean ? v + job.mean[head * n + d] : v;
}

/// x of one head, [D] -> the encoder's input y, [job.width].
inline void to_frame(const FakeQuantJob& job, int head, const float* x, float* y, EncodeCounters* counters) {
  if (job.basis_in) {
    std::vector<float> row(static_cast<std::size_t>(job.head_dim));
    for (int p = 0; p < job.head_dim; ++p) row[static_cast<std::size_t>(p)] = frame_value(job, head, x, p, counters);
    return low_rank_product(job.basis_in + std::int64_t{head} * job.head_dim * job.width, job.head_dim, job.width, row.data(), y);
  }
  for (int p = 0; p < job.head_dim; ++p) y[p] = frame_value(job, head, x, p, counters);
  if (job.had.size) hadamard_rotate(job.had, y, job.head_dim, false);
}

/// Decoded values y, [job.width], which are overwritten -> the model's own coordinates, [D]. out may not overlap y.
inline void from_frame(const FakeQuantJob& job, int head, float* y, float* out) {
  if (job.basis) {
    low_rank_product(job.basis + std::int64_t{head} * job.head_dim * job.width, job.width, job.head_dim, y, out);
    y = out;
  }
  if (job.had.size) hadamard_rotate(job.had, y, job.head_dim, true);
  for (int p = 0; p < job.head_dim; ++p) {
    int d;
    const float v = unframed_value(job, head, y, p, &d);
    out[d] = v;
  }
}

}  // namespace kvrt

#pragma once
// One value of the rows of inputs and outputs ([rows, H, D], any stride), on hosts and devices.

#include <cstdint>
#include <cstring>

#include "kernels/codec/half.h"
#include "kernels/kvrt.h"

namespace kvrt {

/// Byte offset of channel 0 of (row, head).
KVRT_HOST_DEVICE inline std::int64_t row_offset(kvrt_dtype dtype, std::int64_t row_stride, std::int64_t head_stride, std::int64_t n_heads, int head_dim,
                                                std::int64_t row, std::int64_t head) {
  const std::int64_t width = static_cast<std::int64_t>(head_dim) * (dtype == KVRT_F32 ? 4 : 2);
  const std::int64_t per_head = head_stride ? head_stride : width, per_row = row_stride ? row_stride : n_heads * width;
  return row * per_row + head * per_head;
}

/// Value d of a row that starts at p, which is aligned as its type is.
KVRT_HOST_DEVICE inline float load_value(kvrt_dtype dtype, const std::uint8_t* p, int d) {
  if (dtype == KVRT_F32) {
    float x;
    std::memcpy(&x, __builtin_assume_aligned(p + 4 * static_cast<std::int64_t>(d), 4), sizeof x);
    return x;
  }
  std::uint16_t h;
  std::memcpy(&h, __builtin_assume_aligned(p + 2 * static_cast<std::int64_t>(d), 2), sizeof h);
  return dtype == KVRT_F16 ? f16_to_f32(h) : bf16_to_f32(h);
}
KVRT_HOST_DEVICE inline void store_value(kvrt_dtype dtype, std::uint8_t* p, int d, float x) {
  if (dtype == KVRT_F32) {
    std::memcpy(__builtin_assume_aligned(p + 4 * static_cast<std::int64_t>(d), 4), &x, sizeof x);
    return;
  }
  const std::uint16_t h = dtype == KVRT_F16 ? f32_to_f16_rne(x) : f32_to_bf16(x);
  std::memcpy(__builtin_assume_aligned(p + 2 * static_cast<std::int64_t>(d), 2), &h, sizeof h);
}

}  // namespace kvrt

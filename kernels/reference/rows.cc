#include <cstring>

#include "kernels/codec/half.h"
#include "kernels/reference/reference.h"

namespace kvrt {
namespace {

std::int64_t offset_of(kvrt_dtype dtype, std::int64_t row_stride, std::int64_t head_stride, std::int64_t n_heads, int head_dim, std::int64_t row, std::int64_t head) {
  const std::int64_t width = head_dim * (dtype == KVRT_F32 ? 4 : 2);
  const std::int64_t per_head = head_stride ? head_stride : width, per_row = row_stride ? row_stride : n_heads * width;
  return row * per_row + head * per_head;
}

}  // namespace

void load_row(const kvrt_rows& rows, std::int64_t n_heads, int head_dim, std::int64_t row, std::int64_t head, float* out) {
  const auto* from = static_cast<const std::uint8_t*>(rows.data) + offset_of(rows.dtype, rows.row_stride, rows.head_stride, n_heads, head_dim, row, head);
  if (rows.dtype == KVRT_F32) {
    std::memcpy(out, from, static_cast<std::size_t>(head_dim) * sizeof(float));
    return;
  }
  for (int d = 0; d < head_dim; ++d) {
    std::uint16_t h;
    std::memcpy(&h, from + 2 * d, sizeof h);
    out[d] = rows.dtype == KVRT_F16 ? f16_to_f32(h) : bf16_to_f32(h);
  }
}

void store_row(const kvrt_rows_out& rows, std::int64_t n_heads, int head_dim, std::int64_t row, std::int64_t head, const float* x) {
  auto* to = static_cast<std::uint8_t*>(rows.data) + offset_of(rows.dtype, rows.row_stride, rows.head_stride, n_heads, head_dim, row, head);
  if (rows.dtype == KVRT_F32) {
    std::memcpy(to, x, static_cast<std::size_t>(head_dim) * sizeof(float));
    return;
  }
  for (int d = 0; d < head_dim; ++d) {
    const std::uint16_t h = rows.dtype == KVRT_F16 ? f32_to_f16_rne(x[d]) : f32_to_bf16(x[d]);
    std::memcpy(to + 2 * d, &h, sizeof h);
  }
}

}  // namespace kvrt

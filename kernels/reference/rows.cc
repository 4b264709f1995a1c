#include "kernels/core/rows.h"

#include "kernels/reference/reference.h"

namespace kvrt {

void load_row(const kvrt_rows& rows, std::int64_t n_heads, int head_dim, std::int64_t row, std::int64_t head, float* out) {
  const auto* from = static_cast<const std::uint8_t*>(rows.data) + row_offset(rows.dtype, rows.row_stride, rows.head_stride, n_heads, head_dim, row, head);
  for (int d = 0; d < head_dim; ++d) out[d] = load_value(rows.dtype, from, d);
}

void store_row(const kvrt_rows_out& rows, std::int64_t n_heads, int head_dim, std::int64_t row, std::int64_t head, const float* x) {
  auto* to = static_cast<std::uint8_t*>(rows.data) + row_offset(rows.dtype, rows.row_stride, rows.head_stride, n_heads, head_dim, row, head);
  for (int d = 0; d < head_dim; ++d) store_value(rows.dtype, to, d, x[d]);
}

}  // namespace kvrt

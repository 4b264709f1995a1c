#pragma once
// The two linear maps of lowrank<r> (METHODS.md 5.6): a row less its mean to r coefficients, which the format stores, and back.
// Legend: D head_dim, r rank.

#include <cstdint>

namespace kvrt {

/// out[o] = sum of x[i] matrix[i * n_out + o] over i. x: [n_in], out: [n_out], no overlap.
/// Exact: i ascends, and each product is rounded before it is added, so that all backends agree bit for bit.
inline void low_rank_product(const float* matrix, int n_in, int n_out, const float* x, float* out) {
  for (int o = 0; o < n_out; ++o) {
    float sum = 0.0f;
    for (int i = 0; i < n_in; ++i) sum = sum + x[i] * matrix[static_cast<std::int64_t>(i) * n_out + o];
    out[o] = sum;
  }
}

}  // namespace kvrt

#include "libcalib/sens/fisher.h"

#include <algorithm>

#include "libcalib/sens/wide_clones.h"

namespace calib::sens {
namespace {

constexpr std::int64_t kTokensPerTask = 64;

CALIB_WIDE_CLONES void vector_products(const float* __restrict g, const float* __restrict delta, std::int64_t d, double* square_of_sum,
                                       double* sum_of_squares) {
  constexpr int kLanes = 16;
  float dot[kLanes] = {}, squares[kLanes] = {};
  std::int64_t c = 0;
  for (; c + kLanes <= d; c += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float x = g[c + l] * delta[c + l];
      dot[l] += x;
      squares[l] += x * x;
    }
  double a = 0, b = 0;
  for (int l = 0; l < kLanes; ++l) a += static_cast<double>(dot[l]), b += static_cast<double>(squares[l]);
  for (; c < d; ++c) {
    const double x = static_cast<double>(g[c]) * static_cast<double>(delta[c]);
    a += x;
    b += x * x;
  }
  *square_of_sum += a * a;
  *sum_of_squares += b;
}

}  // namespace

void add_fisher_rows(const FisherShape& shape, const float* g, const float* delta, double* vec, double* diagonal, ThreadPool& pool) {
  const std::int64_t row = shape.n_heads * shape.head_dim;
  const double scale = 0.5 / static_cast<double>(shape.n_draws);
  pool.parallel_for((shape.n_tokens + kTokensPerTask - 1) / kTokensPerTask, [&](std::int64_t task) {
    for (std::int64_t j = task * kTokensPerTask; j < std::min(shape.n_tokens, (task + 1) * kTokensPerTask); ++j) {
      double a = 0, b = 0;
      for (std::int64_t r = 0; r < shape.n_draws; ++r)
        for (std::int64_t h = 0; h < shape.n_heads; ++h)
          vector_products(g + (j * shape.n_draws + r) * row + h * shape.head_dim, delta + j * row + h * shape.head_dim, shape.head_dim, &a, &b);
      vec[j] += scale * a;
      diagonal[j] += scale * b;
    }
  });
}

}  // namespace calib::sens

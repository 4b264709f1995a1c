#include "libcalib/sens/fisher.h"

#include <algorithm>

#include "libcalib/sens/wide_clones.h"

namespace calib::sens {
namespace {

constexpr std::int64_t kTokensPerTask = 64;

struct Products {
  double dot = 0, squares = 0;
};

CALIB_WIDE_CLONES Products vector_products(const float* __restrict g, const float* __restrict delta, std::int64_t d) {
  constexpr int kLanes = 16;
  float dot[kLanes] = {}, squares[kLanes] = {};
  std::int64_t c = 0;
  for (; c + kLanes <= d; c += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float x = g[c + l] * delta[c + l];
      dot[l] += x;
      squares[l] += x * x;
    }
  Products out;
  for (int l = 0; l < kLanes; ++l) out.dot += static_cast<double>(dot[l]), out.squares += static_cast<double>(squares[l]);
  for (; c < d; ++c) {
    const double x = static_cast<double>(g[c]) * static_cast<double>(delta[c]);
    out.dot += x;
    out.squares += x * x;
  }
  return out;
}

}  // namespace

void add_fisher_rows(const FisherShape& shape, const float* g, const float* delta, FisherRows* rows, ThreadPool& pool) {
  const std::int64_t row = shape.n_heads * shape.head_dim, n_draws = shape.n_draws;
  const double scale = 0.5 / static_cast<double>(n_draws);
  const std::int64_t n_tasks = (shape.n_tokens + kTokensPerTask - 1) / kTokensPerTask;
  std::vector<double> direction(static_cast<std::size_t>(n_tasks * n_draws));  // by task, so that the order of sums is fixed
  pool.parallel_for(n_tasks, [&](std::int64_t task) {
    double* const along = direction.data() + task * n_draws;
    for (std::int64_t j = task * kTokensPerTask; j < std::min(shape.n_tokens, (task + 1) * kTokensPerTask); ++j) {
      double a = 0, b = 0;
      for (std::int64_t r = 0; r < n_draws; ++r)
        for (std::int64_t h = 0; h < shape.n_heads; ++h) {
          const Products x = vector_products(g + (j * n_draws + r) * row + h * shape.head_dim, delta + j * row + h * shape.head_dim, shape.head_dim);
          a += x.dot * x.dot;
          b += x.squares;
          along[r] += x.dot;
        }
      rows->vec[static_cast<std::size_t>(j)] += scale * a;
      rows->diagonal[static_cast<std::size_t>(j)] += scale * b;
    }
  });
  for (std::int64_t i = 0; i < n_tasks * n_draws; ++i) rows->direction[static_cast<std::size_t>(i % n_draws)] += direction[static_cast<std::size_t>(i)];
}

}  // namespace calib::sens

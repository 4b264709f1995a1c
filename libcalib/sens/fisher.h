#pragma once
// What an error of cached vectors costs by the Fisher information: METHODS.md 7's fisher_vec, fisher and fisher_dir. No Torch.

#include <cstdint>
#include <vector>

#include "libcalib/base/thread_pool.h"

namespace calib::sens {

struct FisherShape {
  std::int64_t n_tokens = 0, n_draws = 0, n_heads = 0, head_dim = 0;
};

/// Sums over a document of T tokens, added to by add_fisher_rows().
struct FisherRows {
  FisherRows() = default;
  explicit FisherRows(const FisherShape& shape)
      : vec(static_cast<std::size_t>(shape.n_tokens)), diagonal(vec.size()), direction(static_cast<std::size_t>(shape.n_draws)) {}
  std::vector<double> vec;        ///< [T] 1/(2R) sum_{r,h} (g_rjh . delta_jh)^2
  std::vector<double> diagonal;   ///< [T] 1/(2R) sum_{r,h,c} (g delta)^2
  std::vector<double> direction;  ///< [R] sum_{j,h} g_rjh . delta_jh
};

/// g: [T, R, H, D] gradients of R label draws; delta: [T, H, D]; both in one frame. Products fp32 inside a vector, sums double.
/// Independent of the pool's size.
void add_fisher_rows(const FisherShape& shape, const float* g, const float* delta, FisherRows* rows, ThreadPool& pool);

}  // namespace calib::sens

#pragma once
// What an error of cached vectors costs by the Fisher information: rows of METHODS.md 7's fisher_vec and fisher. No Torch.

#include <cstdint>

#include "libcalib/base/thread_pool.h"

namespace calib::sens {

struct FisherShape {
  std::int64_t n_tokens = 0, n_draws = 0, n_heads = 0, head_dim = 0;
};

/// Adds, for every token j, 1/(2R) sum_{r,h} (g_rjh . delta_jh)^2 to vec[j] and 1/(2R) sum_{r,h,c} (g delta)^2 to diagonal[j].
/// g: [T, R, H, D] gradients of R label draws; delta: [T, H, D]; both in one frame. Products fp32 inside a vector, sums double.
/// Independent of the pool's size.
void add_fisher_rows(const FisherShape& shape, const float* g, const float* delta, double* vec, double* diagonal, ThreadPool& pool);

}  // namespace calib::sens

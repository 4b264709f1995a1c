#pragma once
// Tokens drawn from the recorded distribution of each channel: what fits that need whole groups are made on, since statistics keep no
// tokens. Channels and tokens are independent of each other, which real ones are not: what is fitted on them is judged on real text.

#include <cstdint>
#include <vector>

#include "libcalib/stats/tensor_stats.h"

namespace calib::quant {

/// [n_tokens, H, D]. Every channel holds its quantiles at (i + 1/2) / n_tokens, shuffled: the same for the same statistics and seed.
std::vector<float> draw_tokens(const stats::TensorStats& tensor, std::int64_t n_tokens, std::uint64_t seed);

}  // namespace calib::quant

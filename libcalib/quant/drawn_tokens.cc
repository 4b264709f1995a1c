#include "libcalib/quant/drawn_tokens.h"

#include <utility>

#include "libcalib/base/rng.h"

namespace calib::quant {

std::vector<float> draw_tokens(const stats::TensorStats& tensor, std::int64_t n_tokens, std::uint64_t seed) {
  const std::size_t n = static_cast<std::size_t>(n_tokens), row = tensor.n_channels();
  std::vector<double> ranks;
  for (std::size_t i = 0; i < n; ++i) ranks.push_back((static_cast<double>(i) + 0.5) / static_cast<double>(n));
  std::vector<float> tokens(n * row);
  for (std::size_t c = 0; c < row; ++c) {
    std::vector<double> values = tensor.quantiles(static_cast<int>(c) / tensor.head_dim, static_cast<int>(c) % tensor.head_dim, ranks);
    Rng rng = Rng::for_item(seed, c);
    for (std::size_t i = n; i > 1; --i) std::swap(values[i - 1], values[rng.below(i)]);
    for (std::size_t t = 0; t < n; ++t) tokens[t * row + c] = static_cast<float>(values[t]);
  }
  return tokens;
}

}  // namespace calib::quant

#include "libcalib/stats/covariance.h"

#include <algorithm>

#include <Eigen/Eigenvalues>

#include "libcalib/base/error.h"
#include "libcalib/stats/tile_kernels.h"

namespace calib::stats {

GramAccumulator::GramAccumulator(int n_matrices, int dim, bool centred, int rows_per_token)
    : n_matrices_(n_matrices), dim_(dim), rows_per_token_(rows_per_token), centred_(centred) {
  CALIB_CHECK(n_matrices > 0 && dim > 0 && rows_per_token > 0);
  const auto n = static_cast<std::size_t>(n_matrices), d = static_cast<std::size_t>(dim);
  n_rows_.assign(n, 0);
  mean_.assign(n * d, 0.0);
  sum_.assign(n * d * d, 0.0);
}

void GramAccumulator::add_rows(int matrix, const float* x, std::int64_t n_rows, std::int64_t row_stride) {
  const auto d = static_cast<std::size_t>(dim_);
  Tile tile(dim_);
  std::vector<float> shift(d);
  std::vector<double> mean(d), gram(d * d), residual(static_cast<std::size_t>(tile.padded_dim()));
  std::vector<float> low(residual.size()), high(residual.size());
  for (std::int64_t first = 0; first < n_rows; first += kTileRows) {
    const int n = static_cast<int>(std::min<std::int64_t>(kTileRows, n_rows - first));
    const float* rows = x + first * row_stride;
    std::fill(gram.begin(), gram.end(), 0.0);
    tile.load(rows, n, row_stride);
    if (centred_) {
      // Subtract the tile's mean rounded to fp32, then correct for what the rounding left.
      tile_sum_extrema(tile, residual.data(), low.data(), high.data());
      for (std::size_t c = 0; c < d; ++c) shift[c] = static_cast<float>(residual[c] / n);
      tile.load(rows, n, row_stride, shift.data());
      tile_sum_extrema(tile, residual.data(), low.data(), high.data());
      for (std::size_t c = 0; c < d; ++c) mean[c] = static_cast<double>(shift[c]) + residual[c] / n;
    }
    tile_gram_upper(tile, gram.data());
    if (centred_)
      for (std::size_t i = 0; i < d; ++i)
        for (std::size_t j = i; j < d; ++j) gram[i * d + j] -= residual[i] * residual[j] / n;
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < i; ++j) gram[i * d + j] = gram[j * d + i];
    merge_one(matrix, n, mean.data(), gram.data());
  }
}

void GramAccumulator::merge_one(int m, std::int64_t n_rows, const double* mean, const double* sum) {
  if (n_rows == 0) return;
  const auto d = static_cast<std::size_t>(dim_), at = static_cast<std::size_t>(m);
  double* own_mean = mean_.data() + at * d;
  double* own_sum = sum_.data() + at * d * d;
  const double na = static_cast<double>(n_rows_[at]), nb = static_cast<double>(n_rows);
  const double weight = na * nb / (na + nb);
  if (centred_) {
    std::vector<double> delta(d);
    for (std::size_t i = 0; i < d; ++i) delta[i] = mean[i] - own_mean[i];
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j) own_sum[i * d + j] += sum[i * d + j] + weight * (delta[i] * delta[j]);
    for (std::size_t i = 0; i < d; ++i) own_mean[i] += delta[i] * (nb / (na + nb));
  } else {
    for (std::size_t i = 0; i < d * d; ++i) own_sum[i] += sum[i];
  }
  n_rows_[at] += n_rows;
}

void GramAccumulator::merge(const GramAccumulator& other) {
  CALIB_CHECK(n_matrices_ == other.n_matrices_ && dim_ == other.dim_ && centred_ == other.centred_ &&
              rows_per_token_ == other.rows_per_token_);
  const auto d = static_cast<std::size_t>(dim_);
  for (int m = 0; m < n_matrices_; ++m) {
    const auto at = static_cast<std::size_t>(m);
    merge_one(m, other.n_rows_[at], other.mean_.data() + at * d, other.sum_.data() + at * d * d);
  }
}

std::vector<double> GramAccumulator::matrix(int m) const {
  const auto d = static_cast<std::size_t>(dim_);
  const double* from = sum_.data() + static_cast<std::size_t>(m) * d * d;
  std::vector<double> out(from, from + d * d);
  const double tokens = n_tokens(m);
  for (double& value : out) value = tokens > 0 ? value / tokens : 0.0;
  return out;
}

std::vector<double> GramAccumulator::eigenvalues(int m) const {
  const std::vector<double> values = matrix(m);
  const Eigen::Map<const Eigen::MatrixXd> map(values.data(), dim_, dim_);
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(map, Eigen::EigenvaluesOnly);
  if (solver.info() != Eigen::Success)
    fail(ErrorKind::kNumeric, "eigenvalues", "the symmetric solver did not converge on a {} x {} matrix", dim_, dim_);
  std::vector<double> out(solver.eigenvalues().data(), solver.eigenvalues().data() + dim_);
  std::reverse(out.begin(), out.end());
  for (double& value : out) value = std::max(value, 0.0);
  return out;
}

void GramAccumulator::set_state(std::vector<std::int64_t> n_rows, std::vector<double> mean, std::vector<double> sum) {
  CALIB_CHECK(n_rows.size() == n_rows_.size() && mean.size() == mean_.size() && sum.size() == sum_.size());
  n_rows_ = std::move(n_rows);
  mean_ = std::move(mean);
  sum_ = std::move(sum);
}

}  // namespace calib::stats

#pragma once
// Sums of outer products x x^T, plain or centred, as a monoid.
// Legend: N matrices (heads), D head_dim.

#include <cstdint>
#include <vector>

namespace calib::stats {

/// N independent D x D Gram matrices. fp32 products within a tile of 256 rows, double accumulation over tiles.
class GramAccumulator {
 public:
  GramAccumulator() = default;
  /// `centred` subtracts the running mean (exactly, by Chan's update over tiles). `rows_per_token` rows make up one token
  /// (the query heads of a GQA group), and matrix() divides by tokens.
  GramAccumulator(int n_matrices, int dim, bool centred, int rows_per_token = 1);

  int n_matrices() const { return n_matrices_; }
  int dim() const { return dim_; }
  bool centred() const { return centred_; }
  int rows_per_token() const { return rows_per_token_; }
  std::int64_t n_rows(int matrix) const { return n_rows_[static_cast<std::size_t>(matrix)]; }
  double n_tokens(int matrix) const { return static_cast<double>(n_rows(matrix)) / rows_per_token_; }

  /// Adds rows x[r] of D floats, `row_stride` floats apart. Different matrices may be fed from different threads.
  /// Requires: finite values.
  void add_rows(int matrix, const float* x, std::int64_t n_rows, std::int64_t row_stride);
  /// Requires: equal shapes. To 1e-12 relative of the largest diagonal element; associative within that bound.
  void merge(const GramAccumulator& other);

  /// [D, D] row-major: sum over rows (of the centred rows) of x x^T, divided by the number of tokens; zeros if empty.
  std::vector<double> matrix(int m) const;
  /// Eigenvalues of matrix(m), descending; negative rounding residue clamped to 0.
  std::vector<double> eigenvalues(int m) const;
  /// Mean row of one matrix; zeros unless centred.
  const double* mean(int m) const { return mean_.data() + static_cast<std::size_t>(m) * static_cast<std::size_t>(dim_); }

  /// The state, for files: n_rows [N], mean [N, D], sums [N, D, D] (not divided).
  const std::vector<std::int64_t>& rows_state() const { return n_rows_; }
  const std::vector<double>& mean_state() const { return mean_; }
  const std::vector<double>& sum_state() const { return sum_; }
  /// Throws kInternal unless the shapes are those of the constructor.
  void set_state(std::vector<std::int64_t> n_rows, std::vector<double> mean, std::vector<double> sum);

 private:
  void merge_one(int m, std::int64_t n_rows, const double* mean, const double* sum);

  int n_matrices_ = 0, dim_ = 0, rows_per_token_ = 1;
  bool centred_ = false;
  std::vector<std::int64_t> n_rows_;
  std::vector<double> mean_, sum_;
};

}  // namespace calib::stats

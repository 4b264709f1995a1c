#pragma once
// INTERNAL to stats/: the loops over one tile of rows that all statistics spend their time in.
// The widest vectors of the CPU are picked once at run time. Every channel is summed in row order with separate multiply
// and add, so results do not depend on the vector width.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace calib::stats {

inline constexpr int kTileRows = 256;
inline constexpr int kLanes = 16;  ///< rows are padded with zeros to a multiple of this many floats

/// One tile, copied to a dense zero-padded buffer.
class Tile {
 public:
  explicit Tile(int dim);
  /// Copies up to kTileRows rows of `dim` floats, `row_stride` apart, minus `shift` (may be null).
  void load(const float* x, int n_rows, std::int64_t row_stride, const float* shift = nullptr);

  int n_rows() const { return n_rows_; }
  int dim() const { return dim_; }
  int padded_dim() const { return padded_dim_; }
  std::size_t row_stride() const { return row_stride_; }
  const float* data() const { return data_; }

 private:
  int dim_, padded_dim_, n_rows_ = 0;
  std::size_t row_stride_;
  std::vector<float> storage_;
  float* data_;
};

/// Per channel: sum (double), smallest and largest value. Outputs: [padded_dim]. A non-finite value makes its sum non-finite.
void tile_sum_extrema(const Tile& tile, double* sum, float* min, float* max);

/// Per channel: sums of (x - mean)^k for k = 1..4, doubles. Outputs: [padded_dim].
void tile_power_sums(const Tile& tile, const double* mean, double* s1, double* s2, double* s3, double* s4);

/// Adds x^T x (fp32 products and sums over the tile) to `sum` [dim, dim], upper triangle only.
void tile_gram_upper(const Tile& tile, double* sum);

/// Turns n >= 1 scores into their softmax, in place: fp32 exponential (2e-7 relative), sum in double over short fp32 runs. NaN or
/// +infinity among the scores makes the whole row NaN.
void row_softmax(float* x, std::size_t n);

/// sum -p ln p (fp32 logarithm, 1e-7 relative) and sum p^2 over n values >= 0.
void row_entropy(const float* p, std::size_t n, double* entropy, double* sum_squares);

}  // namespace calib::stats

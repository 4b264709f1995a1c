#pragma once
// Bases of lowrank<r> (METHODS.md 5.6): the r directions that hold most of what rows cost where they are left out.
// Legend: D head_dim, r rank. Matrices are row-major.

#include <span>
#include <vector>

namespace calib::quant {

/// One head. in x out is the identity [r, r].
struct LowRankBasis {
  std::vector<float> in;      ///< [D, r]: coefficients = (row - mean) in
  std::vector<float> out;     ///< [r, D]: row = mean + coefficients out
  double relative_error = 0;  ///< of rows without quantisation, weighted by the moment
};

/// With S = (moment + 1e-4 mean diagonal I)^(1/2) over the mean diagonal, and U the top eigenvectors of S covariance S: in = S U H^T,
/// out = H U^T S^-1, where H spreads the coefficients (hadamard_order of the rank, rows signed so that its first column is positive; the identity where there
/// is none). moment: [dim, dim] what an error costs; all zeros counts as the identity. covariance: [dim, dim] of the rows. Both symmetric, positive
/// semi-definite: throws kNumeric naming the one that is not. Requires: 1 <= rank <= dim.
LowRankBasis low_rank_basis(const std::vector<double>& moment, const std::vector<double>& covariance, int dim, int rank);

/// sqrt(1 - share of the first `rank`) of eigenvalues in descending order; 0 where all are 0.
double low_rank_error(std::span<const double> eigenvalues, int rank);

}  // namespace calib::quant

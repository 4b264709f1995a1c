#pragma once
// INTERNAL to quant/: eigenvectors and Hadamard matrices, as Eigen matrices.

#include <Eigen/Core>

namespace calib::quant {

/// Of a symmetric positive semi-definite matrix. `values` descending, what rounding left below 0 clamped; the columns of `vectors` belong
/// to them, each signed so that its largest entry is positive, which no solver promises.
struct EigenBasis {
  Eigen::VectorXd values;
  Eigen::MatrixXd vectors;
};
/// Throws kNumeric at `where`, naming the matrix, if it is not positive semi-definite.
EigenBasis eigen_basis(const Eigen::MatrixXd& m, const char* where, const char* name);

/// Orthonormal, the rotation of `had` (hadamard_order() of n; the identity where there is none). Rows are signed so that the first
/// direction of a block adds the same to each of its coefficients: of the direction that varies most int* then takes that out with lo,
/// and the range is that of the others. Columns of Sylvester's matrices are so, Paley's are not.
Eigen::MatrixXd hadamard_matrix(int n);

}  // namespace calib::quant

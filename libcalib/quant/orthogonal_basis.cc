#include "libcalib/quant/orthogonal_basis.h"

#include <cmath>
#include <vector>

#include <Eigen/Eigenvalues>

#include "kernels/codec/hadamard.h"
#include "libcalib/base/error.h"

namespace calib::quant {

EigenBasis eigen_basis(const Eigen::MatrixXd& m, const char* where, const char* name) {
  Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver;
  if (m.allFinite()) solver.compute(m);
  // Rounding may leave eigenvalues of rank-deficient sums a little below 0.
  if (!m.allFinite() || solver.info() != Eigen::Success || solver.eigenvalues()(0) < -1e-6 * std::fabs(solver.eigenvalues()(m.rows() - 1)))
    fail(ErrorKind::kNumeric, where, "the {} is not positive semi-definite", name);
  EigenBasis out{solver.eigenvalues().reverse().cwiseMax(0.0), solver.eigenvectors().rowwise().reverse()};
  for (Eigen::Index j = 0; j < m.rows(); ++j) {
    Eigen::Index largest = 0;
    out.vectors.col(j).cwiseAbs().maxCoeff(&largest);
    if (out.vectors(largest, j) < 0) out.vectors.col(j) *= -1;
  }
  return out;
}

Eigen::MatrixXd hadamard_matrix(int n) {
  Eigen::MatrixXd h = Eigen::MatrixXd::Identity(n, n);
  const kvrt::HadamardOrder order = kvrt::hadamard_order(n);
  if (order.size == 0) return h;
  const double scale = 1 / std::sqrt(static_cast<double>(order.size));
  for (int j = 0; j < n; ++j) {
    std::vector<float> column(static_cast<std::size_t>(n), 0.0f);
    column[static_cast<std::size_t>(j)] = 1.0f;
    kvrt::hadamard_rotate(order, column.data(), n, false);
    for (int i = 0; i < n; ++i) h(i, j) = column[static_cast<std::size_t>(i)] == 0 ? 0.0 : std::copysign(scale, column[static_cast<std::size_t>(i)]);
  }
  for (int i = 0; i < n; ++i)
    if (h(i, i / order.size * order.size) < 0) h.row(i) *= -1;
  return h;
}

}  // namespace calib::quant

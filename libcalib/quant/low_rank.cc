#include "libcalib/quant/low_rank.h"

#include <algorithm>
#include <cmath>

#include <Eigen/Eigenvalues>

#include "kernels/codec/hadamard.h"
#include "libcalib/base/error.h"

namespace calib::quant {
namespace {

constexpr double kRidge = 1e-4;  ///< share of the mean diagonal that is added to it

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Solver = Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd>;

Solver decomposed(const Eigen::MatrixXd& m, const char* name) {
  Solver solver;
  if (m.allFinite()) solver.compute(m);
  // Rounding may leave eigenvalues of rank-deficient sums a little below 0.
  if (!m.allFinite() || solver.info() != Eigen::Success || solver.eigenvalues()(0) < -1e-6 * std::fabs(solver.eigenvalues()(m.rows() - 1)))
    fail(ErrorKind::kNumeric, "lowrank", "the {} is not positive semi-definite", name);
  return solver;
}

/// Rows are signed so that the first direction of a block adds the same to each of its coefficients: of the direction that varies most
/// int* then takes that out with lo, and the range is that of the others. Columns of Sylvester's matrices are so, Paley's are not.
Matrix hadamard(int n) {
  Matrix h = Matrix::Identity(n, n);
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

std::vector<float> to_floats(const Matrix& m) {
  std::vector<float> out;
  for (Eigen::Index i = 0; i < m.size(); ++i) out.push_back(static_cast<float>(m.data()[i]));
  return out;
}

}  // namespace

double low_rank_error(std::span<const double> eigenvalues, int rank) {
  double kept = 0, all = 0;
  for (std::size_t i = 0; i < eigenvalues.size(); ++i) {
    all += eigenvalues[i];
    if (i < static_cast<std::size_t>(rank)) kept += eigenvalues[i];
  }
  return all > 0 ? std::sqrt(std::max(0.0, 1 - kept / all)) : 0.0;
}

LowRankBasis low_rank_basis(const std::vector<double>& moment, const std::vector<double>& covariance, int dim, int rank) {
  CALIB_CHECK(rank >= 1 && rank <= dim && moment.size() == covariance.size() && moment.size() == static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim));
  Eigen::MatrixXd m = Eigen::Map<const Matrix>(moment.data(), dim, dim);
  const double trace = m.trace();
  // In units of the mean diagonal: the coefficients then have the size of the rows, and fp16 holds their ranges.
  if (trace > 0) m *= dim / trace;
  else if (m.isZero(0)) m.setIdentity();
  const Solver of_moment = decomposed(m, "moment");
  const Eigen::VectorXd roots = (of_moment.eigenvalues().cwiseMax(0.0).array() + kRidge).sqrt();
  const Eigen::MatrixXd& q = of_moment.eigenvectors();
  const Eigen::MatrixXd s = q * roots.asDiagonal() * q.transpose(), s_inverse = q * roots.cwiseInverse().asDiagonal() * q.transpose();
  const Eigen::MatrixXd weighted = s * Eigen::Map<const Matrix>(covariance.data(), dim, dim) * s;
  const Solver of_rows = decomposed((weighted + weighted.transpose()) / 2, "covariance");

  std::vector<double> descending;
  for (int i = 0; i < dim; ++i) descending.push_back(std::max(0.0, of_rows.eigenvalues()(dim - 1 - i)));
  Eigen::MatrixXd u = of_rows.eigenvectors().rowwise().reverse().leftCols(rank);
  for (int j = 0; j < rank; ++j) {  // a sign of its own, which no solver promises
    Eigen::Index largest = 0;
    u.col(j).cwiseAbs().maxCoeff(&largest);
    if (u(largest, j) < 0) u.col(j) *= -1;
  }
  const Matrix h = hadamard(rank);
  return {to_floats(s * u * h.transpose()), to_floats(h * u.transpose() * s_inverse), low_rank_error(descending, rank)};
}

}  // namespace calib::quant

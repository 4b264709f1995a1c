#include "libcalib/quant/low_rank.h"

#include <algorithm>
#include <cmath>

#include <Eigen/Core>

#include "libcalib/base/error.h"
#include "libcalib/quant/orthogonal_basis.h"

namespace calib::quant {
namespace {

constexpr double kRidge = 1e-4;  ///< share of the mean diagonal that is added to it

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

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
  const EigenBasis of_moment = eigen_basis(m, "lowrank", "moment");
  const Eigen::VectorXd roots = (of_moment.values.array() + kRidge).sqrt();
  const Eigen::MatrixXd& q = of_moment.vectors;
  const Eigen::MatrixXd s = q * roots.asDiagonal() * q.transpose(), s_inverse = q * roots.cwiseInverse().asDiagonal() * q.transpose();
  const Eigen::MatrixXd weighted = s * Eigen::Map<const Matrix>(covariance.data(), dim, dim) * s;
  const EigenBasis of_rows = eigen_basis((weighted + weighted.transpose()) / 2, "lowrank", "covariance");
  const Eigen::MatrixXd u = of_rows.vectors.leftCols(rank), h = hadamard_matrix(rank);
  return {to_floats(s * u * h.transpose()), to_floats(h * u.transpose() * s_inverse), low_rank_error({of_rows.values.data(), static_cast<std::size_t>(dim)}, rank)};
}

}  // namespace calib::quant

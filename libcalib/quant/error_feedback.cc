#include "libcalib/quant/error_feedback.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "libcalib/base/error.h"

namespace calib::quant {
namespace {

constexpr double kRidge = 0.1;  ///< share of the mean diagonal that is added to it

using Matrix = std::vector<double>;

double& at(Matrix& m, int dim, int i, int j) { return m[static_cast<std::size_t>(i) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(j)]; }
double at(const Matrix& m, int dim, int i, int j) { return m[static_cast<std::size_t>(i) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(j)]; }

/// Lower triangle L with a = L L^T, in place; false if a is not positive definite.
bool cholesky(Matrix& a, int n) {
  for (int j = 0; j < n; ++j) {
    double pivot = at(a, n, j, j);
    for (int k = 0; k < j; ++k) pivot -= at(a, n, j, k) * at(a, n, j, k);
    if (!(pivot > 0) || !std::isfinite(pivot)) return false;
    const double root = std::sqrt(pivot);
    at(a, n, j, j) = root;
    for (int i = j + 1; i < n; ++i) {
      double sum = at(a, n, i, j);
      for (int k = 0; k < j; ++k) sum -= at(a, n, i, k) * at(a, n, j, k);
      at(a, n, i, j) = sum / root;
    }
  }
  return true;
}

/// Inverse of L L^T from its lower triangle.
Matrix inverse_of_factored(const Matrix& lower, int n) {
  Matrix inverse_lower(lower.size(), 0.0), out(lower.size(), 0.0);
  for (int j = 0; j < n; ++j) {
    at(inverse_lower, n, j, j) = 1 / at(lower, n, j, j);
    for (int i = j + 1; i < n; ++i) {
      double sum = 0;
      for (int k = j; k < i; ++k) sum -= at(lower, n, i, k) * at(inverse_lower, n, k, j);
      at(inverse_lower, n, i, j) = sum / at(lower, n, i, i);
    }
  }
  for (int i = 0; i < n; ++i)
    for (int j = 0; j <= i; ++j) {
      double sum = 0;
      for (int k = i; k < n; ++k) sum += at(inverse_lower, n, k, i) * at(inverse_lower, n, k, j);
      at(out, n, i, j) = at(out, n, j, i) = sum;
    }
  return out;
}

}  // namespace

FeedbackTriangle feedback_triangle(std::vector<double> moment, int dim) {
  double trace = 0;
  for (int i = 0; i < dim; ++i) trace += at(moment, dim, i, i);
  std::vector<int> order(static_cast<std::size_t>(dim));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return at(moment, dim, a, a) > at(moment, dim, b, b); });
  Matrix h(moment.size());
  // In units of the mean diagonal: feedback does not depend on the scale, and fp32 holds the result.
  for (int i = 0; i < dim; ++i)
    for (int j = 0; j < dim; ++j) {
      const double value = trace > 0 ? at(moment, dim, order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(j)]) * dim / trace : (i == j ? 1.0 : 0.0);
      at(h, dim, i, j) = value + (i == j ? kRidge : 0.0);
    }
  if (!cholesky(h, dim)) fail(ErrorKind::kNumeric, "error feedback", "the moment is not positive semi-definite");
  h = inverse_of_factored(h, dim);
  if (!cholesky(h, dim)) fail(ErrorKind::kNumeric, "error feedback", "the moment cannot be inverted");
  FeedbackTriangle t;
  for (int i = 0; i < dim; ++i) {
    t.order.push_back(static_cast<float>(order[static_cast<std::size_t>(i)]));
    for (int j = i; j < dim; ++j) t.u.push_back(static_cast<float>(at(h, dim, j, i)));
  }
  return t;
}

}  // namespace calib::quant

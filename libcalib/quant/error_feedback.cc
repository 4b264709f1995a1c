#include "libcalib/quant/error_feedback.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/codec/hadamard.h"
#include "libcalib/base/error.h"

namespace calib::quant {
namespace {

constexpr double kRidge = 0.1;    ///< share of the mean diagonal that is added to it
constexpr int kDistances = 64;

using Matrix = std::vector<double>;

double& at(Matrix& m, int dim, int i, int j) { return m[static_cast<std::size_t>(i) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(j)]; }
double at(const Matrix& m, int dim, int i, int j) { return m[static_cast<std::size_t>(i) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(j)]; }

/// Sum over the query heads of one KV head of E[q q^T], before RoPE.
Matrix query_second_moment(const stats::LayerStats& layer, int head) {
  const LayerGeometry& g = layer.geometry();
  const int group = g.n_q_heads / g.n_kv_heads, d = g.head_dim;
  Matrix sum(static_cast<std::size_t>(d) * static_cast<std::size_t>(d), 0.0);
  for (int q = head * group; q < (head + 1) * group; ++q) {
    const Matrix covariance = layer.query_cov.matrix(q);
    const double* mean = layer.query_cov.mean(q);
    for (int i = 0; i < d; ++i)
      for (int j = 0; j < d; ++j) at(sum, d, i, j) += at(covariance, d, i, j) + mean[i] * mean[j];
  }
  return sum;
}

/// R s R^T, where R turns every RoPE pair by distance * frequency and scales it by the attention factor of both sides.
Matrix turned(const LayerGeometry& g, const Matrix& s, double distance) {
  const int d = g.head_dim, half = g.rotary_dim / 2;
  const double factor = g.attention_factor * g.attention_factor;
  Matrix out = s;
  for (const bool rows : {true, false})
    for (int p = 0; p < half; ++p) {
      const int a = g.rope_style == RopeStyle::kInterleaved ? 2 * p : p, b = g.rope_style == RopeStyle::kInterleaved ? 2 * p + 1 : p + half;
      const double angle = distance * g.inv_freq[static_cast<std::size_t>(p)], c = factor * std::cos(angle), sn = factor * std::sin(angle);
      for (int k = 0; k < d; ++k) {
        double& x = rows ? at(out, d, a, k) : at(out, d, k, a);
        double& y = rows ? at(out, d, b, k) : at(out, d, k, b);
        const double turned_x = c * x - sn * y;
        y = sn * x + c * y;
        x = turned_x;
      }
    }
  return out;
}

Matrix moment_before_rope(const stats::LayerStats& layer, int head, std::int64_t max_distance) {
  const Matrix s = query_second_moment(layer, head);
  Matrix mean(s.size(), 0.0);
  for (int i = 0; i < kDistances; ++i) {
    const double distance = std::round(std::pow(static_cast<double>(max_distance), static_cast<double>(i) / (kDistances - 1)));
    const Matrix one = turned(layer.geometry(), s, distance);
    for (std::size_t k = 0; k < mean.size(); ++k) mean[k] += one[k] / kDistances;
  }
  return mean;
}

/// H m H^T for the rotation H of the stored row.
Matrix rotated(const Matrix& m, int d) {
  const kvrt::HadamardOrder order = kvrt::hadamard_order(d);
  Matrix h(m.size()), left(m.size(), 0.0), out(m.size(), 0.0);
  for (int j = 0; j < d; ++j) {
    std::vector<float> column(static_cast<std::size_t>(d), 0.0f);
    column[static_cast<std::size_t>(j)] = 1.0f;
    kvrt::hadamard_rotate(order, column.data(), d, false);
    for (int i = 0; i < d; ++i) at(h, d, i, j) = column[static_cast<std::size_t>(i)];
  }
  for (int i = 0; i < d; ++i)
    for (int k = 0; k < d; ++k)
      for (int j = 0; j < d; ++j) at(left, d, i, j) += at(h, d, i, k) * at(m, d, k, j);
  for (int i = 0; i < d; ++i)
    for (int j = 0; j < d; ++j)
      for (int k = 0; k < d; ++k) at(out, d, i, j) += at(left, d, i, k) * at(h, d, j, k);
  return out;
}

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

std::vector<double> key_error_moment(const stats::LayerStats& layer, int head, const kvrt::Scheme& scheme, const float* smooth,
                                     std::int64_t max_distance) {
  const int d = layer.geometry().head_dim;
  Matrix m = scheme.pre ? moment_before_rope(layer, head, max_distance) : layer.query_moment.matrix(head);
  for (int i = 0; smooth && i < d; ++i)
    for (int j = 0; j < d; ++j) at(m, d, i, j) *= static_cast<double>(smooth[i]) * smooth[j];
  return scheme.had ? rotated(m, d) : m;
}

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
  if (!cholesky(h, dim)) fail(ErrorKind::kNumeric, "error feedback", "the query moment is not positive semi-definite");
  h = inverse_of_factored(h, dim);
  if (!cholesky(h, dim)) fail(ErrorKind::kNumeric, "error feedback", "the query moment cannot be inverted");
  FeedbackTriangle t;
  for (int i = 0; i < dim; ++i) {
    t.order.push_back(static_cast<float>(order[static_cast<std::size_t>(i)]));
    for (int j = i; j < dim; ++j) t.u.push_back(static_cast<float>(at(h, dim, j, i)));
  }
  return t;
}

}  // namespace calib::quant

#include "libcalib/sens/attention_matching.h"

#include <algorithm>
#include <cmath>

#include "libcalib/base/error.h"

namespace calib::sens {
namespace {

constexpr double kMostBeta = 3, kRidge = 1e-6;
constexpr int kSweeps = 2000;

/// Row-major [n_rows, n_columns].
struct Matrix {
  std::size_t n_rows = 0, n_columns = 0;
  std::vector<double> x;
  Matrix(std::size_t rows, std::size_t columns) : n_rows(rows), n_columns(columns), x(rows * columns, 0.0) {}
  double* row(std::size_t r) { return x.data() + r * n_columns; }
  const double* row(std::size_t r) const { return x.data() + r * n_columns; }
};

/// a' b
Matrix transposed_product(const Matrix& a, const Matrix& b) {
  Matrix out(a.n_columns, b.n_columns);
  for (std::size_t r = 0; r < a.n_rows; ++r)
    for (std::size_t i = 0; i < a.n_columns; ++i)
      for (std::size_t j = 0; j < b.n_columns; ++j) out.row(i)[j] += a.row(r)[i] * b.row(r)[j];
  return out;
}

/// Lower factor in place. False if a pivot is not clearly above the rounding of its diagonal.
bool cholesky(Matrix& a) {
  for (std::size_t i = 0; i < a.n_rows; ++i) {
    const double scale = a.row(i)[i];
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = a.row(i)[j];
      for (std::size_t k = 0; k < j; ++k) sum -= a.row(i)[k] * a.row(j)[k];
      if (i == j && !(sum > 1e-13 * scale)) return false;
      a.row(i)[j] = i == j ? std::sqrt(sum) : sum / a.row(j)[j];
    }
  }
  return true;
}

void solve_cholesky(const Matrix& factor, Matrix& b) {
  for (std::size_t c = 0; c < b.n_columns; ++c) {
    for (std::size_t i = 0; i < b.n_rows; ++i) {
      for (std::size_t k = 0; k < i; ++k) b.row(i)[c] -= factor.row(i)[k] * b.row(k)[c];
      b.row(i)[c] /= factor.row(i)[i];
    }
    for (std::size_t i = b.n_rows; i-- > 0;) {
      for (std::size_t k = i + 1; k < b.n_rows; ++k) b.row(i)[c] -= factor.row(k)[i] * b.row(k)[c];
      b.row(i)[c] /= factor.row(i)[i];
    }
  }
}

double largest_eigenvalue(const Matrix& a) {
  std::vector<double> x(a.n_rows, 1.0), y(a.n_rows);
  double value = 0;
  for (int step = 0; step < 50; ++step) {
    double norm = 0;
    for (std::size_t i = 0; i < a.n_rows; ++i) {
      y[i] = 0;
      for (std::size_t j = 0; j < a.n_rows; ++j) y[i] += a.row(i)[j] * x[j];
      norm += y[i] * y[i];
    }
    value = std::sqrt(norm);
    if (value == 0) return 0;
    for (std::size_t i = 0; i < a.n_rows; ++i) x[i] = y[i] / value;
  }
  return value;
}

/// Rows e^{s - max} on kept keys, and the full sums.
void exponentials(std::span<const double> scores, std::size_t n_keys, std::span<const std::int32_t> kept, Matrix& x, Matrix& y, std::vector<double>& largest) {
  for (std::size_t r = 0; r < x.n_rows; ++r) {
    const double* const s = scores.data() + r * n_keys;
    largest.push_back(*std::max_element(s, s + n_keys));
    for (std::size_t j = 0; j < n_keys; ++j) y.row(r)[0] += std::exp(s[j] - largest[r]);
    for (std::size_t i = 0; i < kept.size(); ++i) x.row(r)[i] = std::exp(s[kept[i]] - largest[r]);
  }
}

std::vector<double> bounded_least_squares(const Matrix& x, const Matrix& y) {
  const Matrix gram = transposed_product(x, x), target = transposed_product(x, y);
  std::vector<double> b(x.n_columns, 1.0);
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    double moved = 0;
    for (std::size_t i = 0; i < b.size(); ++i) {
      double slope = target.row(i)[0];
      for (std::size_t j = 0; j < b.size(); ++j) slope -= gram.row(i)[j] * b[j];
      if (!(gram.row(i)[i] > 0)) continue;
      const double next = std::clamp(b[i] + slope / gram.row(i)[i], std::exp(-kMostBeta), std::exp(kMostBeta));
      moved = std::max(moved, std::abs(next - b[i]));
      b[i] = next;
    }
    if (moved < 1e-12) break;
  }
  return b;
}

/// o of every row: exact, from all keys.
Matrix exact_output(std::span<const double> scores, std::size_t n_keys, std::span<const double> values, std::size_t d, const Matrix& sums,
                    const std::vector<double>& largest) {
  Matrix o(sums.n_rows, d);
  for (std::size_t r = 0; r < o.n_rows; ++r)
    for (std::size_t j = 0; j < n_keys; ++j) {
      const double p = std::exp(scores[r * n_keys + j] - largest[r]) / sums.row(r)[0];
      for (std::size_t c = 0; c < d; ++c) o.row(r)[c] += p * values[j * d + c];
    }
  return o;
}

struct Problem {
  Matrix x, sums, o;
  std::vector<double> largest;
};
Problem set_up(std::span<const double> scores, std::int64_t n_keys, std::span<const std::int32_t> kept, std::span<const double> values, std::int64_t head_dim) {
  const auto n = static_cast<std::size_t>(n_keys), d = static_cast<std::size_t>(head_dim);
  CALIB_CHECK(n > 0 && scores.size() % n == 0 && !scores.empty() && !kept.empty() && values.size() == n * d);
  const std::size_t n_rows = scores.size() / n;
  Problem out{Matrix(n_rows, kept.size()), Matrix(n_rows, 1), Matrix(0, 0), {}};
  exponentials(scores, n, kept, out.x, out.sums, out.largest);
  out.o = exact_output(scores, n, values, d, out.sums, out.largest);
  return out;
}

/// Compact attention of every row: x b over its sum.
Matrix compact_attention(const Matrix& x, std::span<const double> b) {
  Matrix out = x;
  for (std::size_t r = 0; r < x.n_rows; ++r) {
    double sum = 0;
    for (std::size_t i = 0; i < b.size(); ++i) sum += out.row(r)[i] *= b[i];
    for (std::size_t i = 0; i < b.size() && sum > 0; ++i) out.row(r)[i] /= sum;
  }
  return out;
}

}  // namespace

void AttentionMatch::add_row(std::span<const double> o, std::span<const double> o_hat, double log_mass, double log_mass_hat) {
  CALIB_CHECK(o.size() == o_hat.size());
  for (std::size_t c = 0; c < o.size(); ++c) error += (o[c] - o_hat[c]) * (o[c] - o_hat[c]), norm += o[c] * o[c];
  mass += (log_mass - log_mass_hat) * (log_mass - log_mass_hat);
  ++n_rows;
}

AttentionMatch& AttentionMatch::operator+=(const AttentionMatch& other) {
  error += other.error, norm += other.norm, mass += other.mass, n_rows += other.n_rows;
  return *this;
}

CompactBlock refit_compact(std::span<const double> scores, std::int64_t n_keys, std::span<const std::int32_t> kept, std::span<const double> values,
                           std::int64_t head_dim) {
  const auto d = static_cast<std::size_t>(head_dim);
  const Problem problem = set_up(scores, n_keys, kept, values, head_dim);
  const std::vector<double> b = bounded_least_squares(problem.x, problem.sums);
  CompactBlock out;
  for (const double x : b) out.beta.push_back(std::log(x));
  for (const std::int32_t j : kept) out.values.insert(out.values.end(), values.begin() + j * head_dim, values.begin() + (j + 1) * head_dim);

  const Matrix p = compact_attention(problem.x, b);
  Matrix residual = problem.o;
  for (std::size_t r = 0; r < p.n_rows; ++r)
    for (std::size_t i = 0; i < p.n_columns; ++i)
      for (std::size_t c = 0; c < d; ++c) residual.row(r)[c] -= p.row(r)[i] * out.values[i * d + c];
  Matrix normal = transposed_product(p, p), change = transposed_product(p, residual), factor = normal;
  if (!cholesky(factor)) {
    const double ridge = kRidge * largest_eigenvalue(normal);
    for (std::size_t i = 0; i < normal.n_rows; ++i) normal.row(i)[i] += ridge;
    factor = normal;
    if (!cholesky(factor)) return out;
  }
  solve_cholesky(factor, change);
  for (std::size_t i = 0; i < out.values.size(); ++i) out.values[i] += change.x[i];
  return out;
}

AttentionMatch match_compact(std::span<const double> scores, std::int64_t n_keys, std::span<const std::int32_t> kept, std::span<const double> values,
                             std::int64_t head_dim, const CompactBlock& block) {
  const auto d = static_cast<std::size_t>(head_dim);
  const Problem problem = set_up(scores, n_keys, kept, values, head_dim);
  CALIB_CHECK(block.beta.size() == kept.size() && block.values.size() == kept.size() * d);
  AttentionMatch out;
  for (std::size_t r = 0; r < problem.x.n_rows; ++r) {
    std::vector<double> o_hat(d, 0.0);
    double sum = 0;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const double w = problem.x.row(r)[i] * std::exp(block.beta[i]);
      sum += w;
      for (std::size_t c = 0; c < d; ++c) o_hat[c] += w * block.values[i * d + c];
    }
    for (double& x : o_hat) x /= sum;
    out.add_row({problem.o.row(r), d}, o_hat, std::log(problem.sums.row(r)[0]), std::log(sum));
  }
  return out;
}

}  // namespace calib::sens

#include "libcalib/quant/unit_moments.h"

#include <cmath>
#include <complex>

#include <Eigen/Eigenvalues>
#include <gtest/gtest.h>

#include "layer_stats.h"
#include "libcalib/quant/scheme.h"

namespace calib::quant {
namespace {

using Complex = std::complex<double>;

/// Statistics whose queries are `q` [T, Q, D], before and after RoPE alike; keys and values are zero.
stats::LayerStats stats_of_queries(const LayerGeometry& g, const std::vector<float>& q) {
  const std::int64_t n = static_cast<std::int64_t>(q.size()) / (g.n_q_heads * g.head_dim);
  const std::vector<float> zeros(static_cast<std::size_t>(n * g.n_kv_heads * g.head_dim), 0.0f);
  stats::LayerStats stats(g, 0);
  stats::DocumentTensors document;
  document.n_tokens = n;
  document.k_pre = document.k_post = document.v = zeros.data();
  document.q_pre = document.q_post = q.data();
  ThreadPool pool(1);
  stats.add_document(document, pool);
  return stats;
}

/// Queries with a mean and channels that move together.
std::vector<float> correlated_queries(const LayerGeometry& g, std::int64_t n_tokens) {
  Rng rng(12);
  std::vector<float> q;
  for (std::int64_t t = 0; t < n_tokens; ++t)
    for (int h = 0; h < g.n_q_heads; ++h) {
      const double common = rng.normal();
      for (int c = 0; c < g.head_dim; ++c) q.push_back(static_cast<float>(std::cos(c + h) + (1 + c % 3) * common + 0.5 * rng.normal()));
    }
  return q;
}

// G32. The closed form of METHODS.md 2.6: complex second moments of pairs, each multiplied by the mean of its own phase.
TEST(UnitMoments, GoldenG32ClosedFormOfTheMomentBeforeRope) {
  constexpr int d = 8, kFurthest = 7;
  for (const int rotary : {8, 4}) {
    LayerGeometry g = quant_test::geometry(1, d);
    g.rotary_dim = rotary;
    g.attention_factor = 1.25;
    g.inv_freq.clear();
    for (int p = 0; p < rotary / 2; ++p) g.inv_freq.push_back(std::pow(0.3, p));
    const stats::LayerStats stats = stats_of_queries(g, correlated_queries(g, 90));
    const std::vector<double> m = error_moment(stats, Side::kK, 0, parse_scheme("int4.channel.g32.pre.ef"), nullptr, kFurthest);

    double share[kFurthest + 1] = {};  // log-uniform on 1..7
    for (int i = 0; i < 64; ++i) share[static_cast<int>(std::round(std::pow(kFurthest, i / 63.0)))] += 1.0 / 64;
    std::vector<double> s(d * d, 0.0);
    for (int q = 0; q < 2; ++q) {
      const std::vector<double> covariance = stats.query_cov.matrix(q);
      const double* mean = stats.query_cov.mean(q);
      for (std::size_t i = 0; i < d; ++i)
        for (std::size_t j = 0; j < d; ++j) s[i * d + j] += covariance[i * d + j] + mean[i] * mean[j];
    }
    // Coordinates as complex numbers: RoPE pairs, then each channel that does not turn as x + 0 i of frequency 0 and factor 1.
    struct Coordinate { int re, im; double frequency, factor; };
    std::vector<Coordinate> z;
    for (int p = 0; p < rotary / 2; ++p) z.push_back({p, p + rotary / 2, g.inv_freq[static_cast<std::size_t>(p)], 1.25 * 1.25});
    for (int c = rotary; c < d; ++c) z.push_back({c, -1, 0, 1});
    const auto second = [&](int i, int j) { return i < 0 || j < 0 ? 0.0 : s[static_cast<std::size_t>(i * d + j)]; };
    const auto mean_phase = [&](double frequency) {
      Complex sum = 0;
      for (int delta = 1; delta <= kFurthest; ++delta) sum += share[delta] * std::polar(1.0, delta * frequency);
      return sum;
    };
    for (const Coordinate& a : z)
      for (const Coordinate& b : z) {
        const double rr = second(a.re, b.re), ii = second(a.im, b.im), ri = second(a.re, b.im), ir = second(a.im, b.re), f = a.factor * b.factor;
        const Complex conjugate = f * Complex(rr + ii, ir - ri) * mean_phase(a.frequency - b.frequency);  // E z_a conj(z_b)
        const Complex plain = f * Complex(rr - ii, ir + ri) * mean_phase(a.frequency + b.frequency);      // E z_a z_b
        const auto expect = [&](int i, int j, double value) {
          if (i < 0 || j < 0) return;
          EXPECT_NEAR(m[static_cast<std::size_t>(i * d + j)], value, 1e-10) << rotary << " " << i << " " << j;
        };
        expect(a.re, b.re, (conjugate + plain).real() / 2);
        expect(a.im, b.im, (conjugate - plain).real() / 2);
        expect(a.im, b.re, (conjugate + plain).imag() / 2);
        expect(a.re, b.im, (plain - conjugate).imag() / 2);
      }
  }
}

// G33. In the basis U H, U the eigenvectors of the query moment, every channel's error costs the same.
TEST(UnitMoments, GoldenG33AHadamardOverTheEigenbasisSpreadsTheMomentEvenly) {
  for (const int d : {64, 96, 128}) {
    const LayerGeometry g = quant_test::geometry(1, d);
    const std::vector<float> q = correlated_queries(g, 400);
    const std::vector<double> m = error_moment(stats_of_queries(g, q), Side::kK, 0, parse_scheme("int4.token.g"), nullptr, 1);
    const Eigen::Map<const Eigen::MatrixXd> matrix(m.data(), d, d);
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(matrix);
    // The same queries in the eigenbasis, then what `had` makes of their moment.
    const Eigen::Map<const Eigen::MatrixXf> rows(q.data(), d, static_cast<Eigen::Index>(q.size()) / d);
    const Eigen::MatrixXf turned = (solver.eigenvectors().transpose() * rows.cast<double>()).cast<float>();
    const std::vector<float> in_basis(turned.data(), turned.data() + turned.size());
    const std::vector<double> spread = error_moment(stats_of_queries(g, in_basis), Side::kK, 0, parse_scheme("int4.token.g.had"), nullptr, 1);
    const double mean = matrix.trace() / d;
    EXPECT_GT(solver.eigenvalues().maxCoeff(), 10 * mean);  // there is something to spread
    for (int c = 0; c < d; ++c) EXPECT_NEAR(spread[static_cast<std::size_t>(c * d + c)], mean, 1e-6 * matrix.trace()) << d;
  }
}

}  // namespace
}  // namespace calib::quant

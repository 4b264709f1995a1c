#include "libcalib/sens/metrics.h"

#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "libcalib/base/rng.h"

namespace calib::sens {
namespace {

std::vector<double> softmax(std::vector<double> s) {
  double top = s[0], sum = 0;
  for (const double x : s) top = std::max(top, x);
  for (double& x : s) sum += x = std::exp(x - top);
  for (double& x : s) x /= sum;
  return s;
}

double two_softmax_kl(const std::vector<double>& s, const std::vector<double>& delta) {
  std::vector<double> moved = s;
  for (std::size_t i = 0; i < s.size(); ++i) moved[i] += delta[i];
  const auto p = softmax(s), q = softmax(moved);
  double kl = 0;
  for (std::size_t i = 0; i < s.size(); ++i) kl += p[i] * std::log(p[i] / q[i]);
  return kl;
}

TEST(AttentionKl, GoldenG1) {
  EXPECT_NEAR(attention_kl(softmax({0, 1, 2}), std::vector<double>{.1, -.2, .05}), 5.894765970577e-3, 1e-12);
}

TEST(AttentionKl, GoldenG2HalfVariance) {
  EXPECT_NEAR(half_variance(softmax({0, 1, 2}), std::vector<double>{.1, -.2, .05}), 6.153958346270e-3, 1e-12);
}

TEST(AttentionKl, GoldenG3ShiftInvariance) {
  const auto p = softmax({0, 1, 2});
  EXPECT_NEAR(attention_kl(p, std::vector<double>{7, 7, 7}), 0.0, 1e-15);
  const double kl = attention_kl(p, std::vector<double>{.1, -.2, .05});
  EXPECT_NEAR(attention_kl(p, std::vector<double>{11.1, 10.8, 11.05}), kl, 1e-12);
}

// G6: normal noise on the scores of all distractors. A fine grid of its density stands for any number of them, so that the sums are exact.
TEST(AttentionKl, GoldenG6NoiseOnDistractorsTakesFromTheNeedle) {
  struct Row { double mass, sd, kept; };
  for (const Row& r : {Row{.5, .5, .468791}, Row{.5, 1, .377541}, Row{.5, 2, .119203}, Row{.9, 1, .845172}}) {
    std::vector<double> p{r.mass}, delta{0};
    constexpr double kStep = 0.05;  // the trapezoid rule is exact to rounding for a Gaussian at any step below 1
    for (int i = -240; i <= 240; ++i) {
      p.push_back((1 - r.mass) * kStep * std::exp(-0.5 * i * kStep * i * kStep) / std::sqrt(2 * M_PI));
      delta.push_back(r.sd * i * kStep);
    }
    // The noise has mean 0 under p, so KL = ln(m + (1 - m) e^(s^2 / 2)): what the needle's mass is divided by.
    EXPECT_NEAR(r.mass * std::exp(-attention_kl(p, delta)), r.kept, 1e-6);
    std::vector<float> p32(p.begin(), p.end()), d32(delta.begin(), delta.end());
    attention_kl_row(p32.data(), d32.data(), static_cast<std::int64_t>(p32.size()));
    EXPECT_NEAR(r.mass + d32[0], r.kept, 1e-6);
  }
}

TEST(AttentionKl, HugeShiftsStayFinite) {
  // One key takes all the mass: KL = ln(p e^d + ...) - p d, computed by hand for p = (1/2, 1/2), delta = (0, 200).
  const std::vector<double> p{0.5, 0.5};
  EXPECT_NEAR(attention_kl(p, std::vector<double>{0, 200}), 100 - std::log(2.0), 1e-9);
}

// |x| from 1e-6 (cancellation) to 40 (overflow of the short form): fast fp32 row against two softmaxes in double.
TEST(AttentionKl, FastRowMatchesTwoSoftmaxes) {
  for (const double size : {1e-3, 0.05, 0.8, 6.0, 45.0}) {
    Rng rng(7);
    const std::size_t n = 301;  // not a multiple of the lanes
    std::vector<double> s(n), delta(n);
    for (std::size_t i = 0; i < n; ++i) s[i] = 2 * rng.normal(), delta[i] = static_cast<float>(size * rng.normal());
    std::vector<double> p = softmax(s);
    std::vector<float> p32(p.begin(), p.end()), d32(delta.begin(), delta.end());
    const double want = two_softmax_kl(s, delta), got = attention_kl_row(p32.data(), d32.data(), static_cast<std::int64_t>(n));
    // fp32 p: relative error 2^-24 an entry, and sum p differs from 1 by as much; both scale with the KL's own terms.
    EXPECT_NEAR(got, want, 1e-5 * want) << size;
    std::vector<double> moved = s;
    for (std::size_t i = 0; i < n; ++i) moved[i] += delta[i];
    const auto q = softmax(moved);
    for (std::size_t i = 0; i < n; ++i) ASSERT_NEAR(d32[i], q[i] - p[i], 2e-7 + 1e-5 * q[i]) << size << " " << i;
    EXPECT_NEAR(attention_kl(p, delta), want, 1e-9 * want + 1e-14);
  }
}

double softmax_gain(const std::vector<float>& p, std::vector<float> delta) {
  const auto n = static_cast<std::int64_t>(p.size());
  const double linear = linear_change_norm2(p.data(), delta.data(), n);
  attention_kl_row(p.data(), delta.data(), n);
  return row_norm2(delta.data(), n) / linear;
}

std::vector<float> normal_scores(std::size_t n, double sd, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(n);
  for (float& a : x) a = static_cast<float>(sd * rng.normal());
  return x;
}

TEST(ProbabilityChange, LinearPartOfATwoKeyRow) {
  // p = (3/4, 1/4), delta = (1, -1): mean 1/2, so (3/4 * 1/2)^2 + (1/4 * 3/2)^2 = 9/32.
  const std::vector<float> p{0.75f, 0.25f}, delta{1, -1};
  EXPECT_NEAR(linear_change_norm2(p.data(), delta.data(), 2), 9.0 / 32, 1e-12);
  EXPECT_EQ(linear_change_norm2(p.data(), delta.data(), 0), 0);
}

TEST(ProbabilityChange, GainIsOneForSmallScoresAndBelowWhereTheRowSaturates) {
  const auto s = normal_scores(301, 2, 3);
  const auto p = softmax({s.begin(), s.end()});
  const std::vector<float> p32(p.begin(), p.end());
  EXPECT_NEAR(softmax_gain(p32, normal_scores(p.size(), 1e-4, 5)), 1.0, 2e-3);
  EXPECT_LT(softmax_gain({0.5f, 0.5f}, {20, -20}), 0.01);
}

// 16 squares: three standard errors are 3 sqrt(2 / 16) = 1.06.
TEST(Coherence, IsTheRatioWhereChanceDoesNotExplainIt) {
  EXPECT_EQ(coherence(2, 4.1, 16), 1.0);
  EXPECT_DOUBLE_EQ(coherence(2, 4.2, 16), 2.1);
  EXPECT_EQ(coherence(2, 4.2, 8), 1.0);
  EXPECT_EQ(coherence(2, 0.1, 1000), 1.0);  // fewer squares than tokens: below is noise, and the score stays on the safe side
  EXPECT_EQ(coherence(0, 0, 16), 1.0);
}

// Uniform row: p^ = p e^d / mean(e^d), so sum (p^ - p)^2 = (e^(s^2) - 1) / n and the linear part is s^2 / n.
TEST(ProbabilityChange, GainOfAUniformRowIsTheLogNormalVariance) {
  const std::size_t n = 1 << 18;
  const std::vector<float> p(n, 1.0f / static_cast<float>(n));
  for (const double sd : {0.1, 0.5, 1.0}) {
    const double want = std::expm1(sd * sd) / (sd * sd);
    EXPECT_NEAR(softmax_gain(p, normal_scores(n, sd, 17)), want, 0.03 * want) << sd;
  }
}

// G4: K ~ N(0,1), q ~ N(0,9), d 128, T 512, int2/3/4 with one range per token. The quantiser here is the plain affine rule.
TEST(AttentionKl, GoldenG4HalfVarianceOnMeans) {
  constexpr int d = 128, n_keys = 512, n_rows = 1000;
  for (const int bits : {3, 4}) {
    Rng rng(11);
    std::vector<double> k(n_keys * d), error(n_keys * d);
    for (double& x : k) x = rng.normal();
    for (int j = 0; j < n_keys; ++j) {
      const auto row = k.begin() + j * d;
      const double lo = *std::min_element(row, row + d), hi = *std::max_element(row, row + d), step = (hi - lo) / ((1 << bits) - 1);
      for (int c = 0; c < d; ++c) error[j * d + c] = lo + step * std::nearbyint((row[c] - lo) / step) - row[c];
    }
    double half = 0, exact = 0;
    std::vector<double> q(d), s(n_keys), delta(n_keys);
    for (int r = 0; r < n_rows; ++r) {
      for (double& x : q) x = 3 * rng.normal() / std::sqrt(128.0);
      for (int j = 0; j < n_keys; ++j) {
        s[j] = std::inner_product(q.begin(), q.end(), k.begin() + j * d, 0.0);
        delta[j] = std::inner_product(q.begin(), q.end(), error.begin() + j * d, 0.0);
      }
      const auto p = softmax(s);
      half += half_variance(p, delta);
      exact += attention_kl(p, delta);
    }
    EXPECT_NEAR(half / exact, 1.0, 0.08) << bits;
  }
}

// G5: the first-order output error against the measured one.
TEST(AttentionKl, GoldenG5OutputError) {
  constexpr int d = 128, n_keys = 512, n_rows = 300;
  const double tau = 1 / std::sqrt(128.0);
  for (const auto& [sk, sv] : {std::pair{.02, .03}, {.05, .075}, {.11, .165}}) {
    Rng rng(13);
    std::vector<double> k(n_keys * d), v(n_keys * d);
    for (double& x : k) x = rng.normal();
    for (double& x : v) x = rng.normal();
    double predicted = 0, measured = 0;
    std::vector<double> q(d), s(n_keys), moved(n_keys), o(d), changed(d);
    for (int r = 0; r < n_rows; ++r) {
      double q2 = 0;
      for (double& x : q) x = 3 * rng.normal(), q2 += x * x;
      for (int j = 0; j < n_keys; ++j) {
        s[j] = tau * std::inner_product(q.begin(), q.end(), k.begin() + j * d, 0.0);
        moved[j] = s[j] + tau * std::sqrt(q2) * sk * rng.normal();  // q . e of an isotropic error
      }
      const auto p = softmax(s), p_hat = softmax(moved);
      std::fill(o.begin(), o.end(), 0.0);
      std::fill(changed.begin(), changed.end(), 0.0);
      for (int j = 0; j < n_keys; ++j)
        for (int c = 0; c < d; ++c) {
          o[c] += p[j] * v[j * d + c];
          changed[c] += p_hat[j] * v[j * d + c];
        }
      // A weighted sum of independent normal value errors is one normal of that variance.
      double weight2 = 0;
      for (const double w : p_hat) weight2 += w * w;
      for (int c = 0; c < d; ++c) changed[c] += sv * std::sqrt(weight2) * rng.normal();
      predicted += first_order_output_error(p, v, o, q2, tau, sk * sk, sv * sv);
      for (int c = 0; c < d; ++c) measured += (changed[c] - o[c]) * (changed[c] - o[c]);
    }
    EXPECT_NEAR(predicted / measured, 1.0, 0.15) << sk;
  }
}

RowIndex rows_of(const std::vector<std::int64_t>& lengths) {
  RowIndex rows;
  for (std::size_t d = 0; d < lengths.size(); ++d)
    for (std::int64_t t = 0; t < lengths[d]; ++t) {
      rows.document.push_back(static_cast<std::int32_t>(d));
      rows.position.push_back(t);
      rows.weight.push_back(1);
      rows.denominator.push_back(1);
    }
  return rows;
}

TEST(Spread, KnownValues) {
  RowIndex rows = rows_of(std::vector<std::int64_t>(10, 300));
  std::vector<float> value(rows.size());
  for (std::size_t i = 0; i < value.size(); ++i) value[i] = static_cast<float>(rows.document[i] + (rows.position[i] >= 256 ? 100 : 0));
  const Bootstrap bootstrap(rows, 1);
  const Spread s = summarise(rows, value, bootstrap, n_position_buckets(300));
  EXPECT_FALSE(bootstrap.few_docs());
  EXPECT_NEAR(s.mean, 4.5 + 100 * 44.0 / 300, 1e-9);
  ASSERT_EQ(s.by_bucket.size(), 2u);
  EXPECT_NEAR(s.by_bucket[0], 4.5, 1e-9);
  EXPECT_NEAR(s.by_bucket[1], 104.5, 1e-9);
  EXPECT_NEAR(s.max, 109, 1e-9);
  EXPECT_NEAR(s.p99, 109, 1e-9);  // 44 of 3,000 rows hold 109: more than 1 %
  EXPECT_NEAR(s.worst_decile, 9 + 100 * 44.0 / 300, 1e-9);
  // SE of the mean of ten documents with values 0..9: sqrt(8.25 / 10), bootstrap noise 1 / sqrt(2 * 1000) relative, 4 sigma.
  EXPECT_NEAR(s.se, std::sqrt(8.25 / 10), 4 * std::sqrt(8.25 / 10) / std::sqrt(2000.0));
}

TEST(Spread, WeightsAndDenominatorsAreARatioOfSums) {
  RowIndex rows = rows_of({2, 1});
  rows.weight = {1, 3, 2};
  rows.denominator = {2, 1, 4};
  const Spread s = summarise(rows, std::vector<float>{1, 2, 3}, Bootstrap(rows, 1), 1);
  EXPECT_NEAR(s.mean, (1 + 6 + 6) / (2.0 + 3 + 8), 1e-12);
  EXPECT_NEAR(s.max, 3 / (13.0 / 6), 1e-9);
}

TEST(Spread, FewDocumentsResampleBlocks) {
  const RowIndex rows = rows_of({1000, 600});
  const Bootstrap bootstrap(rows, 1);
  EXPECT_TRUE(bootstrap.few_docs());
  EXPECT_EQ(bootstrap.n_items(), 7u);
}

TEST(Spread, OrderOfEqualDocumentsDoesNotMatter) {
  const RowIndex rows = rows_of(std::vector<std::int64_t>(12, 50));
  std::vector<float> value(rows.size()), reversed(rows.size());
  Rng rng(3);
  for (float& x : value) x = static_cast<float>(rng.uniform());
  for (std::size_t d = 0; d < 12; ++d) std::copy_n(value.begin() + static_cast<long>(d * 50), 50, reversed.begin() + static_cast<long>((11 - d) * 50));
  const Bootstrap bootstrap(rows, 1);
  const Spread a = summarise(rows, value, bootstrap, 1), b = summarise(rows, reversed, bootstrap, 1);
  EXPECT_NEAR(a.mean, b.mean, 1e-12);
  EXPECT_EQ(a.p99, b.p99);
  EXPECT_NEAR(a.worst_decile, b.worst_decile, 1e-12);
  EXPECT_NEAR(a.se, b.se, 0.15 * a.se);  // another draw of the same resampling: 4 sigma of 1/sqrt(2000) twice
}

TEST(Percentile, InterpolatesLinearly) {
  const std::vector<double> x{0, 1, 2, 10};
  EXPECT_DOUBLE_EQ(percentile(x, 0.5), 1.5);
  EXPECT_DOUBLE_EQ(percentile(x, 1.0), 10);
  EXPECT_DOUBLE_EQ(percentile(x, 0.9), 2 + 0.7 * 8);
}

TEST(ClusterMean, GoldenG43) {
  const std::vector<double> sum{.01, .03, -.01, .02}, weight{1, 1, 1, 1};
  const ClusterMean m = cluster_mean(sum, weight);
  EXPECT_NEAR(std::exp(m.mean), 1.012578, 1e-6);
  EXPECT_NEAR(std::exp(m.mean) * m.se, .008647, 1e-6);
}

}  // namespace
}  // namespace calib::sens

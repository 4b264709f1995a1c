#include "libcalib/quant/error_feedback.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/write/fake_quant.h"
#include "layer_stats.h"
#include "libcalib/base/error.h"
#include "libcalib/quant/calibrated_params.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/quant/unit_moments.h"

namespace calib::quant {
namespace {

/// A covariance whose first eigenvalues hold most of the trace.
std::vector<double> anisotropic(int d, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<double> h(static_cast<std::size_t>(d * d), 0.0), a(static_cast<std::size_t>(d));
  for (const double weight : {20.0, 6.0, 2.0, 1.0, 0.5, 0.25}) {
    for (double& v : a) v = rng.normal();
    for (int i = 0; i < d; ++i)
      for (int j = 0; j < d; ++j) h[static_cast<std::size_t>(i * d + j)] += weight * a[static_cast<std::size_t>(i)] * a[static_cast<std::size_t>(j)];
  }
  return h;
}
std::vector<double> with_ridge(std::vector<double> h, int d) {
  double trace = 0;
  for (int i = 0; i < d; ++i) trace += h[static_cast<std::size_t>(i * d + i)];
  for (int i = 0; i < d; ++i) h[static_cast<std::size_t>(i * d + i)] += 0.1 * trace / d;
  return h;
}

std::vector<float> code(const char* scheme, int d, const std::vector<float>& x, const FeedbackTriangle& t) {
  std::vector<float> out(x.size());
  const std::vector<std::int32_t> order(t.order.begin(), t.order.end());
  kvrt::FakeQuantArgs args;
  args.scheme = parse_scheme(scheme);
  args.n_tokens = static_cast<std::int64_t>(x.size()) / d, args.n_heads = 1, args.head_dim = d;
  args.x = x.data(), args.out = out.data();
  args.ef_u = t.u.data(), args.ef_order = order.data();
  const kvrt::Status status = kvrt::fake_quant(args);
  EXPECT_TRUE(status.ok()) << status.text();
  return out;
}
/// Codes of a token group whose scale and lo were refitted. Requires: channel `low` has code 0, channel `high` qmax.
std::vector<float> codes_of(std::vector<float> y, std::size_t low, std::size_t high, float qmax) {
  const float lo = y[low], step = (y[high] - lo) / qmax;
  for (float& v : y) v = std::nearbyint((v - lo) / step);
  return y;
}
double cost(const std::vector<double>& h, int d, const std::vector<float>& x, const std::vector<float>& y) {
  double sum = 0;
  for (std::size_t t = 0; t < x.size(); t += static_cast<std::size_t>(d))
    for (int i = 0; i < d; ++i)
      for (int j = 0; j < d; ++j) {
        const std::size_t a = t + static_cast<std::size_t>(i), b = t + static_cast<std::size_t>(j);
        sum += h[static_cast<std::size_t>(i * d + j)] * (static_cast<double>(y[a]) - x[a]) * (static_cast<double>(y[b]) - x[b]);
      }
  return sum;
}

TEST(ErrorFeedback, TriangleFactorsTheInverse) {
  constexpr int d = 12;
  const std::vector<double> h = anisotropic(d, 3);
  const FeedbackTriangle t = feedback_triangle(h, d);
  ASSERT_EQ(t.u.size(), 78u);
  double trace = 0;
  for (int i = 0; i < d; ++i) trace += h[static_cast<std::size_t>(i * d + i)];
  const std::vector<double> ridged = with_ridge(h, d);
  // U (H' in the order) U^T = mean diagonal * I.
  const auto u = [&](int i, int j) { return j < i ? 0.0 : t.u[static_cast<std::size_t>(i * d - i * (i - 1) / 2 + j - i)]; };
  const auto hp = [&](int i, int j) {
    return ridged[static_cast<std::size_t>(static_cast<int>(t.order[static_cast<std::size_t>(i)]) * d + static_cast<int>(t.order[static_cast<std::size_t>(j)]))];
  };
  for (int i = 0; i + 1 < d; ++i) EXPECT_GE(hp(i, i), hp(i + 1, i + 1));
  for (int i = 0; i < d; ++i)
    for (int j = 0; j < d; ++j) {
      double sum = 0;
      for (int a = 0; a < d; ++a)
        for (int b = 0; b < d; ++b) sum += u(i, a) * hp(a, b) * u(j, b);
      EXPECT_NEAR(sum * d / trace, i == j ? 1.0 : 0.0, 1e-4);
    }
  EXPECT_THROW(feedback_triangle({3, 0, 0, -1}, 2), Error);
}

// METHODS.md 4.11: 10^4 random vectors.
TEST(ErrorFeedback, CostsLessThanRoundingToNearestUnderItsMoment) {
  constexpr int d = 64;
  const std::vector<double> h = anisotropic(d, 5), ridged = with_ridge(h, d);
  const FeedbackTriangle t = feedback_triangle(h, d);
  std::vector<float> x(10000 * d);
  Rng rng(6);
  for (float& v : x) v = static_cast<float>(rng.normal());
  const std::vector<float> exact = x;
  struct Row { const char *with, *without; };
  for (const Row& r : {Row{"int4.token.g.ef", "int4.token.g"}, Row{"int2.token.g32.ef", "int2.token.g32"}, Row{"sint4.token.g.ef", "sint4.token.g"},
                       Row{"lm3.token.g.ef", "lm3.token.g"}}) {
    EXPECT_LT(cost(ridged, d, x, code(r.with, d, x, t)), 0.8 * cost(ridged, d, x, code(r.without, d, x, t))) << r.with;
  }
}

TEST(ErrorFeedback, AMomentWithoutDirectionsIsRoundingToNearest) {
  constexpr int d = 32;
  std::vector<double> h(d * d, 0.0);
  for (int i = 0; i < d; ++i) h[static_cast<std::size_t>(i * d + i)] = 4;
  std::vector<float> x(500 * d);
  Rng rng(7);
  for (float& v : x) v = static_cast<float>(rng.normal());
  for (const std::vector<double>& moment : {h, std::vector<double>(d * d, 0.0)}) {
    const FeedbackTriangle t = feedback_triangle(moment, d);
    const std::vector<float> plain = code("int3.token.g", d, x, t), fed_back = code("int3.token.g.ef", d, x, t);
    for (auto row = plain.begin(), other = fed_back.begin(); row != plain.end(); row += d, other += d) {
      const auto low = static_cast<std::size_t>(std::min_element(row, row + d) - row), high = static_cast<std::size_t>(std::max_element(row, row + d) - row);
      EXPECT_EQ(codes_of({other, other + d}, low, high, 7), codes_of({row, row + d}, low, high, 7));
    }
  }
}

// Two channels by hand: H' = [2 1; 1 1] in units of the mean diagonal.
TEST(ErrorFeedback, TwoChannelsByHand) {
  // Its inverse is [1 -1; -1 2] = U^T U with U = [1 -1; 0 1]. Two more channels, untouched, fix the grid 0 1 2 3.
  FeedbackTriangle four;
  four.order = {0, 1, 2, 3};
  four.u = {1, -1, 0, 0, 1, 0, 0, 1, 0, 1};
  // 0.4 -> 0, error .4, the second becomes 1.3 + .4 = 1.7 -> 2 (nearest alone: 1).
  EXPECT_EQ(codes_of(code("int2.token.g.ef", 4, {0.4f, 1.3f, 0, 3}, four), 2, 3, 3), (std::vector<float>{0, 2, 0, 3}));
  EXPECT_EQ(code("int2.token.g", 4, {0.4f, 1.3f, 0, 3}, four), (std::vector<float>{0, 1, 0, 3}));
  // Clamped: 2.9 -> 3, error -.1; 0.1 - .1 -> 0.
  EXPECT_EQ(codes_of(code("int2.token.g.ef", 4, {2.9f, 0.1f, 0, 3}, four), 2, 3, 3), (std::vector<float>{3, 0, 0, 3}));
  // Codes 0 2 0 3 (mean 1.25) of values of mean 1.175: <x - mean, code - mean> = 5.725, |x - mean|^2 = 5.3275.
  const std::vector<float> refitted = code("int2.token.g.ef", 4, {0.4f, 1.3f, 0, 3}, four);
  const float scale = 5.3275f / 5.725f;
  for (const auto& [i, q] : {std::pair{0, 0.0f}, {1, 2.0f}, {3, 3.0f}}) EXPECT_NEAR(refitted[static_cast<std::size_t>(i)], 1.175f + scale * (q - 1.25f), 2e-3);
}

// Error feedback is Babai's nearest plane on the lattice of the grid: with H' = B^T B, walk the channels and project out what is left.
TEST(ErrorFeedback, IsTheNearestPlaneAlgorithm) {
  constexpr int d = 6;
  const std::vector<double> h = anisotropic(d, 9), ridged = with_ridge(h, d);
  const FeedbackTriangle t = feedback_triangle(h, d);
  Rng rng(8);
  for (int round = 0; round < 200; ++round) {
    std::vector<float> x(d + 2);  // two more channels, untouched by feedback, fix the grid 0..15
    for (int i = 0; i < d; ++i) x[static_cast<std::size_t>(i)] = static_cast<float>(4 + 7 * rng.uniform());
    x[d] = 0, x[d + 1] = 15;
    FeedbackTriangle wide;
    for (int i = 0, k = 0; i < d + 2; ++i) {
      wide.order.push_back(i < d ? t.order[static_cast<std::size_t>(i)] : static_cast<float>(i));
      for (int j = i; j < d + 2; ++j) wide.u.push_back(i < d && j < d ? t.u[static_cast<std::size_t>(k++)] : i == j ? 1.0f : 0.0f);
    }
    const std::vector<float> coded = codes_of(code("int4.token.g.ef", d + 2, x, wide), d, d + 1, 15);
    // Fix channels in order; each takes the integer nearest to the minimiser of the cost given the ones before it.
    std::vector<double> error(d, 0.0);
    for (int i = 0; i < d; ++i) {
      // The best real errors of the channels from i on: solve H'[rest, rest] e = -H'[rest, done] e_done by Gauss-Seidel.
      std::vector<double> e = error;
      for (int sweep = 0; sweep < 500; ++sweep)
        for (int a = i; a < d; ++a) {
          const int ra = static_cast<int>(t.order[static_cast<std::size_t>(a)]);
          double sum = 0;
          for (int b = 0; b < d; ++b) {
            const int rb = static_cast<int>(t.order[static_cast<std::size_t>(b)]);
            if (b != a) sum += ridged[static_cast<std::size_t>(ra * d + rb)] * e[static_cast<std::size_t>(b)];
          }
          e[static_cast<std::size_t>(a)] = -sum / ridged[static_cast<std::size_t>(ra * d + ra)];
        }
      const int channel = static_cast<int>(t.order[static_cast<std::size_t>(i)]);
      const double target = x[static_cast<std::size_t>(channel)] + e[static_cast<std::size_t>(i)], integer = std::min(15.0, std::max(0.0, std::nearbyint(target)));
      if (std::abs(target - std::floor(target) - 0.5) < 1e-4) break;  // too close to a boundary to compare fp32 with double
      ASSERT_EQ(coded[static_cast<std::size_t>(channel)], integer) << "round " << round << " step " << i;
      error[static_cast<std::size_t>(i)] = integer - x[static_cast<std::size_t>(channel)];
    }
  }
}

TEST(ErrorFeedback, MomentsFollowTheSchemesCoordinates) {
  LayerGeometry g = quant_test::geometry();
  const auto value = [](std::int64_t t, int h, int c) { return static_cast<float>(std::sin(0.1 * static_cast<double>(t * (c + 1) + h))); };
  const stats::LayerStats stats = quant_test::layer_stats(g, 4, 200, value, value, value);
  const std::vector<double> m = error_moment(stats, Side::kK, 1, parse_scheme("int4.token.g.ef"), nullptr, 100);
  EXPECT_EQ(m, stats.query_moment.matrix(1));
  const auto trace = [](const std::vector<double>& a) {
    double sum = 0;
    for (int i = 0; i < 64; ++i) sum += a[static_cast<std::size_t>(65 * i)];
    return sum;
  };
  // A rotation keeps the trace; so does RoPE, whose queries here are the same before and after.
  EXPECT_NEAR(trace(error_moment(stats, Side::kK, 1, parse_scheme("int4.token.g.had.ef"), nullptr, 100)), trace(m), 1e-4 * trace(m));
  EXPECT_NEAR(trace(error_moment(stats, Side::kK, 1, parse_scheme("int4.token.g.pre.ef"), nullptr, 100)), trace(m), 1e-4 * trace(m));
  const std::vector<float> smooth(64, 3.0f);
  EXPECT_NEAR(trace(error_moment(stats, Side::kK, 1, parse_scheme("int4.token.g.smooth.ef"), smooth.data(), 100)), 9 * trace(m), 1e-4 * trace(m));
  const SchemeParams p = fit_params(parse_scheme("int4.channel.g32.pre.ef"), Side::kK, stats, 4, nullptr, 100);
  EXPECT_EQ(p.ef_u.size(), 2u * 64 * 65 / 2);
  EXPECT_EQ(p.ef_order.size(), 128u);
}

// Queries that point one way: what fit_params finds reaches the encoder, and costs less under the moment than rounding to nearest.
TEST(ErrorFeedback, FittedConstantsLowerTheCostOfStoredKeys) {
  LayerGeometry g = quant_test::geometry();
  const auto value = [](std::int64_t t, int h, int c) { return static_cast<float>(std::sin(0.1 * static_cast<double>(t * (c + 1) + h))); };
  const std::vector<float> k = quant_test::fill(200, 2, 64, value);
  const std::vector<float> q = quant_test::fill(200, 4, 64, [](std::int64_t t, int h, int c) {
    return static_cast<float>(2 * std::cos(static_cast<double>(c * c)) + std::sin(0.7 * static_cast<double>(t * (c + 2) + h)));
  });
  stats::LayerStats stats(g, 4);
  stats::DocumentTensors document;
  document.n_tokens = 200;
  document.k_pre = document.k_post = document.v = k.data();
  document.q_pre = document.q_post = q.data();
  ThreadPool pool(1);
  stats.add_document(document, pool);
  std::vector<float> x(64 * 128), with(x.size()), without(x.size());
  Rng rng(4);
  for (float& v : x) v = static_cast<float>(rng.normal());
  struct Row { const char *with, *without; };
  for (const Row& r :
       {Row{"int4.channel.g32.pre.ef", "int4.channel.g32.pre"}, Row{"int3.token.g.ef", "int3.token.g"}, Row{"int4.token.g.had.ef", "int4.token.g.had"}}) {
    const SchemeParams p = fit_params(parse_scheme(r.with), Side::kK, stats, 4, nullptr, 100);
    fake_quant_document(parse_scheme(r.with), Side::kK, g, p, 0, false, 64, x.data(), with.data(), pool);
    fake_quant_document(parse_scheme(r.without), Side::kK, g, {}, 0, false, 64, x.data(), without.data(), pool);
    double cost_with = 0, cost_without = 0;
    for (int h = 0; h < 2; ++h) {
      // Decoded values are the model's own coordinates, without the rotation.
      const std::vector<double> moment =
          error_moment(stats, Side::kK, h, parse_scheme(parse_scheme(r.with).pre ? "int4.token.g.pre" : "int4.token.g"), nullptr, 100);
      const auto of_head = [&](const std::vector<float>& v) {
        std::vector<float> rows;
        for (std::size_t t = 0; t < 64; ++t)
          for (std::size_t c = 0; c < 64; ++c) rows.push_back(v[t * 128 + static_cast<std::size_t>(h) * 64 + c]);
        return rows;
      };
      cost_with += cost(moment, 64, of_head(x), of_head(with)), cost_without += cost(moment, 64, of_head(x), of_head(without));
    }
    EXPECT_LT(cost_with, 0.7 * cost_without) << r.with;
  }
}

// Before RoPE: the cost of an error of the stored key, averaged over the distances it will be read at.
TEST(ErrorFeedback, MomentBeforeRopeIsTheMeanOverDistances) {
  LayerGeometry g = quant_test::geometry(1, 8);
  g.inv_freq.clear();
  for (int p = 0; p < 4; ++p) g.inv_freq.push_back(std::pow(100.0, -p / 4.0));
  const auto value = [](std::int64_t t, int, int c) { return static_cast<float>(std::sin(0.3 * static_cast<double>(t + c))); };
  const stats::LayerStats stats = quant_test::layer_stats(g, 0, 50, value, value, value);
  const std::vector<double> m = error_moment(stats, Side::kK, 0, parse_scheme("int4.channel.g32.pre.ef"), nullptr, 1);  // distance 1 only
  // error^T m error = sum over heads of E (q0 . R_1^T error)^2, R_1 the rotation by one token.
  std::vector<double> error(8), back(8);
  for (int i = 0; i < 8; ++i) error[static_cast<std::size_t>(i)] = std::cos(i);
  for (std::size_t p = 0; p < 4; ++p) {
    const double c = std::cos(g.inv_freq[p]), s = std::sin(g.inv_freq[p]);
    back[p] = c * error[p] + s * error[p + 4];
    back[p + 4] = -s * error[p] + c * error[p + 4];
  }
  double expected = 0, found = 0;
  for (int q = 0; q < 2; ++q) {
    const std::vector<double> covariance = stats.query_cov.matrix(q);
    const double* mean = stats.query_cov.mean(q);
    for (std::size_t i = 0; i < 8; ++i)
      for (std::size_t j = 0; j < 8; ++j) expected += back[i] * back[j] * (covariance[i * 8 + j] + mean[i] * mean[j]);
  }
  for (std::size_t i = 0; i < 8; ++i)
    for (std::size_t j = 0; j < 8; ++j) found += error[i] * error[j] * m[i * 8 + j];
  EXPECT_NEAR(found, expected, 1e-9 * expected);
}

}  // namespace
}  // namespace calib::quant

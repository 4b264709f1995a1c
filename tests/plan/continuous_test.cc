#include "libcalib/plan/continuous.h"

#include <gtest/gtest.h>

#include <cmath>

#include "libcalib/base/rng.h"

namespace calib::plan {
namespace {

// METHODS.md G40.
TEST(Continuous, GoldenWidths) {
  const std::vector<double> bits = continuous_bits({4.0, {1, 4, 16, 1}}, 3.0);
  const double expected[] = {2.25, 3.25, 4.25, 2.25};
  for (std::size_t u = 0; u < 4; ++u) EXPECT_NEAR(bits[u], expected[u], 1e-9);
}

// METHODS.md 2.7 and G7: two units whose weights differ by (sigma_s)^2, at base 4: bK - bV = log2(sigma_s).
TEST(Continuous, KeysAgainstValues) {
  for (const double sigma : {1.0, 2.0, 4.0, 8.0}) {
    const std::vector<double> bits = continuous_bits({4.0, {sigma * sigma, 1}}, 4.0);
    EXPECT_NEAR(bits[0] - bits[1], std::log2(sigma), 1e-12);
  }
}

TEST(Continuous, NoOtherWidthsLoseLess) {
  Rng rng(5);
  DamageCurves curves{3.4, {}};
  for (int u = 0; u < 8; ++u) curves.weight.push_back(std::exp(2 * rng.normal()));
  const std::vector<double> best = continuous_bits(curves, 3.5);
  const auto loss = [&](const std::vector<double>& bits) {
    double sum = 0;
    for (std::size_t u = 0; u < bits.size(); ++u) sum += curves.weight[u] * std::pow(curves.base, -bits[u]);
    return sum;
  };
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<double> bits = best;
    const double moved = rng.normal();
    bits[rng.below(8)] += moved;
    bits[rng.below(8)] -= moved;  // the same mean
    EXPECT_GE(loss(bits), loss(best) * (1 - 1e-12));
  }
}

TEST(Continuous, FitFindsBaseAndWeights) {
  std::vector<std::vector<std::pair<double, double>>> points;
  const double weights[] = {1, 7, 0.02};
  for (const double w : weights) points.push_back({{2, w * std::pow(3.3, -2)}, {3, w * std::pow(3.3, -3)}, {4, w * std::pow(3.3, -4)}});
  const std::optional<DamageCurves> curves = fit_damage_curves(points);
  ASSERT_TRUE(curves);
  EXPECT_NEAR(curves->base, 3.3, 1e-9);
  for (std::size_t u = 0; u < 3; ++u) EXPECT_NEAR(curves->weight[u], weights[u], 1e-9 * weights[u]);
  points[1].pop_back();  // two widths do not make a curve
  EXPECT_FALSE(fit_damage_curves(points));
  EXPECT_FALSE(fit_damage_curves({{{2, 1}, {3, 2}, {4, 4}}}));  // more bits, more loss
  EXPECT_FALSE(fit_damage_curves({{{2, 1}, {3, 0}, {4, 1}}}));
  EXPECT_FALSE(fit_damage_curves({}));
}

// METHODS.md G23: a bit divides the loss of an optimal quantiser of N(0,1) by less than 4. Errors: section 4.7.
TEST(Continuous, RatiosPerAddedBit) {
  const double lloyd[] = {0.363380, 0.117482, 0.034548, 0.009501, 0.002505}, uniform[] = {0.363380, 0.118846, 0.037440, 0.011543, 0.003495};
  const double lloyd_ratio[] = {3.09, 3.40, 3.64, 3.79}, uniform_ratio[] = {3.06, 3.17, 3.24, 3.30};
  for (int b = 0; b + 2 < 5; ++b)
    for (const auto& [mse, ratio] : {std::pair(lloyd, lloyd_ratio), std::pair(uniform, uniform_ratio)}) {
      EXPECT_NEAR(mse[b] / mse[b + 1], ratio[b], 0.01);
      // Over three widths the fitted base is the geometric mean of its two ratios.
      const std::optional<DamageCurves> curves = fit_damage_curves({{{b + 1, mse[b]}, {b + 2, mse[b + 1]}, {b + 3, mse[b + 2]}}});
      ASSERT_TRUE(curves);
      EXPECT_NEAR(curves->base, std::sqrt(ratio[b] * ratio[b + 1]), 0.01);
    }
}

}  // namespace
}  // namespace calib::plan

#include "libcalib/model/rope.h"

#include <cmath>

#include <gtest/gtest.h>

namespace calib::model {
namespace {

TEST(Rope, Llama3MultipliersAndFarPosition) {  // AR-02
  RopeConfig plain, scaled;
  plain.theta = scaled.theta = 500000;
  scaled.scaling = RopeScaling::kLlama3;
  scaled.factor = 32, scaled.low_freq_factor = 1, scaled.high_freq_factor = 4, scaled.original_max_positions = 8192;
  const auto a = rope_inv_freq(plain, 64), b = rope_inv_freq(scaled, 64);
  ASSERT_EQ(b.size(), 32u);
  for (std::size_t i = 0; i < 32; ++i) {
    const double expected = i < 15 ? 1.0 : i == 15 ? 0.60557 : i == 16 ? 0.30374 : i == 17 ? 0.10345 : 0.03125;
    EXPECT_NEAR(b[i] / a[i], expected, 1e-5) << i;
  }
  const auto table = RopeCache(b).table(9001);
  EXPECT_NEAR(table->cos[9000 * 32 + 16], -0.748885f, 1e-4f);
  EXPECT_NEAR(table->sin[9000 * 32 + 16], -0.662700f, 1e-4f);
}

TEST(Rope, LinearDividesTheAngleAtAnyLength) {  // AR-07
  RopeConfig rope;
  rope.scaling = RopeScaling::kLinear;
  rope.factor = 4;
  const auto omega = rope_inv_freq(rope, 8);
  EXPECT_DOUBLE_EQ(100 * omega[0], 25.0);
  EXPECT_DOUBLE_EQ(omega[1] * 4, std::pow(10000.0, -0.25));
}

TEST(Rope, FileFactorsDivideFrequencies) {
  RopeConfig rope;
  rope.freq_factors = {1, 2, 8, 32};
  const auto omega = rope_inv_freq(rope, 8);
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_DOUBLE_EQ(omega[i], std::pow(10000.0, -0.25 * static_cast<double>(i)) / rope.freq_factors[i]);
}

TEST(Rope, TablesGrowWithoutChanging) {
  const RopeCache cache({1.0, 0.01}, 1.5);
  const auto small = cache.table(10), large = cache.table(3000);
  ASSERT_GE(large->n_positions, 3000);
  for (std::size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(small->cos[i], large->cos[i]);
    EXPECT_EQ(small->sin[i], large->sin[i]);
  }
  EXPECT_EQ(large->cos[2 * 2999 + 1], static_cast<float>(1.5 * std::cos(29.99)));
  EXPECT_EQ(large->sin[2 * 2999], static_cast<float>(1.5 * std::sin(2999.0)));
}

}  // namespace
}  // namespace calib::model

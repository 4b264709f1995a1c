#include "libcalib/stats/tensor_stats.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "tests/stats/random_floats.h"

namespace calib::stats {
namespace {

constexpr int kHeads = 2, kDim = 20;
constexpr std::int64_t kStride = kHeads * kDim;

TensorStats stats_of(const std::vector<float>& x) {
  TensorStats out(kHeads, kDim, 6);
  const auto n = static_cast<std::int64_t>(x.size()) / kStride;
  for (int h = 0; h < kHeads; ++h) EXPECT_FALSE(out.add_head(h, x.data() + h * kDim, n, kStride).has_value());
  return out;
}

TEST(TensorStats, EqualsADoubleReference) {
  const std::int64_t n = 700;  // three tiles, the last one short
  const std::vector<float> x = test::normal_floats(static_cast<std::size_t>(n * kStride), 1, -0.7, 1.5);
  const TensorStats s = stats_of(x);
  EXPECT_EQ(s.n_tokens(), n);
  for (int h = 0; h < kHeads; ++h)
    for (int c = 0; c < kDim; ++c) {
      long double mean = 0, m2 = 0, m3 = 0, m4 = 0;
      float low = std::numeric_limits<float>::infinity(), high = -low;
      QuantileSketch sketch(6);
      for (std::int64_t t = 0; t < n; ++t) {
        const float v = x[static_cast<std::size_t>(t * kStride + h * kDim + c)];
        mean += v;
        low = std::min(low, v);
        high = std::max(high, v);
        sketch.add(v);
      }
      mean /= n;
      for (std::int64_t t = 0; t < n; ++t) {
        const long double d = x[static_cast<std::size_t>(t * kStride + h * kDim + c)] - mean;
        m2 += d * d;
        m3 += d * d * d;
        m4 += d * d * d * d;
      }
      const Moments& m = s.moments[s.index(h, c)];
      const double scale = std::pow(static_cast<double>(m2) / static_cast<double>(n), 1.5) * static_cast<double>(n);
      EXPECT_NEAR(m.mean, static_cast<double>(mean), 1e-13 * 3);
      EXPECT_NEAR(m.m2, static_cast<double>(m2), 1e-12 * static_cast<double>(m2));
      EXPECT_NEAR(m.m3, static_cast<double>(m3), 1e-12 * scale);
      EXPECT_NEAR(m.m4, static_cast<double>(m4), 1e-12 * static_cast<double>(m4));
      EXPECT_EQ(s.min(h, c), low);
      EXPECT_EQ(s.max(h, c), high);
      EXPECT_EQ(s.absmax(h, c), std::max(std::fabs(low), std::fabs(high)));
      EXPECT_TRUE(s.sketches[s.index(h, c)] == sketch);
    }
}

TEST(TensorStats, VarianceUnderAMeanOfSixHundred) {  // a key bias far above the spread, as in SA-01
  const std::int64_t n = 2048;
  std::vector<float> x = test::normal_floats(static_cast<std::size_t>(n * kStride), 2, 600, 0.01);
  const TensorStats s = stats_of(x);
  long double mean = 0, m2 = 0;
  for (std::int64_t t = 0; t < n; ++t) mean += x[static_cast<std::size_t>(t * kStride)];
  mean /= n;
  for (std::int64_t t = 0; t < n; ++t) m2 += (x[static_cast<std::size_t>(t * kStride)] - mean) * (x[static_cast<std::size_t>(t * kStride)] - mean);
  EXPECT_NEAR(s.mean(0, 0), static_cast<double>(mean), 1e-10);
  EXPECT_NEAR(s.moments[0].m2, static_cast<double>(m2), 1e-9 * static_cast<double>(m2));
  EXPECT_LT(s.moments[0].variance(), 2e-4);
}

TEST(TensorStats, NamesTheEarliestNonFiniteValue) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> x = test::normal_floats(static_cast<std::size_t>(600 * kStride), 3);
    x[static_cast<std::size_t>(300 * kStride + 7)] = bad;
    x[static_cast<std::size_t>(400 * kStride + 2)] = bad;
    TensorStats s(kHeads, kDim, 6);
    const auto found = s.add_head(0, x.data(), 600, kStride);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->token, 300);
    EXPECT_EQ(found->channel, 7);
    EXPECT_FALSE(s.add_head(1, x.data() + kDim, 600, kStride).has_value());
  }
}

TEST(TensorStats, OppositeInfinitiesAreNotMissed) {
  std::vector<float> x(static_cast<std::size_t>(4 * kStride), 0.0f);
  x[0] = std::numeric_limits<float>::infinity();
  x[kStride] = -x[0];
  EXPECT_TRUE(TensorStats(kHeads, kDim, 6).add_head(0, x.data(), 4, kStride).has_value());
}

TEST(TensorStats, QuantilesAreClampedToWhatWasSeen) {
  std::vector<float> x(static_cast<std::size_t>(10 * kStride), 1.0f);  // its bucket's midpoint is 1 + 1/128
  const TensorStats s = stats_of(x);
  EXPECT_EQ(s.quantile(0, 0, 0.5), 1.0);
  EXPECT_EQ(s.abs_quantile(0, 0, 0.999), 1.0);
  EXPECT_EQ(TensorStats(kHeads, kDim, 6).quantile(0, 0, 0.5), 0.0);
}

TEST(TensorStats, LargestFiniteValuesDoNotOverflow) {
  const float largest = std::numeric_limits<float>::max();
  std::vector<float> x(static_cast<std::size_t>(300 * kStride));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = (i / kStride) % 2 ? largest : -largest;
  const TensorStats s = stats_of(x);
  EXPECT_EQ(s.absmax(0, 0), largest);
  EXPECT_TRUE(std::isfinite(s.moments[0].m4));
  EXPECT_NEAR(s.moments[0].excess_kurtosis(), -2.0, 1e-9);
}

TEST(TensorStats, OutlierRatioIsAbsmaxOverTheHeadsMedian) {
  std::vector<float> x(static_cast<std::size_t>(kStride), 2.0f);
  x[3] = -28.0f;
  for (int c = 0; c < kDim; ++c) x[static_cast<std::size_t>(kDim + c)] = 0.0f;
  const TensorStats s = stats_of(x);
  const std::vector<double> ratio = channel_outlier_ratios(s);
  EXPECT_EQ(ratio[3], 14.0);
  EXPECT_EQ(ratio[4], 1.0);
  EXPECT_EQ(ratio[kDim], 0.0);  // a head of zeros has no outliers
  EXPECT_EQ(s.head_absmax(0), 28.0f);
  EXPECT_EQ(s.head_absmax(1), 0.0f);
  EXPECT_EQ(s.absmax(), 28.0f);
}

}  // namespace
}  // namespace calib::stats

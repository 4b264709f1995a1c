#include "libcalib/stats/tile_kernels.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/stats/random_floats.h"

namespace calib::stats {
namespace {

class TileKernels : public testing::TestWithParam<std::pair<int, int>> {};  // dim, rows

TEST_P(TileKernels, AgreeWithPlainLoops) {
  const auto [dim, n] = GetParam();
  const std::int64_t stride = dim + 5;
  const std::vector<float> x = test::normal_floats(static_cast<std::size_t>(n * stride), 1, 0.5, 3.0);
  Tile tile(dim);
  tile.load(x.data(), n, stride);
  const auto padded = static_cast<std::size_t>(tile.padded_dim());
  std::vector<double> sum(padded), mean(padded, 0.25), s1(padded), s2(padded), s3(padded), s4(padded);
  std::vector<float> low(padded), high(padded);
  tile_sum_extrema(tile, sum.data(), low.data(), high.data());
  tile_power_sums(tile, mean.data(), s1.data(), s2.data(), s3.data(), s4.data());
  std::vector<double> gram(static_cast<std::size_t>(dim * dim), 1.0);
  tile_gram_upper(tile, gram.data());

  for (int c = 0; c < dim; ++c) {
    double rs = 0, r1 = 0, r2 = 0, r3 = 0, r4 = 0;
    float lo = std::numeric_limits<float>::infinity(), hi = -lo;
    for (int r = 0; r < n; ++r) {
      const float v = x[static_cast<std::size_t>(r * stride + c)];
      const double d = static_cast<double>(v) - 0.25;
      rs += v;
      r1 += d;
      r2 += d * d;
      r3 += d * d * d;
      r4 += d * d * (d * d);
      lo = std::min(lo, v);
      hi = std::max(hi, v);
    }
    const auto at = static_cast<std::size_t>(c);
    EXPECT_EQ(sum[at], rs);  // same order, same operations: equal bits
    EXPECT_EQ(s1[at], r1);
    EXPECT_EQ(s2[at], r2);
    EXPECT_EQ(s3[at], r3);
    EXPECT_EQ(s4[at], r4);
    EXPECT_EQ(low[at], lo);
    EXPECT_EQ(high[at], hi);
    for (int e = 0; e < dim; ++e) {
      double product = 1.0, magnitude = 1.0;
      for (int r = 0; r < n && e >= c; ++r) {
        const double term = static_cast<double>(x[static_cast<std::size_t>(r * stride + c)]) * x[static_cast<std::size_t>(r * stride + e)];
        product += term;
        magnitude += std::fabs(term);
      }
      // n fp32 additions and one product rounding each.
      EXPECT_NEAR(gram[static_cast<std::size_t>(c * dim + e)], product, magnitude * (n + 1) * 0x1.0p-24) << c << "," << e;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, TileKernels,
                         testing::Values(std::pair{1, 1}, std::pair{2, 3}, std::pair{15, 256}, std::pair{16, 7}, std::pair{17, 256},
                                         std::pair{64, 256}, std::pair{80, 31}, std::pair{128, 100}));

TEST(TileKernelsShift, LoadSubtractsTheShift) {
  const std::vector<float> x = {1, 2, 3, 4}, shift = {0.5f, 1};
  Tile tile(2);
  tile.load(x.data(), 2, 2, shift.data());
  EXPECT_EQ(tile.data()[0], 0.5f);
  EXPECT_EQ(tile.data()[tile.row_stride() + 1], 3.0f);
}

TEST(TileKernelsShift, RowsOfAnEarlierLoadDoNotLeak) {
  Tile tile(3);
  const std::vector<float> big(3 * 256, 1e9f), small = {1, 2, 3};
  tile.load(big.data(), 256, 3);
  tile.load(small.data(), 1, 3);
  double sum[16];
  float low[16], high[16];
  tile_sum_extrema(tile, sum, low, high);
  EXPECT_EQ(sum[2], 3);
  EXPECT_EQ(high[2], 3);
}

TEST(RowEntropy, AgreesWithTheLibraryLogarithm) {
  for (const std::size_t n : {1u, 5u, 64u, 255u, 256u, 257u, 2000u}) {
    std::vector<float> p(n);
    Rng rng(n);
    double total = 0;
    for (float& v : p) total += v = static_cast<float>(std::exp(4 * rng.normal()));
    double entropy = 0, squares = 0;
    for (float& v : p) {
      v = static_cast<float>(v / total);
      entropy -= static_cast<double>(v) * std::log(static_cast<double>(v));
      squares += static_cast<double>(v) * v;
    }
    double h = 0, sq = 0;
    row_entropy(p.data(), n, &h, &sq);
    EXPECT_NEAR(h, entropy, 1e-6 * std::max(1.0, entropy)) << n;
    EXPECT_NEAR(sq, squares, 1e-6 * squares) << n;
  }
}

TEST(RowEntropy, ZeroProbabilitiesAddNothing) {
  const std::vector<float> p = {0, 1, 0, std::numeric_limits<float>::denorm_min()};
  double h = 1, sq = 0;
  row_entropy(p.data(), p.size(), &h, &sq);
  EXPECT_NEAR(h, 0, 1e-7);
  EXPECT_EQ(sq, 1);
}

TEST(RowSoftmax, AgreesWithDoubles) {
  for (const std::size_t n : {1u, 2u, 15u, 16u, 17u, 255u, 256u, 257u, 2000u}) {
    Rng rng(n);
    std::vector<float> x(n);
    for (float& v : x) v = static_cast<float>(20 * rng.normal());
    double largest = -1e30, sum = 0;
    for (const float v : x) largest = std::max(largest, static_cast<double>(v));
    for (const float v : x) sum += std::exp(static_cast<double>(v) - largest);
    std::vector<float> p = x;
    row_softmax(p.data(), n);
    // The difference to the largest score is rounded to fp32 before the exponential: 60 half-ulps of it at most.
    for (std::size_t i = 0; i < n; ++i) {
      const double want = std::exp(static_cast<double>(x[i]) - largest) / sum;
      EXPECT_NEAR(p[i], want, 1e-5 * want + 1e-37) << n << " " << i;
    }
  }
}

TEST(RowSoftmax, ScoresThatAreNotNumbersShow) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {nan, inf}) {
    std::vector<float> x(40, 1.0f);
    x[20] = bad;
    row_softmax(x.data(), x.size());
    for (const float p : x) EXPECT_TRUE(std::isnan(p));
  }
  std::vector<float> hidden = {0, -inf, 0};
  row_softmax(hidden.data(), 3);
  EXPECT_EQ(hidden[0], 0.5f);
  EXPECT_LT(hidden[1], 1e-37f);
}

}  // namespace
}  // namespace calib::stats

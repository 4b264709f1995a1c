#include "libcalib/base/rng.h"

#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace calib {
namespace {

TEST(Rng, SplitMix64KnownValues) {
  Rng zero(0);
  EXPECT_EQ(zero.next(), 0xE220A8397B1DCDAFull);
  EXPECT_EQ(zero.next(), 0x6E789E6AA1B965F4ull);
  EXPECT_EQ(zero.next(), 0x06C45D188009454Full);
  Rng other(1234567);
  EXPECT_EQ(other.next(), 6457827717110365317ull);
  EXPECT_EQ(other.next(), 3203168211198807973ull);
}

TEST(Rng, StreamsOfItemsKnownValues) {  // from an independent Python version
  Rng r = Rng::for_item(1, 2, 3);
  EXPECT_EQ(r.next(), 0x53DAED9C89CAC8B6ull);
  EXPECT_EQ(r.next(), 0x8A2768BFD3CC0C39ull);
  Rng n = Rng::for_item(1, 7);
  EXPECT_NEAR(n.normal(), -0.47642899127540095, 1e-15);
  EXPECT_NEAR(n.normal(), -1.2716009965082533, 1e-15);
}

TEST(Rng, NeighbouringItemsDiffer) {
  std::set<std::uint64_t> first;
  for (std::uint64_t seed = 0; seed < 4; ++seed)
    for (std::uint64_t a = 0; a < 16; ++a)
      for (std::uint64_t b = 0; b < 16; ++b) first.insert(Rng::for_item(seed, a, b).next());
  EXPECT_EQ(first.size(), 4u * 16 * 16);
}

TEST(Rng, UniformAndBelowStayInRange) {
  Rng r(5);
  const int n = 100'000;
  double sum = 0;
  std::vector<int> counts(7);
  for (int i = 0; i < n; ++i) {
    const double u = r.uniform();
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
    const auto k = r.below(7);
    ASSERT_LT(k, 7u);
    ++counts[k];
  }
  EXPECT_NEAR(sum / n, 0.5, 5 * std::sqrt(1.0 / 12 / n));  // 5 sigma
  for (int c : counts) EXPECT_NEAR(c, n / 7.0, 5 * std::sqrt(n * 6.0 / 49));
}

TEST(Rng, NormalHasUnitMoments) {
  Rng r(6);
  const int n = 200'000;
  double m1 = 0, m2 = 0, m4 = 0;
  for (int i = 0; i < n; ++i) {
    const double x = r.normal();
    ASSERT_TRUE(std::isfinite(x));
    m1 += x, m2 += x * x, m4 += x * x * x * x;
  }
  EXPECT_NEAR(m1 / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(m2 / n, 1, 5 * std::sqrt(2.0 / n));
  EXPECT_NEAR(m4 / n, 3, 5 * std::sqrt(96.0 / n));
}

}  // namespace
}  // namespace calib

#include "libcalib/stats/moments.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "libcalib/base/rng.h"

namespace calib::stats {
namespace {

// Two passes in long double: the reference for all bounds below.
struct Reference {
  long double mean = 0, m2 = 0, m3 = 0, m4 = 0;
};
Reference reference(const std::vector<double>& x) {
  Reference out;
  for (const double v : x) out.mean += v;
  out.mean /= static_cast<long double>(x.size());
  for (const double v : x) {
    const long double d = v - out.mean;
    out.m2 += d * d;
    out.m3 += d * d * d;
    out.m4 += d * d * d * d;
  }
  return out;
}

Moments one_by_one(const std::vector<double>& x) {
  Moments out;
  for (const double v : x) out.add(v);
  return out;
}

// M3 can cancel to nearly nothing, so its error is measured against the scale that its terms have.
void expect_near_reference(const Moments& m, const std::vector<double>& x, double tolerance) {
  const Reference r = reference(x);
  const double n = static_cast<double>(x.size()), scale = std::sqrt(static_cast<double>(r.m2) / n);
  EXPECT_EQ(m.n, static_cast<std::int64_t>(x.size()));
  EXPECT_NEAR(m.mean, static_cast<double>(r.mean), tolerance * std::max(scale, std::fabs(static_cast<double>(r.mean))));
  EXPECT_NEAR(m.m2, static_cast<double>(r.m2), tolerance * static_cast<double>(r.m2));
  EXPECT_NEAR(m.m3, static_cast<double>(r.m3), tolerance * n * scale * scale * scale);
  EXPECT_NEAR(m.m4, static_cast<double>(r.m4), tolerance * static_cast<double>(r.m4));
}

std::vector<double> normals(std::size_t n, std::uint64_t seed, double mean = 0, double std = 1) {
  Rng rng(seed);
  std::vector<double> out(n);
  for (double& x : out) x = mean + std * rng.normal();
  return out;
}

TEST(Moments, KnownAnswerOfMergingTwoSets) {  // METHODS.md G9
  Moments a = one_by_one({1, 2, 3, 4});
  const Moments b = one_by_one({10, 20});
  a.merge(b);
  EXPECT_EQ(a.n, 6);
  EXPECT_NEAR(a.mean, 20.0 / 3, 1e-9 * 7);
  EXPECT_NEAR(a.m2, 263.0 + 1.0 / 3, 1e-9 * 264);
  EXPECT_NEAR(a.m3, 2055.0 + 5.0 / 9, 1e-9 * 2056);
  EXPECT_NEAR(a.m4, 33465.0 + 1.0 / 9, 1e-9 * 33466);
  EXPECT_NEAR(a.skew(), 1.178273, 1e-6);
  EXPECT_NEAR(a.excess_kurtosis(), -0.104445, 1e-6);
}

TEST(Moments, EmptySetIsNeutral) {
  const Moments a = one_by_one({1, 2, 4});
  Moments left, right = a;
  left.merge(a);
  right.merge(Moments{});
  for (const Moments& m : {left, right}) {
    EXPECT_EQ(m.n, a.n);
    EXPECT_EQ(m.mean, a.mean);
    EXPECT_EQ(m.m2, a.m2);
    EXPECT_EQ(m.m3, a.m3);
    EXPECT_EQ(m.m4, a.m4);
  }
  EXPECT_EQ(Moments{}.variance(), 0);
  EXPECT_EQ(Moments{}.skew(), 0);
  EXPECT_EQ(Moments{}.excess_kurtosis(), 0);
}

TEST(Moments, MergeEqualsOnePass) {
  const std::vector<double> x = normals(3000, 1, 0.3, 2);
  for (const std::size_t cut : {1u, 10u, 1500u, 2999u}) {
    Moments a = one_by_one({x.begin(), x.begin() + static_cast<std::ptrdiff_t>(cut)});
    a.merge(one_by_one({x.begin() + static_cast<std::ptrdiff_t>(cut), x.end()}));
    expect_near_reference(a, x, 1e-12);
  }
}

TEST(Moments, MergingIsAssociativeAndIndependentOfOrder) {
  const std::vector<double> x = normals(999, 2);
  const auto part = [&](std::size_t i) {
    return one_by_one({x.begin() + static_cast<std::ptrdiff_t>(333 * i), x.begin() + static_cast<std::ptrdiff_t>(333 * (i + 1))});
  };
  Moments left = part(0);
  left.merge(part(1));
  left.merge(part(2));
  Moments tail = part(1);
  tail.merge(part(2));
  Moments right = part(0);
  right.merge(tail);
  Moments reversed = part(2);
  reversed.merge(part(0));
  reversed.merge(part(1));
  for (const Moments& m : {left, right, reversed}) expect_near_reference(m, x, 1e-12);
}

TEST(Moments, MeanFarAboveTheSpread) {
  const std::vector<double> x = normals(2000, 3, 600, 0.01);
  // One part in 6e4 of the mean: d carries 2^-53 * 600 / 0.01 relative error, below 1e-11.
  expect_near_reference(one_by_one(x), x, 1e-10);
}

TEST(Moments, ConstantHasNoSpread) {
  const Moments m = one_by_one(std::vector<double>(100, -3.25));
  EXPECT_EQ(m.mean, -3.25);
  EXPECT_EQ(m.m2, 0);
  EXPECT_EQ(m.skew(), 0);
  EXPECT_EQ(m.excess_kurtosis(), 0);
}

TEST(Moments, SkewAndKurtosisOfAnExponentialSample) {
  Rng rng(4);
  std::vector<double> x(200000);
  for (double& v : x) v = -std::log(1.0 - rng.uniform());
  const Moments m = one_by_one(x);
  // Skew 2, excess 6; standard errors of these estimators at n = 2e5 are about 0.02 and 0.3 (heavy eighth moment).
  EXPECT_NEAR(m.skew(), 2.0, 0.1);
  EXPECT_NEAR(m.excess_kurtosis(), 6.0, 1.5);
}

}  // namespace
}  // namespace calib::stats

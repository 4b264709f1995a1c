#include "libcalib/stats/covariance.h"

#include <cmath>

#include <gtest/gtest.h>

#include "tests/stats/random_floats.h"

namespace calib::stats {
namespace {

constexpr int kDim = 20;

// Plain double loops over all rows.
std::vector<double> reference(const std::vector<float>& x, bool centred) {
  const std::size_t n = x.size() / kDim;
  std::vector<double> mean(kDim, 0.0), out(kDim * kDim, 0.0);
  if (centred) {
    for (std::size_t r = 0; r < n; ++r)
      for (std::size_t c = 0; c < kDim; ++c) mean[c] += x[r * kDim + c];
    for (double& m : mean) m /= static_cast<double>(n);
  }
  for (std::size_t r = 0; r < n; ++r)
    for (std::size_t i = 0; i < kDim; ++i)
      for (std::size_t j = 0; j < kDim; ++j) out[i * kDim + j] += (x[r * kDim + i] - mean[i]) * (x[r * kDim + j] - mean[j]);
  for (double& v : out) v /= static_cast<double>(n);
  return out;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double out = 0;
  for (std::size_t i = 0; i < a.size(); ++i) out = std::max(out, std::fabs(a[i] - b[i]));
  return out;
}

GramAccumulator gram_of(const std::vector<float>& x, bool centred) {
  GramAccumulator out(1, kDim, centred);
  out.add_rows(0, x.data(), static_cast<std::int64_t>(x.size()) / kDim, kDim);
  return out;
}

TEST(GramAccumulator, EqualsADoubleReference) {
  const std::vector<float> x = test::normal_floats(700 * kDim, 1, 0.4, 1.0);
  // fp32 sums over tiles of 256: worst relative error 257 * 2^-24 of the diagonal, typically its square root.
  EXPECT_LT(largest_difference(gram_of(x, false).matrix(0), reference(x, false)), 1.2 * 257 * 0x1.0p-24);
  EXPECT_LT(largest_difference(gram_of(x, true).matrix(0), reference(x, true)), 257 * 0x1.0p-24);
}

TEST(GramAccumulator, CentringSurvivesALargeMean) {
  const std::vector<float> x = test::normal_floats(700 * kDim, 2, 600, 0.05);
  const std::vector<double> expected = reference(x, true);
  EXPECT_LT(largest_difference(gram_of(x, true).matrix(0), expected), expected[0] * 257 * 0x1.0p-24);
}

TEST(GramAccumulator, MergeEqualsOnePassInAnyOrder) {
  const std::vector<float> x = test::normal_floats(768 * kDim, 3, 2, 1);
  const auto part = [&](int i) { return gram_of({x.begin() + i * 256 * kDim, x.begin() + (i + 1) * 256 * kDim}, true); };
  GramAccumulator forward = part(0), backward = part(2), tail = part(1), nested = part(0);
  forward.merge(part(1));
  forward.merge(part(2));
  backward.merge(part(1));
  backward.merge(part(0));
  tail.merge(part(2));
  nested.merge(tail);
  const std::vector<double> once = gram_of(x, true).matrix(0);  // tiles coincide with the parts
  for (const GramAccumulator* g : {&forward, &backward, &nested}) {
    EXPECT_EQ(g->n_rows(0), 768);
    EXPECT_LT(largest_difference(g->matrix(0), once), 1e-12);
  }
  GramAccumulator neutral(1, kDim, true);
  neutral.merge(forward);
  EXPECT_LT(largest_difference(neutral.matrix(0), once), 1e-12);
  EXPECT_NEAR(neutral.mean(0)[0], forward.mean(0)[0], 1e-15);
}

TEST(GramAccumulator, QueryMomentSumsOverTheGroupAndDividesByTokens) {
  const std::vector<float> a = {1, 2}, b = {3, -1};
  GramAccumulator moment(1, 2, false, 2);
  moment.add_rows(0, a.data(), 1, 2);
  moment.add_rows(0, b.data(), 1, 2);
  EXPECT_EQ(moment.n_tokens(0), 1.0);
  EXPECT_EQ(moment.matrix(0), (std::vector<double>{1 + 9, 2 - 3, 2 - 3, 4 + 1}));
}

TEST(GramAccumulator, MatricesAreIndependentAndSymmetric) {
  const std::vector<float> x = test::normal_floats(300 * kDim, 4);
  GramAccumulator g(2, kDim, true);
  g.add_rows(1, x.data(), 300, kDim);
  EXPECT_EQ(g.matrix(0), std::vector<double>(kDim * kDim, 0.0));
  const std::vector<double> m = g.matrix(1);
  for (int i = 0; i < kDim; ++i)
    for (int j = 0; j < kDim; ++j) EXPECT_EQ(m[static_cast<std::size_t>(i * kDim + j)], m[static_cast<std::size_t>(j * kDim + i)]);
}

TEST(GramAccumulator, EigenvaluesDescendAndClampAtZero) {
  std::vector<float> x;  // rank one: every row a multiple of (1, 2, 3)
  for (int r = 0; r < 50; ++r)
    for (int c = 1; c <= 3; ++c) x.push_back(static_cast<float>((r % 7 - 3) * c));
  GramAccumulator g(1, 3, false);
  g.add_rows(0, x.data(), 50, 3);
  const std::vector<double> values = g.eigenvalues(0);
  double trace = 0;
  for (int c = 0; c < 3; ++c) trace += g.matrix(0)[static_cast<std::size_t>(4 * c)];
  EXPECT_NEAR(values[0], trace, 1e-12 * trace);
  EXPECT_NEAR(values[1], 0, 1e-12 * trace);
  EXPECT_GE(values[1], 0);
  EXPECT_GE(values[2], 0);
}

TEST(GramAccumulator, StateRoundTrip) {
  const GramAccumulator g = gram_of(test::normal_floats(100 * kDim, 5, 1, 1), true);
  GramAccumulator again(1, kDim, true);
  again.set_state(g.rows_state(), g.mean_state(), g.sum_state());
  EXPECT_EQ(again.matrix(0), g.matrix(0));
}

}  // namespace
}  // namespace calib::stats

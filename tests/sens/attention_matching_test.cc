#include "libcalib/sens/attention_matching.h"

#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "libcalib/base/rng.h"

namespace calib::sens {
namespace {

std::vector<double> normals(std::size_t n, double sd, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<double> x(n);
  for (double& a : x) a = sd * rng.normal();
  return x;
}
std::vector<std::int32_t> all_of(std::int32_t n) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

TEST(AttentionMatch, KnownAnswerAndMerge) {
  AttentionMatch a, b;
  a.add_row(std::vector<double>{3, 4}, std::vector<double>{3, 3}, 2.0, 1.5);
  EXPECT_DOUBLE_EQ(a.e_out(), 1.0 / 25);
  EXPECT_DOUBLE_EQ(a.e_mass(), 0.25);
  b.add_row(std::vector<double>{1, 0}, std::vector<double>{0, 0}, 1.0, 1.0);
  a += b;
  EXPECT_DOUBLE_EQ(a.e_out(), 2.0 / 26) << "a ratio of sums";
  EXPECT_DOUBLE_EQ(a.e_mass(), 0.125);
  EXPECT_EQ(AttentionMatch{}.e_out(), 0.0);
}

// More rows than keys, fewer (a singular problem), and one.
TEST(RefitCompact, G38AllKeysKept) {
  for (const std::size_t n_rows : {40u, 5u, 1u}) {
    const std::int64_t n = 12, d = 6;
    const std::vector<double> scores = normals(n_rows * n, 2, 1), values = normals(n * d, 1, 2);
    const CompactBlock block = refit_compact(scores, n, all_of(12), values, d);
    for (const double beta : block.beta) EXPECT_NEAR(beta, 0, 1e-6) << n_rows;
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(block.values[i], values[i], 1e-6) << n_rows;
    const AttentionMatch match = match_compact(scores, n, all_of(12), values, d, block);
    EXPECT_NEAR(match.e_out(), 0, 1e-6);
    EXPECT_NEAR(match.e_mass(), 0, 1e-6);
  }
}

// Two keys with equal scores in all rows stand for each other: bias ln 2 and the mean of their values lose nothing.
TEST(RefitCompact, ATwinIsReplacedExactly) {
  const std::size_t n_rows = 30;
  const std::int64_t n = 5, d = 3;
  std::vector<double> scores = normals(n_rows * n, 1, 3), values = normals(n * d, 1, 4);
  for (std::size_t r = 0; r < n_rows; ++r) scores[r * 5 + 4] = scores[r * 5 + 1];
  const std::vector<std::int32_t> kept{0, 1, 2, 3};
  const CompactBlock block = refit_compact(scores, n, kept, values, d);
  EXPECT_NEAR(block.beta[1], std::log(2.0), 1e-6);
  EXPECT_NEAR(block.beta[0], 0, 1e-6);
  for (std::size_t c = 0; c < 3; ++c) EXPECT_NEAR(block.values[3 + c], 0.5 * (values[3 + c] + values[12 + c]), 1e-5);
  const AttentionMatch match = match_compact(scores, n, kept, values, d, block);
  EXPECT_NEAR(match.e_out(), 0, 1e-9);
  EXPECT_NEAR(match.e_mass(), 0, 1e-9);
}

TEST(RefitCompact, LosesLessThanDroppingAndKeepsItsBounds) {
  const std::size_t n_rows = 200;
  const std::int64_t n = 32, d = 8;
  const std::vector<double> scores = normals(n_rows * n, 1.5, 5), values = normals(n * d, 1, 6);
  const std::vector<std::int32_t> kept = all_of(20);
  const CompactBlock fitted = refit_compact(scores, n, kept, values, d);
  const CompactBlock dropped{std::vector<double>(20, 0.0), {values.begin(), values.begin() + 20 * d}};
  const AttentionMatch a = match_compact(scores, n, kept, values, d, fitted), b = match_compact(scores, n, kept, values, d, dropped);
  EXPECT_LT(a.e_mass(), 0.5 * b.e_mass());
  EXPECT_LT(a.e_out(), b.e_out());
  for (const double beta : fitted.beta) EXPECT_LE(std::abs(beta), 3 + 1e-12);
  // A kept key that the rest dwarfs cannot stand for them: the bias stops at 3.
  std::vector<double> far(n_rows * 2);
  for (std::size_t r = 0; r < n_rows; ++r) far[2 * r] = -10, far[2 * r + 1] = 0;
  EXPECT_NEAR(refit_compact(far, 2, std::vector<std::int32_t>{0}, normals(2, 1, 7), 1).beta[0], 3, 1e-12);
}

}  // namespace
}  // namespace calib::sens

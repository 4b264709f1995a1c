#include "libcalib/quant/codebook_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "libcalib/base/error.h"
#include "libcalib/base/rng.h"

namespace calib::quant {
namespace {

std::vector<double> products(const std::vector<double>& x, const std::vector<double>& w) {
  std::vector<double> sums;
  for (std::size_t i = 0; i < x.size(); ++i) sums.push_back(x[i] * w[i]);
  return sums;
}

double cost(const std::vector<double>& x, const std::vector<double>& w, const std::vector<double>& means) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    double least = std::numeric_limits<double>::infinity();
    for (const double m : means) least = std::min(least, (x[i] - m) * (x[i] - m));
    sum += w[i] * least;
  }
  return sum;
}

MATCHER_P(NearEach, expected, "") {
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (std::fabs(arg[i] - expected[i]) > 1e-6) return false;
  return arg.size() == expected.size();
}

// G27.
TEST(CodebookFit, KnownMeans) {
  const std::vector<double> x = {-1, -.8, -.1, 0, .1, .6, 1}, ones(7, 1.0);
  std::vector<double> last = ones;
  last[6] = 20;
  struct Row { const std::vector<double>& w; std::vector<double> means; double cost; };
  for (const Row& r : {Row{ones, {-.9, .32}, .888}, Row{ones, {-.9, 0, .6, 1}, .04}, Row{last, {-.36, .980952}, 1.164381}, Row{last, {-.9, 0, .980952}, .192381}}) {
    const std::vector<double> means = optimal_means(r.w, products(x, r.w), r.means.size());
    EXPECT_THAT(means, NearEach(r.means));
    EXPECT_NEAR(cost(x, r.w, means), r.cost, 1e-6);
  }
}

// Exact: no partition of the sorted points is better. All of them are tried.
TEST(CodebookFit, EqualsExhaustiveSearch) {
  Rng rng(11);
  for (int round = 0; round < 50; ++round) {
    const std::size_t n = 9;
    std::vector<double> x, w;
    for (std::size_t i = 0; i < n; ++i) x.push_back(rng.normal()), w.push_back(rng.below(4) == 0 ? 0.0 : rng.uniform());
    std::sort(x.begin(), x.end());
    for (std::size_t k = 1; k <= 5; ++k) {
      double least = std::numeric_limits<double>::infinity();
      for (unsigned cuts = 0; cuts < (1u << (n - 1)); ++cuts) {
        std::vector<double> means;
        double weight = 0, sum = 0;
        for (std::size_t i = 0; i < n; ++i) {
          weight += w[i], sum += w[i] * x[i];
          if (i + 1 < n && !(cuts >> i & 1u)) continue;
          if (weight > 0) means.push_back(sum / weight);
          weight = sum = 0;
        }
        if (!means.empty() && means.size() <= k) least = std::min(least, cost(x, w, means));
      }
      if (std::all_of(w.begin(), w.end(), [](double v) { return v == 0; })) continue;
      const std::vector<double> means = optimal_means(w, products(x, w), k);
      ASSERT_EQ(means.size(), k);
      EXPECT_TRUE(std::is_sorted(means.begin(), means.end()));
      EXPECT_NEAR(cost(x, w, means), least, 1e-12) << "round " << round << " k " << k;
    }
  }
}

// G21: 4096 bins of N(0, 1/3.5) within [-1, 1] give the Lloyd-Max table of 3 and 4 bits, whose grid costs little.
TEST(CodebookFit, NormalDataGiveLloydMax) {
  NormalisedHistogram histogram;
  constexpr double kScale = 6;
  for (int i = -60000; i <= 60000; ++i) histogram.add(i / 60000.0, std::exp(-0.5 * std::pow(kScale * i / 60000.0, 2)));
  struct Row { std::size_t k; std::vector<double> positive; };
  for (const Row& r : {Row{4, {0.452780, 1.510418}}, Row{8, {0.245094, 0.756005, 1.343909, 2.151946}},
                       Row{16, {0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590}}}) {
    const std::vector<double> means = optimal_means(histogram.weight(), histogram.weighted_sum(), r.k);
    const std::vector<float> stored = stored_codebook(means);
    const double step = 1 / 127.0 * kScale * means.back();
    for (std::size_t i = 0; i < r.positive.size(); ++i) {
      const std::size_t at = r.k / 2 + i;
      EXPECT_NEAR(kScale * means[at], r.positive[i], 2e-3) << r.k;
      EXPECT_NEAR(kScale * stored[at], r.positive[i], 2e-3 + 0.5 * step) << r.k;
    }
  }
}

/// The density of N(0,1) on a grid of 1/1000.
void add_normal_points(std::vector<double>* weight, std::vector<double>* sum) {
  for (int i = -8000; i <= 8000; ++i) {
    weight->push_back(std::exp(-0.5 * i * i * 1e-6) * 1e-3 / std::sqrt(2 * M_PI));
    sum->push_back(weight->back() * i * 1e-3);
  }
}

// G26, under midpoints of the stretched entries.
TEST(CodebookFit, QNormStretchesTheTableToTheSpreadOfItsData) {
  std::vector<double> weight, sum;
  add_normal_points(&weight, &sum);
  struct Row { std::size_t k; double factor, mse; };
  for (const Row& r : {Row{4, 1.064482, .118974}, Row{8, 1.017735, .034593}}) {
    const std::vector<double> means = optimal_means(weight, sum, r.k), moved = match_spread(means, weight, sum);
    std::vector<double> x;
    for (std::size_t i = 0; i < weight.size(); ++i) x.push_back(sum[i] / weight[i]);
    for (std::size_t i = 0; i < r.k; ++i) EXPECT_NEAR(moved[i] / means[i], r.factor, 1e-5) << r.k;
    EXPECT_NEAR(cost(x, weight, moved), r.mse, 1e-5) << r.k;
    EXPECT_GT(cost(x, weight, moved), cost(x, weight, means));  // it buys variance, not error
  }
}

TEST(CodebookFit, QNormKeepsMeanAndDeviationOfWhatIsCoded) {
  // Points 0 1 5 9 by weights 1 2 3 4, coded with 1 1 6 6.
  const std::vector<double> weight{1, 2, 3, 4}, sum{0, 2, 15, 36}, moved = match_spread({1, 6}, weight, sum);
  const double mean = (3 * moved[0] + 7 * moved[1]) / 10, square = (3 * moved[0] * moved[0] + 7 * moved[1] * moved[1]) / 10;
  EXPECT_NEAR(mean, 5.3, 1e-12);
  EXPECT_NEAR(square - mean * mean, (2 + 75 + 324) / 10.0 - 5.3 * 5.3, 1e-12);
  EXPECT_EQ(match_spread({3, 3}, weight, sum), (std::vector<double>{3, 3}));  // nothing to stretch
  EXPECT_THROW(match_spread({1, 2}, {0, 0}, {0, 0}), Error);
}

// Points far too light to move a mean must not break the sums of those that are not.
TEST(CodebookFit, WeightsOverManyDecades) {
  std::vector<double> x, w;
  Rng rng(4);
  for (int i = 0; i < 2000; ++i) x.push_back(-1 + i / 1000.0), w.push_back(i < 900 ? 1e-30 * (1 + rng.uniform()) : 1 + rng.uniform());
  const std::vector<double> means = optimal_means(w, products(x, w), 4);
  const std::vector<double> heavy_x(x.begin() + 900, x.end()), heavy_w(w.begin() + 900, w.end());
  EXPECT_THAT(means, NearEach(optimal_means(heavy_w, products(heavy_x, heavy_w), 4)));
}

TEST(CodebookFit, FewPointsAndNone) {
  EXPECT_THAT(optimal_means({0, 2, 0}, {0, -1, 0}, 4), testing::ElementsAre(-0.5, -0.5, -0.5, -0.5));
  EXPECT_THROW(optimal_means({0, 0}, {0, 0}, 2), Error);
  EXPECT_THAT(stored_codebook({-1, -1}), testing::ElementsAre(-1.0f, -1.0f));
  EXPECT_EQ(stored_codebook({0, 0}).back(), 1.0f);
}

}  // namespace
}  // namespace calib::quant

#include "libcalib/stats/attention_stats.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include <gtest/gtest.h>

#include "libcalib/base/error.h"
#include "libcalib/base/rng.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::stats {
namespace {

std::vector<float> softmax_row(std::size_t n, std::uint64_t seed, double spread) {
  Rng rng(seed);
  std::vector<double> w(n);
  double total = 0;
  for (double& v : w) total += v = std::exp(spread * rng.normal());
  std::vector<float> out(n);
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<float>(w[i] / total);
  return out;
}

double top_mass_by_sorting(std::vector<float> p, double share) {
  std::sort(p.begin(), p.end(), std::greater<>());
  const auto k = static_cast<std::size_t>(std::ceil(share * static_cast<double>(p.size()) - 1e-9));
  double out = 0;
  for (std::size_t i = 0; i < k; ++i) out += p[i];
  return out;
}

TEST(RowConcentration, KnownAnswer) {  // METHODS.md G8
  const std::vector<float> p = {0.5f, 0.25f, 0.25f};
  const RowConcentration c = row_concentration(p.data(), 0, 3, 1);
  EXPECT_NEAR(c.entropy, 1.039721, 1e-6);
  EXPECT_NEAR(c.normalised_entropy, 0.946395, 1e-6);
  EXPECT_NEAR(c.n_eff, 2.666667, 1e-6);
  EXPECT_NEAR(c.sink_mass, 0.5, 1e-12);
  EXPECT_NEAR(c.top_mass[0], 0.5, 1e-12);   // ceil(0.03) = 1 key
  EXPECT_NEAR(c.top_mass[4], 0.75, 1e-12);  // ceil(1.5) = 2 keys
}

TEST(RowConcentration, TopMassEqualsSorting) {
  for (const double spread : {0.01, 1.0, 5.0, 12.0})
    for (const std::size_t n : {64u, 100u, 129u, 1024u, 3000u}) {
      const std::vector<float> p = softmax_row(n, n, spread);
      const RowConcentration c = row_concentration(p.data(), 0, static_cast<std::int64_t>(n), 4);
      for (std::size_t i = 0; i < kTopShares.size(); ++i) EXPECT_NEAR(c.top_mass[i], top_mass_by_sorting(p, kTopShares[i]), 1e-12) << n << " " << spread;
    }
}

TEST(RowConcentration, UniformAndOneHotRows) {
  const std::vector<float> uniform(128, 1.0f / 128);
  const RowConcentration u = row_concentration(uniform.data(), 0, 128, 4);
  EXPECT_NEAR(u.entropy, std::log(128.0), 1e-6);
  EXPECT_NEAR(u.normalised_entropy, 1, 1e-6);
  EXPECT_NEAR(u.n_eff, 128, 1e-4);
  EXPECT_NEAR(u.sink_mass, 4.0 / 128, 1e-12);
  EXPECT_NEAR(u.top_mass[2], 13.0 / 128, 1e-12);
  std::vector<float> one_hot(128, 0.0f);
  one_hot[70] = 1;
  const RowConcentration o = row_concentration(one_hot.data(), 0, 128, 4);
  EXPECT_NEAR(o.entropy, 0, 1e-7);
  EXPECT_NEAR(o.n_eff, 1, 1e-12);
  EXPECT_EQ(o.sink_mass, 0);
  for (const double mass : o.top_mass) EXPECT_EQ(mass, 1);
}

TEST(RowConcentration, WindowLeavesOutEarlierPositions) {
  std::vector<float> p(200, 99.0f);  // what the row does not see must not be read
  const std::vector<float> seen = softmax_row(100, 3, 1);
  std::copy(seen.begin(), seen.end(), p.begin() + 2);
  const RowConcentration c = row_concentration(p.data(), 2, 100, 4);
  EXPECT_NEAR(c.sink_mass, static_cast<double>(seen[0]) + seen[1], 1e-12);
  EXPECT_NEAR(c.top_mass[4], top_mass_by_sorting(seen, 0.5), 1e-12);
}

struct Sample {
  SampledRows rows;
  std::vector<float> p;
  std::int64_t n_tokens = 0;
};

// Rows of one document for `n_heads` heads, all of them softmax rows over what they see.
Sample make_sample(std::vector<std::int64_t> rows, std::int64_t n_tokens, int n_heads, std::uint64_t seed, std::int64_t window = 0) {
  Sample out;
  out.n_tokens = n_tokens;
  out.rows.rows = std::move(rows);
  for (std::size_t r = 0; r < out.rows.rows.size(); ++r) out.rows.row_weight.push_back(1.0 + static_cast<double>(r % 3));
  const std::size_t n_rows = out.rows.rows.size();
  out.p.assign(static_cast<std::size_t>(n_heads) * n_rows * static_cast<std::size_t>(n_tokens), 0.0f);
  for (int h = 0; h < n_heads; ++h)
    for (std::size_t r = 0; r < n_rows; ++r) {
      const std::int64_t n_vis = window > 0 ? std::min(window, out.rows.rows[r] + 1) : out.rows.rows[r] + 1;
      const std::vector<float> row = softmax_row(static_cast<std::size_t>(n_vis), seed + 1000 * static_cast<std::uint64_t>(h) + r, 2);
      std::copy(row.begin(), row.end(),
                out.p.begin() + static_cast<std::ptrdiff_t>((static_cast<std::size_t>(h) * n_rows + r) * static_cast<std::size_t>(n_tokens)) +
                    out.rows.rows[r] + 1 - n_vis);
    }
  out.rows.p = out.p.data();
  return out;
}

AttentionStats stats_of(const Sample& s, int n_heads, std::int64_t window = 0) {
  AttentionStats out(n_heads);
  out.reserve_buckets(position_bucket(s.rows.rows.back()) + 1);
  for (int h = 0; h < n_heads; ++h)
    out.add_head(h, s.rows, s.p.data() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(h) * s.rows.rows.size()) * s.n_tokens, s.n_tokens, window, 4);
  return out;
}

TEST(AttentionStats, WeightedMeansByBucket) {
  const Sample s = make_sample({10, 62, 63, 200, 255, 256, 511, 512, 599}, 600, 2, 1);
  const AttentionStats a = stats_of(s, 2);
  EXPECT_EQ(a.n_buckets(), 3);
  EXPECT_EQ(a.n_rows(0, 0), 3);  // 10 and 62 see fewer than 64 keys
  EXPECT_EQ(a.n_rows(1, 1), 2);
  EXPECT_EQ(a.n_rows(1, 2), 2);
  double weight = 0, entropy = 0, top = 0;
  for (const std::size_t r : {2u, 3u, 4u}) {
    const RowConcentration c = row_concentration(s.p.data() + r * 600, 0, s.rows.rows[r] + 1, 4);
    weight += s.rows.row_weight[r];
    entropy += s.rows.row_weight[r] * c.entropy;
    top += s.rows.row_weight[r] * c.top_mass[1];
  }
  EXPECT_NEAR(a.weight(0, 0), weight, 1e-12);
  EXPECT_NEAR(a.mean(0, 0, AttentionStats::kEntropy), entropy / weight, 1e-12);
  EXPECT_NEAR(a.mean(0, 0, AttentionStats::kTopMass + 1), top / weight, 1e-12);
}

TEST(AttentionStats, SlidingWindowLimitsWhatARowSees) {
  const Sample s = make_sample({50, 300, 500}, 600, 1, 5, 100);
  const AttentionStats a = stats_of(s, 1, 100);
  EXPECT_EQ(a.n_rows(0, 0), 0);
  EXPECT_EQ(a.n_rows(0, 1), 2);
  EXPECT_EQ(a.mean(0, 0, AttentionStats::kEntropy), 0);
  EXPECT_EQ(a.mean(0, 1, AttentionStats::kSinkMass), 0);
  EXPECT_LT(a.mean(0, 1, AttentionStats::kNEff), 100);
}

TEST(AttentionStats, MergeEqualsOnePassAlsoWithFewerBuckets) {
  const Sample whole = make_sample({100, 130, 300, 900}, 1000, 2, 9);
  // The same rows, cut in two documents' worth.
  Sample first = whole, second = whole;
  const auto keep = [](Sample& s, std::size_t from, std::size_t to) {
    std::vector<float> p;
    const std::size_t n_rows = s.rows.rows.size(), n = static_cast<std::size_t>(s.n_tokens);
    for (std::size_t h = 0; h < 2; ++h)
      p.insert(p.end(), s.p.begin() + static_cast<std::ptrdiff_t>((h * n_rows + from) * n), s.p.begin() + static_cast<std::ptrdiff_t>((h * n_rows + to) * n));
    s.p = std::move(p);
    s.rows.rows = {s.rows.rows.begin() + static_cast<std::ptrdiff_t>(from), s.rows.rows.begin() + static_cast<std::ptrdiff_t>(to)};
    s.rows.row_weight = {s.rows.row_weight.begin() + static_cast<std::ptrdiff_t>(from), s.rows.row_weight.begin() + static_cast<std::ptrdiff_t>(to)};
    s.rows.p = s.p.data();
  };
  keep(first, 0, 2);
  keep(second, 2, 4);
  const AttentionStats once = stats_of(whole, 2);
  AttentionStats ab = stats_of(first, 2), ba = stats_of(second, 2), neutral(2);
  ab.merge(stats_of(second, 2));
  ba.merge(stats_of(first, 2));
  neutral.merge(ab);
  for (const AttentionStats* a : {&ab, &ba, &neutral}) {
    ASSERT_EQ(a->n_buckets(), once.n_buckets());
    for (int h = 0; h < 2; ++h)
      for (int b = 0; b < once.n_buckets(); ++b) {
        EXPECT_EQ(a->n_rows(h, b), once.n_rows(h, b));
        for (int m = 0; m < AttentionStats::kMeasures; ++m) EXPECT_NEAR(a->mean(h, b, m), once.mean(h, b, m), 1e-12 * std::max(1.0, once.mean(h, b, m)));
      }
  }
}

TEST(AttentionStats, RowsThatAreNotProbabilitiesAreRefused) {
  Sample s = make_sample({100}, 200, 1, 2);
  s.p[5] = std::numeric_limits<float>::quiet_NaN();
  try {
    stats_of(s, 1);
    FAIL() << "accepted NaN";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kNumeric);
    EXPECT_NE(e.where().find("head 0, position 100"), std::string::npos);
  }
}

TEST(ColumnMass, AveragesLaterRowsOnly) {
  SampledRows rows;
  rows.rows = {1, 3};
  rows.row_weight = {1, 3};
  const std::vector<float> p = {0.5f, 0.5f, 0,    0,     //
                                0.1f, 0.2f, 0.3f, 0.4f,  // head 1:
                                1,    0,    0,    0,     //
                                1,    0,    0,    0};
  rows.p = p.data();
  EXPECT_NEAR(column_mass(rows, 2, 4, 0)[0], (0.5 + 3 * 0.1) / 4, 1e-7);
  EXPECT_NEAR(column_mass(rows, 2, 4, 1)[0], 0.2, 1e-7);
  EXPECT_EQ(column_mass(rows, 2, 4, 0)[1], 1.0);
  EXPECT_EQ(column_mass(rows, 2, 4, 3), (std::vector<double>{0, 0}));
}

TEST(ColumnMass, FunctionalSinkNeedsATenthOfTheHeads) {
  std::vector<double> mass(20, 0.0);
  EXPECT_FALSE(is_functional_sink(mass));
  mass[3] = 0.31;
  EXPECT_FALSE(is_functional_sink(mass));
  mass[9] = 0.5;
  EXPECT_TRUE(is_functional_sink(mass));
  mass[9] = 0.3;
  EXPECT_FALSE(is_functional_sink(mass));
  EXPECT_FALSE(is_functional_sink({}));
}

}  // namespace
}  // namespace calib::stats

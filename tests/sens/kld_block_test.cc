#include "libcalib/sens/kld_block.h"

#include <cmath>

#include <gtest/gtest.h>

namespace calib::sens {
namespace {

struct Logits {
  std::vector<float> log_p, p;
};

Logits row(std::vector<double> p) {
  Logits out;
  for (const double x : p) out.p.push_back(static_cast<float>(x)), out.log_p.push_back(static_cast<float>(std::log(x)));
  return out;
}

TEST(KldRowTest, KnownDistributions) {
  // Nine entries so that both the lanes and the rest are used; the last seven share what is left.
  std::vector<double> a{0.5, 0.15}, b{0.2, 0.45};
  for (int i = 0; i < 7; ++i) a.push_back(0.05), b.push_back(0.05);
  const Logits p = row(a), q = row(b);
  const ReferenceRow reference = make_reference_row(p.log_p.data(), p.p.data(), 9, 1);
  EXPECT_EQ(reference.top, 0);
  const KldRow r = compare_row(reference, q.log_p.data(), q.p.data());
  EXPECT_NEAR(r.kld, 0.5 * std::log(2.5) + 0.15 * std::log(1.0 / 3), 1e-6);
  EXPECT_NEAR(r.delta_p, 30, 1e-4);
  EXPECT_NEAR(r.nll, -std::log(0.45), 1e-6);
  EXPECT_FALSE(r.same_top);
  const double rest = 7 * 0.05 * std::log(0.05);
  EXPECT_NEAR(r.entropy_shift, -(0.2 * std::log(0.2) + 0.45 * std::log(0.45) + rest) + (0.5 * std::log(0.5) + 0.15 * std::log(0.15) + rest), 1e-6);
  const KldRow self = compare_row(reference, p.log_p.data(), p.p.data());
  EXPECT_EQ(self.kld, 0);
  EXPECT_TRUE(self.same_top);
}

/// Documents of `length` rows each; fill(number of the document, row).
template <class Fill>
std::vector<KldRow> documents_of(std::size_t n, std::int64_t length, Fill fill) {
  std::vector<KldRow> rows;
  for (std::size_t d = 0; d < n; ++d)
    for (std::int64_t t = 0; t < length; ++t) {
      KldRow& r = rows.emplace_back();
      r.document = static_cast<std::int32_t>(d), r.position = t;
      fill(d, r);
    }
  return rows;
}

std::vector<KldRow> rows_with_nll_difference(const std::vector<double>& per_document, std::int64_t length) {
  return documents_of(per_document.size(), length, [&](std::size_t d, KldRow& r) {
    r.nll_ref = 2;
    r.nll = 2 + per_document[d];
    r.kld = static_cast<double>(r.position);
    r.delta_p = r.position % 2 == 0 ? 3 : -3;
    r.same_top = r.position % 4 != 0;
  });
}

TEST(KldBlockTest, GoldenG43PairedRatio) {
  const KldBlock b = summarise_kld(rows_with_nll_difference({.01, .03, -.01, .02}, 100));
  EXPECT_NEAR(b.ppl_ratio.mean, 1.012578, 1e-6);
  EXPECT_NEAR(b.ppl_ratio.se, .008647, 1e-6);
  EXPECT_NEAR(b.ppl_base.mean, std::exp(2.0), 1e-12);
  EXPECT_NEAR(b.ppl_base.se, 0, 1e-12);
}

TEST(KldBlockTest, MeansOfDocuments) {
  std::vector<KldRow> rows = rows_with_nll_difference({0, 0, 0}, 3);  // KLD 0, 1, 2 each
  rows.pop_back();
  EXPECT_EQ(document_klds(rows), (std::vector<double>{1, 1, 0.5}));
  EXPECT_TRUE(document_klds({}).empty());
}

TEST(KldBlockTest, PercentilesAndShares) {
  const KldBlock b = summarise_kld(rows_with_nll_difference({0, 0}, 101));
  EXPECT_EQ(b.n_rows, 202);
  EXPECT_EQ(b.n_documents, 2);
  EXPECT_DOUBLE_EQ(b.kld.mean, 50);
  EXPECT_DOUBLE_EQ(b.kld_percentiles[4], 50);                       // median of 0, 0, 1, 1, ... 100, 100
  EXPECT_DOUBLE_EQ(b.kld_percentiles[1], 99);   // at 198.99, between entries 198 and 199, both 99
}

TEST(KldBlockTest, RmsAndTop) {
  const KldBlock b = summarise_kld(rows_with_nll_difference({0, 0}, 100));
  EXPECT_DOUBLE_EQ(b.rms_delta_p.mean, 3);
  EXPECT_DOUBLE_EQ(b.delta_p.mean, 0);
  EXPECT_DOUBLE_EQ(b.same_top_p.mean, 75);
  EXPECT_DOUBLE_EQ(b.kld_min, 0);
  EXPECT_DOUBLE_EQ(b.kld_max, 99);
}

TEST(KldBlockTest, OneDocumentUsesBlocks) {
  const KldBlock b = summarise_kld(rows_with_nll_difference({.1}, 600));
  EXPECT_EQ(b.n_documents, 1);
  EXPECT_GT(b.kld.se, 0);
}

TEST(KldBlockTest, BucketsCoverTheirPositions) {
  const auto buckets = summarise_buckets(rows_with_nll_difference({0, .1}, 600));
  ASSERT_EQ(buckets.size(), 3u);
  EXPECT_EQ(buckets[0].first_position, 0);
  EXPECT_EQ(buckets[0].end_position, 256);
  EXPECT_EQ(buckets[1].first_position, 256);
  EXPECT_EQ(buckets[1].end_position, 512);
  EXPECT_EQ(buckets[2].first_position, 512);
  EXPECT_EQ(buckets[2].end_position, 1024);
  EXPECT_DOUBLE_EQ(buckets[0].block.kld.mean, 127.5);
  EXPECT_EQ(buckets[2].block.n_rows, 2 * 88);
}

std::vector<EvalBucket> buckets_of(const std::vector<double>& ratios, double se) {
  std::vector<EvalBucket> buckets;
  for (std::size_t b = 0; b < ratios.size(); ++b) {
    EvalBucket bucket;
    bucket.first_position = b == 0 ? 0 : std::int64_t{128} << b;
    bucket.end_position = std::int64_t{256} << b;
    bucket.block.ppl_ratio = {ratios[b], se};
    buckets.push_back(bucket);
  }
  return buckets;
}

TEST(LengthLimit, GoldenG45) {
  EXPECT_EQ(length_limit(buckets_of({1.00, 1.01, 1.02, 1.05, 1.12, 1.30}, 1e-3)), 2048);
  EXPECT_EQ(length_limit(buckets_of({1.00, 1.01, 1.02, 1.05, 1.12, 1.02}, 1e-3)), std::nullopt);
}

TEST(LengthLimit, NeedsConfidenceAndIsNotMovedByOneBucket) {
  EXPECT_EQ(length_limit(buckets_of({1.00, 1.12}, 1e-3)), 256);           // the last bucket needs no other
  EXPECT_EQ(length_limit(buckets_of({1.00, 1.12}, 0.07)), std::nullopt);  // 1.12 - 1.96 * 0.07 < 1
  EXPECT_EQ(length_limit(buckets_of({1.20, 1.01, 1.15, 1.30}, 1e-3)), 512);
  EXPECT_EQ(length_limit(buckets_of({1.00, 1.12, 1.30}, 1e-3), 1.25), 512);
  EXPECT_EQ(length_limit({}), std::nullopt);
}

// KLD factor * (t + 1)^power of each document.
std::vector<KldRow> power_law(const std::vector<double>& factors, double power, std::int64_t length) {
  return documents_of(factors.size(), length, [&](std::size_t d, KldRow& r) { r.kld = factors[d] * std::pow(static_cast<double>(r.position + 1), power); });
}

KldRow single(std::int32_t document, std::int64_t position, double kld) {
  KldRow r;
  r.document = document;
  r.position = position;
  r.kld = kld;
  return r;
}

TEST(KldSlope, TwoPointsByHand) {
  // Means 0.1 at positions t + 1 = 100 and 0.4 at 400: ln 4 / ln 4 = 1. Rows of a bucket count by their mean.
  const std::vector<KldRow> rows = {single(0, 99, 0.05), single(0, 99, 0.15), single(0, 399, 0.4)};
  const auto slope = kld_slope(rows);
  ASSERT_TRUE(slope.has_value());
  EXPECT_NEAR(slope->mean, 1, 1e-12);
  EXPECT_EQ(slope->se, 0);  // one document
}

TEST(KldSlope, WeightsBucketsByRows) {
  // Points (x, y) = (0, 0), (1, 0), (2, 1) in units of ln 4 and ln 2 with weights 2, 1, 1: x mean 3/4, y mean 1/4,
  // sum w dx dy = 5/4, sum w dx^2 = 11/4; slope 5/11 * ln 2 / ln 4 = 5/22.
  const std::vector<KldRow> rows = {single(0, 99, 1), single(0, 99, 1), single(0, 399, 1), single(0, 1599, 2)};
  EXPECT_NEAR(kld_slope(rows)->mean, 5.0 / 22, 1e-12);
}

TEST(KldSlope, JackknifeOverDocuments) {
  // Leaving out one of two documents leaves the other: slopes 1 and 0, SE = sqrt(1/2 * (1/4 + 1/4)) = 1/2.
  const std::vector<KldRow> rows = {single(0, 99, 0.1), single(0, 399, 0.4), single(1, 99, 0.1), single(1, 399, 0.1)};
  const auto slope = kld_slope(rows);
  EXPECT_NEAR(slope->mean, std::log(2.5) / std::log(4.0), 1e-12);
  EXPECT_NEAR(slope->se, 0.5, 1e-12);
}

// An exact window makes any loss rise while it is a good part of what a row reads: that is no trend.
TEST(KldSlope, StartsWhereTheWindowIsASmallPart) {
  EXPECT_EQ(trend_start(4, 128), 264);
  const std::vector<KldRow> rows = {single(0, 99, 1e-6), single(0, 299, 0.1), single(0, 599, 0.2), single(0, 1199, 0.2)};
  EXPECT_GT(kld_slope(rows)->mean, 2);
  EXPECT_NEAR(kld_slope(rows, 264)->mean, 0, 1e-12);
  EXPECT_NEAR(kld_slope(rows, 256)->mean, 0.5, 1e-12);  // ln 2 over ln 2 and 0 over ln 2: least squares through three equal steps
  EXPECT_FALSE(kld_slope(rows, 513).has_value());
}

TEST(KldSlope, PowerLawsAndEmptyCases) {
  for (const double power : {0.0, 0.3, 0.7}) {
    const auto slope = kld_slope(power_law({1e-3, 2e-3, 4e-3}, power, 8192));
    EXPECT_NEAR(slope->mean, power, 0.02) << power;  // a bucket's mean is not the value at its geometric mean
    EXPECT_NEAR(slope->se, 0, 1e-9) << power;        // documents that differ by a factor agree on the slope
  }
  EXPECT_FALSE(kld_slope({}).has_value());
  EXPECT_FALSE(kld_slope(power_law({1e-3}, 1, 256)).has_value());                          // one bucket
  EXPECT_FALSE(kld_slope(power_law({0}, 1, 8192)).has_value());                            // nothing lost
  EXPECT_TRUE(kld_slope(std::vector{single(0, 0, 0.1), single(0, 300, 0.0), single(0, 600, 0.1)}).has_value());
}

std::vector<EvalBucket> shifts_of(const std::vector<double>& shifts, double se) {
  std::vector<EvalBucket> buckets;
  for (const double s : shifts) {
    EvalBucket b;
    b.entropy_shift = {s, se};
    buckets.push_back(b);
  }
  return buckets;
}

TEST(LengthFlags, SlopeAndShift) {
  using Flags = std::vector<std::string>;
  EXPECT_EQ(length_flags(MeanSe{0.51, 0.1}, {}), Flags{"kld_slope"});
  EXPECT_EQ(length_flags(MeanSe{0.5, 0.1}, {}), Flags{});
  EXPECT_EQ(length_flags(std::nullopt, shifts_of({0.01, -0.051}, 0.001)), Flags{"entropy_shift"});
  EXPECT_EQ(length_flags(std::nullopt, shifts_of({0.05, -0.05}, 0.001)), Flags{});
}

TEST(LengthFlags, SteadyGrowth) {
  using Flags = std::vector<std::string>;
  const auto flags = [](const std::vector<double>& shifts, double se) { return length_flags(std::nullopt, shifts_of(shifts, se)); };
  EXPECT_EQ(flags({0.001, 0.002, 0.004}, 1e-4), Flags{"entropy_growth"});
  EXPECT_EQ(flags({-0.001, -0.002, -0.004}, 1e-4), Flags{"entropy_growth"});
  EXPECT_EQ(flags({0.001, 0.002, 0.004}, 2e-3), Flags{});    // 0.003 within 1.96 * 2e-3 * sqrt 2
  EXPECT_EQ(flags({0.001, 0.004, 0.002}, 1e-5), Flags{});
  EXPECT_EQ(flags({-0.001, 0.002, 0.004}, 1e-5), Flags{});   // not in one direction
  EXPECT_EQ(flags({0.001, 0.004}, 1e-5), Flags{});           // two buckets are no trend
  EXPECT_EQ(flags({0.004, 0.002, 0.001}, 1e-5), Flags{});    // fades
  auto early = shifts_of({0.001, 0.002, 0.004}, 1e-4);
  for (std::size_t b = 1; b < 3; ++b) early[b].first_position = 128 << b;
  EXPECT_EQ(length_flags(std::nullopt, early, 256), Flags{});  // two buckets are left
  EXPECT_EQ(flags({-0.02, -0.03, -0.06}, 1e-3), (Flags{"entropy_shift", "entropy_growth"}));
}

TEST(LengthFlags, WarningsNameNumbersAndPositions) {
  EvalContender c;
  c.name = "kivi2";
  c.kld_slope = MeanSe{0.75, 0.02};
  c.buckets = shifts_of({0.01, -0.08, 0.02}, 0.001);
  c.buckets[1].first_position = 256, c.buckets[1].end_position = 512;
  c.flags = length_flags(c.kld_slope, c.buckets);
  const auto warnings = length_warnings(c);
  ASSERT_EQ(warnings.size(), 2u);
  for (const char* part : {"kivi2", "0.75", "0.02", "0.5"}) EXPECT_NE(warnings[0].find(part), std::string::npos) << warnings[0];
  for (const char* part : {"kivi2", "-0.08", "256 to 511"}) EXPECT_NE(warnings[1].find(part), std::string::npos) << warnings[1];
  EXPECT_TRUE(length_warnings(EvalContender{}).empty());
}

}  // namespace
}  // namespace calib::sens

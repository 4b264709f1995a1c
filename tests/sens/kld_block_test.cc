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

std::vector<KldRow> rows_with_nll_difference(const std::vector<double>& per_document, std::int64_t length) {
  std::vector<KldRow> rows;
  for (std::size_t d = 0; d < per_document.size(); ++d)
    for (std::int64_t t = 0; t < length; ++t) {
      KldRow r;
      r.document = static_cast<std::int32_t>(d);
      r.position = t;
      r.nll_ref = 2;
      r.nll = 2 + per_document[d];
      r.kld = static_cast<double>(t);
      r.delta_p = t % 2 == 0 ? 3 : -3;
      r.same_top = t % 4 != 0;
      rows.push_back(r);
    }
  return rows;
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

}  // namespace
}  // namespace calib::sens

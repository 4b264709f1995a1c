#include "libcalib/model/row_sampling.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

namespace calib::model {
namespace {

LayerGeometry layer(int index, std::int64_t window = 0) {
  LayerGeometry g;
  g.index = index;
  g.sliding_window = window;
  return g;
}

TEST(RowSampling, EqualPerBucketDistinctAndWeighted) {
  const RowSample s = sample_rows(layer(2), 2048, 128, 5, 7);
  ASSERT_EQ(s.rows.size(), 128u);
  ASSERT_EQ(s.row_weight.size(), 128u);
  EXPECT_TRUE(std::is_sorted(s.rows.begin(), s.rows.end()));
  EXPECT_EQ(std::adjacent_find(s.rows.begin(), s.rows.end()), s.rows.end());
  EXPECT_GE(s.rows.front(), 63);
  EXPECT_LT(s.rows.back(), 2048);
  int per_bucket[4] = {};
  double weight[4] = {};
  for (std::size_t i = 0; i < s.rows.size(); ++i) {
    ++per_bucket[position_bucket(s.rows[i])];
    weight[position_bucket(s.rows[i])] += s.row_weight[i];
  }
  for (int b = 0; b < 4; ++b) EXPECT_EQ(per_bucket[b], 32);
  const double sizes[4] = {256 - 63, 256, 512, 1024};  // eligible rows of the bucket: totals are weighted back to them
  for (int b = 0; b < 4; ++b) EXPECT_NEAR(weight[b], sizes[b], 1e-9);
}

TEST(RowSampling, SeededByDocumentAndLayer) {
  const auto rows = [](std::uint64_t seed, std::int64_t document, int l) { return sample_rows(layer(l), 512, 32, seed, document).rows; };
  EXPECT_EQ(rows(1, 2, 3), rows(1, 2, 3));
  EXPECT_NE(rows(1, 2, 3), rows(2, 2, 3));
  EXPECT_NE(rows(1, 2, 3), rows(1, 3, 3));
  EXPECT_NE(rows(1, 2, 3), rows(1, 2, 4));
}

TEST(RowSampling, ShortDocumentsAndWindows) {
  EXPECT_TRUE(sample_rows(layer(0), 63, 128, 0, 0).rows.empty());
  EXPECT_EQ(sample_rows(layer(0), 64, 128, 0, 0).rows, std::vector<std::int64_t>{63});
  EXPECT_TRUE(sample_rows(layer(0, 8), 1024, 128, 0, 0).rows.empty());
  EXPECT_FALSE(sample_rows(layer(0, 64), 1024, 128, 0, 0).rows.empty());
  EXPECT_TRUE(sample_rows(layer(0), 1024, 0, 0, 0).rows.empty());
  // A bucket with fewer rows than its share gives all of them.
  const RowSample all = sample_rows(layer(0), 100, 128, 0, 0);
  std::vector<std::int64_t> expected(37);
  std::iota(expected.begin(), expected.end(), 63);
  EXPECT_EQ(all.rows, expected);
}

TEST(RowSampling, EveryRowIsReachable) {
  std::vector<int> hits(256);
  for (std::int64_t d = 0; d < 400; ++d)
    for (const std::int64_t r : sample_rows(layer(0), 256, 16, 0, d).rows) ++hits[static_cast<std::size_t>(r)];
  // Binomial(400, 16/193): mean 33, standard deviation 5.5; six of them either side.
  for (std::size_t r = 63; r < 256; ++r) {
    EXPECT_GT(hits[r], 0) << r;
    EXPECT_LT(hits[r], 67) << r;
  }
}

}  // namespace
}  // namespace calib::model

#include "libcalib/sens/reply_metrics.h"

#include <vector>

#include <gtest/gtest.h>

#include "libcalib/base/rng.h"

namespace calib::sens {
namespace {

using Ids = std::vector<std::int32_t>;

TEST(ReplyMetrics, GoldenG44) {
  EXPECT_NEAR(repeated_4grams(Ids{1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5}), .583333, 1e-6);
}

TEST(ReplyMetrics, RepetitionOfShortAndConstantReplies) {
  EXPECT_EQ(repeated_4grams(Ids{}), 0);
  EXPECT_EQ(repeated_4grams(Ids{7, 7, 7}), 0);
  EXPECT_EQ(repeated_4grams(Ids{7, 7, 7, 7}), 0);
  EXPECT_DOUBLE_EQ(repeated_4grams(Ids(103, 7)), 0.99);  // one of a hundred
  EXPECT_EQ(repeated_4grams(Ids{1, 2, 3, 4, 5, 6, 7, 8}), 0);
}

TEST(ReplyMetrics, LongestRepeatedSuffix) {
  EXPECT_EQ(longest_repeated_suffix(Ids{}), 0);
  EXPECT_EQ(longest_repeated_suffix(Ids{1}), 0);
  EXPECT_EQ(longest_repeated_suffix(Ids{1, 2, 3}), 0);
  EXPECT_EQ(longest_repeated_suffix(Ids{9, 1, 2, 8, 1, 2}), 2);
  EXPECT_EQ(longest_repeated_suffix(Ids{5, 5, 5, 5}), 3);                     // overlapping
  EXPECT_EQ(longest_repeated_suffix(Ids{4, 1, 2, 3, 1, 2, 3, 1, 2, 3}), 6);   // a loop of 3
  EXPECT_EQ(longest_repeated_suffix(Ids{1, 2, 3, 1, 2, 3, 9}), 0);            // repetition that does not reach the end
}

TEST(ReplyMetrics, LongestRepeatedSuffixEqualsTheSearchByHand) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng = Rng::for_item(seed, 0);
    Ids ids;
    for (std::uint64_t i = 0, n = rng.below(40); i < n; ++i) ids.push_back(static_cast<std::int32_t>(rng.below(2)));
    std::size_t longest = 0;
    for (std::size_t end = 0; end < ids.size(); ++end) {
      std::size_t k = 0;
      while (k < end && ids[end - 1 - k] == ids[ids.size() - 1 - k]) ++k;
      longest = std::max(longest, k);
    }
    EXPECT_EQ(longest_repeated_suffix(ids), static_cast<std::int64_t>(longest)) << "seed " << seed;
  }
}

TEST(ReplyMetrics, AgreeingPrefix) {
  EXPECT_EQ(agreeing_prefix(Ids{1, 2, 3}, Ids{1, 2, 4}), 2);
  EXPECT_EQ(agreeing_prefix(Ids{1, 2, 3}, Ids{1, 2}), 2);
  EXPECT_EQ(agreeing_prefix(Ids{1}, Ids{2, 1}), 0);
  EXPECT_EQ(agreeing_prefix(Ids{}, Ids{2}), 0);
}

TEST(ReplyMetrics, GoldenG47) {
  const Interval none = wilson_interval(0, 20), some = wilson_interval(3, 50), all = wilson_interval(20, 20);
  EXPECT_EQ(none.low, 0);
  EXPECT_NEAR(none.high, .161130, 1e-5);
  EXPECT_NEAR(some.low, .020615, 1e-5);
  EXPECT_NEAR(some.high, .162173, 1e-5);
  EXPECT_EQ(all.high, 1);
  EXPECT_NEAR(all.low, 1 - .161130, 1e-5);
}

}  // namespace
}  // namespace calib::sens

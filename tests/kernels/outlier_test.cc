// Outliers of out<p>: which values are taken, what the entries hold, and what is gained (METHODS.md 4.6).

#include "kernels/codec/outlier.h"

#include <algorithm>
#include <cmath>

#include "gmock/gmock.h"
#include "kernels/codec/page_codec.h"
#include "kernels/read/decode_cuda.h"
#include "tests/kernels/fake_quant_fixture.h"

namespace kvrt {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using testing::Call;
using testing::mse;
using testing::parse;

std::vector<int> picked(const std::vector<float>& x, int k) {
  std::uint16_t picks[kMaxTokenOutliers];
  float median = NAN;
  const int n = pick_vector_outliers(x.data(), static_cast<int>(x.size()), k, picks, &median);
  return {picks, picks + n};
}

// G28.
TEST(Outlier, TheFarthestFromTheMedianTiesToTheLowerIndex) {
  const std::vector<float> x = {0, 0, 0, 7, 7, 7, -5, 1, 2, -1};
  EXPECT_THAT(picked(x, 1), ElementsAre(3));
  EXPECT_THAT(picked(x, 2), ElementsAre(3, 4));
  EXPECT_THAT(picked(x, 3), ElementsAre(3, 4, 5));
  EXPECT_THAT(picked(x, 4), ElementsAre(3, 4, 5, 6));
}

TEST(Outlier, CountsAreExact) {  // the achieved share enters the bytes
  for (const auto& [per_mille, expected] : {std::pair{5, 1}, {10, 2}, {20, 3}}) EXPECT_EQ(token_outliers(per_mille, 128), expected);
  EXPECT_EQ(token_outliers(20, kMaxOutlierDim), kMaxTokenOutliers);
  EXPECT_EQ(group_outliers_before(20, 128, kMaxOutlierDim, 1), kMaxGroupOutliers);
  EXPECT_EQ(group_outliers_before(10, 32, 80, 0), 0);   // 25.6 entries a group: pooled over the page, spent group by group
  EXPECT_EQ(group_outliers_before(10, 32, 80, 1), 26);
  EXPECT_EQ(group_outliers_before(10, 32, 80, 2), 52);
}

TEST(Outlier, MedianEqualsSorting) {
  calib::Rng rng(3);
  for (const int n : {1, 2, 3, 8, 31, 64, 127, 128, 512}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<float> x(static_cast<std::size_t>(n)), copy;
      for (float& v : x) v = round % 2 ? static_cast<float>(rng.normal()) : static_cast<float>(rng.below(4));
      copy = x;
      std::sort(x.begin(), x.end());
      const std::size_t half = x.size() / 2;
      EXPECT_EQ(detail::median(copy.data(), n), n % 2 ? x[half] : 0.5f * x[half - 1] + 0.5f * x[half]) << n;
    }
  }
}

// Pooled quotas against a sort of all values of the group by distance to their channel's median.
TEST(Outlier, PooledPicksEqualSorting) {
  calib::Rng rng(4);
  const int n = 32, d = 80, k = 51;
  std::vector<float> x(n * d);
  for (float& v : x) v = static_cast<float>(std::round(4 * rng.normal()));  // ties
  std::vector<std::uint16_t> picks(kMaxGroupOutliers);
  std::vector<float> medians(d);
  ASSERT_EQ(pick_group_outliers([&](int t, int c) { return x[static_cast<std::size_t>(t * d + c)]; }, n, d, k, picks.data(), medians.data()), k);
  std::vector<int> order(n * d);
  for (int i = 0; i < n * d; ++i) order[static_cast<std::size_t>(i)] = i;
  const auto distance = [&](int i) { return std::fabs(x[static_cast<std::size_t>(i)] - medians[static_cast<std::size_t>(i % d)]); };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return distance(a) > distance(b); });
  order.resize(k);
  std::sort(order.begin(), order.end());
  EXPECT_THAT(std::vector<int>(picks.begin(), picks.begin() + k), ElementsAreArray(order));
}

// channel.static: only values beyond their thresholds, relative to the step of their channel; those beyond the quota saturate.
TEST(Outlier, StaticThresholdsTakeTheLargestRelativeExcess) {
  Call call("int4.channel.static.out1", 1, 1, 128);  // two entries a token
  std::fill(call.clip_lo.begin(), call.clip_lo.end(), -1.0f);
  std::fill(call.clip_hi.begin(), call.clip_hi.end(), 1.0f);
  call.clip_lo[5] = -100, call.clip_hi[5] = 100;
  call.x[5] = 103;   // an excess of 3, but of a channel with steps a hundred times as wide
  call.x[9] = 1.5f;
  call.x[70] = -2;
  FakeQuantCounters counters;
  const std::vector<float> out = call.run(&counters);
  EXPECT_EQ(counters.saturated, 1);
  EXPECT_EQ(out[5], 100);
  EXPECT_EQ(out[9], 1.5f);
  EXPECT_EQ(out[70], -2);
  call.x[9] = call.x[70] = 0;
  EXPECT_EQ(call.run()[5], 103);
}

TEST(Outlier, LeaveTheRangeAndComeBackAsTheyWere) {
  for (const char* text : {"int4.token.g.out1", "int4.token.g32.out1", "int4.channel.g32.out1", "nuq4.token.g.out1"}) {
    Call call(text, 64, 1, 64), plain(std::string(text).substr(0, std::string(text).find(".out")), 64, 1, 64);
    call.fill_normal(6);
    const bool pooled = call.scheme.granularity == Granularity::kChannel;
    for (std::size_t t = 0; t < 64; ++t) {
      if (!pooled || t % 8 == 0) call.x[t * 64 + t] = t % 2 ? 80.0f : -96.0f;
    }
    plain.x = call.x;
    const std::vector<float> out = call.run();
    for (std::size_t t = 0; t < 64; ++t) {
      const std::size_t at = t * 64 + t;
      EXPECT_NEAR(out[at], call.x[at], std::fabs(call.x[at]) > 50 ? 0.04 : 0.4) << text;  // fp16 of the rest
    }
    EXPECT_LT(mse(out, call.x), 0.03 * mse(plain.run(), call.x)) << text;
  }
}

// A group whose values are all taken has no range of its own left; a group of constants has nothing to take.
TEST(Outlier, GroupsOfOutliersAndConstants) {
  Call call("int4.token.g8.out2", 64, 1, 512);  // 11 entries a token, groups of 8
  call.fill_normal(7);
  for (std::size_t t = 0; t < 64; ++t) {
    for (std::size_t d = 0; d < 8; ++d) call.x[t * 512 + 16 + d] = 1000.0f + static_cast<float>(d);
    if (t % 2) std::fill(&call.x[t * 512], &call.x[t * 512] + 512, 3.25f);
  }
  const std::vector<float> out = call.run();
  EXPECT_EQ(out, call.reference());
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], call.x[i], std::fabs(call.x[i]) > 500 ? 0.26 : 0.3) << i;
}

// Every entry of a page, read back by slot, and the starts.
TEST(Outlier, EntriesOfAPageAreFoundBySlot) {
  for (const char* text : {"int4.channel.g32.out1", "int3.channel.g64.out0.5", "int4.token.g.out2"}) {
    for (const int spread : {0, 32}) {
      const int d = 64, p = 64;
      const Scheme scheme = parse(text);
      PageCodec codec = make_page_codec(scheme, code_bits(scheme.format), d, p);
      codec.spread = spread;
      std::vector<std::uint8_t> block(1 << 14, 0xFF);
      Call call(text, p, 1, d);
      call.fill_normal(8);
      EncodeCounters counters;
      const bool pooled = scheme.granularity == Granularity::kChannel;
      for (int t = 0; t < p; t += pooled ? scheme.group : 1) {
        if (pooled) encode_channel_group(codec, &call.x[static_cast<std::size_t>(t * d)], d, t / scheme.group, block.data(), &counters);
        else encode_row(codec, &call.x[static_cast<std::size_t>(t * d)], t, block.data(), &counters);
      }
      int n = 0, last = -1;
      visit_outliers(codec, block.data(), 0, p, [&](int slot, int position, float delta) {
        const int c = stored_channel(spread, d, position);
        const float coded = decode_code(codec, block.data(), slot, c), x = call.x[static_cast<std::size_t>(slot * d + c)];
        EXPECT_NEAR(coded + delta, x, 1e-3 * std::fabs(x - coded) + 1e-7) << text;
        EXPECT_GE(slot, last);
        last = slot, ++n;
      });
      EXPECT_EQ(n,
                pooled ? group_outliers_before(scheme.outlier_per_mille, scheme.group, d, p / scheme.group) : p * token_outliers(scheme.outlier_per_mille, d))
          << text;
      int in_parts = 0;
      for (int slot = 0; slot < p; slot += 16)
        visit_outliers(codec, block.data(), slot, slot + 16, [&](int at, int, float) { in_parts += at >= slot && at < slot + 16; });
      EXPECT_EQ(in_parts, n) << text;
    }
  }
}

TEST(Outlier, ADeltaBeyondFp16SaturatesAndIsCounted) {
  Call call("int4.token.g.out1", 1, 1, 64);
  call.x[3] = 1e30f;
  FakeQuantCounters counters;
  EXPECT_EQ(call.run(&counters)[3], 65504.0f);
  EXPECT_EQ(counters.saturated, 1);
}

TEST(Outlier, CudaRefusesThemByName) {
  const Scheme scheme = parse("int4.token.g.out1");
  DecodeFamily family;
  std::string error;
  EXPECT_FALSE(decode_family(make_page_codec(scheme, 4, 128, 64), &family, &error));
  EXPECT_THAT(error, ::testing::HasSubstr("out1"));
}

}  // namespace
}  // namespace kvrt

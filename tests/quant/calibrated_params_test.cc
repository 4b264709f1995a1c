#include "libcalib/quant/calibrated_params.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "layer_stats.h"
#include "libcalib/quant/scheme.h"

namespace calib::quant {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kTokens = 300, kSinks = 4;

/// Sinks hold 1000; the body has mean c / 8 in channel c plus a swing of +-(head + 1).
float body(std::int64_t t, int h, int c, float sign) {
  if (t < kSinks) return 1000.0f;
  return sign * (static_cast<float>(c) / 8 + (t % 2 == 0 ? 1.0f : -1.0f) * static_cast<float>(h + 1));
}

stats::LayerStats layer() {
  return quant_test::layer_stats(
      quant_test::geometry(), kSinks, kTokens, [](std::int64_t t, int h, int c) { return body(t, h, c, -1); },
      [](std::int64_t t, int h, int c) { return body(t, h, c, 1); }, [](std::int64_t t, int h, int c) { return body(t, h, c, 2); });
}

TEST(CalibratedParams, NothingForDataFreeSchemes) {
  for (const char* text : {"int4.token.g32", "int4.channel.g64.pre", "bf16", "q4_0.had", "fp8e4m3.token.g"})
    EXPECT_TRUE(fit_params(parse_scheme(text), Side::kK, layer(), kSinks).empty()) << text;
}

TEST(CalibratedParams, MeanOfTheSchemesFrameWithoutSinks) {
  const stats::LayerStats stats = layer();
  const SchemeParams post = fit_params(parse_scheme("int4.token.g64.center.had"), Side::kK, stats, kSinks);
  const SchemeParams pre = fit_params(parse_scheme("int4.token.g64.pre.center"), Side::kK, stats, kSinks);
  const SchemeParams v = fit_params(parse_scheme("int4.token.g64.center"), Side::kV, stats, kSinks);
  ASSERT_EQ(post.mean.size(), 128u);
  for (int c = 0; c < 64; ++c) {
    EXPECT_NEAR(post.mean[static_cast<std::size_t>(c)], c / 8.0, 1e-5);
    EXPECT_NEAR(pre.mean[static_cast<std::size_t>(c)], -c / 8.0, 1e-5);
    EXPECT_NEAR(v.mean[static_cast<std::size_t>(64 + c)], 2 * c / 8.0, 1e-5);
  }
  EXPECT_TRUE(post.clip_hi.empty());
}

TEST(CalibratedParams, SinksAreMergedBackForPlansWithoutSinks) {
  const SchemeParams p = fit_params(parse_scheme("int4.token.g64.center"), Side::kK, layer(), 0);
  const double share = static_cast<double>(kSinks) / kTokens;
  for (int c = 0; c < 64; ++c) EXPECT_NEAR(p.mean[static_cast<std::size_t>(c)], 1000 * share + (1 - share) * c / 8.0, 1e-3);
  EXPECT_EQ(fit_params(parse_scheme("fp8e4m3.tensor"), Side::kK, layer(), 0).clip_hi.at(0), 1000.0f);
}

TEST(CalibratedParams, OtherSinkCountsAreRefused) {
  try {
    fit_params(parse_scheme("fp8e4m3.head"), Side::kK, layer(), 2);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUsage);
    EXPECT_THAT(e.what(), HasSubstr("layer 3 K fp8e4m3.head"));
    EXPECT_THAT(e.what(), HasSubstr("--sinks"));
  }
}

TEST(CalibratedParams, StaticAbsmaxPerUnitAndHead) {
  const stats::LayerStats stats = layer();
  // Largest channel mean 63 / 8, swing 1 in head 0 and 2 in head 1.
  EXPECT_THAT(fit_params(parse_scheme("fp8e4m3.head"), Side::kK, stats, kSinks).clip_hi, testing::ElementsAre(63.0f / 8 + 1, 63.0f / 8 + 2));
  EXPECT_THAT(fit_params(parse_scheme("fp8e4m3.tensor"), Side::kV, stats, kSinks).clip_hi, testing::ElementsAre(2 * (63.0f / 8 + 2)));
  // Centring leaves the swing.
  const SchemeParams centred = fit_params(parse_scheme("fp8e4m3.head.center"), Side::kK, stats, kSinks);
  EXPECT_NEAR(centred.clip_hi.at(0), 1, 1e-5);
  EXPECT_NEAR(centred.clip_hi.at(1), 2, 1e-5);
}

TEST(CalibratedParams, RotatedRangesAreCovered) {
  // The bound is the norm of the channels' extremes: no rotated value of any token may exceed it.
  const stats::LayerStats stats = layer();
  const SchemeParams p = fit_params(parse_scheme("fp8e4m3.head.had"), Side::kK, stats, kSinks);
  for (int h = 0; h < 2; ++h) {
    double largest_norm = 0;
    for (std::int64_t t = kSinks; t < kSinks + 2; ++t) {
      double squares = 0;
      for (int c = 0; c < 64; ++c) squares += std::pow(body(t, h, c, 1), 2);
      largest_norm = std::max(largest_norm, std::sqrt(squares));
    }
    EXPECT_GE(p.clip_hi.at(static_cast<std::size_t>(h)), largest_norm);
    EXPECT_LE(p.clip_hi.at(static_cast<std::size_t>(h)), 1.5 * largest_norm);
  }
}

// CASES.md 1: a K or V that is zero everywhere gets scale 1 and says so.
TEST(CalibratedParams, ZeroRangeGivesScaleOne) {
  const auto zero = [](std::int64_t, int, int) { return 0.0f; };
  const stats::LayerStats stats = quant_test::layer_stats(quant_test::geometry(), kSinks, kTokens, zero, zero, zero);
  std::vector<std::string> why;
  EXPECT_THAT(fit_params(parse_scheme("fp8e4m3.head"), Side::kV, stats, kSinks, &why).clip_hi, testing::ElementsAre(448.0f, 448.0f));
  ASSERT_EQ(why.size(), 2u);
  EXPECT_THAT(why[0], HasSubstr("scale 1"));
}

TEST(CalibratedParams, NoTokenIsNumeric) {
  const auto one = [](std::int64_t, int, int) { return 1.0f; };
  const stats::LayerStats stats = quant_test::layer_stats(quant_test::geometry(), kSinks, kSinks, one, one, one);
  try {
    fit_params(parse_scheme("fp8e4m3.head"), Side::kK, stats, kSinks);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kNumeric);
  }
}

TEST(CalibratedParams, StaticIntegerRangesOfUnitHeadAndChannel) {
  const stats::LayerStats stats = layer();
  const SchemeParams unit = fit_params(parse_scheme("int8.tensor"), Side::kK, stats, kSinks);
  EXPECT_THAT(unit.clip_lo, testing::ElementsAre(-2.0f));
  EXPECT_THAT(unit.clip_hi, testing::ElementsAre(63.0f / 8 + 2));
  const SchemeParams head = fit_params(parse_scheme("sint8.head"), Side::kV, stats, kSinks);
  EXPECT_THAT(head.clip_lo, testing::ElementsAre(-2.0f, -4.0f));
  EXPECT_THAT(head.clip_hi, testing::ElementsAre(2 * (63.0f / 8 + 1), 2 * (63.0f / 8 + 2)));
  // The preset int8-channel: minimum and maximum of every channel of keys before RoPE, without the sinks.
  const SchemeParams channel = fit_params(parse_scheme("int8.channel.static.pre"), Side::kK, stats, kSinks);
  ASSERT_EQ(channel.clip_lo.size(), 128u);
  for (int h = 0; h < 2; ++h)
    for (int c = 0; c < 64; ++c) {
      EXPECT_FLOAT_EQ(channel.clip_lo[static_cast<std::size_t>(64 * h + c)], -static_cast<float>(c) / 8 - static_cast<float>(h + 1));
      EXPECT_FLOAT_EQ(channel.clip_hi[static_cast<std::size_t>(64 * h + c)], -static_cast<float>(c) / 8 + static_cast<float>(h + 1));
    }
  const SchemeParams with_sinks = fit_params(parse_scheme("int8.channel.static.pre"), Side::kK, stats, 0);
  EXPECT_EQ(with_sinks.clip_hi[5], 1000.0f);
  const SchemeParams centred = fit_params(parse_scheme("int4.channel.static.center"), Side::kV, stats, kSinks);
  EXPECT_NEAR(centred.clip_lo[3], -2, 1e-5);
  EXPECT_NEAR(centred.clip_hi[3], 2, 1e-5);
}

// METHODS.md 4.10: thresholds of keys after RoPE hold at positions that the text did not reach.
TEST(CalibratedParams, ChannelRangesAfterRopeCoverEveryPosition) {
  const stats::LayerStats stats = layer();
  const SchemeParams p = fit_params(parse_scheme("int8.channel.static"), Side::kK, stats, kSinks);
  for (int c = 0; c < 32; ++c) {
    const float envelope = std::hypot(static_cast<float>(c) / 8 + 1, static_cast<float>(c + 32) / 8 + 1);
    for (const int channel : {c, c + 32}) {
      EXPECT_LE(p.clip_lo[static_cast<std::size_t>(channel)], -envelope * 0.99999f);
      EXPECT_GE(p.clip_hi[static_cast<std::size_t>(channel)], envelope * 0.99999f);
      EXPECT_LE(p.clip_hi[static_cast<std::size_t>(channel)], envelope * 1.00001f);
    }
  }
}

TEST(CalibratedParams, SmoothingFactorsAreSharedByEachRopePair) {
  const stats::LayerStats stats = layer();
  const SchemeParams p = fit_params(parse_scheme("int4.token.g.smooth"), Side::kK, stats, kSinks);
  ASSERT_EQ(p.smooth.size(), 128u);
  for (int h = 0; h < 2; ++h)
    for (int c = 0; c < 32; ++c) {
      const float expected = std::sqrt(static_cast<float>(c + 32) / 8 + static_cast<float>(h + 1));  // the pair's larger channel
      EXPECT_FLOAT_EQ(p.smooth[static_cast<std::size_t>(64 * h + c)], expected);
      EXPECT_FLOAT_EQ(p.smooth[static_cast<std::size_t>(64 * h + c + 32)], expected);
    }
  EXPECT_TRUE(p.clip_hi.empty());
  // Static ranges are those of what is stored: smoothed.
  const SchemeParams head = fit_params(parse_scheme("fp8e4m3.head.smooth"), Side::kK, stats, kSinks);
  EXPECT_NEAR(head.clip_hi[0], (63.0 / 8 + 1) / std::sqrt(63.0 / 8 + 1), 1e-5);
  const auto zero = [](std::int64_t, int, int) { return 0.0f; };
  const stats::LayerStats nothing = quant_test::layer_stats(quant_test::geometry(), kSinks, kTokens, zero, zero, zero);
  EXPECT_THAT(fit_params(parse_scheme("int4.token.g.smooth"), Side::kK, nothing, kSinks).smooth, testing::Each(1.0f));
}

TEST(CalibratedParams, Nvfp4TakesTheAbsmaxOfTheUnit) {
  EXPECT_THAT(fit_params(parse_scheme("nvfp4"), Side::kK, layer(), kSinks).clip_hi, testing::ElementsAre(63.0f / 8 + 2));
  const auto zero = [](std::int64_t, int, int) { return 0.0f; };
  const stats::LayerStats nothing = quant_test::layer_stats(quant_test::geometry(), kSinks, kTokens, zero, zero, zero);
  EXPECT_THAT(fit_params(parse_scheme("nvfp4"), Side::kV, nothing, kSinks).clip_hi, testing::ElementsAre(2688.0f));
}

TEST(CalibratedParams, NotOfferedIsUnsupported) {
  for (const char* text : {"nuq4.token.g", "nuq3.channel.static.pre", "int4.channel.static.out1", "int4.head.had", "int4.token.g.center.clip"}) {
    try {
      fit_params(parse_scheme(text), Side::kK, layer(), kSinks);
      ADD_FAILURE() << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUnsupported) << text;
    }
  }
}

}  // namespace
}  // namespace calib::quant

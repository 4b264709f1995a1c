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

TEST(CalibratedParams, NotOfferedIsUnsupported) {
  for (const char* text : {"int8.channel.static.pre", "int8.tensor", "nuq4.token.g", "int4.token.g.smooth"}) {
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

#include "libcalib/quant/calibrated_params.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/codec/hadamard.h"
#include "layer_stats.h"
#include "libcalib/base/rng.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/quant/static_thresholds.h"
#include "libcalib/quant/unit_moments.h"

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
  EXPECT_EQ(fit_params(parse_scheme("fp8e4m3.tensor.pre"), Side::kK, layer(), 0).clip_hi.at(0), 1000.0f);
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
  EXPECT_THAT(fit_params(parse_scheme("fp8e4m3.head.pre"), Side::kK, stats, kSinks).clip_hi, testing::ElementsAre(63.0f / 8 + 1, 63.0f / 8 + 2));
  EXPECT_THAT(fit_params(parse_scheme("fp8e4m3.tensor"), Side::kV, stats, kSinks).clip_hi, testing::ElementsAre(2 * (63.0f / 8 + 2)));
  // Centring leaves the swing.
  const SchemeParams centred = fit_params(parse_scheme("fp8e4m3.head.pre.center"), Side::kK, stats, kSinks);
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
  const SchemeParams unit = fit_params(parse_scheme("int8.tensor.pre"), Side::kK, stats, kSinks);
  EXPECT_THAT(unit.clip_lo, testing::ElementsAre(-63.0f / 8 - 2));
  EXPECT_THAT(unit.clip_hi, testing::ElementsAre(2.0f));
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

// The same under one range for a head or a unit: slow pairs turn into values that the text did not show, fast ones have shown theirs.
TEST(CalibratedParams, RangesOfHeadsAndUnitsAfterRopeCoverEveryPosition) {
  const stats::LayerStats stats = layer();
  const float slow = std::hypot(31.0f / 8 + 2, 63.0f / 8 + 2), seen = 63.0f / 8 + 2;
  for (const char* text : {"fp8e4m3.tensor", "int8.tensor", "nvfp4"}) {
    EXPECT_NEAR(fit_params(parse_scheme(text), Side::kK, stats, kSinks).clip_hi.at(0), slow, 1e-5) << text;
    EXPECT_NEAR(fit_params(parse_scheme(text), Side::kV, stats, kSinks).clip_hi.at(0), 2 * seen, 1e-5) << text;
  }
  EXPECT_NEAR(fit_params(parse_scheme("int8.head"), Side::kK, stats, kSinks).clip_lo.at(1), -slow, 1e-5);
  LayerGeometry fast = quant_test::geometry();
  fast.inv_freq.assign(32, 1.0);
  const auto k = [](std::int64_t t, int h, int c) { return body(t, h, c, 1); };
  EXPECT_NEAR(fit_params(parse_scheme("fp8e4m3.tensor"), Side::kK, quant_test::layer_stats(fast, kSinks, kTokens, k, k, k), kSinks).clip_hi.at(0), seen, 1e-5);
}

// METHODS.md 3: a plan keeps the sinks that the statistics keep apart, or none; then they are merged back, quantiles and histograms too.
TEST(CalibratedParams, QuantilesWithoutSinksAreThoseOfStatisticsWithoutSinks) {
  const auto value = [](std::int64_t t, int h, int c) {
    return static_cast<float>(std::sin(0.37 * static_cast<double>(t * (c + 3) + h)) * (t < kSinks ? 40 : 1 + c % 5));
  };
  const stats::LayerStats apart = quant_test::layer_stats(quant_test::geometry(), kSinks, kTokens, value, value, value);
  const stats::LayerStats together = quant_test::layer_stats(quant_test::geometry(), 0, kTokens, value, value, value);
  for (const char* text : {"nuq3.channel.static.pre.out1", "int4.channel.static.pre.out2", "nuq2.channel.static.pre"}) {
    const SchemeParams merged = fit_params(parse_scheme(text), Side::kK, apart, 0), plain = fit_params(parse_scheme(text), Side::kK, together, 0),
                       kept = fit_params(parse_scheme(text), Side::kK, apart, kSinks);
    EXPECT_EQ(merged.clip_hi, plain.clip_hi) << text;
    EXPECT_NE(merged.clip_hi, kept.clip_hi) << text;
    for (std::size_t i = 0; i < plain.codebook.size(); ++i) EXPECT_NEAR(merged.codebook[i], plain.codebook[i], 0.02) << text;
    try {
      fit_params(parse_scheme(text), Side::kK, apart, 2);
      FAIL() << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUsage);
      EXPECT_THAT(e.what(), testing::AllOf(HasSubstr(text), HasSubstr("keep 4 apart"), HasSubstr("--sinks 2")));
    }
  }
}

// METHODS.md 4.5, the factor sigma^2: errors are weighed in the units of the data, so that the one wide channel shapes the codebook and
// not the many narrow ones.
TEST(CalibratedParams, WideChannelsShapeTheCodebook) {
  // Narrow channels sit at the ends of their range, the wide channel sits at -1/3 and 1/3 of it but for two tokens.
  const auto value = [](std::int64_t t, int, int c) {
    const double sign = t % 2 == 0 ? 1 : -1;
    return static_cast<float>(c == 5 ? 100 * sign * (t < kSinks + 2 ? 1.0 : 1.0 / 3) : 0.1 * sign);
  };
  const stats::LayerStats stats = quant_test::layer_stats(quant_test::geometry(1), kSinks, kTokens, value, value, value);
  const std::vector<float> codebook = fit_params(parse_scheme("nuq2.channel.static.pre"), Side::kK, stats, kSinks).codebook;
  ASSERT_EQ(codebook.size(), 4u);
  EXPECT_NEAR(codebook[1], -1.0 / 3, 0.01);
  EXPECT_NEAR(codebook[2], 1.0 / 3, 0.01);
}

// G42
TEST(CalibratedParams, PairsThatATextTurnsOnce) {
  struct Row { double theta; int pairs[4]; };
  for (const Row& r : {Row{5e5, {29, 35, 42, 49}}, Row{1e4, {41, 50, 60, 64}}}) {
    LayerGeometry g = quant_test::geometry(1, 128);
    g.inv_freq.clear();
    for (int p = 0; p < 64; ++p) g.inv_freq.push_back(std::pow(r.theta, -p / 64.0));
    const std::int64_t lengths[] = {2048, 8192, 32768, 131072};
    for (int i = 0; i < 4; ++i) {
      int n = 0;
      for (int p = 0; p < 64; ++p) n += finishes_a_turn(g, p, lengths[i]);
      EXPECT_EQ(n, r.pairs[i]) << r.theta << " " << lengths[i];
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
  const SchemeParams head = fit_params(parse_scheme("fp8e4m3.head.pre.smooth"), Side::kK, stats, kSinks);
  EXPECT_NEAR(head.clip_hi[0], (63.0 / 8 + 1) / std::sqrt(63.0 / 8 + 1), 1e-5);
  const auto zero = [](std::int64_t, int, int) { return 0.0f; };
  const stats::LayerStats nothing = quant_test::layer_stats(quant_test::geometry(), kSinks, kTokens, zero, zero, zero);
  EXPECT_THAT(fit_params(parse_scheme("int4.token.g.smooth"), Side::kK, nothing, kSinks).smooth, testing::Each(1.0f));
}

TEST(CalibratedParams, Nvfp4TakesTheAbsmaxOfTheUnit) {
  EXPECT_THAT(fit_params(parse_scheme("nvfp4"), Side::kV, layer(), kSinks).clip_hi, testing::ElementsAre(2 * (63.0f / 8 + 2)));
  const auto zero = [](std::int64_t, int, int) { return 0.0f; };
  const stats::LayerStats nothing = quant_test::layer_stats(quant_test::geometry(), kSinks, kTokens, zero, zero, zero);
  EXPECT_THAT(fit_params(parse_scheme("nvfp4"), Side::kV, nothing, kSinks).clip_hi, testing::ElementsAre(2688.0f));
}

Error refusal(const char* text, Side side, const stats::LayerStats& stats, std::int64_t plan_sinks = kSinks) {
  try {
    fit_params(parse_scheme(text), side, stats, plan_sinks);
  } catch (const Error& e) {
    return e;
  }
  ADD_FAILURE() << text;
  return Error(ErrorKind::kInternal, "", "not refused");
}

TEST(CalibratedParams, RotatedSinksAreInNoCovariance) {
  const stats::LayerStats stats = layer();
  const Error e = refusal("int4.head.had", Side::kK, stats, 0);
  EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(e.what(), HasSubstr("--sinks 0"));
}

TEST(CalibratedParams, ValuesWithoutTheOutputMomentNeedANewerFile) {
  for (const char* text : {"int4.token.g.ef", "nuq4.token.g", "int3.token.g32.clip", "int4.token.g.lowrank8"}) {
    const Error e = refusal(text, Side::kV, layer());
    EXPECT_EQ(e.kind(), ErrorKind::kVersion) << text;
    EXPECT_THAT(e.what(), HasSubstr("run kvcalib again")) << text;
  }
}

/// Normal data whose channels differ, and an output projection that sees channel 1 of every head much more than the others.
stats::LayerStats normal_layer(double tail = 0, bool with_rope = true) {
  LayerGeometry g = quant_test::geometry();
  if (!with_rope) g.rotary_dim = 0, g.rope_style = RopeStyle::kNone;
  Rng rng(9);
  const auto value = [&](std::int64_t, int, int c) {
    const double spike = tail > 0 && rng.uniform() < 0.01 ? tail : 1.0;
    return static_cast<float>((1 + c % 4) * (rng.normal() * spike + 0.5));
  };
  stats::LayerStats stats = quant_test::layer_stats(g, kSinks, 1500, value, value, value);
  stats.output_moment.assign(2 * 64 * 64, 0.0);
  for (std::size_t h = 0; h < 2; ++h)
    for (std::size_t c = 0; c < 64; ++c) stats.output_moment[(h * 64 + c) * 64 + c] = c == 1 ? 100.0 : 1.0;
  return stats;
}

// G24: what one alpha for all groups of N(0,1) comes to.
TEST(CalibratedParams, ClipKeepsTheShareThatCostsLeast) {
  const stats::LayerStats stats = normal_layer();
  struct Row { const char* scheme; float low, high; };
  for (const Row& r : {Row{"int2.channel.g128.pre.clip", .55f, .70f}, Row{"int3.channel.g64.pre.clip", .80f, .90f}, Row{"int4.channel.g32.pre.clip", .95f, 1.0f},
                       Row{"int8.channel.g32.pre.clip", 1.0f, 1.0f}}) {
    std::vector<std::string> why;
    const SchemeParams p = fit_params(parse_scheme(r.scheme), Side::kK, stats, kSinks, &why, 512);
    ASSERT_EQ(p.clip_alpha.size(), 1u);
    EXPECT_GE(p.clip_alpha[0], r.low - 0.001f) << r.scheme;
    EXPECT_LE(p.clip_alpha[0], r.high + 0.001f) << r.scheme;
    EXPECT_THAT(why, testing::ElementsAre(HasSubstr("clip: "))) << r.scheme;
  }
  // The alpha of a scheme with feedback is that without it, and feedback is fitted all the same.
  const SchemeParams with = fit_params(parse_scheme("int3.channel.g64.pre.clip.ef"), Side::kK, stats, kSinks, nullptr, 512);
  EXPECT_EQ(with.clip_alpha, fit_params(parse_scheme("int3.channel.g64.pre.clip"), Side::kK, stats, kSinks, nullptr, 512).clip_alpha);
  EXPECT_EQ(with.ef_order.size(), 128u);
  // Static ranges are stored as they are left: about the mean, 2 bits of about 1500 normal values by channel.
  const SchemeParams whole = fit_params(parse_scheme("int2.channel.static.pre"), Side::kK, stats, kSinks),
                     clipped = fit_params(parse_scheme("int2.channel.static.pre.clip"), Side::kK, stats, kSinks, nullptr, 512);
  EXPECT_TRUE(clipped.clip_alpha.empty());
  for (std::size_t i = 0; i < 128; ++i) {
    const double mean = stats.k_pre.body.moments[i].mean, share = (clipped.clip_hi[i] - mean) / (whole.clip_hi[i] - mean);
    EXPECT_NEAR(share, (mean - clipped.clip_lo[i]) / (mean - whole.clip_lo[i]), 1e-4);
    EXPECT_LE(share, 0.71);
    EXPECT_GE(share, 0.39);
  }
}

TEST(CalibratedParams, PercentilesAreTheThresholdsWithOutliers) {
  const stats::LayerStats stats = normal_layer(8);
  for (const auto& [text, tail] :
       {std::pair("int4.channel.static.pre.out1", 0.005), {"int4.channel.static.pre.out2", 0.01}, {"int4.channel.static.pre.out0.5", 0.0025}}) {
    const SchemeParams p = fit_params(parse_scheme(text), Side::kK, stats, kSinks);
    for (int c = 0; c < 64; ++c) {
      EXPECT_FLOAT_EQ(p.clip_lo[static_cast<std::size_t>(64 + c)], static_cast<float>(stats.k_pre.body.quantile(1, c, tail))) << text;
      EXPECT_FLOAT_EQ(p.clip_hi[static_cast<std::size_t>(64 + c)], static_cast<float>(stats.k_pre.body.quantile(1, c, 1 - tail))) << text;
    }
  }
  // After RoPE slow pairs, which 100 positions do not turn once, are bounded by their norm at every position; fast ones keep percentiles.
  const SchemeParams post = fit_params(parse_scheme("int4.channel.static.out1"), Side::kK, stats, kSinks, nullptr, 100);
  EXPECT_FLOAT_EQ(post.clip_hi[0], static_cast<float>(stats.k_post.body.quantile(0, 0, 0.995)));
  EXPECT_FLOAT_EQ(post.clip_hi[31], stats.pair_absmax[31]);
}

TEST(CalibratedParams, PairedThresholdsAreOneRange) {
  const stats::LayerStats stats = normal_layer();
  const SchemeParams p = fit_params(parse_scheme("int8.channel.static.pre.pair"), Side::kK, stats, kSinks),
                     alone = fit_params(parse_scheme("int8.channel.static.pre"), Side::kK, stats, kSinks);
  for (std::size_t c = 0; c < 32; ++c) {
    EXPECT_EQ(p.clip_hi[c], std::max(alone.clip_hi[c], alone.clip_hi[c + 32]));
    EXPECT_EQ(p.clip_hi[c + 32], p.clip_hi[c]);
    EXPECT_EQ(p.clip_lo[c + 32], std::min(alone.clip_lo[c], alone.clip_lo[c + 32]));
  }
}

double cost_of(const char* text, Side side, const stats::LayerStats& stats, const std::vector<float>& x) {
  const kvrt::Scheme scheme = parse_scheme(text);
  const SchemeParams p = fit_params(scheme, side, stats, kSinks, nullptr, 512);
  std::vector<float> out(x.size());
  ThreadPool pool(1);
  fake_quant_document(scheme, side, stats.geometry(), p, 0, false, static_cast<std::int64_t>(x.size()) / 128, x.data(), out.data(), pool);
  const std::vector<double> weights = channel_weights(stats, side, scheme, 512);
  double cost = 0;
  for (std::size_t i = 0; i < x.size(); ++i) cost += weights[i % 128] * (static_cast<double>(out[i]) - x[i]) * (static_cast<double>(out[i]) - x[i]);
  return cost;
}

/// Fresh rows of normal_layer()'s distribution.
std::vector<float> fresh_rows(double tail, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(256 * 128);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double spike = tail > 0 && rng.uniform() < 0.01 ? tail : 1.0;
    x[i] = static_cast<float>((1 + i % 4) * (rng.normal() * spike + 0.5));
  }
  return x;
}

// A fitted codebook is worth more than evenly spaced codes on the same ranges, and outliers more still where there are any.
TEST(CalibratedParams, CodebooksBeatEvenCodesOnFreshData) {
  const stats::LayerStats stats = normal_layer(), heavy = normal_layer(8);
  const std::vector<float> x = fresh_rows(0, 77), spiked = fresh_rows(8, 78);
  struct Row { const char *book, *even; Side side; };
  for (const Row& r : {Row{"nuq3.channel.static.pre", "int3.channel.static.pre", Side::kK}, Row{"nuq3.token.g", "int3.token.g", Side::kV},
                       Row{"nuq2.token.g", "int2.token.g", Side::kV}, Row{"nuq4.token.g", "int4.token.g", Side::kK},
                       Row{"nuq3.token.g.center.smooth", "int3.token.g.center.smooth", Side::kK}}) {
    EXPECT_LT(cost_of(r.book, r.side, stats, x), 0.9 * cost_of(r.even, r.side, stats, x)) << r.book;
  }
  EXPECT_LT(cost_of("nuq3.channel.static.pre.out2", Side::kK, heavy, spiked), 0.3 * cost_of("nuq3.channel.static.pre", Side::kK, heavy, spiked));
  EXPECT_LT(cost_of("nuq3.token.g.out2", Side::kV, heavy, spiked), 0.6 * cost_of("nuq3.token.g", Side::kV, heavy, spiked));
}

// METHODS.md 4.5: at 2 bits there is a second codebook, whose coded values vary as the data do.
TEST(CalibratedParams, QNormAtTwoBits) {
  const stats::LayerStats stats = normal_layer();
  for (const char* text : {"nuq2.channel.static.pre", "nuq2.token.g", "nuq2.token.g.out1"}) {
    const SchemeParams p = fit_params(parse_scheme(text), Side::kK, stats, kSinks);
    ASSERT_EQ(p.codebook_qnorm.size(), 4u) << text;
    EXPECT_TRUE(std::is_sorted(p.codebook_qnorm.begin(), p.codebook_qnorm.end()));
    EXPECT_GT(p.codebook_qnorm[3] - p.codebook_qnorm[0], 1.03f * (p.codebook[3] - p.codebook[0])) << text;
    for (const auto& [name, values] : p.arrays()) EXPECT_NE(values, &p.codebook_qnorm);
  }
  EXPECT_TRUE(fit_params(parse_scheme("nuq3.token.g"), Side::kK, stats, kSinks).codebook_qnorm.empty());
}

TEST(CalibratedParams, FeedbackOnValuesMeetsTheOutputProjection) {
  const stats::LayerStats stats = normal_layer();
  const SchemeParams p = fit_params(parse_scheme("int4.token.g.ef"), Side::kV, stats, kSinks);
  EXPECT_EQ(p.ef_order[0], 1.0f);  // the channel that the projection sees most is coded first
  EXPECT_EQ(p.ef_order[64], 1.0f);
  EXPECT_EQ(p.ef_u.size(), 2u * 64 * 65 / 2);
}

// Static integers over a rotation: ranges that fresh rotated rows fill and hardly leave.
TEST(CalibratedParams, RotatedIntegerRangesFollowTheCovariance) {
  const stats::LayerStats stats = normal_layer(0, false);  // the keys of this layer are the same before and after RoPE
  const std::vector<float> x = fresh_rows(0, 79);
  for (const char* text : {"int8.head.had", "int8.tensor.had", "int8.head.center.had", "int8.channel.static.had", "int8.head.smooth.had"}) {
    for (const Side side : {Side::kK, Side::kV}) {
      if (side == Side::kV && parse_scheme(text).smooth) continue;
      const SchemeParams p = fit_params(parse_scheme(text), side, stats, kSinks, nullptr, 1500);
      std::int64_t beyond = 0;
      double largest = 0;
      for (std::size_t row = 0; row < x.size() / 64; ++row) {
        std::vector<float> y(64);
        for (std::size_t c = 0; c < 64; ++c) {
          const std::size_t i = row % 2 * 64 + c;
          y[c] = (x[row * 64 + c] - (p.mean.empty() ? 0 : p.mean[i])) / (p.smooth.empty() ? 1 : p.smooth[i]);
        }
        kvrt::hadamard_rotate(kvrt::hadamard_order(64), y.data(), 64, false);
        for (std::size_t c = 0; c < 64; ++c) {
          const std::size_t at = p.clip_lo.size() == 1 ? 0 : p.clip_lo.size() == 2 ? row % 2 : row % 2 * 64 + c;
          beyond += y[c] < p.clip_lo[at] || y[c] > p.clip_hi[at];
          largest = std::max(largest, static_cast<double>(y[c] / (y[c] < 0 ? p.clip_lo[at] : p.clip_hi[at])));
        }
      }
      EXPECT_LT(static_cast<double>(beyond) / static_cast<double>(x.size()), 1e-3) << text;
      EXPECT_GT(largest, 0.6) << text;
    }
  }
}

}  // namespace
}  // namespace calib::quant

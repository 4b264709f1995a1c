// What the stored numbers are worth: known error levels, one-sided data, constants, zeros, what is not finite. Rows QZ-* of the case list.

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/codec/hadamard.h"
#include "tests/kernels/fake_quant_fixture.h"

namespace kvrt {
namespace {

using testing::Call;
using testing::mse;

double normal_mse(const std::string& scheme, int d = 128, double scale = 1, double offset = 0, float clip = 0) {
  Call call(scheme, 4096, 1, d);
  call.fill_normal(24, scale, offset);
  if (clip > 0) std::fill(call.clip_hi.begin(), call.clip_hi.end(), clip);
  return mse(call.run(), call.x) / (scale * scale);
}

// G24: min-max rows of N(0,1), +-2 %. The int8 rows are printed with two digits.
TEST(FakeQuantQuality, IntegerErrorOfNormalData) {
  struct Row { int group; double mse2, mse3, mse4, mse8; };
  for (const Row& r : {Row{32, 0.1544, 0.0281, 0.0061, 2.1e-5}, Row{64, 0.2023, 0.0370, 0.0080, 2.8e-5}, Row{128, 0.2505, 0.0457, 0.0099, 3.4e-5}}) {
    const std::string group = ".token.g" + std::to_string(r.group);
    EXPECT_NEAR(normal_mse("int2" + group), r.mse2, 0.02 * r.mse2);
    EXPECT_NEAR(normal_mse("int3" + group), r.mse3, 0.02 * r.mse3);
    EXPECT_NEAR(normal_mse("int4" + group), r.mse4, 0.02 * r.mse4);
    EXPECT_NEAR(normal_mse("int8" + group), r.mse8, 0.03 * r.mse8);
  }
  EXPECT_NEAR(normal_mse("int4.channel.g32"), 0.0061, 0.02 * 0.0061);
  EXPECT_NEAR(normal_mse("int2.channel.g128"), 0.2505, 0.02 * 0.2505);
}

/// MSE of one alpha for all groups.
double clipped_mse(const std::string& scheme, float alpha, double offset = 0) {
  Call call(scheme + ".clip", 4096, 1, 128);
  call.fill_normal(24, 1, offset);
  call.clip_alpha[0] = alpha;
  return mse(call.run(), call.x);
}

// G24: one alpha for all groups of N(0,1), the best of the grid.
TEST(FakeQuantQuality, ClippedErrorOfNormalData) {
  struct Row { const char* scheme; float alpha; double mse; };
  for (const Row& r : {Row{"int2.token.g32", .70f, .102}, Row{"int3.token.g32", .90f, .0253}, Row{"int4.token.g32", 1.0f, .0061}, Row{"int2.token.g64", .65f, .113},
                       Row{"int3.token.g64", .85f, .0308}, Row{"int4.token.g64", .95f, .0077}, Row{"int2.token.g", .60f, .119}, Row{"int3.token.g", .80f, .0345},
                       Row{"int4.token.g", .95f, .0092}, Row{"int3.channel.g64", .85f, .0308}}) {
    const double best = clipped_mse(r.scheme, r.alpha);
    EXPECT_NEAR(best, r.mse, 0.02 * r.mse) << r.scheme;
    for (const float step : {-0.1f, 0.1f}) {
      const float other = std::min(r.alpha + step, 1.0f);
      EXPECT_GE(clipped_mse(r.scheme, other), best) << r.scheme;
    }
  }
  EXPECT_EQ(clipped_mse("int4.token.g32", 1.0f), normal_mse("int4.token.g32"));
}

// G25: N(10, 1), 2 bits: shrinking about the mean keeps its gain wherever the mean is.
TEST(FakeQuantQuality, ClipIsAboutTheMeanOfTheGroup) {
  EXPECT_NEAR(clipped_mse("int2.token.g", 0.60f, 10), clipped_mse("int2.token.g", 0.60f, 0), 0.02 * 0.119);
  EXPECT_NEAR(clipped_mse("int2.channel.g128", 0.60f, 10), 0.119, 0.02 * 0.119);
}

// Both channels of a RoPE pair have the range of the wider one; a pair of two equal channels loses nothing.
TEST(FakeQuantQuality, PairsShareTheWiderRange) {
  Call paired("int4.channel.g32.pair", 32, 1, 64), plain("int4.channel.g32", 32, 1, 64);
  paired.fill_normal(31);
  for (std::size_t t = 0; t < 32; ++t) paired.x[t * 64 + 5] *= 100, paired.x[t * 64 + 32 + 6] = paired.x[t * 64 + 6];
  plain.x = paired.x;
  const std::vector<float> a = paired.run(), b = plain.run();
  double narrow = 0, expected = 0;
  for (std::size_t t = 0; t < 32; ++t) {
    for (const std::size_t c : {std::size_t{5}, std::size_t{6}, std::size_t{38}}) EXPECT_EQ(a[t * 64 + c], b[t * 64 + c]);
    narrow += std::fabs(a[t * 64 + 37] - paired.x[t * 64 + 37]), expected += std::fabs(b[t * 64 + 37] - paired.x[t * 64 + 37]);
  }
  EXPECT_GT(narrow, 3 * expected);
}

// G19 and G17.
TEST(FakeQuantQuality, BlockAndFloatErrorOfNormalData) {
  EXPECT_NEAR(normal_mse("q4_0"), 0.00737, 0.03 * 0.00737);
  EXPECT_NEAR(normal_mse("q8_0"), 2.86e-5, 0.03 * 2.86e-5);
  EXPECT_NEAR(normal_mse("sint4.token.g32"), 0.00940, 0.03 * 0.00940);
  EXPECT_NEAR(normal_mse("sint8.token.g32"), 2.86e-5, 0.03 * 2.86e-5);
  EXPECT_NEAR(normal_mse("nvfp4", 128, 1, 0, 6), 0.00903, 0.03 * 0.00903);
  EXPECT_NEAR(normal_mse("mxfp4"), 0.0133, 0.03 * 0.0133);
  for (const float clip : {8.0f, 16.0f, 64.0f}) EXPECT_NEAR(normal_mse("fp8e4m3.tensor", 128, 1, 0, clip), 7.0e-4, 0.02 * 7.0e-4) << clip;
  for (const float clip : {8.0f, 16.0f, 64.0f}) EXPECT_NEAR(normal_mse("fp8e5m2.tensor", 128, 1, 0, clip), 2.77e-3, 0.02 * 2.77e-3) << clip;
}

// QZ-03: data away from zero. A lane of padding in the range would stretch the step sixfold.
TEST(FakeQuantQuality, OneSidedDataKeepTheirLevels) {
  struct Row { int d; double lo; };
  for (const Row& r : {Row{96, 5}, Row{80, -6}, Row{72, 5}, Row{100, -6}}) {
    for (const WritePath& backend : write_paths()) {
      Call call("int4.token.g", 64, 2, r.d);
      calib::Rng rng(11);
      for (float& v : call.x) v = static_cast<float>(r.lo + rng.uniform());
      for (std::size_t row = 0; row < call.x.size(); row += static_cast<std::size_t>(r.d)) {
        call.x[row] = static_cast<float>(r.lo), call.x[row + 1] = static_cast<float>(r.lo + 1);
      }
      const std::vector<float> out = call.on(backend);
      double worst = 0;
      for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(static_cast<double>(out[i]) - call.x[i]));
      EXPECT_LE(worst, 0.034) << backend.name << " D " << r.d;
      EXPECT_NEAR(static_cast<double>(out[1]) - out[0], 15 * (1.0 / 15), 1e-3);  // 15 steps of 1/15
    }
  }
}

// KN-01: what lies behind the last channel and the last token never takes part.
TEST(FakeQuantQuality, PaddingNeverTakesPart) {
  for (const char* scheme : {"int4.token.g", "int3.token.g", "int4.channel.g32", "fp8e4m3.token.g"}) {
    for (const auto& [d, padded] : {std::pair{100, 104}, {72, 80}, {80, 96}, {96, 128}}) {
      Call call(scheme, 32, 1, d);
      call.fill_normal(2);
      const std::vector<float> expected = call.run();
      std::vector<float> wide(static_cast<std::size_t>(33 * padded), NAN), out(wide);
      for (std::size_t t = 0; t < 32; ++t)
        std::memcpy(&wide[t * static_cast<std::size_t>(padded)], &call.x[t * static_cast<std::size_t>(d)], sizeof(float) * static_cast<std::size_t>(d));
      for (const WritePath& backend : write_paths()) {
        FakeQuantArgs args = call.args(out.data());
        args.x = wide.data();
        args.x_token_stride = args.out_token_stride = padded;
        FakeQuantCounters counters;
        ASSERT_TRUE(fake_quant_on(args, backend, &counters).ok());
        EXPECT_EQ(counters.non_finite, 0);
        for (std::size_t t = 0; t < 33; ++t) {
          for (std::size_t i = 0; i < static_cast<std::size_t>(padded); ++i) {
            const float v = out[t * static_cast<std::size_t>(padded) + i];
            if (t < 32 && i < static_cast<std::size_t>(d)) ASSERT_EQ(v, expected[t * static_cast<std::size_t>(d) + i]);
            else ASSERT_TRUE(std::isnan(v));
          }
        }
      }
    }
  }
}

// QZ-05
TEST(FakeQuantQuality, RotationTamesOutlierChannelsButIsNotFreeBits) {
  const auto fill = [](Call* call) {
    call->fill_normal(5);
    for (std::size_t t = 0; t < 512; ++t) call->x[t * 64 + 3] *= 20, call->x[t * 64 + 35] *= 20;
  };
  std::vector<float> q(64 * 64);
  calib::Rng rng(6);
  for (float& v : q) v = static_cast<float>(rng.normal());
  const auto score_error = [&](const std::string& scheme) {  // root mean square of q.(k - k^)
    Call call(scheme, 512, 1, 64);
    fill(&call);
    const std::vector<float> out = call.run();
    double sum = 0;
    for (std::size_t t = 0; t < 512; ++t) {
      for (std::size_t i = 0; i < 64; ++i) {
        double dot = 0;
        for (std::size_t c = 0; c < 64; ++c) dot += static_cast<double>(q[i * 64 + c]) * (static_cast<double>(out[t * 64 + c]) - call.x[t * 64 + c]);
        sum += dot * dot;
      }
    }
    return std::sqrt(sum / (512 * 64));
  };
  const double int4_had = score_error("int4.token.g.had");
  EXPECT_LT(int4_had, 0.5 * score_error("int4.token.g"));
  const double ratio = score_error("int3.token.g.had") / int4_had;
  EXPECT_GE(ratio, 2.0);
  EXPECT_LE(ratio, 2.4);
}

const char* const kAllForms[] = {"int8.token.g",
                                 "int4.token.g32",
                                 "int3.token.g32",
                                 "int2.token.g32",
                                 "int8.channel.g32",
                                 "int4.channel.g32",
                                 "int3.channel.g64",
                                 "int2.channel.g32",
                                 "fp8e4m3.tensor",
                                 "fp8e4m3.head",
                                 "fp8e4m3.token.g",
                                 "q8_0",
                                 "q4_0",
                                 "q4_1",
                                 "q5_0",
                                 "q5_1",
                                 "fp8e5m2.token.g",
                                 "sint8.token.g",
                                 "sint4.token.g32",
                                 "bf16",
                                 "fp16",
                                 "int4.token.g.had",
                                 "fp8e4m3.token.g.had",
                                 "q4_0.had",
                                 "q8_0.had",
                                 "lm4.token.g",
                                 "lm3.token.g.had",
                                 "lm2.token.g32",
                                 "iq4_nl",
                                 "nvfp4",
                                 "mxfp4",
                                 "mxfp4.had",
                                 "int4.token.g32.smooth",
                                 "lm4.token.g.smooth.had",
                                 "int4.token.g.clip",
                                 "int2.channel.g32.clip",
                                 "fp8e4m3.token.g32.clip",
                                 "int4.channel.g32.pair",
                                 "int4.token.g32.out1",
                                 "int3.channel.g64.out2",
                                 "int4.channel.g32.clip.out1.pair",
                                 "nuq4.token.g",
                                 "nuq3.token.g",
                                 "nuq2.token.g.out1"};

// QZ-06
TEST(FakeQuantQuality, ZerosComeBackAsZerosAndSubnormalsStayFinite) {
  for (const char* scheme : kAllForms) {
    Call call(scheme, 64, 2, 64);
    // A codebook need not hold -1, the lower end of every range: then zeros are off by a share of the least scale, 2^-14.
    const float off = std::string(scheme).compare(0, 3, "nuq") == 0 ? 0x1p-17f : 0.0f;
    for (const float v : call.run()) ASSERT_LE(std::abs(v), off) << scheme;
    call.fill_normal(3);
    for (std::size_t t = 0; t < 64; ++t) call.x[t * 128 + 5] = call.x[t * 128 + 37] = 0;  // a RoPE pair of zeros
    for (std::size_t c = 0; c < 128; ++c) call.x[7 * 128 + c] = 0;     // a token of zeros
    const std::vector<float> out = call.run();
    const bool by_channel = call.scheme.granularity == Granularity::kChannel;
    for (std::size_t c = 0; c < 128 && !by_channel; ++c) ASSERT_LE(std::abs(out[7 * 128 + c]), off) << scheme;
    for (std::size_t t = 0; t < 64 && by_channel; ++t) ASSERT_EQ(out[t * 128 + 5], 0.0f) << scheme;
    for (float& v : call.x) v = 1e-40f;
    for (const float v : call.run()) ASSERT_LE(std::abs(v), 0x1p-13f) << scheme;
  }
}

// QZ-07
TEST(FakeQuantQuality, ConstantsComeBackWithinHalfAPercent) {
  for (const char* scheme : {"sint8.token.g", "sint4.token.g32", "sint4.token.g"}) {
    for (const float value : {100.0f, -100.0f, 0.25f, 1e-3f}) {
      Call call(scheme, 64, 2, 64);
      std::fill(call.x.begin(), call.x.end(), value);
      // Symmetric formats have no minimum of their own: below 127 (7) steps of the least scale, 2^-14, only half such a step is promised.
      for (const float v : call.run()) ASSERT_NEAR(v, value, std::max(0.005 * std::abs(value), 0x1p-15)) << scheme;
    }
  }
  for (const char* scheme : kAllForms) {
    if (std::string(scheme).compare(0, 3, "int") != 0 || std::string(scheme).find("had") != std::string::npos ||
        std::string(scheme).find("smooth") != std::string::npos)
      continue;
    for (const float value : {100.0f, -100.0f, 1e-3f, 3.25f, 6e4f}) {
      Call call(scheme, 64, 2, 64);
      std::fill(call.x.begin(), call.x.end(), value);
      for (const float v : call.run()) ASSERT_NEAR(v, value, 0.005 * std::abs(value)) << scheme;
    }
  }
}

// QZ-09: what is not finite becomes 0, is counted once, and spoils nothing else.
TEST(FakeQuantQuality, ValuesThatAreNotFiniteAreCountedAndStoredAsZero) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const char* scheme : kAllForms) {
    Call call(scheme, 64, 2, 64), clean = call;
    call.fill_normal(4), clean.fill_normal(4);
    const std::size_t bad[] = {0, 77, 130, 4000};
    const float values[] = {NAN, inf, -inf, -NAN};
    for (int i = 0; i < 4; ++i) call.x[bad[i]] = values[i], clean.x[bad[i]] = 0;
    for (const bool bf16 : {false, true}) {
      call.bf16 = clean.bf16 = bf16;
      FakeQuantCounters counters;
      EXPECT_EQ(call.run(&counters), clean.run()) << scheme;
      EXPECT_EQ(counters.non_finite, 4) << scheme;
    }
  }
}

TEST(FakeQuantQuality, HugeValuesSaturateAndAreCounted) {
  for (const char* scheme : kAllForms) {
    Call call(scheme, 64, 2, 64);
    call.fill_normal(4, 1e30);
    FakeQuantCounters counters;
    const std::vector<float> out = call.run(&counters);
    for (const float v : out) ASSERT_TRUE(std::isfinite(v)) << scheme;
    if (std::string(scheme) == "bf16" || call.scheme.format == Format::kMxfp4) continue;  // they reach as far as fp32
    EXPECT_GT(counters.saturated, 0) << scheme;
  }
  Call tensor("fp8e4m3.tensor", 1, 1, 64);
  tensor.clip_hi = {448};
  const float x[] = {448, 449, 464, 1e4f, -1e4f, 0, -0.0f, 0x1p-10f}, expected[] = {448, 448, 448, 448, -448, 0, 0, 0};
  std::copy(std::begin(x), std::end(x), tensor.x.begin());
  FakeQuantCounters counters;
  const std::vector<float> out = tensor.run(&counters);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(out[i], expected[i]) << x[i];
  EXPECT_EQ(counters.saturated, 4);  // beyond clip_hi
}

TEST(FakeQuantQuality, CentringRemovesAnOffsetAndItsErrorWithIt) {
  Call plain("int4.token.g32", 512, 1, 64), centred("int4.token.g32.center", 512, 1, 64);
  calib::Rng rng(10);
  for (std::size_t c = 0; c < 64; ++c) centred.mean[c] = static_cast<float>(20 * rng.normal());
  for (std::size_t i = 0; i < plain.x.size(); ++i) plain.x[i] = centred.x[i] = static_cast<float>(centred.mean[i % 64] + rng.normal());
  EXPECT_LT(mse(centred.run(), centred.x), 0.1 * mse(plain.run(), plain.x));
  EXPECT_NEAR(mse(centred.run(), centred.x), 0.0061, 0.05 * 0.0061);  // that of N(0,1), G24
}

TEST(FakeQuantQuality, BlocksAreCutInTheGivenChannelOrder) {
  Call natural("q4_0", 64, 1, 64), paired("q4_0", 64, 1, 64);
  natural.fill_normal(12);
  for (int i = 0; i < 64; ++i) paired.block_order.push_back(i % 2 ? 32 + i / 2 : i / 2);  // half-split channels, pairs adjacent
  for (std::size_t t = 0; t < 64; ++t) {
    for (std::size_t p = 0; p < 64; ++p) paired.x[t * 64 + static_cast<std::size_t>(paired.block_order[p])] = natural.x[t * 64 + p];
  }
  const std::vector<float> a = natural.run(), b = paired.run();
  for (std::size_t t = 0; t < 64; ++t) {
    for (std::size_t p = 0; p < 64; ++p) ASSERT_EQ(b[t * 64 + static_cast<std::size_t>(paired.block_order[p])], a[t * 64 + p]);
  }
}

TEST(FakeQuantQuality, LlamaCppRotationsUseItsBlockSizes) {
  // V of 128 channels is turned in blocks of 64: what changes in the second block cannot reach the first. K is turned as a whole.
  for (const bool is_key : {false, true}) {
    Call call("q4_0.had", 1, 1, 128);
    call.is_key = is_key;
    call.fill_normal(14);
    const std::vector<float> before = call.run();
    call.x[100] += 3;
    const std::vector<float> after = call.run();
    EXPECT_EQ(!std::equal(before.begin(), before.begin() + 64, after.begin()), is_key);
  }
}

}  // namespace
}  // namespace kvrt

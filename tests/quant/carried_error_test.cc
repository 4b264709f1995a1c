#include "libcalib/quant/carried_error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "layer_stats.h"
#include "libcalib/quant/scheme.h"

namespace calib::quant {
namespace {

std::vector<float> normal_rows(std::int64_t n_tokens, const LayerGeometry& g) {
  Rng rng(7);
  return quant_test::fill(n_tokens, g.n_kv_heads, g.head_dim, [&](std::int64_t, int, int) { return static_cast<float>(rng.normal()); });
}

TEST(CarriedError, NoShareIsNoCarry) {
  const LayerGeometry g = quant_test::geometry();
  ThreadPool pool(1);
  const std::vector<float> x = normal_rows(50, g);
  for (const char* text : {"int4.token.g32", "int3.token.g64.had", "int2.token.g", "lm3.token.g.had", "fp8e4m3.token.g", "int4.token.g64.out1"})
    for (const bool bf16 : {false, true}) {
      std::vector<float> carried(x.size()), plain(x.size());
      fake_quant_carried(parse_scheme(text), Side::kV, g, {}, 0.0f, 3, bf16, 50, x.data(), carried.data());
      fake_quant_document(parse_scheme(text), Side::kV, g, {}, 3, bf16, 50, x.data(), plain.data(), pool);
      EXPECT_EQ(carried, plain) << text;
    }
}

// By hand, for the first three coded tokens of each head.
TEST(CarriedError, ARowTakesOverAShareOfTheErrorBefore) {
  const LayerGeometry g = quant_test::geometry();
  ThreadPool pool(1);
  constexpr std::int64_t kSinks = 2, kTokens = 5;
  constexpr float kShare = 0.5f;
  const kvrt::Scheme scheme = parse_scheme("int2.token.g32");
  const std::int64_t row = static_cast<std::int64_t>(g.n_kv_heads) * g.head_dim;
  const std::vector<float> x = normal_rows(kTokens, g);
  std::vector<float> carried(x.size()), expected(x);
  fake_quant_carried(scheme, Side::kV, g, {}, kShare, kSinks, false, kTokens, x.data(), carried.data());
  std::vector<float> given(x.begin() + kSinks * row, x.begin() + (kSinks + 1) * row);
  for (std::int64_t t = kSinks; t < kTokens; ++t) {
    float* out = expected.data() + t * row;
    fake_quant_document(scheme, Side::kV, g, {}, 0, false, 1, given.data(), out, pool);
    for (std::int64_t c = 0; c < row && t + 1 < kTokens; ++c)
      given[static_cast<std::size_t>(c)] = x[static_cast<std::size_t>((t + 1) * row + c)] + kShare * (given[static_cast<std::size_t>(c)] - out[c]);
  }
  EXPECT_EQ(carried, expected);
}

// y_t - x = share e_(t-1) - e_t: the errors of n equal rows add up to (share - 1) sum e - share e_n. A whole share leaves the last row's
// error alone, at most half a step of 2 bits.
TEST(CarriedError, TheMeanOfAConstantInputComesBack) {
  const LayerGeometry g = quant_test::geometry();
  constexpr std::int64_t kTokens = 1000;
  const std::int64_t row = static_cast<std::int64_t>(g.n_kv_heads) * g.head_dim;
  const std::vector<float> one = normal_rows(1, g);
  std::vector<float> x, y(static_cast<std::size_t>(kTokens * row));
  for (std::int64_t t = 0; t < kTokens; ++t) x.insert(x.end(), one.begin(), one.end());
  const auto mean_errors = [&](float share) {
    fake_quant_carried(parse_scheme("int2.token.g"), Side::kV, g, {}, share, 0, false, kTokens, x.data(), y.data());
    std::vector<double> mean(static_cast<std::size_t>(row), 0.0);
    for (std::size_t i = 0; i < y.size(); ++i) mean[i % mean.size()] += (static_cast<double>(y[i]) - x[i]) / kTokens;
    return mean;
  };
  const auto rms = [](const std::vector<double>& v) {
    double sum = 0;
    for (const double e : v) sum += e * e;
    return std::sqrt(sum / static_cast<double>(v.size()));
  };
  const double none = rms(mean_errors(0)), half = rms(mean_errors(0.5f)), most = rms(mean_errors(0.75f));
  EXPECT_LT(half, 0.9 * none);
  EXPECT_LT(most, 0.9 * half);
  // Rows that carry reach at most half a step further on both sides, and a step is a third of the range.
  const double range = 2 * *std::max_element(one.begin(), one.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); });
  for (const double e : mean_errors(1)) EXPECT_LE(std::fabs(e), std::fabs(range) / kTokens);
}

TEST(CarriedError, TokenGroupsWithoutFeedbackOrABasis) {
  for (const char* text : {"int4.token.g32", "int2.token.g.had", "sint4.token.g", "fp8e5m2.token.g32", "lm4.token.g", "nuq3.token.g"})
    EXPECT_TRUE(can_carry_error(parse_scheme(text))) << text;
  for (const char* text : {"bf16", "int4.token.g32.ef", "int4.channel.g32", "int8.head", "nuq3.channel.static", "q4_0", "nvfp4", "int4.token.g.lowrank16"})
    EXPECT_FALSE(can_carry_error(parse_scheme(text))) << text;
}

}  // namespace
}  // namespace calib::quant

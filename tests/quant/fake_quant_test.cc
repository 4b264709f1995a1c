#include "libcalib/quant/fake_quant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "layer_stats.h"
#include "libcalib/quant/scheme.h"

namespace calib::quant {
namespace {

std::vector<float> normal(std::int64_t n_tokens, const LayerGeometry& g, std::uint64_t seed = 2) {
  Rng rng(seed);
  return quant_test::fill(n_tokens, g.n_kv_heads, g.head_dim, [&](std::int64_t, int, int) { return static_cast<float>(rng.normal()); });
}

/// Tokens whose row differs from the input.
std::vector<std::int64_t> changed(const std::vector<float>& x, const std::vector<float>& y, std::int64_t row) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t t = 0; t < static_cast<std::int64_t>(x.size()) / row; ++t)
    if (!std::equal(x.begin() + t * row, x.begin() + (t + 1) * row, y.begin() + t * row)) tokens.push_back(t);
  return tokens;
}

TEST(FakeQuant, SinksAndPartialGroupStayExact) {
  const LayerGeometry g = quant_test::geometry();
  ThreadPool pool(2);
  const std::vector<float> x = normal(107, g);
  std::vector<float> y(x.size());
  fake_quant_document(parse_scheme("int4.channel.g32"), Side::kK, g, {}, 4, false, 107, x.data(), y.data(), pool);
  const std::vector<std::int64_t> touched = changed(x, y, 128);
  ASSERT_EQ(touched.size(), 96u);  // three whole groups of the 103 tokens after the sinks
  EXPECT_EQ(touched.front(), 4);
  EXPECT_EQ(touched.back(), 99);
  fake_quant_document(parse_scheme("int4.token.g32"), Side::kK, g, {}, 4, false, 107, x.data(), y.data(), pool);
  EXPECT_EQ(changed(x, y, 128).size(), 103u);
  // Shorter than the sinks: nothing to code.
  fake_quant_document(parse_scheme("int4.token.g32"), Side::kK, g, {}, 4, false, 3, x.data(), y.data(), pool);
  EXPECT_TRUE(std::equal(x.begin(), x.begin() + 3 * 128, y.begin()));
}

TEST(FakeQuant, ErrorIsWithinHalfAStep) {
  const LayerGeometry g = quant_test::geometry();
  ThreadPool pool(1);
  const std::vector<float> x = normal(64, g);
  std::vector<float> y(x.size());
  fake_quant_document(parse_scheme("int4.token.g32"), Side::kV, g, {}, 0, false, 64, x.data(), y.data(), pool);
  for (std::size_t begin = 0; begin < x.size(); begin += 32) {
    const auto [lo, hi] = std::minmax_element(x.begin() + static_cast<std::ptrdiff_t>(begin), x.begin() + static_cast<std::ptrdiff_t>(begin) + 32);
    // fp16 rounding of minimum and scale outward: METHODS.md 4.1, |x - x'| <= s / 2 with s <= (hi - lo + 2 ulp) / 15 (1 + 2^-10).
    const float half_step = 0.5f * ((*hi - *lo) + 0.004f) / 15.0f * 1.001f;
    for (std::size_t i = begin; i < begin + 32; ++i) EXPECT_LE(std::fabs(x[i] - y[i]), half_step);
  }
}

TEST(FakeQuant, SameForEveryPoolSizeAndInPlace) {
  const LayerGeometry g = quant_test::geometry(3, 64);
  ThreadPool one(1), three(3);
  const std::vector<float> x = normal(200, g);
  for (const char* text : {"int3.token.g64.had", "int4.channel.g64.pre", "q4_0", "int8.token.g"}) {
    std::vector<float> a(x.size()), b = x;
    fake_quant_document(parse_scheme(text), Side::kK, g, {}, 4, true, 200, x.data(), a.data(), one);
    fake_quant_document(parse_scheme(text), Side::kK, g, {}, 4, true, 200, b.data(), b.data(), three);
    EXPECT_EQ(a, b) << text;
  }
}

// CASES.md QZ-04: centring removes an offset that eats the range.
TEST(FakeQuant, CentringPaysOffForOffsetKeys) {
  const LayerGeometry g = quant_test::geometry(1, 64);
  ThreadPool pool(1);
  std::vector<float> x = normal(512, g);
  for (float& value : x) value += 10;
  SchemeParams params;
  params.mean.assign(64, 10.0f);
  const auto rms = [&](const char* text, const SchemeParams& p) {
    std::vector<float> y(x.size());
    fake_quant_document(parse_scheme(text), Side::kK, g, p, 0, false, 512, x.data(), y.data(), pool);
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
    return std::sqrt(sum / static_cast<double>(x.size()));
  };
  // q4_0 and sint4 code symmetric about zero; q4_0 has no `center`, so the offset is taken off by hand.
  const double offset = rms("q4_0", {});
  std::vector<float> kept = x;
  for (float& value : x) value -= 10;
  EXPECT_LT(rms("q4_0", {}) / offset, 0.25);
  x = kept;
  EXPECT_LT(rms("sint4.token.g32.center", params) / rms("sint4.token.g32", {}), 0.25);
  EXPECT_NEAR(rms("int4.token.g.center", params), rms("int4.token.g", {}), 0.1 * rms("int4.token.g", {}));  // asymmetric: no offset problem
}

TEST(FakeQuant, NonFiniteInputIsNumeric) {
  const LayerGeometry g = quant_test::geometry();
  ThreadPool pool(1);
  std::vector<float> x = normal(40, g), y(x.size());
  x[5000] = std::nanf("");
  try {
    fake_quant_document(parse_scheme("int4.token.g32"), Side::kK, g, {}, 0, false, 40, x.data(), y.data(), pool);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kNumeric);
    EXPECT_THAT(e.where(), testing::HasSubstr("layer 3 K int4.token.g32"));
  }
}

TEST(FakeQuant, WrongParameterSizesAreInternal) {
  const LayerGeometry g = quant_test::geometry();
  ThreadPool pool(1);
  std::vector<float> x = normal(8, g), y(x.size());
  SchemeParams params;
  params.clip_hi = {1.0f, 2.0f, 3.0f};
  EXPECT_THROW(fake_quant_document(parse_scheme("fp8e4m3.head"), Side::kK, g, params, 0, false, 8, x.data(), y.data(), pool), Error);
}

TEST(RoundBf16, NearestEven) {
  const float x[] = {1.0f, 1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, -0.1f, 0.0f};
  float y[5];
  round_bf16(x, y, 5);
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_EQ(y[1], 1.0f);               // tie to even
  EXPECT_EQ(y[2], 1.0f + 4 * 0x1p-8f);  // tie to even, up
  EXPECT_EQ(y[3], -0.10009765625f);
  EXPECT_EQ(y[4], 0.0f);
}

TEST(LlamacppBlockOrder, OnlyForKeysOfItsNormFamilies) {
  LayerGeometry g = quant_test::geometry(1, 64);
  const kvrt::Scheme q4 = parse_scheme("q4_0");
  EXPECT_TRUE(llamacpp_block_order(q4, Side::kK, g).empty());
  g.llamacpp_adjacent_pairs = true;
  EXPECT_TRUE(llamacpp_block_order(q4, Side::kV, g).empty());
  EXPECT_TRUE(llamacpp_block_order(parse_scheme("int4.token.g32"), Side::kK, g).empty());
  const std::vector<std::int32_t> order = llamacpp_block_order(q4, Side::kK, g);
  ASSERT_EQ(order.size(), 64u);
  EXPECT_EQ(order[0], 0);
  EXPECT_EQ(order[1], 32);
  EXPECT_EQ(order[2], 1);
  EXPECT_EQ(order[63], 63);
  g.rotary_dim = 32;  // partial rotary: the rest stays
  const std::vector<std::int32_t> partial = llamacpp_block_order(q4, Side::kK, g);
  EXPECT_EQ(partial[1], 16);
  EXPECT_EQ(partial[31], 31);
  EXPECT_EQ(partial[40], 40);
}

}  // namespace
}  // namespace calib::quant

#include "kernels/codec/half.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace kvrt {
namespace {

double f16_value(unsigned h) {  // definition of the format, in double
  const int exponent = (h >> 10) & 31, mantissa = h & 0x3FF;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}
bool is_nan16(unsigned h) { return (h & 0x7C00) == 0x7C00 && (h & 0x3FF); }
bool is_inf16(unsigned h) { return (h & 0x7FFF) == 0x7C00; }

TEST(Half, AllFp16CodesDecodeByDefinitionAndComeBack) {
  for (unsigned h = 0; h < 0x10000; ++h) {
    const float x = f16_to_f32(static_cast<std::uint16_t>(h));
    if (is_nan16(h)) {
      EXPECT_TRUE(std::isnan(x));
      EXPECT_TRUE(is_nan16(f32_to_f16_rne(x)));
      continue;
    }
    if (is_inf16(h)) {
      EXPECT_TRUE(std::isinf(x));
    } else {
      ASSERT_EQ(static_cast<double>(x), f16_value(h)) << h;
    }
    ASSERT_EQ(f32_to_f16_rne(x), h);
    ASSERT_EQ(f32_to_f16_down(x), h);
    ASSERT_EQ(f32_to_f16_up(x), h);
  }
}

TEST(Half, BetweenTwoFp16CodesEveryModeRoundsAsItsNameSays) {
  for (unsigned h = 0; h < 0x7BFF; ++h) {  // neighbours h < h + 1, both signs
    const float lo = f16_to_f32(static_cast<std::uint16_t>(h)), hi = f16_to_f32(static_cast<std::uint16_t>(h + 1));
    const float middle = lo + (hi - lo) / 2;  // exact in fp32
    const float below = std::nextafter(middle, 0.0f), above = std::nextafter(middle, 1e30f);
    const unsigned even = h & 1 ? h + 1 : h;
    ASSERT_EQ(f32_to_f16_rne(middle), even);
    ASSERT_EQ(f32_to_f16_rne(below), h);
    ASSERT_EQ(f32_to_f16_rne(above), h + 1);
    ASSERT_EQ(f32_to_f16_rne(-above), 0x8000u | (h + 1));
    for (const float x : {std::nextafter(lo, 1e30f), below, middle, above, std::nextafter(hi, 0.0f)}) {
      ASSERT_EQ(f32_to_f16_down(x), h);
      ASSERT_EQ(f32_to_f16_up(x), h + 1);
      ASSERT_EQ(f32_to_f16_down(-x), 0x8000u | (h + 1));
      ASSERT_EQ(f32_to_f16_up(-x), 0x8000u | h);
    }
  }
}

TEST(Half, EndsOfTheFp16Range) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(f32_to_f16_rne(65519.996f), 0x7BFF);
  EXPECT_EQ(f32_to_f16_rne(65520.0f), 0x7C00);
  EXPECT_EQ(f32_to_f16_down(1e30f), 0x7BFF);
  EXPECT_EQ(f32_to_f16_up(1e30f), 0x7BFF);
  EXPECT_EQ(f32_to_f16_down(-1e30f), 0xFBFF);
  EXPECT_EQ(f32_to_f16_up(-1e30f), 0xFBFF);
  EXPECT_EQ(f32_to_f16_up(inf), 0x7C00);
  EXPECT_EQ(f32_to_f16_down(-inf), 0xFC00);
  for (const float tiny : {1e-40f, 1e-30f, 0x1p-26f}) {
    EXPECT_EQ(f32_to_f16_rne(tiny), 0);
    EXPECT_EQ(f32_to_f16_down(tiny), 0);
    EXPECT_EQ(f32_to_f16_up(tiny), 1);
    EXPECT_EQ(f32_to_f16_down(-tiny), 0x8001);
    EXPECT_EQ(f32_to_f16_up(-tiny), 0x8000);
  }
  EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16_down(std::nanf("")))));
}

TEST(Half, AllBf16CodesComeBackAndMidpointsGoToEven) {
  for (unsigned b = 0; b < 0x10000; ++b) {
    const float x = bf16_to_f32(static_cast<std::uint16_t>(b));
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(x))));
      continue;
    }
    ASSERT_EQ(f32_to_bf16(x), b);
    if (std::isinf(x)) continue;
    const std::uint32_t middle = (b << 16) | 0x8000u;  // halfway to the next larger magnitude
    ASSERT_EQ(f32_to_bf16(f32_from_bits(middle - 1)), b);
    ASSERT_EQ(f32_to_bf16(f32_from_bits(middle)), b & 1 ? b + 1 : b);
    ASSERT_EQ(f32_to_bf16(f32_from_bits(middle + 1)), b + 1);
  }
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(f32_from_bits(0x7F800001u)))));  // payload only in the low half
}

}  // namespace
}  // namespace kvrt

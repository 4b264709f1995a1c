#include "kernels/codec/fp8_codec.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace kvrt {
namespace {

struct Format8 {
  const char* name;
  int mantissa, bias, first_special;  ///< codes from first_special up are infinity or NaN
  std::uint8_t (*encode)(float);
  float (*decode)(std::uint8_t);
};
const Format8 kFormats[] = {{"e4m3", 3, 7, 0x7F, f32_to_e4m3, e4m3_to_f32}, {"e5m2", 2, 15, 0x7C, f32_to_e5m2, e5m2_to_f32}};

double value_by_definition(const Format8& f, int code) {
  const int e = code >> f.mantissa, m = code & ((1 << f.mantissa) - 1);
  return e == 0 ? std::ldexp(m, 1 - f.bias - f.mantissa) : std::ldexp((1 << f.mantissa) + m, e - f.bias - f.mantissa);
}

TEST(Fp8, AllCodesDecodeByDefinitionAndComeBack) {
  for (const Format8& f : kFormats) {
    for (int code = 0; code < 128; ++code) {
      const float x = f.decode(static_cast<std::uint8_t>(code)), y = f.decode(static_cast<std::uint8_t>(code | 0x80));
      if (code >= f.first_special) {
        EXPECT_FALSE(std::isfinite(x)) << f.name;
        continue;
      }
      ASSERT_EQ(x, value_by_definition(f, code)) << f.name << " " << code;
      ASSERT_EQ(y, -x);
      ASSERT_EQ(f.encode(x), code);
      ASSERT_EQ(f.encode(-x), code | 0x80);
    }
  }
}

// Nearest finite code, ties to the even one, by search over all of them: every fp16 input (QZ-09), and fp32 inputs around midpoints.
TEST(Fp8, RoundsToNearestEvenAndSaturates) {
  for (const Format8& f : kFormats) {
    std::vector<double> values;
    for (int code = 0; code < f.first_special; ++code) values.push_back(value_by_definition(f, code));
    const auto expected = [&](double a) {
      std::size_t hi = 0;
      while (hi + 1 < values.size() && values[hi] < a) ++hi;
      if (hi == 0 || values[hi] <= a) return hi;
      const double below = a - values[hi - 1], above = values[hi] - a;
      return below < above || (below == above && (hi - 1) % 2 == 0) ? hi - 1 : hi;
    };
    for (unsigned h = 0; h < 0x7C00; ++h) {
      const float x = f16_to_f32(static_cast<std::uint16_t>(h));
      const std::size_t want = expected(x);
      ASSERT_EQ(f.encode(x), want) << f.name << " " << x;
      ASSERT_EQ(f.encode(-x), want | 0x80) << f.name << " " << -x;
    }
    for (std::size_t i = 0; i + 1 < values.size(); ++i) {
      const float middle = static_cast<float>((values[i] + values[i + 1]) / 2);
      for (const float x : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1e30f)}) ASSERT_EQ(f.encode(x), expected(x));
    }
  }
}

TEST(Fp8, GoldenValuesG14) {
  const auto round_trip = [](float x) { return e4m3_to_f32(f32_to_e4m3(x)); };
  const float pairs[][2] = {{17, 16}, {19, 20}, {464, 448}, {1e4f, 448}, {-1e4f, -448}, {448, 448}, {449, 448}, {0x1p-9f, 0x1p-9f},
                            {0x1p-10f, 0}, {0x1.8p-10f, 0x1p-9f}, {0.3f, 0.3125f}};
  for (const auto& p : pairs) EXPECT_EQ(round_trip(p[0]), p[1]) << p[0];
}

TEST(Fp8, GoldenValuesG15) {
  const auto round_trip = [](float x) { return e5m2_to_f32(f32_to_e5m2(x)); };
  const float pairs[][2] = {{9, 8}, {11, 12}, {61440, 57344}, {1e6f, 57344}, {-1e6f, -57344}, {0x1p-16f, 0x1p-16f}, {0x1p-17f, 0}, {0.3f, 0.3125f}};
  for (const auto& p : pairs) EXPECT_EQ(round_trip(p[0]), p[1]) << p[0];
}

TEST(Fp8, WhatIsNotFiniteNeverBecomesANanCode) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(f32_to_e4m3(inf), 0x7E);
  EXPECT_EQ(f32_to_e4m3(-inf), 0xFE);
  EXPECT_EQ(f32_to_e5m2(inf), 0x7B);
  EXPECT_EQ(f32_to_e4m3(NAN), 0);
  EXPECT_EQ(f32_to_e5m2(-NAN), 0);
  EXPECT_EQ(f32_to_e4m3(0.0f), 0x00);
  EXPECT_EQ(f32_to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(f32_to_e4m3(1e-45f), 0x00);
}

}  // namespace
}  // namespace kvrt

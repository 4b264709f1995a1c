#include "kernels/codec/range.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "libcalib/base/rng.h"

namespace kvrt {
namespace {

TEST(Range, AffineGroupOfG11) {
  EncodeCounters counters;
  const AffineParams p = affine_params(10.0f, 11.5f, 15, &counters);
  const float lo = f16_to_f32(p.lo), scale = f16_to_f32(p.scale);
  EXPECT_EQ(lo, 10.0f);
  EXPECT_EQ(scale, 0.10003662109375f);
  const float x[] = {10, 10.5f, 10.75f, 11.5f};
  const int codes[] = {0, 5, 7, 15};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(affine_code(x[i], scale, lo, 15), codes[i]);
  EXPECT_FLOAT_EQ(affine_value(15, scale, lo), 11.500549316f);
  EXPECT_EQ(counters.floored + counters.saturated, 0);
}

TEST(Range, ConstantGroupsOfG12) {
  EncodeCounters counters;
  const AffineParams p = affine_params(0.1f, 0.1f, 15, &counters);
  EXPECT_EQ(f16_to_f32(p.lo), 0.0999755859375f);
  EXPECT_EQ(f16_to_f32(p.scale), 0x1p-14f);
  EXPECT_EQ(affine_code(0.1f, 0x1p-14f, f16_to_f32(p.lo), 15), 0);
  EXPECT_EQ(affine_value(0, 0x1p-14f, f16_to_f32(p.lo)), f16_to_f32(p.lo));
  const AffineParams q = affine_params(-3.0f, -3.0f, 15, &counters);
  EXPECT_EQ(f16_to_f32(q.lo), -3.0f);
  const AffineParams zero = affine_params(-0.0f, 0.0f, 15, &counters);
  EXPECT_EQ(zero.lo, 0);  // one spelling of zero
  EXPECT_EQ(counters.floored, 3);
}

// G13: directed rounding of the parameters keeps every value within half a step, for every finite group whose minimum and range fit.
TEST(Range, ErrorsStayWithinHalfAStep) {
  calib::Rng rng(13);
  for (const int bits : {8, 4, 3, 2}) {
    const int qmax = (1 << bits) - 1;
    for (int trial = 0; trial < 4000; ++trial) {
      const double mean = (trial % 4 == 0 ? 600 : trial % 4 == 1 ? -600 : 0) * rng.uniform(), std = std::ldexp(1.0, static_cast<int>(rng.below(24)) - 12);
      std::vector<float> x(32);
      for (float& v : x) v = static_cast<float>((trial % 8 == 7 ? -std::abs(rng.normal()) : rng.normal()) * std + mean);
      const auto [min, max] = std::minmax_element(x.begin(), x.end());
      EncodeCounters counters;
      const AffineParams p = affine_params(*min, *max, qmax, &counters);
      if (counters.saturated) continue;
      const float lo = f16_to_f32(p.lo), scale = f16_to_f32(p.scale);
      const float absmax = std::max(std::abs(*min), std::abs(*max));
      const double ulp = std::nextafter(absmax, INFINITY) - absmax;
      for (const float v : x) {
        const std::uint8_t code = affine_code(v, scale, lo, qmax);
        ASSERT_LE(std::abs(static_cast<double>(affine_value(code, scale, lo)) - v), scale / 2.0 + 2 * ulp);
        ASSERT_LE(std::abs(static_cast<double>(code) * scale + lo - v), scale / 2.0 * (1 + 1e-4) + ulp / 2);  // decoded in double
      }
    }
  }
}

TEST(Range, EveryScaleExponentUsesTheStoredScaleAndItsEnds) {
  for (unsigned h = 0x0400; h < 0x7C00; h += 0x40) {  // normal fp16 scales
    const float scale = f16_to_f32(static_cast<std::uint16_t>(h));
    for (const int qmax : {255, 15, 7, 3}) {
      for (int code = 0; code <= qmax; ++code) {
        ASSERT_EQ(affine_code(affine_value(static_cast<std::uint8_t>(code), scale, 0.0f), scale, 0.0f, qmax), code);
      }
      ASSERT_EQ(affine_code(scale * static_cast<float>(qmax) * 2, scale, 0.0f, qmax), qmax);  // clamped, never wrapped
      ASSERT_EQ(affine_code(-scale, scale, 0.0f, qmax), 0);
    }
  }
}

TEST(Range, CodesRoundHalvesToEven) {
  EXPECT_EQ(affine_code(0.5f, 1.0f, 0.0f, 255), 0);
  EXPECT_EQ(affine_code(1.5f, 1.0f, 0.0f, 255), 2);
  EXPECT_EQ(affine_code(2.5f, 1.0f, 0.0f, 255), 2);
  EXPECT_EQ(affine_code(254.5f, 1.0f, 0.0f, 255), 254);
}

TEST(Range, ParametersPastFp16SaturateAndAreCounted) {
  EncodeCounters counters;
  EXPECT_EQ(f16_to_f32(affine_params(-1e6f, -1e6f, 15, &counters).lo), -65504.0f);
  EXPECT_EQ(counters.saturated, 1);
  EXPECT_EQ(f16_to_f32(affine_params(0.0f, 3e38f, 15, &counters).scale), 65504.0f);
  EXPECT_EQ(counters.saturated, 2);
}

TEST(Range, Fp8Scales) {
  EncodeCounters counters;
  EXPECT_EQ(f16_to_f32(fp8_token_scale(18.265625f, 448, &counters)), 0.040771484375f);  // QZ-08
  EXPECT_EQ(f16_to_f32(fp8_token_scale(0.0f, 448, &counters)), 1.0f);
  EXPECT_EQ(f16_to_f32(fp8_token_scale(1e-45f, 448, &counters)), 0x1p-24f);
  EXPECT_GE(f16_to_f32(fp8_token_scale(1.0f, 448, &counters)) * 448, 1.0f);
  EXPECT_EQ(counters.saturated, 0);
  EXPECT_EQ(f16_to_f32(fp8_token_scale(3e38f, 448, &counters)), 65504.0f);
  EXPECT_EQ(counters.saturated, 1);
  EXPECT_EQ(fp8_static_scale(18.265625f, 448), 18.265625f / 448);
  EXPECT_EQ(fp8_static_scale(0.0f, 448), 1.0f);
  EXPECT_GT(fp8_static_scale(1e-45f, 448), 0.0f);
}

TEST(Range, Bf16OfAFiniteValueStaysFinite) {
  EXPECT_EQ(bf16_to_f32(f32_to_bf16_finite(3.4028235e38f)), bf16_to_f32(0x7F7F));
  EXPECT_EQ(bf16_to_f32(f32_to_bf16_finite(-3.4028235e38f)), bf16_to_f32(0xFF7F));
  EXPECT_EQ(bf16_to_f32(f32_to_bf16_finite(1.0f)), 1.0f);
}

}  // namespace
}  // namespace kvrt

#include "kernels/codec/fp4_codec.h"

#include <cmath>
#include <limits>

#include "tests/kernels/fake_quant_fixture.h"

namespace kvrt {
namespace {

using testing::Call;

constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

TEST(Fp4, EveryCodeIsItsValueAndComesBack) {
  for (int code = 0; code < 16; ++code) {
    const float value = e2m1_to_f32(static_cast<std::uint8_t>(code));
    EXPECT_EQ(f32_bits(value), f32_bits(code < 8 ? kMagnitudes[code] : -kMagnitudes[code - 8]));
    EXPECT_EQ(f32_to_e2m1(value), code);
  }
  for (int code = 0; code < 255; ++code) EXPECT_EQ(e8m0_to_f32(static_cast<std::uint8_t>(code)), std::ldexp(1.0f, code - 127));
}

// G16
TEST(Fp4, RoundsToNearestEvenAndSaturates) {
  const float pairs[][2] = {{0.25f, 0}, {0.75f, 1}, {1.25f, 1}, {1.75f, 2}, {2.5f, 2}, {3.5f, 4}, {5, 4}, {7.9f, 6}, {1e30f, 6}};
  for (const auto& p : pairs) {
    EXPECT_EQ(e2m1_to_f32(f32_to_e2m1(p[0])), p[1]) << p[0];
    EXPECT_EQ(e2m1_to_f32(f32_to_e2m1(-p[0])), -p[1]) << p[0];
  }
  for (double a = 0; a < 8; a += 1.0 / 4096) {  // by search
    int best = 0;
    for (int i = 1; i < 8; ++i) {
      const double d = std::abs(a - kMagnitudes[i]), least = std::abs(a - kMagnitudes[best]);
      if (d < least || (d == least && i % 2 == 0)) best = i;
    }
    ASSERT_EQ(f32_to_e2m1(static_cast<float>(a)), best) << a;
  }
  EXPECT_EQ(f32_to_e2m1(std::numeric_limits<float>::infinity()), 7);
  EXPECT_EQ(f32_to_e2m1(-std::numeric_limits<float>::infinity()), 15);
  EXPECT_EQ(f32_to_e2m1(NAN), 0);
}

// G18
TEST(Fp4, Nvfp4BlockOfTheWorkedExample) {
  EXPECT_NEAR(static_range(Format::kNvfp4, 0, 12).scale, 0.0044642857, 1e-9);
  EXPECT_EQ(e4m3_to_f32(nvfp4_scale(3.0f, 12.0f / 2688)), 112.0f);
  Call call("nvfp4", 1, 1, 64);
  call.clip_hi = {12.0f};
  const float x[] = {3, -1.3f, 0.2f, 0.9f}, expected[] = {3, -1.5f, 0.25f, 1};
  for (std::size_t i = 0; i < 4; ++i) call.x[i] = x[i];
  const std::vector<float> out = call.run();
  for (std::size_t i = 0; i < 64; ++i) EXPECT_NEAR(out[i], i < 4 ? expected[i] : 0.0f, 1e-6) << i;
}

// G20
TEST(Fp4, Mxfp4BlockOfTheWorkedExample) {
  Call call("mxfp4", 1, 1, 64);
  const float x[] = {7.9f, -1.3f, 0.2f, 0.9f, 5}, expected[] = {6, -1.5f, 0, 1, 4};
  for (std::size_t i = 0; i < 5; ++i) call.x[i] = x[i];
  const std::vector<float> out = call.run();
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(out[i], i < 5 ? expected[i] : 0.0f) << i;
}

TEST(Fp4, ScalesOfExtremeBlocks) {
  EXPECT_EQ(mxfp4_scale(0.0f), 0);
  EXPECT_EQ(mxfp4_scale(1e-45f), 0);
  EXPECT_EQ(mxfp4_scale(std::numeric_limits<float>::max()), 252);  // 2^125; 0xFF is never reached
  EXPECT_EQ(nvfp4_scale(0.0f, 1.0f), 0);
  EXPECT_EQ(e4m3_to_f32(nvfp4_scale(1e-20f, 1.0f)), 0x1p-9f);  // a block that is not zero keeps a scale
  EXPECT_EQ(e4m3_to_f32(nvfp4_scale(1e30f, 1.0f)), 448.0f);
  Call call("nvfp4", 1, 1, 16);
  call.clip_hi = {1.0f};
  call.x.assign(16, 0.5f);
  call.x[3] = 2.0f, call.x[4] = -3.0f;
  FakeQuantCounters counters;
  call.run(&counters);
  EXPECT_EQ(counters.saturated, 2);  // values beyond the clip
}

}  // namespace
}  // namespace kvrt

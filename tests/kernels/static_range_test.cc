// Static ranges: thresholds of the unit, of a head, of a channel.

#include "kernels/codec/static_range.h"

#include <cmath>

#include "tests/kernels/fake_quant_fixture.h"

namespace kvrt {
namespace {

using testing::Call;
using testing::parse;

const char* const kForms[] = {"int8.tensor", "int4.head", "int3.tensor", "int2.head", "int8.channel.static", "int4.channel.static",
                              "int3.channel.static", "int2.channel.static", "sint8.tensor", "sint4.head"};

void set_all(Call* call, float lo, float hi) {
  for (std::size_t i = 0; i < call->clip_hi.size(); ++i) call->clip_lo[i] = lo, call->clip_hi[i] = hi;
}
int levels(const Call& call) { return is_sint(call.scheme.format) ? (1 << code_bits(call.scheme.format)) - 2 : (1 << code_bits(call.scheme.format)) - 1; }

TEST(StaticRange, StepsAndFloors) {
  EXPECT_EQ(static_range(Format::kInt8, -1, 1).scale, 2.0f / 255);
  EXPECT_EQ(static_range(Format::kInt4, -1, 2).scale, 3.0f / 15);
  EXPECT_EQ(static_range(Format::kInt3, 0, 7).scale, 1.0f);
  EXPECT_EQ(static_range(Format::kInt2, 1, 1).scale, 0x1p-14f);
  EXPECT_EQ(static_range(Format::kNuq4, -1, 3).scale, 2.0f);
  EXPECT_EQ(static_range(Format::kSint8, -2.54f, 1).scale, 2.54f / 127);
  EXPECT_EQ(static_range(Format::kSint4, -1, 7).scale, 1.0f);
  EXPECT_EQ(static_range(Format::kSint4, 0, 0).scale, 0x1p-14f);
}

// QZ-08: one number, two encodings of E4M3; this library's is the one with 448.
TEST(StaticRange, Fp8ScaleOfTheWorkedExample) {
  EXPECT_EQ(static_range(Format::kFp8E4m3, 0, 18.265625f).scale, 0.040771484375f);
  EXPECT_NEAR(fp8_static_scale(18.265625f, 240.0f), 0.0761068, 1e-6);
}

TEST(StaticRange, EveryLevelIsReachedAndComesBack) {
  for (const char* form : kForms) {
    Call call(form, 256, 1, 64);
    const int n = levels(call);
    set_all(&call, -static_cast<float>(n) / 16, static_cast<float>(n) / 16);  // step 1/8
    for (std::size_t i = 0; i < call.x.size(); ++i) call.x[i] = static_cast<float>(static_cast<int>(i * 7 % static_cast<std::size_t>(n + 1)) * 2 - n) / 16;
    if (is_sint(call.scheme.format)) set_all(&call, -static_cast<float>(n) / 16, 0);  // the larger magnitude counts
    FakeQuantCounters counters;
    EXPECT_EQ(call.run(&counters), call.x) << form;
    EXPECT_EQ(counters.saturated, 0) << form;
  }
}

TEST(StaticRange, ErrorIsAtMostHalfAStepInsideAndCountedOutside) {
  for (const char* form : kForms) {
    Call call(form, 64, 2, 64);
    set_all(&call, -3, 3);
    call.fill_normal(1);
    for (float& v : call.x) v = std::min(2.999f, std::max(-2.999f, v));
    FakeQuantCounters counters;
    std::vector<float> out = call.run(&counters);
    const double half = 3.0 / levels(call);
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_LE(std::abs(static_cast<double>(out[i]) - call.x[i]), half * (1 + 1e-4)) << form;
    EXPECT_EQ(counters.saturated, 0) << form;
    call.x[5] = 9, call.x[100] = -9;
    out = call.run(&counters);
    EXPECT_NEAR(out[5], 3, 1e-5) << form;
    EXPECT_NEAR(out[100], -3, 1e-5) << form;
    EXPECT_EQ(counters.saturated, 2) << form;
  }
}

// QZ-06, QZ-07: thresholds as a fit finds them on zeros and on constants.
TEST(StaticRange, ConstantsComeBackFromTheirOwnThresholds) {
  for (const char* form : kForms) {
    for (const float value : {0.0f, 100.0f, -100.0f, 1e-3f, 1e-40f}) {
      Call call(form, 64, 2, 64);
      set_all(&call, value, value);
      for (float& v : call.x) v = value;
      for (const float v : call.run()) {
        if (value == 0) ASSERT_EQ(v, 0.0f) << form;
        else ASSERT_NEAR(v, value, 0.005 * std::abs(value) + (std::abs(value) < 1e-30f || is_sint(call.scheme.format) ? 0x1p-15 : 0)) << form;
      }
    }
  }
}

TEST(StaticRange, ChannelsKeepTheirOwnRanges) {
  Call call("int4.channel.static", 64, 2, 64);
  for (std::size_t c = 0; c < 128; ++c) call.clip_lo[c] = -std::ldexp(1.0f, static_cast<int>(c % 20) - 10), call.clip_hi[c] = 2 * -call.clip_lo[c];
  call.fill_normal(4);
  for (std::size_t i = 0; i < call.x.size(); ++i) call.x[i] = std::min(call.clip_hi[i % 128], std::max(call.clip_lo[i % 128], call.x[i] * call.clip_hi[i % 128]));
  const std::vector<float> out = call.run();
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_LE(std::abs(out[i] - call.x[i]), std::max(0x1p-15f, 1.001f * (call.clip_hi[i % 128] - call.clip_lo[i % 128]) / 30));
  }
}

}  // namespace
}  // namespace kvrt

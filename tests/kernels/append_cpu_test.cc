// The cpu backend's append writes the bytes of the reference, whatever the path, the scheme and the sizes of the calls.

#include <cmath>
#include <cstdlib>
#include <limits>

#include "kernels/codec/half.h"
#include "kernels/write/write_path.h"
#include "tests/kernels/cache_fixture.h"
#include "tests/kernels/schemes.h"

namespace kvrt::testing {
namespace {

/// Rows that reach every branch of the encoders: ordinary, one-sided, tiny, huge, constant, zeros of one and of both signs, ties,
/// values that are not finite.
std::vector<float> mixed_rows(std::uint64_t seed, std::int64_t tokens, std::int64_t row, bool finite) {
  calib::Rng rng(seed);
  std::vector<float> x(static_cast<std::size_t>(tokens * row));
  for (std::size_t i = 0; i < x.size(); ++i) {
    float v = static_cast<float>(rng.normal());
    switch (static_cast<std::int64_t>(i) / row % 15) {
      case 2: v = 600 + 0.01f * v; break;
      case 3: v *= 1e-6f; break;
      case 4: v *= 1e-40f; break;
      case 5: v = 3.25f; break;
      case 6: v = 0; break;
      case 7: v = -0.0f; break;
      case 8: v = std::round(v * 4) / 4; break;
      case 9: v *= 3e4f; break;
      case 10: if (!finite && rng.below(9) == 0) v = rng.below(2) ? std::numeric_limits<float>::infinity() : NAN; break;
      case 11: if (!finite) v *= 3e38f; break;
      case 12: v *= 5e-5f; break;
      case 13: v = v > 1 ? v : std::copysign(0.0f, v); break;
      case 14: v = std::copysign(0.0f, v); break;
      default: break;
    }
    x[i] = v;
  }
  return x;
}

struct Appended {
  std::vector<std::uint8_t> bytes[2][KVRT_SIDES];
  kvrt_health health[KVRT_SIDES];
};

/// Appends the rows in calls of the given sizes.
Appended append_in(CacheShape shape, kvrt_backend backend, const std::vector<std::int64_t>& calls, const std::vector<float>& k, const std::vector<float>& v) {
  shape.backend = backend;
  Cache cache(shape);
  EXPECT_TRUE(cache.status().ok()) << cache.status().text();
  std::int64_t t = 0;
  for (const std::int64_t n : calls) {
    const Status status = cache.append(n, k.data() + t * cache.row(), v.data() + t * cache.row());
    EXPECT_TRUE(status.ok()) << status.text();
    t += n;
  }
  Appended out;
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    for (const bool exact : {true, false}) out.bytes[exact][side] = cache.bytes(exact, side);
    out.health[side] = cache.health(side);
  }
  return out;
}

void expect_same(const Appended& a, const Appended& b, const std::string& what) {
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    for (const bool exact : {true, false}) {
      const auto &x = a.bytes[exact][side], &y = b.bytes[exact][side];
      ASSERT_EQ(x.size(), y.size());
      for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i], y[i]) << what << (exact ? " exact" : " base") << (side == KVRT_K ? " K" : " V") << " byte " << i;
    }
    const kvrt_health &h = a.health[side], &r = b.health[side];
    ASSERT_EQ(h.tokens, r.tokens) << what;
    ASSERT_EQ(h.non_finite, r.non_finite) << what;
    ASSERT_EQ(h.saturated, r.saturated) << what;
    ASSERT_EQ(h.floored, r.floored) << what;
  }
}

/// On every path of this CPU, against the reference fed one by one.
void equals_reference(const CacheShape& shape, const std::vector<std::int64_t>& calls, bool finite = false) {
  const std::string what = shape.k + " / " + shape.v + " D " + std::to_string(shape.width) + " S " + std::to_string(shape.sinks) + " W " +
                           std::to_string(shape.window) + " " + shape.chan_perm;
  const std::int64_t n = std::accumulate(calls.begin(), calls.end(), std::int64_t{0}), row = std::int64_t{shape.heads} * shape.width;
  const std::vector<float> k = mixed_rows(61, n, row, finite), v = mixed_rows(62, n, row, finite);
  const Appended reference = append_in(shape, KVRT_BACKEND_REF, std::vector<std::int64_t>(static_cast<std::size_t>(n), 1), k, v);
  for (const WritePath& path : write_paths()) {
    setenv("KVRT_FORCE_ISA", path.name, 1);
    expect_same(append_in(shape, KVRT_BACKEND_CPU, calls, k, v), reference, what + " " + path.name);
    unsetenv("KVRT_FORCE_ISA");
    if (::testing::Test::HasFatalFailure()) return;
  }
}

class AppendCpu : public ::testing::TestWithParam<const char*> {};

TEST_P(AppendCpu, BytesOfTheReference) {
  for (const int width : {64, 80, 96, 128}) {
    CacheShape shape;
    shape.k = GetParam(), shape.width = width;
    if (!fits(GetParam(), width)) continue;
    equals_reference(shape, {1, 2, 150, 1, 1, 70, 33});
    if (HasFatalFailure()) return;
  }
  for (const std::int64_t window : {0, 1, 5, 128}) {
    for (const std::int64_t sinks : {0, 20}) {
      CacheShape shape;
      shape.k = GetParam(), shape.window = window, shape.sinks = sinks, shape.heads = 1;
      equals_reference(shape, {300});
      equals_reference(shape, {17, 140, 1, 142});
      if (HasFatalFailure()) return;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Schemes, AppendCpu, ::testing::ValuesIn(kKeySchemes), [](const auto& info) { return test_name(info.param); });

TEST(AppendCpu, ValuesAndPagesOfEverySize) {
  for (const char* v : {"int4.token.g32", "int3.token.g64.had", "int2.channel.g32", "lm3.token.g.had", "nuq4.token.g", "fp8e4m3.head", "q8_0", "q4_0", "q4_1",
                        "q5_0", "q5_1", "iq4_nl", "bf16"}) {
    for (const int page_tokens : {32, 64, 128}) {
      CacheShape shape;
      shape.v = v, shape.k = "int4.channel.g64", shape.page_tokens = page_tokens;
      equals_reference(shape, {200, 77});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(AppendCpu, StoredOrderOfChannels) {
  for (const int width : {64, 96, 128}) {
    for (const char* k : {"int8.token.g.pre", "int4.token.g32.pre", "int4.channel.g64.pre", "int3.channel.g32.pre", "int2.channel.g64.pre", "bf16.pre", "fp16.pre",
                          "lm3.token.g.pre", "fp8e4m3.token.g.pre", "int4.channel.static.pre"}) {
      CacheShape shape;
      shape.k = k, shape.width = width, shape.chan_perm = "spread" + std::to_string(width / 2);
      equals_reference(shape, {150, 60});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(AppendCpu, RotatedKeysOfEveryStyle) {
  for (const kvrt_rope_style rope : {KVRT_ROPE_HALF_SPLIT, KVRT_ROPE_INTERLEAVED, KVRT_ROPE_NONE}) {
    for (const int rotary : {48, 64}) {
      CacheShape shape;
      shape.k = "int4.token.g32", shape.rope = rope, shape.rotary_dim = rotary, shape.attention_factor = 1.25;
      equals_reference(shape, {90, 1, 61});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(AppendCpu, WidthsThatVectorsDoNotDivide) {
  for (const int width : {8, 72, 100}) {
    CacheShape shape;
    shape.k = shape.v = "int4.token.g", shape.width = width;
    equals_reference(shape, {60, 1, 60});
    if (HasFatalFailure()) return;
  }
}

/// 16-bit rows with strides, all exponents included, against the same values in fp32.
TEST(AppendCpu, RowsOf16Bits) {
  for (const kvrt_dtype dtype : {KVRT_F16, KVRT_BF16}) {
    CacheShape shape;
    shape.k = "int8.token.g", shape.v = "fp16";
    const std::int64_t n = 300, row = std::int64_t{shape.heads} * shape.width;
    std::vector<std::uint16_t> half(static_cast<std::size_t>(n * 2 * row), 0xFFFF);  // every second row is NaN
    std::vector<float> x(static_cast<std::size_t>(n * row));
    calib::Rng rng(63);
    for (std::int64_t i = 0; i < n * row; ++i) {
      const auto bits = static_cast<std::uint16_t>(rng.below(65536));
      half[static_cast<std::size_t>(i / row * 2 * row + i % row)] = bits;
      x[static_cast<std::size_t>(i)] = dtype == KVRT_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }
    const Appended expected = append_in(shape, KVRT_BACKEND_REF, {n}, x, x);
    for (const WritePath& path : write_paths()) {
      setenv("KVRT_FORCE_ISA", path.name, 1);
      Cache cache(shape);
      unsetenv("KVRT_FORCE_ISA");
      kvrt_qkv qkv = {};
      qkv.k = qkv.v = {half.data(), dtype, 2 * row * 2, 0}, qkv.k_frame = KVRT_PRE_ROPE;
      const kvrt_workspace w = cache.workspace();
      kvrt_error err;
      ASSERT_EQ(kvrt_append(cache.context(), Cache::kLayer, &cache.batch({n}), &qkv, &cache.pools(), &w, nullptr, &err), KVRT_OK) << err.text;
      Appended out;
      for (const kvrt_side side : {KVRT_K, KVRT_V}) {
        for (const bool exact : {true, false}) out.bytes[exact][side] = cache.bytes(exact, side);
        out.health[side] = cache.health(side);
      }
      expect_same(out, expected, path.name);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace kvrt::testing

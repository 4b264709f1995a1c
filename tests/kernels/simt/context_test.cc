// Contexts on CUDA (here: the executor) against those of the reference: equal bytes of all pages.

#include "tests/kernels/cache_fixture.h"
#include "tests/kernels/simt/executor.h"

namespace kvrt::testing {
namespace {

const char* const kKeySchemes[] = {
    "bf16", "fp16", "bf16.pre", "fp8e4m3.tensor", "fp8e4m3.head", "fp8e4m3.token.g", "fp8e5m2.token.g16", "int8.token.g", "int4.token.g16", "int3.token.g16",
    "int2.token.g16", "int8.channel.g32", "int4.channel.g64", "int3.channel.g64", "int2.channel.g32", "int4.channel.g64.pre", "int3.channel.g32.pre",
    "int2.channel.g64.pre", "int4.channel.g128.pre", "int8.tensor", "int4.head", "int8.channel.static.pre", "int4.channel.static", "sint8.token.g", "sint4.token.g16",
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "nuq4.token.g", "nuq3.channel.static.pre", "nuq2.token.g", "lm4.token.g.had", "lm3.token.g",
    "lm2.token.g.had", "nvfp4", "mxfp4", "int4.token.g16.center.had", "int4.token.g16.pre.center", "int4.token.g.smooth", "int4.token.g.pre.center.smooth",
    "int4.token.g16.ef", "int3.channel.g64.pre.ef", "int8.token.g.had", "int4.channel.g32.had"};
const char* const kValueSchemes[] = {"int4.token.g", "int4.channel.g32"};

bool fits(const char* scheme, int width) {
  Scheme s;
  std::string error;
  return parse_scheme(scheme, &s, &error) && check_shape(s, width, true).empty();
}

void expect_equal_pages(Cache* a, Cache* b, const std::string& what) {
  for (const bool exact : {true, false}) {
    for (const kvrt_side side : {KVRT_K, KVRT_V}) {
      EXPECT_TRUE(a->bytes(exact, side) == b->bytes(exact, side)) << what << (exact ? " exact " : " base ") << (side == KVRT_K ? "K" : "V");
    }
  }
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    const kvrt_health x = a->health(side), y = b->health(side);
    EXPECT_EQ(x.tokens, y.tokens) << what;
    EXPECT_EQ(x.non_finite, y.non_finite) << what;
    EXPECT_EQ(x.saturated, y.saturated) << what;
    EXPECT_EQ(x.floored, y.floored) << what;
  }
}

/// Appends the same rows in the given steps to both backends.
void append_on_both(CacheShape shape, const std::vector<std::int64_t>& steps) {
  const std::string what = shape.k + " / " + shape.v + " D " + std::to_string(shape.width) + " W " + std::to_string(shape.window) + " " + shape.chan_perm;
  shape.storage_only = true;
  shape.backend = KVRT_BACKEND_REF;
  Cache reference(shape);
  shape.backend = KVRT_BACKEND_CUDA;
  Cache device(shape);
  ASSERT_TRUE(reference.status().ok() && device.status().ok()) << what << ": " << device.status().text();
  std::int64_t n = 0;
  for (const std::int64_t step : steps) n += step;
  std::vector<float> k = normal_rows(1, n * device.row()), v = normal_rows(2, n * device.row(), 2, 0.3);
  k[7] = NAN, v[5] = INFINITY;
  std::int64_t at = 0;
  for (const std::int64_t step : steps) {
    for (Cache* c : {&reference, &device}) {
      const Status status = c->append(step, k.data() + at * device.row(), v.data() + at * device.row());
      ASSERT_TRUE(status.ok()) << what << ": " << status.text();
    }
    at += step;
  }
  expect_equal_pages(&reference, &device, what);
}

class AppendBytes : public ::testing::TestWithParam<int> {};

TEST_P(AppendBytes, EverySchemeInBulk) {
  for (const char* scheme : kKeySchemes) {
    if (!fits(scheme, GetParam())) continue;
    for (const std::int64_t window : {32, 0}) {
      CacheShape shape;
      shape.k = scheme, shape.width = GetParam(), shape.window = window, shape.v = kValueSchemes[window == 0 ? 0 : 1];
      append_on_both(shape, {151});
    }
  }
}

TEST_P(AppendBytes, StoredOrders) {
  for (const char* scheme : {"int3.channel.g64.pre", "int4.token.g.pre", "bf16.pre", "lm3.token.g.pre"}) {
    CacheShape shape;
    shape.k = scheme, shape.width = GetParam(), shape.chan_perm = "spread" + std::to_string(GetParam() / 2);
    append_on_both(shape, {151});
  }
  CacheShape adjacent;
  adjacent.k = "q4_0", adjacent.width = 96, adjacent.block_order = "adjacent";
  append_on_both(adjacent, {80});
}

INSTANTIATE_TEST_SUITE_P(Widths, AppendBytes, ::testing::Values(64, 80, 96, 128), [](const auto& info) { return "D" + std::to_string(info.param); });

TEST(AppendSteps, EveryLengthAndSplit) {
  for (const char* scheme : {"int4.token.g", "int4.channel.g32.pre"}) {
    for (const std::int64_t window : {32, 2, 0}) {
      for (const std::vector<std::int64_t>& steps : std::vector<std::vector<std::int64_t>>{
               {1}, {2, 1}, {3, 1, 1, 1}, {15}, {16, 1}, {35, 1, 1}, {63}, {64, 1}, {65}, {100, 1, 1, 57}, {127, 1, 1}, {30, 90, 1, 60}, {1, 200}}) {
        CacheShape shape;
        shape.k = scheme, shape.window = window, shape.heads = 1;
        append_on_both(shape, steps);
      }
    }
  }
}

}  // namespace
}  // namespace kvrt::testing

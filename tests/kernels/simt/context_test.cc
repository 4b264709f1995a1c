// Contexts on CUDA (here: the executor) against those of the reference: equal bytes of all pages.

#include <cstdlib>

#include "gmock/gmock.h"
#include "tests/kernels/cache_fixture.h"
#include "tests/kernels/schemes.h"
#include "tests/kernels/simt/executor.h"

namespace kvrt::testing {
namespace {

const char* const kValueSchemes[] = {"int4.token.g", "int4.channel.g32"};

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
    for (const std::int64_t window : {8, 0}) {
      CacheShape shape;
      shape.k = scheme, shape.width = GetParam(), shape.window = window, shape.v = kValueSchemes[window == 0 ? 0 : 1];
      shape.heads = GetParam() == 64 ? 2 : 1;
      append_on_both(shape, {window == 0 ? 71 : 141});
    }
  }
}

TEST_P(AppendBytes, StoredOrders) {
  for (const char* scheme : {"int3.channel.g64.pre", "int4.token.g.pre", "bf16.pre", "lm3.token.g.pre"}) {
    CacheShape shape;
    shape.k = scheme, shape.width = GetParam(), shape.chan_perm = "spread" + std::to_string(GetParam() / 2);
    append_on_both(shape, {111});
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

using ::testing::HasSubstr;

/// One append and one decode of the last of n tokens.
struct Steps {
  explicit Steps(const CacheShape& shape, std::int64_t n) : cache(shape), k(normal_rows(3, n * cache.row())), q(normal_rows(4, cache.q_row())), out(q.size(), NAN) {
    EXPECT_TRUE(cache.status().ok()) << cache.status().text();
  }
  Status append(std::int64_t n) { return cache.append(n, k.data(), k.data()); }
  Status decode() { return cache.decode(cache.attn(q.data(), out.data())); }
  Cache cache;
  std::vector<float> k, q, out;
};

TEST(DriverErrors, AreKeptWithTheirCodeAndEndTheContext) {
  Steps steps(CacheShape(), 50);
  ASSERT_TRUE(steps.append(20).ok());
  {
    simt::Settings failing;
    failing.failing_launch = 1;  // the upload of the control arrays goes through
    const simt::Executor executor(failing);
    const Status status = steps.append(1);
    EXPECT_EQ(status.code(), Code::kCuda);
    EXPECT_THAT(status.text(), HasSubstr("(719)"));
  }
  for (const Status& status : {steps.append(1), steps.decode()}) {
    EXPECT_EQ(status.code(), Code::kCuda);
    EXPECT_THAT(status.text(), HasSubstr("(719); the context is lost"));
  }
  kvrt_verify_report report;
  EXPECT_EQ(steps.cache.verify(&report).code(), Code::kCuda);
  kvrt_error err;
  kvrt_health health;
  EXPECT_EQ(kvrt_monitor_read(steps.cache.context(), Cache::kLayer, KVRT_K, &health, &err), KVRT_E_CUDA);
  Steps fresh(CacheShape(), 20);
  EXPECT_TRUE(fresh.append(20).ok());
}

TEST(Devices, PoolsAreAlignedForVectors) {
  Steps steps(CacheShape(), 20);
  kvrt_pools pools = steps.cache.pools();
  pools.base[KVRT_V].base = static_cast<std::uint8_t*>(pools.base[KVRT_V].base) + 8;
  kvrt_qkv qkv = {};
  qkv.k.data = qkv.v.data = steps.k.data(), qkv.k_frame = KVRT_PRE_ROPE;
  const kvrt_workspace workspace = steps.cache.workspace();
  kvrt_error err;
  EXPECT_EQ(kvrt_append(steps.cache.context(), Cache::kLayer, &steps.cache.batch({20}), &qkv, &pools, &workspace, nullptr, &err), KVRT_E_ARGUMENT);
  EXPECT_THAT(std::string(err.text), HasSubstr("layer 5 V int4.token.g: base and page_stride of the base pool must be multiples of 16"));
}

TEST(Devices, OneWithoutCodeIsNamedWithTheBuiltTargets) {  // bug class 20
  simt::Settings settings;
  settings.has_code = false;
  const simt::Executor executor(settings);
  const Cache cache{CacheShape()};
  EXPECT_EQ(cache.status().code(), Code::kMismatch);
  EXPECT_THAT(cache.status().text(), HasSubstr("device 0 is executor (0.0); this build of kvrt has code for"));
}

TEST(Devices, AnIndexThatIsNotThere) {
  const Cache cache{CacheShape()};
  kvrt_limits limits = {};
  limits.max_batch = 1, limits.max_length = 64;
  const kvrt_device device = {KVRT_BACKEND_CUDA, 3};
  kvrt_context* context = nullptr;
  kvrt_error err;
  EXPECT_EQ(kvrt_context_create(cache.plan(), &device, &limits, &context, &err), KVRT_E_ARGUMENT);
  EXPECT_THAT(std::string(err.text), HasSubstr("device index 3"));
}

TEST(Devices, TheForcedBackendIsTaken) {  // bug class 7
  ::setenv("KVRT_FORCE_BACKEND", "cuda", 1);
  CacheShape shape;
  shape.backend = KVRT_BACKEND_REF;
  const Cache cache(shape);
  ::unsetenv("KVRT_FORCE_BACKEND");
  ASSERT_TRUE(cache.status().ok()) << cache.status().text();
  EXPECT_THAT(std::string(kvrt_describe(cache.context(), Cache::kLayer)), HasSubstr("layer 5: cuda, K int4.token.g, V int4.token.g, decode fused"));
}

// Without several launches a kernel: control arrays, append, and flush where exit blocks leave; control arrays, queries, decode, merge.
TEST(Launches, AreFew) {  // bug class 17
  for (const char* k : {"int4.token.g", "int4.channel.g32"}) {
    CacheShape shape;
    shape.k = k;
    Steps steps(shape, 200);
    const simt::Executor executor{simt::Settings{}};
    std::int64_t before = 0;
    const auto launches = [&] {
      const std::int64_t n = executor.counts().launches - before;
      before = executor.counts().launches;
      return n;
    };
    ASSERT_TRUE(steps.append(67).ok());
    launches();
    for (int i = 0; i < 40; ++i) {
      ASSERT_TRUE(steps.append(1).ok());
      const bool flushes = std::string(k) == "int4.channel.g32" && (steps.cache.length() - 4 - 32) % 32 == 0;
      EXPECT_EQ(launches(), flushes ? 3 : 2) << k << " length " << steps.cache.length();
    }
    if (std::string(k) != "int4.token.g") continue;
    ASSERT_TRUE(steps.decode().ok());
    EXPECT_EQ(launches(), 4);
  }
}

}  // namespace
}  // namespace kvrt::testing

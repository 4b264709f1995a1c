// append and decode allocate nothing: every way to operator new and malloc's family that C++ code takes is counted.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "tests/kernels/cache_fixture.h"

namespace {
std::atomic<std::int64_t> n_allocations{0};
std::atomic<std::int64_t> n_granted{INT64_MAX};  // allocations before the first that fails
void* counted(std::size_t n) {
  n_allocations.fetch_add(1, std::memory_order_relaxed);
  if (n_granted.fetch_sub(1, std::memory_order_relaxed) <= 0) throw std::bad_alloc();
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(std::size_t n) { return counted(n); }
void* operator new[](std::size_t n) { return counted(n); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }

namespace kvrt::testing {
namespace {

TEST(NoAllocation, AppendAndDecode) {
  for (const char* k : {"int4.token.g32", "int4.channel.g32.pre", "lm3.token.g.had", "int3.token.g.ef", "int4.token.g.center.had"}) {
    CacheShape shape;
    shape.k = k;
    Cache cache(shape);
    ASSERT_TRUE(cache.status().ok()) << cache.status().text();
    const std::vector<float> x = normal_rows(51, 200 * cache.row()), q = normal_rows(52, cache.q_row());
    std::vector<float> out(q.size());
    kvrt_qkv qkv = {};
    qkv.k_frame = KVRT_PRE_ROPE;
    const kvrt_attn attn = cache.attn(q.data(), out.data());
    const kvrt_workspace w = cache.workspace();
    kvrt_error err;
    for (std::int64_t t = 0; t < 200; ++t) {
      qkv.k.data = qkv.v.data = x.data() + t * cache.row();
      cache.set_lengths({t});
      const kvrt_batch& batch = cache.batch({1});
      const std::int64_t before = n_allocations.load();
      const kvrt_status appended = kvrt_append(cache.context(), Cache::kLayer, &batch, &qkv, &cache.pools(), &w, nullptr, &err);
      const kvrt_status decoded = kvrt_decode(cache.context(), Cache::kLayer, &batch, &attn, &cache.pools(), &w, nullptr, &err);
      ASSERT_EQ(n_allocations.load(), before) << k << " token " << t;
      ASSERT_EQ(appended, KVRT_OK) << err.text;
      ASSERT_EQ(decoded, KVRT_OK) << err.text;
    }
  }
  EXPECT_GT(n_allocations.load(), 0);
}

/// call() -> kvrt_status with the first, second, ... allocation failing, until it needs no more. Returns how many failed.
template <class Call>
int fail_each_allocation(Call call) {
  for (int n = 0;; ++n) {
    kvrt_error err = {KVRT_OK, ""};
    n_granted = n;
    const kvrt_status status = call(&err);
    n_granted = INT64_MAX;
    if (status == KVRT_OK) return n;
    EXPECT_EQ(status, KVRT_E_INTERNAL) << "allocation " << n << ": " << err.text;
    EXPECT_STREQ(err.text, "out of memory");
    if (status != KVRT_E_INTERNAL) return -1;
  }
}

TEST(NoMemory, EveryFailedAllocationIsInternal) {
  CacheShape shape;
  shape.k = "int4.token.g32.center.had", shape.v = "int3.token.g.ef";
  const Cache cache(shape);
  kvrt_layer_view layer = cache.layer_view();
  kvrt_plan_view view = {};
  view.n_layers = 1, view.layers = &layer, view.page_tokens = 64;
  EXPECT_GT(fail_each_allocation([&](kvrt_error* err) {
    kvrt_plan* plan = nullptr;
    const kvrt_status status = kvrt_plan_adopt(&view, &plan, err);
    EXPECT_EQ(plan != nullptr, status == KVRT_OK);
    kvrt_plan_release(plan);
    return status;
  }), 5);
  kvrt_limits limits = {};
  limits.max_batch = 2, limits.max_length = 512;
  EXPECT_GT(fail_each_allocation([&](kvrt_error* err) {
    kvrt_context* context = nullptr;
    const kvrt_status status = kvrt_context_create(cache.plan(), nullptr, &limits, &context, err);
    EXPECT_EQ(context != nullptr, status == KVRT_OK);
    kvrt_context_destroy(context);
    return status;
  }), 10);
}

}  // namespace
}  // namespace kvrt::testing

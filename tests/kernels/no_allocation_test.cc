// append and decode allocate nothing: every way to operator new and malloc's family that C++ code takes is counted.

#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/kernels/cache_fixture.h"

namespace {
std::atomic<std::int64_t> n_allocations{0};
void* counted(std::size_t n) {
  n_allocations.fetch_add(1, std::memory_order_relaxed);
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

}  // namespace
}  // namespace kvrt::testing

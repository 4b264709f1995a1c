// append, gather, decode and fake_quant through a context with one std::thread per CUDA thread, for ThreadSanitizer or AddressSanitizer
// and UBSan.

#include "gtest/gtest.h"
#include "tests/kernels/cache_fixture.h"
#include "tests/kernels/simt/executor.h"

namespace kvrt::testing {
namespace {

TEST(SanitizedContext, WritesTheReferencesBytes) {
  const simt::Executor executor(simt::Settings{simt::Mode::kThreads});
  for (const char* k : {"int4.channel.g32", "int3.token.g16.had", "lm4.token.g.ef", "q4_1", "int4.token.g.out1"}) {
    CacheShape shape;
    shape.k = k, shape.v = "int4.token.g", shape.heads = 1, shape.group = 1, shape.sinks = 1, shape.window = 2, shape.storage_only = true;
    shape.backend = KVRT_BACKEND_REF;
    Cache reference(shape);
    shape.backend = KVRT_BACKEND_CUDA;
    Cache device(shape);
    ASSERT_TRUE(device.status().ok()) << device.status().text();
    const std::vector<float> x = normal_rows(1, 36 * device.row());
    for (Cache* c : {&reference, &device}) {
      ASSERT_TRUE(c->append(35, x.data(), x.data()).ok()) << k;
      ASSERT_TRUE(c->append(1, x.data(), x.data()).ok()) << k;
    }
    for (const bool exact : {true, false}) {
      for (const kvrt_side side : {KVRT_K, KVRT_V}) EXPECT_TRUE(reference.bytes(exact, side) == device.bytes(exact, side)) << k;
    }
    EXPECT_EQ(reference.gather(KVRT_K, KVRT_AS_STORED), device.gather(KVRT_K, KVRT_AS_STORED)) << k;
    std::vector<float> a(x.size()), b(x.size());
    for (auto [c, out] : {std::pair(&reference, &a), std::pair(&device, &b)}) {
      ASSERT_EQ(kvrt_fake_quant(c->context(), Cache::kLayer, KVRT_K, 32, x.data(), out->data(), nullptr), KVRT_OK) << k;
    }
    EXPECT_EQ(a, b) << k;
  }
}

}  // namespace
}  // namespace kvrt::testing

// One std::thread per CUDA thread, for ThreadSanitizer or AddressSanitizer and UBSan.

#include "gtest/gtest.h"
#include "kernels/cuda/portable.h"
#include "tests/kernels/simt/decode_case.h"

namespace kvrt::simt {
namespace {

constexpr Settings kThreaded{Mode::kThreads};

void expect_clean_decode() {
  for (const char* scheme :
       {"int4.token.g", "int4.token.g32", "bf16", "fp8e4m3.token.g16", "int3.channel.g32", "int2.token.g", "nuq4.channel.static", "lm3.token.g"}) {
    DecodeSpec spec;
    spec.n_kv_heads = 1, spec.head_dim = 64, spec.n_query_heads = 3;
    spec.sequences = {{{scheme, scheme, 97}, {"bf16", "bf16", 7, 16}}};
    const DecodeCase decode(spec);
    const DecodeOutput output = decode.run(kThreaded);
    decode.expect_close(output, scheme);
    EXPECT_EQ(output.out, decode.run({}).out) << "threads and fibers disagree";
  }
}

#if !defined(__SANITIZE_THREAD__)
TEST(AddressSanitizer, DecodeIsClean) { expect_clean_decode(); }
#else
TEST(ThreadSanitizer, DecodeIsClean) { expect_clean_decode(); }

// Barriers of the kernel in order: 0 and 1 before the loop, 2 after the maxima, 3 to 6 around each warp's turn to add its outputs.
TEST(ThreadSanitizerDeathTest, ADroppedBarrierIsARace) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  DecodeSpec spec;
  spec.n_kv_heads = 1, spec.head_dim = 64, spec.n_query_heads = 3;
  spec.sequences = {{{"int4.token.g", "int4.token.g", 97}}};
  const DecodeCase decode(spec);
  Settings settings = kThreaded;
  settings.dropped_barrier = 3;
  EXPECT_DEATH({ decode.run(settings); exit(0); }, "data race");
}
#endif

}  // namespace
}  // namespace kvrt::simt

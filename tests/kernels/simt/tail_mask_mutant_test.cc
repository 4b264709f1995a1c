// Compiled with kernels that take every slot for a live one (see CMakeLists.txt).

#include <cmath>

#include "gtest/gtest.h"
#include "tests/kernels/simt/decode_case.h"

namespace kvrt::simt {
namespace {

TEST(TailMaskMutant, IsSeenByEveryFamily) {
  for (const char* scheme : {"int4.token.g", "int4.token.g32", "int8.token.g", "bf16", "fp16", "fp8e4m3.head", "fp8e4m3.token.g", "int3.token.g",
                             "int2.token.g", "nuq4.token.g", "lm3.token.g", "int4.channel.static"}) {
    DecodeSpec spec;
    spec.n_kv_heads = 1, spec.head_dim = 64;
    spec.sequences = {{{scheme, scheme, 65}}};
    const DecodeCase decode(spec);
    EXPECT_GT(decode.worst_ratio(decode.run({})), 1.0) << scheme;
  }
}

TEST(TailMaskMutant, FullPagesAreStillRight) {
  DecodeSpec spec;
  spec.n_kv_heads = 1, spec.head_dim = 64;
  spec.sequences = {{{"int4.token.g", "int4.token.g", 128}}};
  const DecodeCase decode(spec);
  decode.expect_close(decode.run({}), "no tail to mask");
}

}  // namespace
}  // namespace kvrt::simt

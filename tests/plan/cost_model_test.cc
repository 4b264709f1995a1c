#include "libcalib/plan/cost_model.h"

#include <gtest/gtest.h>

#include "libcalib/quant/scheme.h"
#include "synthetic_sens.h"

namespace calib::plan {
namespace {

LayerGeometry layer(int head_dim, int kv_heads = 1, std::int64_t sliding = 0) {
  LayerGeometry g;
  g.n_q_heads = g.n_kv_heads = kv_heads;
  g.head_dim = g.rotary_dim = head_dim;
  g.sliding_window = sliding;
  return g;
}

Accounting at(std::int64_t context, std::int64_t sinks = 4) {
  Accounting a;
  a.context_tokens = context;
  a.sink_tokens = sinks;
  return a;
}

double lower_bits(const char* scheme, std::int64_t context) {
  const kvrt::Scheme s = quant::parse_scheme(scheme);
  const kvrt::LayerLayout layout = make_layout(layer(128), s, s, 128, at(context));
  return 8 * unpadded_bytes(layout, context) / (2.0 * 128 * static_cast<double>(context));
}

// METHODS.md G41.
TEST(CostModel, LowerBoundGoldens) {
  EXPECT_NEAR(lower_bits("int4.token.g", 8192), 4.439331, 1e-6);
  EXPECT_NEAR(lower_bits("int4.token.g64", 8192), 4.685303, 1e-6);
  EXPECT_NEAR(lower_bits("lm4.token.g", 8192), 4.316345, 1e-6);
  EXPECT_NEAR(lower_bits("int2.channel.g32", 8192), 3.253906, 1e-6);
  EXPECT_NEAR(lower_bits("int4.token.g", 1024), 5.764648, 1e-6);
}

TEST(CostModel, LowerBoundWithSalientTier) {
  const kvrt::Scheme base = quant::parse_scheme("int4.token.g");
  kvrt::LayerLayout layout = make_layout(layer(128), base, base, 2, at(8192));
  layout.salient = quant::parse_scheme("fp8e4m3.token.g");
  layout.tiers = kvrt::finish_tiers(base, base, 4, 2, 0.2);
  EXPECT_EQ(layout.tiers.exit_block(), 80);
  EXPECT_NEAR(8 * unpadded_bytes(layout, 8192) / (2.0 * 128 * 8192), 5.067871, 1e-6);
}

// CASES.md PL-03: bytes per token and head of one side, before padding.
TEST(CostModel, SideDataIsCounted) {
  const auto per_token = [](const char* scheme) {
    const kvrt::Scheme s = quant::parse_scheme(scheme);
    const kvrt::BlockLayout b = kvrt::block_layout(make_layout(layer(128), s, s, 0, at(64, 0)), kvrt::CacheSide::kV);
    return static_cast<double>(b.codes + b.params) / b.page_tokens;
  };
  EXPECT_EQ(per_token("fp8e4m3.token.g"), 130);
  EXPECT_EQ(per_token("int4.token.g128"), 68);
  EXPECT_EQ(per_token("fp8e4m3.head"), 128);
  // 65 tokens take two pages of 64.
  const kvrt::Scheme s = quant::parse_scheme("int4.token.g128");
  const std::int64_t one = layer_bytes(layer(128), s, s, 0, at(64, 0)), two = layer_bytes(layer(128), s, s, 0, at(65, 0));
  EXPECT_EQ(two, 2 * one);
  EXPECT_EQ(one, 2 * 4352);
}

// CASES.md PL-05.
TEST(CostModel, MemoryFormulas) {
  // stories260K: 5 layers, 4 KV heads of 8 channels, 16 bits: 640 elements' bytes per token.
  std::vector<LayerGeometry> s260k(5, layer(8, 4));
  for (LayerGeometry& g : s260k) g.n_q_heads = 8;
  EXPECT_EQ(2 * cache_elements(s260k, at(1)), 640);
  // A sliding layer stops growing at its window.
  const kvrt::Scheme s = quant::parse_scheme("int8.token.g");
  const LayerGeometry sliding = layer(64, 2, 512);
  EXPECT_EQ(layer_bytes(sliding, s, s, 0, at(512)), layer_bytes(sliding, s, s, 0, at(4096)));
  EXPECT_EQ(cache_elements({sliding, layer(64, 2)}, at(4096)), 2 * 64 * 2 * (512 + 4096));
  // m-gemma3: layers sliding, full, sliding, full; window 8; 2 KV heads of 16 channels. 16 bits and nothing else at 4,096 tokens.
  const std::vector<LayerGeometry> gemma = {layer(16, 2, 8), layer(16, 2), layer(16, 2, 8), layer(16, 2)};
  EXPECT_EQ(cache_elements(gemma, at(4096)), 2 * 2 * 16 * (2 * 8 + 2 * 4096));
  const kvrt::Scheme bf16 = quant::parse_scheme("bf16");
  for (const std::int64_t context : {64, 4096, 8192}) {
    EXPECT_EQ(layer_bytes(gemma[0], bf16, bf16, 0, at(context, 0)), 2 * 64 * 2 * 16 * 2 + 128)
        << "one page of 64 holds the 8 tokens; K pages of a sliding layer carry positions";
    EXPECT_EQ(layer_bytes(gemma[1], bf16, bf16, 0, at(context, 0)), 2 * context * 2 * 16 * 2);
  }
  // Batch multiplies.
  Accounting eight = at(1000);
  eight.batch = 8;
  EXPECT_EQ(layer_bytes(layer(64), s, s, 128, eight), 8 * layer_bytes(layer(64), s, s, 128, at(1000)));
}

TEST(CostModel, NeverBelowTheUnpaddedBytes) {
  for (const char* k : {"bf16", "int8.token.g", "int4.token.g32", "int3.token.g64", "int4.channel.g64.pre", "int2.channel.g32", "q4_0"})
    for (const char* v : {"bf16", "int4.token.g64", "int2.token.g32"})
      for (const std::int64_t window : {0, 32, 128})
        for (const std::int64_t context : {1, 4, 5, 100, 133, 200, 1000, 8192})
          for (const std::int64_t sliding : {0, 64}) {
            const LayerGeometry g = layer(64, 2, sliding);
            const kvrt::LayerLayout layout = make_layout(g, quant::parse_scheme(k), quant::parse_scheme(v), window, at(context));
            EXPECT_GE(static_cast<double>(layer_bytes(g, layout.k, layout.v, window, at(context))), unpadded_bytes(layout, context))
                << k << ' ' << v << ' ' << window << ' ' << context;
          }
}

}  // namespace
}  // namespace calib::plan

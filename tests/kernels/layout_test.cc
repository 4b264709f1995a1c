#include "kernels/core/layout.h"

#include <algorithm>
#include <string>

#include "gtest/gtest.h"

namespace kvrt {
namespace {

Scheme parse(const std::string& text) {
  Scheme s;
  std::string error;
  EXPECT_TRUE(parse_scheme(text, &s, &error)) << error;
  return s;
}
LayerLayout layer(const std::string& k, const std::string& v, std::int64_t sinks = 4, std::int64_t window = 128, double salient = 0,
                  int heads = 8, int head_dim = 128) {
  LayerLayout l;
  l.n_kv_heads = heads, l.head_dim = head_dim;
  l.k = parse(k), l.v = parse(v);
  l.tiers = finish_tiers(l.k, l.v, sinks, window, salient);
  l.salient = parse("fp8e4m3.token.g");
  return l;
}
double effective_bits(const LayerLayout& l, std::int64_t n) {
  const double bytes = static_cast<double>(cache_bytes(l, CacheSide::kK, n) + cache_bytes(l, CacheSide::kV, n));
  return bytes * 8 / (2.0 * static_cast<double>(n) * l.n_kv_heads * l.head_dim);
}

// KERNELS.md 3.2: one head block at D = 128, P = 64, without positions.
TEST(Layout, BlockBytesAreThoseOfTheTable) {
  struct Row { const char* scheme; std::int64_t block; };
  const Row rows[] = {
      {"bf16", 16384}, {"fp16", 16384}, {"fp8e4m3.tensor", 8192}, {"fp8e4m3.head", 8192}, {"fp8e4m3.token.g", 8320}, {"int8.token.g", 8448},
      {"int8.channel.static", 8192}, {"int4.token.g", 4352}, {"int4.token.g64", 4608}, {"int4.token.g32", 5120}, {"int4.channel.g64", 4608},
      {"int4.channel.g32", 5120}, {"int4.channel.g64.out1", 4992}, {"int3.token.g", 3328}, {"int3.token.g64", 3584}, {"int3.token.g32", 4096},
      {"int3.channel.g64", 3584}, {"int3.channel.g64.out1", 3968}, {"int2.token.g64", 2560}, {"int2.token.g32", 3072},
      {"int2.channel.g64", 2560}, {"int2.channel.g32", 3072}, {"nuq4.token.g", 4352}, {"nuq3.token.g.out1", 3840},
      {"nuq3.channel.static.out1", 3584}, {"nuq2.channel.static.out1", 2560}, {"lm4.token.g.had", 4224}, {"lm3.token.g.had", 3200},
      {"lm2.token.g.had", 2176}, {"q8_0", 8704}, {"q4_0", 4608}, {"iq4_nl", 4608}, {"q4_1", 5120}, {"q5_0", 5632}, {"q5_1", 6144},
      {"sint8.token.g32", 8704}, {"sint4.token.g32", 4608}, {"nvfp4", 4608}, {"mxfp4", 4352}};
  for (const Row& r : rows) {
    EXPECT_EQ(block_layout(layer(r.scheme, r.scheme), CacheSide::kV).block, r.block) << r.scheme;
    EXPECT_DOUBLE_EQ(page_bytes_per_token(layer(r.scheme, r.scheme), CacheSide::kV), 8.0 * static_cast<double>(r.block) / 64) << r.scheme;
  }
}

// PL-03
TEST(Layout, TokenRowsCostWhatTheirSideDataSay) {
  EXPECT_DOUBLE_EQ(page_bytes_per_token(layer("bf16", "fp8e4m3.token.g", 4, 128, 0, 1), CacheSide::kV), 130);
  EXPECT_DOUBLE_EQ(page_bytes_per_token(layer("bf16", "int4.token.g128", 4, 128, 0, 1), CacheSide::kV), 68);
  const LayerLayout l = layer("int4.token.g128", "int4.token.g128", 0, 0);
  EXPECT_EQ(cache_bytes(l, CacheSide::kV, 64), 8 * 4352);
  EXPECT_EQ(cache_bytes(l, CacheSide::kV, 65), 2 * 8 * 4352);  // 65 tokens cost two pages
  EXPECT_EQ(cache_bytes(l, CacheSide::kV, 0), 0);
  const LayerLayout tiers = layer("int4.token.g128", "int4.token.g128", 4, 128);  // + 16 sink slots + 144 ring slots of BF16
  EXPECT_EQ(cache_bytes(tiers, CacheSide::kV, 65), 160 * 8 * 256);
  EXPECT_EQ(cache_bytes(tiers, CacheSide::kV, 133), 160 * 8 * 256 + 8 * 4352);
}

TEST(Layout, RowsOfOddHeadsArePadded) {
  EXPECT_EQ(row_bytes(parse("int8.token.g"), 101), 104);
  EXPECT_EQ(row_bytes(parse("int4.token.g"), 100), 52);
  EXPECT_EQ(row_bytes(parse("int3.token.g"), 80), 36);
  EXPECT_EQ(row_bytes(parse("int2.token.g"), 72), 20);
  EXPECT_EQ(row_bytes(parse("bf16"), 72), 144);
  EXPECT_EQ(row_bytes(parse("q8_0"), 96), 102);
  EXPECT_EQ(row_bytes(parse("int4.token.g.lowrank32"), 128), 16);
}

TEST(Layout, HeadersPositionsAndRefreshAppearWhereTheyAreNeeded) {
  EXPECT_EQ(block_layout(layer("int4.token.g", "int4.token.g"), CacheSide::kK).header, 0);
  const LayerLayout pre = layer("int4.channel.g64.pre", "int4.token.g");
  EXPECT_EQ(block_layout(pre, CacheSide::kK).header, 128);
  EXPECT_EQ(block_layout(pre, CacheSide::kV).header, 0);
  EXPECT_EQ(block_layout(pre, CacheSide::kK).page, 128 + 8 * 4608);
  LayerLayout sliding = layer("int4.token.g", "int4.token.g");
  sliding.sliding_window = 512;
  EXPECT_EQ(block_layout(sliding, CacheSide::kK).header, 128);
  EXPECT_EQ(cache_bytes(sliding, CacheSide::kV, 100000), cache_bytes(sliding, CacheSide::kV, 512));
  const LayerLayout salient = layer("int4.token.g128", "int4.token.g128", 4, 2, 0.2);
  EXPECT_EQ(block_layout(salient, CacheSide::kK).block, 4480);        // 4096 + 256 + 8 + 64, rounded up
  EXPECT_EQ(block_layout(salient, CacheSide::kK, true).block, 8576);  // 8192 + 128 + 8 + 128
  EXPECT_EQ(block_layout(salient, CacheSide::kV, true).block, 8320);
  LayerLayout refresh = layer("fp8e4m3.head", "fp8e4m3.token.g");
  refresh.refresh_tokens = 1024;
  EXPECT_EQ(block_layout(refresh, CacheSide::kK).refresh, 16);
  EXPECT_EQ(block_layout(refresh, CacheSide::kV).refresh, 0);
  EXPECT_EQ(block_layout(layer("int4.channel.g128", "int4.token.g"), CacheSide::kV).page_tokens, 128);  // P = N*
}

// KERNELS.md 10: effective bits at D 128, H 8. Printed with two decimals, hence 0.005 (0.0101 for the row with `pre`:
// the table leaves out the position headers of exact pages, which are counted here).
TEST(Layout, EffectiveBitsAreThoseOfTheTable) {
  struct Row { LayerLayout l; double bits[4], tolerance; };
  LayerLayout kivi = layer("int2.channel.g32", "int2.token.g32", 0, 128);
  const Row rows[] = {
      {layer("fp8e4m3.head", "fp8e4m3.head", 0, 0), {8.00, 8.00, 8.00, 8.00}, 0.005},
      {layer("fp8e4m3.head", "fp8e4m3.head"), {8.75, 8.19, 8.05, 8.01}, 0.005},
      {layer("int4.token.g128", "int4.token.g128", 4, 2, 0.2), {6.05, 5.33, 5.16, 5.11}, 0.005},
      {layer("int4.token.g128", "int4.token.g128"), {5.23, 4.50, 4.31, 4.27}, 0.005},
      {layer("int3.channel.g64.pre.out1", "int3.token.g64"), {4.97, 4.01, 3.78, 3.72}, 0.0101},
      {kivi, {4.06, 3.27, 3.07, 3.02}, 0.005}};
  for (const Row& r : rows) {
    const std::int64_t lengths[] = {2048, 8192, 32768, 131072};
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(effective_bits(r.l, lengths[i]), r.bits[i], r.tolerance) << to_string(r.l.k) << " " << lengths[i];
  }
}

// Bytes without any padding (METHODS.md 8), per KV head and side.
double lower_bound_bits(const LayerLayout& l, const std::string& k, const std::string& v, std::int64_t n) {
  const auto row = [&](const std::string& text) {
    const LayerLayout one = layer(text, text, 0, 0, 0, 1, l.head_dim);
    const BlockLayout b = block_layout(one, CacheSide::kV);
    return static_cast<double>(b.codes + b.params + b.outliers) / b.page_tokens;
  };
  const Tiers& t = l.tiers;
  const std::int64_t x = blocks_out(t, n), body = std::max<std::int64_t>(0, n - t.n_sinks);
  const double exact = static_cast<double>(std::min(n, t.n_sinks) + body - x * t.exit_block()) * 2 * l.head_dim;
  const double coded = static_cast<double>(x * t.block_base), salient = static_cast<double>(x * t.block_salient) * row("fp8e4m3.token.g");
  return (coded * row(k) + coded * row(v) + 2 * salient + 2 * exact) * 8 / (2.0 * static_cast<double>(n) * l.head_dim);
}

TEST(Layout, LowerBoundOfG41) {
  struct Row { const char* scheme; std::int64_t window, n; double salient, bits; };
  const Row rows[] = {{"int4.token.g", 128, 8192, 0, 4.439331}, {"int4.token.g64", 128, 8192, 0, 4.685303},
                      {"lm4.token.g", 128, 8192, 0, 4.316345}, {"int2.channel.g32", 128, 8192, 0, 3.253906},
                      {"int4.token.g128", 2, 8192, 0.2, 5.067871}, {"int4.token.g", 128, 1024, 0, 5.764648}};
  for (const Row& r : rows) {
    EXPECT_NEAR(lower_bound_bits(layer(r.scheme, r.scheme, 4, r.window, r.salient), r.scheme, r.scheme, r.n), r.bits, 1e-6) << r.scheme;
  }
}

TEST(Layout, BytesNeverFallBelowTheLowerBoundAndNeverShrinkWithLength) {
  for (const char* scheme : {"int4.token.g", "int4.token.g32", "int3.token.g64", "int2.channel.g32", "int4.channel.g128", "fp8e4m3.token.g",
                             "int8.token.g", "q4_0", "bf16"}) {
    for (const std::int64_t window : {0, 2, 128}) {
      for (const double salient : {0.0, 0.1, 0.2}) {
        const LayerLayout l = layer(scheme, scheme, 4, window, salient);
        std::int64_t last = 0;
        for (std::int64_t n = 1; n < 3000; n += 7) {
          ASSERT_GE(effective_bits(l, n) * (1 + 1e-12), lower_bound_bits(l, scheme, scheme, n)) << scheme << " W " << window << " T " << n;
          const std::int64_t bytes = cache_bytes(l, CacheSide::kK, n);
          ASSERT_GE(bytes, last);
          last = bytes;
        }
      }
    }
  }
}

TEST(Layout, HugeLengthsDoNotOverflow) {
  const LayerLayout l = layer("int8.token.g", "int8.token.g");
  const std::int64_t n = std::int64_t{1} << 40;
  EXPECT_NEAR(static_cast<double>(cache_bytes(l, CacheSide::kV, n)) / (static_cast<double>(n) * 8 * 132), 1.0, 1e-6);
}

}  // namespace
}  // namespace kvrt

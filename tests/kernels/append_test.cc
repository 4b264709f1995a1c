#include <cstring>

#include "kernels/codec/channel_order.h"
#include "kernels/codec/half.h"
#include "kernels/core/layout.h"
#include "tests/kernels/cache_fixture.h"
#include "tests/kernels/schemes.h"

namespace kvrt::testing {
namespace {

const char* const kValueSchemes[] = {"int4.token.g32",
                                     "int3.token.g64.had",
                                     "int2.token.g64.had",
                                     "fp8e4m3.head",
                                     "int4.channel.g32",
                                     "lm3.token.g.had",
                                     "int4.token.g32.center",
                                     "q4_0",
                                     "bf16",
                                     "int4.token.g.out1",
                                     "nuq3.token.g.clip.out1",
                                     "int3.channel.g64.out2",
                                     "int2.channel.g32.clip.out0.5.ef"};

/// What gather must give AS_STORED: sinks and window in bf16, base tokens through fake_quant.
void expect_fake_quant(Cache* cache, const CacheShape& shape, kvrt_side side, const std::vector<float>& x, const Tiers& tiers, const std::string& what) {
  const std::vector<float> stored = cache->gather(side, KVRT_AS_STORED);
  const std::int64_t length = cache->length(), coded = coded_end(tiers, length), row = cache->row();
  std::vector<float> base(x.begin() + tiers.n_sinks * row, x.begin() + coded * row), expected(base.size());
  kvrt_error err;
  ASSERT_EQ(kvrt_fake_quant(cache->context(), Cache::kLayer, side, coded - tiers.n_sinks, base.data(), expected.data(), &err), KVRT_OK) << what << ": " << err.text;
  ASSERT_GT(coded, tiers.n_sinks) << what;
  for (std::int64_t i = 0; i < length * row; ++i) {
    const std::int64_t t = i / row;
    const bool is_base = t >= tiers.n_sinks && t < coded;
    const float want = is_base ? expected[static_cast<std::size_t>(i - tiers.n_sinks * row)] : bf16_to_f32(f32_to_bf16(x[static_cast<std::size_t>(i)]));
    ASSERT_EQ(f32_bits(stored[static_cast<std::size_t>(i)]), f32_bits(want)) << what << " token " << t << " element " << i % row << " of width " << shape.width;
  }
}

Tiers tiers_of(const CacheShape& shape) {
  Scheme k, v;
  std::string error;
  EXPECT_TRUE(parse_scheme(shape.k, &k, &error) && parse_scheme(shape.v, &v, &error));
  return finish_tiers(k, v, shape.sinks, shape.window, 0);
}

void write_then_gather(CacheShape shape) {
  if (kOnCuda) shape.heads = 1;  // lanes are threads of control: fewer of them
  const std::string what = shape.k + " / " + shape.v + " W " + std::to_string(shape.window) + " " + shape.chan_perm;
  Cache cache(shape);
  ASSERT_TRUE(cache.status().ok()) << what << ": " << cache.status().text();
  constexpr std::int64_t kTokens = kOnCuda ? 171 : 231;
  const std::vector<float> k = normal_rows(1, kTokens * cache.row()), v = normal_rows(2, kTokens * cache.row(), 2, 0.3);
  const bool pre = shape.k.find(".pre") != std::string::npos;
  ASSERT_TRUE(cache.append({kTokens}, k.data(), v.data(), pre ? KVRT_PRE_ROPE : KVRT_POST_ROPE).ok());
  expect_fake_quant(&cache, shape, KVRT_K, k, tiers_of(shape), what);
  expect_fake_quant(&cache, shape, KVRT_V, v, tiers_of(shape), what);
  kvrt_verify_report report;
  const Status status = cache.verify(&report);
  EXPECT_TRUE(status.ok()) << what << ": " << status.text();
  EXPECT_EQ(report.n_tokens, 2 * kTokens);
}

TEST(Append, WritePageThenGatherIsFakeQuantBitForBit) {
  for (const char* scheme : kKeySchemes) {
    CacheShape shape;
    shape.k = scheme, shape.v = "int4.token.g";
    write_then_gather(shape);
    shape.window = 0;  // without a ring the encoder sees x itself
    write_then_gather(shape);
  }
  for (const char* scheme : kValueSchemes) {
    CacheShape shape;
    shape.v = scheme;
    shape.width = 128, shape.page_tokens = 32;
    write_then_gather(shape);
  }
}

TEST(Append, EveryWidthAndStoredOrder) {
  for (const int width : {64, 80, 96, 128}) {
    CacheShape shape;
    shape.k = "int3.channel.g64.pre", shape.v = "int4.token.g", shape.width = width;
    shape.chan_perm = "spread" + std::to_string(width / 2);
    write_then_gather(shape);
    shape.k = "int4.token.g" + std::to_string(width / 2) + ".pre";
    write_then_gather(shape);
    shape.k = "bf16.pre";
    write_then_gather(shape);
  }
}

TEST(Append, StoredOrderPutsRopePairsInOneQuarter) {
  for (int d = 0; d < 64; ++d) {
    EXPECT_EQ(stored_channel(32, 64, stored_position(32, 64, d)), d);
    EXPECT_EQ(stored_position(32, 64, d % 32) / 16, stored_position(32, 64, d % 32 + 32) / 16) << d;
  }
}

TEST(Append, KeysAreRotatedWhereTheLayerStoresThemSo) {
  for (const kvrt_rope_style rope : {KVRT_ROPE_HALF_SPLIT, KVRT_ROPE_INTERLEAVED}) {
    CacheShape shape;
    shape.k = "bf16", shape.v = "bf16", shape.rope = rope, shape.rotary_dim = 48, shape.attention_factor = 1.25;
    Cache cache(shape);
    ASSERT_TRUE(cache.status().ok()) << cache.status().text();
    const std::int64_t n = 200, row = cache.row();
    cache.first_position = 37;
    const std::vector<float> k = normal_rows(3, n * row), v = normal_rows(4, n * row);
    ASSERT_TRUE(cache.append(n, k.data(), v.data()).ok());
    const std::vector<float> stored = cache.gather(KVRT_K, KVRT_POST_ROPE);
    for (std::int64_t t = 0; t < n; ++t) {
      std::vector<double> x(k.begin() + t * row, k.begin() + t * row + shape.width);
      rotate_row(shape, cache.inv_freq(), 37 + t, x.data());
      for (int d = 0; d < shape.width; ++d) {
        // Half a bf16 step of values up to about 6, and fp32 rotation.
        ASSERT_NEAR(stored[static_cast<std::size_t>(t * row + d)], x[static_cast<std::size_t>(d)], 0.004 * (std::fabs(x[static_cast<std::size_t>(d)]) + 0.01));
      }
    }
  }
}

TEST(Append, OneByOneGivesTheBytesOfBulk) {  // KN-05, bug class 8
  for (const std::int64_t window : {128, 2, 0}) {
    for (const char* k : {"int4.token.g32", "int4.channel.g64.pre", "int3.channel.g32"}) {
      CacheShape shape;
      shape.k = k, shape.window = window, shape.n_seqs = 2;
      Cache bulk(shape), single(shape);
      ASSERT_TRUE(bulk.status().ok() && single.status().ok());
      const std::int64_t row = bulk.row(), first = 300, second = 217;
      const std::vector<float> keys = normal_rows(7, (first + second) * row), values = normal_rows(8, (first + second) * row);
      ASSERT_TRUE(bulk.append({first, second}, keys.data(), values.data()).ok());
      for (std::int64_t t = 0; t < first; ++t) {
        std::vector<float> kr(keys.begin() + t * row, keys.begin() + (t + 1) * row), vr(values.begin() + t * row, values.begin() + (t + 1) * row);
        if (t < second) {
          kr.insert(kr.end(), keys.begin() + (first + t) * row, keys.begin() + (first + t + 1) * row);
          vr.insert(vr.end(), values.begin() + (first + t) * row, values.begin() + (first + t + 1) * row);
        }
        ASSERT_TRUE(single.append({1, t < second ? 1 : 0}, kr.data(), vr.data()).ok());
      }
      for (const bool exact : {true, false}) {
        for (const kvrt_side side : {KVRT_K, KVRT_V}) EXPECT_EQ(bulk.bytes(exact, side), single.bytes(exact, side)) << k << " W " << window;
      }
    }
  }
}

TEST(Append, PagesOfAFinishedSequenceShowNothingOfIt) {  // KN-05
  CacheShape shape;
  shape.k = "int4.channel.g32.pre";
  Cache fresh(shape), used(shape);
  const std::int64_t row = used.row();
  const std::vector<float> old = normal_rows(9, 400 * row, 100), k = normal_rows(10, 150 * row), v = normal_rows(11, 150 * row);
  ASSERT_TRUE(used.append(400, old.data(), old.data()).ok());
  used.restart(0);
  ASSERT_TRUE(used.append(150, k.data(), v.data()).ok() && fresh.append(150, k.data(), v.data()).ok());
  EXPECT_EQ(used.gather(KVRT_K, KVRT_POST_ROPE), fresh.gather(KVRT_K, KVRT_POST_ROPE));
  EXPECT_EQ(used.gather(KVRT_V, KVRT_AS_STORED), fresh.gather(KVRT_V, KVRT_AS_STORED));
}

TEST(Append, ASinkJoinsNoRange) {  // bug class 5
  CacheShape shape;
  shape.k = "int4.channel.g32", shape.sinks = 1, shape.window = 0;
  Cache plain(shape), spiked(shape);
  const std::int64_t row = plain.row();
  std::vector<float> k = normal_rows(12, 97 * row), v = normal_rows(13, 97 * row);
  ASSERT_TRUE(plain.append({97}, k.data(), v.data(), KVRT_POST_ROPE).ok());
  for (std::int64_t i = 0; i < row; ++i) k[static_cast<std::size_t>(i)] *= 50, v[static_cast<std::size_t>(i)] *= 50;
  ASSERT_TRUE(spiked.append({97}, k.data(), v.data(), KVRT_POST_ROPE).ok());
  for (const kvrt_side side : {KVRT_K, KVRT_V}) EXPECT_EQ(plain.bytes(false, side), spiked.bytes(false, side));
}

TEST(Append, ConstantAndOneSidedRows) {  // bug classes 3 and 5
  for (const char* scheme : {"int4.token.g", "int2.token.g", "sint4.token.g", "fp8e4m3.token.g", "q4_0", "lm4.token.g"}) {
    for (const float x : {0.0f, 1e-6f, 3.25f, -3.25f, 6e4f}) {
      CacheShape shape;
      shape.k = scheme, shape.window = 0, shape.sinks = 0;
      Cache cache(shape);
      const std::vector<float> rows(static_cast<std::size_t>(64 * cache.row()), x);
      ASSERT_TRUE(cache.append({64}, rows.data(), rows.data(), KVRT_POST_ROPE).ok());
      for (const float y : cache.gather(KVRT_K, KVRT_AS_STORED)) ASSERT_NEAR(y, x, 0.13 * std::fabs(x) + 6.2e-5) << scheme;
    }
  }
}

TEST(Append, NonFiniteKeysAreZeroAndCounted) {
  CacheShape shape;
  shape.k = "int4.token.g.had", shape.v = "int4.channel.g32";
  Cache cache(shape), clean(shape);
  const std::int64_t row = cache.row();
  std::vector<float> k = normal_rows(14, 160 * row), v = normal_rows(15, 160 * row), k0 = k, v0 = v;
  for (const std::int64_t at : {3 * row + 1, 50 * row + 7, 150 * row + 64}) {
    k[static_cast<std::size_t>(at)] = NAN, v[static_cast<std::size_t>(at)] = -INFINITY;
    k0[static_cast<std::size_t>(at)] = v0[static_cast<std::size_t>(at)] = 0;
  }
  ASSERT_TRUE(cache.append(160, k.data(), v.data()).ok() && clean.append(160, k0.data(), v0.data()).ok());
  EXPECT_EQ(cache.health(KVRT_K).non_finite, 3);
  EXPECT_EQ(cache.health(KVRT_V).non_finite, 3);
  EXPECT_EQ(clean.health(KVRT_K).non_finite, 0);
  EXPECT_GT(cache.health(KVRT_K).tokens, 0);
  for (const kvrt_side side : {KVRT_K, KVRT_V}) EXPECT_EQ(cache.gather(side, KVRT_POST_ROPE), clean.gather(side, KVRT_POST_ROPE));
}

TEST(Append, PageIdsAreWidenedBeforeTheyAreMultiplied) {  // bug class 1: ids near 2^31 against a base far below the memory
  CacheShape shape;
  shape.k = "int4.token.g", shape.window = 0, shape.sinks = 0;
  Cache cache(shape);
  kvrt_layout layout;
  ASSERT_EQ(kvrt_page_layout(cache.context(), Cache::kLayer, KVRT_K, KVRT_BASE, &layout, nullptr), KVRT_OK);
  constexpr std::int64_t kStride = std::int64_t{1} << 20;
  constexpr std::int32_t kPage = INT32_MAX - 1;
  std::vector<std::uint8_t> memory[2];
  kvrt_pools pools = {};
  for (int side = 0; side < 2; ++side) {
    memory[side].assign(static_cast<std::size_t>(layout.page_bytes), 0xFF);
    pools.base[side] = {reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(memory[side].data()) - static_cast<std::uintptr_t>(kPage * kStride)), kStride,
                        std::int64_t{INT32_MAX}};
  }
  const std::vector<float> k = normal_rows(16, 10 * cache.row());
  const std::int64_t seq_len[] = {0}, rows[] = {0, 10}, offsets[] = {0, 1};
  std::int64_t positions[10];
  std::iota(positions, positions + 10, 0);
  kvrt_batch batch = {};
  batch.n_seqs = 1, batch.seq_len = seq_len, batch.row_offsets = rows, batch.positions = positions, batch.pages[KVRT_BASE] = {&kPage, offsets};
  kvrt_qkv qkv = {};
  qkv.k.data = qkv.v.data = k.data(), qkv.k_frame = KVRT_POST_ROPE;
  const kvrt_workspace w = cache.workspace();
  kvrt_error err;
  ASSERT_EQ(kvrt_append(cache.context(), Cache::kLayer, &batch, &qkv, &pools, &w, nullptr, &err), KVRT_OK) << err.text;
  std::vector<float> out(k.size(), NAN);
  kvrt_gather_args args = {};
  args.frame = KVRT_AS_STORED, args.n_tokens = 10, args.out.data = out.data();
  ASSERT_EQ(kvrt_gather(cache.context(), Cache::kLayer, &batch, &args, &pools, &w, nullptr, &err), KVRT_OK) << err.text;
  for (std::size_t i = 0; i < k.size(); ++i) ASSERT_NEAR(out[i], k[i], 0.25);
}

TEST(Append, AShareOfTheHeadsStoresWhatTheWholeStores) {
  for (const char* scheme :
       {"int4.token.g32.center.had", "fp8e4m3.head", "int8.channel.static.pre", "int3.token.g.ef", "nuq4.channel.static.out1", "int4.channel.g32.out1"}) {
    CacheShape shape;
    shape.k = scheme, shape.heads = 3;
    Cache whole(shape);
    shape.first_head = 1, shape.n_heads = 2;
    Cache share(shape);
    ASSERT_TRUE(whole.status().ok() && share.status().ok()) << share.status().text();
    const std::vector<float> k = normal_rows(18, 100 * whole.row());
    std::vector<float> part;
    for (int t = 0; t < 100; ++t) part.insert(part.end(), k.begin() + t * whole.row() + shape.width, k.begin() + (t + 1) * whole.row());
    ASSERT_TRUE(whole.append(100, k.data(), k.data()).ok() && share.append(100, part.data(), part.data()).ok());
    const std::vector<float> all = whole.gather(KVRT_K, KVRT_AS_STORED), some = share.gather(KVRT_K, KVRT_AS_STORED);
    for (int t = 0; t < 100; ++t) {
      for (std::int64_t i = 0; i < share.row(); ++i) {
        ASSERT_EQ(some[static_cast<std::size_t>(t * share.row() + i)], all[static_cast<std::size_t>(t * whole.row() + shape.width + i)]) << scheme;
      }
    }
  }
}

TEST(Append, RowsWithoutTokenAndOtherTypesAndStrides) {
  CacheShape shape;
  Cache cache(shape), plain(shape);
  const std::int64_t row = cache.row(), width = shape.width;
  const std::vector<float> x = normal_rows(19, 5 * row);
  std::vector<std::uint16_t> strided(static_cast<std::size_t>(5 * 2 * row), 0xFFFF);  // bf16 [H, rows, 2 D]: NaN between the rows
  std::vector<float> rounded(x.size());
  for (std::int64_t t = 0; t < 5; ++t) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      for (std::int64_t d = 0; d < width; ++d) {
        const std::size_t at = static_cast<std::size_t>(t * row + h * width + d);
        const std::uint16_t b = f32_to_bf16(x[at]);
        strided[static_cast<std::size_t>(h * 5 * 2 * width + t * 2 * width + d)] = b;
        rounded[at] = bf16_to_f32(b);
      }
    }
  }
  kvrt_qkv qkv = {};
  qkv.k = {strided.data(), KVRT_BF16, 2 * width * 2, 5 * 2 * width * 2};
  qkv.v = qkv.k;
  qkv.k_frame = KVRT_POST_ROPE;
  std::int64_t positions[] = {0, 1, 2, -1, -1};
  kvrt_batch batch = cache.batch({5});
  batch.positions = positions;
  const kvrt_workspace w = cache.workspace();
  kvrt_error err;
  ASSERT_EQ(kvrt_append(cache.context(), Cache::kLayer, &batch, &qkv, &cache.pools(), &w, nullptr, &err), KVRT_OK) << err.text;
  cache.set_lengths({3});
  ASSERT_TRUE(plain.append({3}, rounded.data(), rounded.data(), KVRT_POST_ROPE).ok());
  EXPECT_EQ(cache.gather(KVRT_V, KVRT_AS_STORED), plain.gather(KVRT_V, KVRT_AS_STORED));
  for (const bool exact : {true, false}) EXPECT_EQ(cache.bytes(exact, KVRT_K), plain.bytes(exact, KVRT_K));
}

}  // namespace
}  // namespace kvrt::testing

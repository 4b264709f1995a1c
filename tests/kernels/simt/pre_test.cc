// Keys stored before RoPE on the executor against the double reference: every family and granularity, stored orders of half-split,
// partial and interleaved rotations, positions up to 2^20, gaps, rings, both paths, both accumulation modes.

#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "tests/kernels/simt/pre_case.h"

namespace kvrt::simt {
namespace {

constexpr std::int64_t kFar = (std::int64_t{1} << 20) - 700;

PreSpec split_spec(const std::string& k, const std::string& v, int head_dim) {
  PreSpec spec;
  spec.k = k, spec.v = v, spec.head_dim = head_dim, spec.n_pairs = spec.spread = head_dim / 2;
  return spec;
}

// The fused pairs, keys with each granularity that a plan may give them.
constexpr SchemePair kFused[] = {
    {"int8.channel.g64.pre", "int8.token.g"},     {"int8.token.g.pre", "int8.token.g"},           {"int8.token.g32.pre", "int4.token.g64"},
    {"int4.channel.g64.pre", "int4.token.g64"},   {"int4.channel.g32.pre", "int3.token.g64"},     {"int4.token.g64.pre", "int8.token.g"},
    {"int4.channel.static.pre", "int4.token.g"},  {"int4.token.g32.pre.center", "int4.token.g"},  {"int4.channel.g64.pre.center", "int4.token.g"},
    {"int3.channel.g64.pre", "int3.token.g64"},   {"int3.token.g32.pre", "int2.token.g64"},       {"int2.channel.g64.pre", "int2.token.g64"},
    {"int2.channel.g32.pre", "int2.token.g64"},   {"nuq4.channel.static.pre", "nuq4.token.g"},    {"nuq3.channel.static.pre", "lm3.token.g"},
    {"nuq2.channel.static.pre", "nuq2.token.g"},  {"lm4.token.g.pre", "lm4.token.g64"},           {"lm3.token.g32.pre", "nuq3.token.g"},
    {"lm2.token.g64.pre.center", "lm2.token.g"},  {"sint8.token.g.pre", "int8.token.g"},          {"sint4.token.g64.pre", "int4.token.g"},
    {"int8.head.pre", "int8.head"},
};

class PreKeys : public ::testing::TestWithParam<std::tuple<SchemePair, int>> {};

TEST_P(PreKeys, TiersInEveryOrderAndMode) {
  const auto [schemes, head_dim] = GetParam();
  PreSpec spec = split_spec(schemes.k, schemes.v, head_dim);
  spec.sequences = {{kFar, 4, 192, 30}};  // the ring has come round, p0 is no multiple of 64
  const PreCase decode(spec);
  for (const Accumulation a : {Accumulation::kExact, Accumulation::kTruncating}) decode.expect_close(decode.run_in_all_orders(a), "tiers");
}
INSTANTIATE_TEST_SUITE_P(Fused, PreKeys, ::testing::Combine(::testing::ValuesIn(kFused), ::testing::Values(64, 128)), name_of_pair);

TEST(PreOrders, PartialAndInterleavedRotationsInTwoPasses) {
  for (const int head_dim : {64, 128}) {
    for (const char* k : {"int8.channel.g64.pre", "int4.channel.g32.pre", "int4.token.g64.pre", "int3.channel.g64.pre", "int2.token.g32.pre",
                          "nuq4.channel.static.pre", "lm3.token.g.pre", "nuq2.channel.static.pre"}) {
      for (const int part : {2, 4, -1, -2}) {  // half, quarter; interleaved: all, half
        if (std::string(k).find("int3") == 0 && head_dim == 64) continue;  // DecodeRefusals
        PreSpec spec = split_spec(k, "fp8e4m3.token.g", head_dim);
        spec.interleaved = part < 0;
        spec.n_pairs = head_dim / 2 / std::abs(part);
        spec.spread = spec.interleaved ? 0 : spec.n_pairs;
        spec.sequences = {{kFar, 3, 128, 17}};
        const PreCase decode(spec);
        decode.expect_close(decode.run({}, DecodePath::kTwoPass), std::string(k) + " D " + std::to_string(head_dim) + " rotation " + std::to_string(part));
      }
    }
  }
}

TEST(PreOrders, TwoPassesAreThoseOfOneKernel) {
  PreSpec spec;
  spec.sequences = {{12345, 4, 320, 100}, {0, 2, 64, 5}};
  const PreCase decode(spec);
  decode.expect_close(decode.run_in_all_orders(Accumulation::kExact, DecodePath::kTwoPass), "two passes");
}

TEST(PreLengths, EveryTailAndHeadCount) {
  for (const std::int64_t n : {1, 2, 15, 16, 17, 63, 64, 65, 129}) {
    PreSpec spec = split_spec("int4.token.g.pre", "int4.token.g", 64);
    spec.sequences = {{77, 1, n, n}};
    const PreCase decode(spec);
    decode.expect_close(decode.run({}), "length " + std::to_string(n));
  }
  for (int heads = 1; heads <= 16; ++heads) {
    PreSpec spec = split_spec("int3.channel.g32.pre", "int3.token.g", 64);
    spec.n_query_heads = heads, spec.sequences = {{77, 1, 96, 3}};
    const PreCase decode(spec);
    decode.expect_close(decode.run({}), "G " + std::to_string(heads));
  }
}

TEST(PreLengths, WideHeads) {
  for (const SchemePair& s : {kFused[0], kFused[3], kFused[9]}) {
    PreSpec spec = split_spec(s.k, s.v, 256);
    spec.v = std::string(s.k).substr(0, 4) + ".token.g";
    spec.sequences = {{kFar, 4, 64, 9}};
    const PreCase decode(spec);
    decode.expect_close(decode.run({}), s.k);
  }
}

TEST(PrePositions, GapsInPagesOfEverySize) {
  for (const int page_tokens : {64, 128}) {
    PreSpec spec;
    spec.k = "int4.channel.g64.pre", spec.page_tokens = page_tokens, spec.gap = page_tokens == 64 ? 1 : 0, spec.rope_offsets = 128;
    spec.sequences = {{100, 4, 256, 20}};
    const PreCase decode(spec);
    decode.expect_close(decode.run({}), "P " + std::to_string(page_tokens));
  }
}

TEST(PrePositions, AttentionFactorAndEdgesOfTheTables) {
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, std::int64_t{127}, kFar}) {
    PreSpec spec = split_spec("int8.channel.g64.pre", "int8.token.g", 64);
    spec.attention_factor = 1.1386, spec.sequences = {{first, 0, 128, 1}};
    const PreCase decode(spec);
    decode.expect_close(decode.run({}), "from position " + std::to_string(first));
  }
}

// The bound is a worst case; what it must not hide is a key at the wrong place.
TEST(PrePositions, OneTokenOffIsSeen) {
  for (const char* k : {"int4.channel.g64.pre", "int8.token.g.pre"}) {
    PreSpec spec = split_spec(k, "int8.token.g", 64);
    spec.sequences = {{kFar, 0, 64, 0}};
    spec.header_error = 1;
    const PreCase decode(spec);
    EXPECT_GT(decode.worst_ratio(decode.run({})), 1.0) << k;
  }
}

TEST(PreNumerics, ValuesFarFromZeroAndHugeQueries) {
  for (const char* k : {"int4.channel.g64.pre", "int8.token.g.pre", "int3.channel.g64.pre"}) {
    for (const double scale : {1e-6, 1.0, 3e4}) {
      PreSpec spec = split_spec(k, "int8.token.g", 64);
      spec.v = std::string(k).substr(0, 4) + ".token.g";
      spec.key_offset = 30, spec.query_scale = scale, spec.sequences = {{5000, 2, 128, 17}};
      const PreCase decode(spec);
      decode.expect_close(decode.run({}), std::string(k) + " query scale " + std::to_string(scale));
    }
  }
}

TEST(PreRefusals, ByName) {
  const auto text = [](const std::string& scheme, int head_dim, int spread, int n_pairs, bool interleaved) {
    Scheme s;
    std::string error;
    EXPECT_TRUE(parse_scheme(scheme, &s, &error)) << error;
    PageCodec codec = make_page_codec(s, code_bits(s.format), head_dim, 64);
    codec.spread = spread;
    RopeTables rope;
    rope.n_pairs = n_pairs, rope.interleaved = interleaved;
    DecodeUnit unit = {};
    DecodePath path;
    unit.head_dim = head_dim;
    if (!decode_family(codec, &unit.k, &error) || !key_pairs(codec, rope, &unit.pairs, &error)) return error;
    unit.v = DecodeFamily::kI4;
    return choose_decode_path(unit, &path, &error) ? std::string() : error;
  };
  EXPECT_EQ(text("int4.channel.g64.pre", 128, 64, 64, false), "");
  EXPECT_NE(text("int4.channel.g64.pre", 128, 0, 64, false).find("spread64, not natural"), std::string::npos);
  EXPECT_NE(text("int4.channel.g64.pre", 128, 64, 64, true).find("natural order, not spread64"), std::string::npos);
  EXPECT_NE(text("int4.channel.g64.pre", 128, 0, 48, false).find("96 of 128"), std::string::npos);
  EXPECT_NE(text("int4.token.g8.pre", 128, 64, 64, false).find("multiple of 16"), std::string::npos);
  EXPECT_NE(text("int3.channel.g64.pre", 64, 16, 16, false).find("family i3"), std::string::npos);
  EXPECT_NE(text("bf16.pre", 128, 64, 64, false).find("family b16"), std::string::npos);
  EXPECT_NE(text("int4.channel.g64.pre", 80, 40, 40, false).find("head_dim 80"), std::string::npos);
}

}  // namespace
}  // namespace kvrt::simt

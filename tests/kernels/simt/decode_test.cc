// Fused decode on the executor against the double reference: every family, head size and head count, the lengths around page, tile
// and warp borders, exact segments and rings beside coded pages, both accumulation modes.

#include <cmath>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "tests/kernels/simt/decode_case.h"

namespace kvrt::simt {
namespace {

// Every fused pair of families, every format and granularity on both sides.
constexpr SchemePair kFamilies[] = {
    {"int4.token.g", "int4.token.g"},         {"int4.token.g64", "int4.token.g32"},       {"bf16", "bf16"},
    {"fp16", "fp16"},                         {"int8.token.g", "int8.token.g"},           {"int8.token.g32", "int8.token.g64"},
    {"int8.token.g", "int4.token.g"},         {"fp8e4m3.tensor", "fp8e4m3.head"},         {"fp8e4m3.token.g", "fp8e4m3.token.g"},
    {"fp8e4m3.token.g32", "fp8e4m3.token.g32"}, {"fp8e4m3.head", "int4.channel.static"},  {"int4.channel.g64", "int3.token.g"},
    {"int4.head", "int2.token.g"},            {"int3.token.g", "int3.token.g"},           {"int3.token.g16", "int2.token.g16"},
    {"int3.channel.g64", "int3.channel.g64"}, {"int2.token.g32", "int2.token.g32"},       {"int2.channel.g32", "int2.channel.g32"},
    {"sint8.token.g", "sint8.token.g"},       {"sint8.tensor", "sint4.token.g16"},        {"sint4.token.g32", "sint4.tensor"},
    {"nuq4.token.g", "nuq4.token.g"},         {"nuq4.channel.static", "lm4.token.g"},     {"lm4.token.g64", "int4.token.g8"},
    {"nuq3.channel.static", "nuq3.token.g"}, {"lm3.token.g", "lm2.token.g"},            {"nuq3.token.g", "nuq2.token.g"},
    {"int8.channel.static", "int8.channel.g32"}, {"int3.tensor", "int3.channel.static"},
};

class Decode : public ::testing::TestWithParam<std::tuple<SchemePair, int>> {};

TEST_P(Decode, EveryLengthInEveryOrder) {
  const auto [families, head_dim] = GetParam();
  for (const std::int64_t n : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129}) {
    DecodeSpec spec;
    spec.head_dim = head_dim, spec.n_kv_heads = 1, spec.sequences = {{{families.k, families.v, n}}};
    const DecodeCase decode(spec);
    decode.expect_close(decode.run_in_all_orders(Accumulation::kExact), "length " + std::to_string(n));
  }
}

TEST_P(Decode, RaggedBatchWithSinksAndRing) {
  const auto [families, head_dim] = GetParam();
  DecodeSpec spec;
  spec.head_dim = head_dim;
  spec.sequences = {{{"bf16", "bf16", 4, 16}, {families.k, families.v, 391}, {"bf16", "bf16", 30, 16, true}},
                    {{families.k, families.v, 64}, {"bf16", "bf16", 17, 16, true}}};
  const DecodeCase decode(spec);
  for (const Accumulation a : {Accumulation::kExact, Accumulation::kTruncating}) decode.expect_close(decode.run_in_all_orders(a), "ragged");
}

TEST_P(Decode, EveryHeadCount) {
  const auto [families, head_dim] = GetParam();
  for (int heads = 1; heads <= 16; ++heads) {
    DecodeSpec spec;
    spec.head_dim = head_dim, spec.n_query_heads = heads, spec.n_kv_heads = 1, spec.sequences = {{{families.k, families.v, 70}}};
    const DecodeCase decode(spec);
    decode.expect_close(decode.run({}), "G " + std::to_string(heads));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Decode, ::testing::Combine(::testing::ValuesIn(kFamilies), ::testing::Values(64, 128)), name_of_pair);

// Families apart: scores of each key family with any values, outputs of each value family with any keys.
constexpr SchemePair kTwoPass[] = {
    {"bf16", "int3.token.g"}, {"fp8e4m3.token.g", "bf16"}, {"fp16", "nuq3.token.g"}, {"int8.channel.g64", "lm2.token.g32"}, {"int4.token.g8", "fp16"},
    {"int3.token.g", "fp8e4m3.token.g"}, {"int2.token.g", "int8.token.g"}, {"nuq4.token.g", "int2.channel.static"}, {"lm3.token.g", "nuq4.channel.static"},
    {"lm2.token.g", "int4.token.g"}, {"nuq2.channel.static", "sint8.head"}, {"int2.channel.g32", "lm4.token.g"},
};
class DecodeTwoPass : public ::testing::TestWithParam<std::tuple<SchemePair, int>> {};

TEST_P(DecodeTwoPass, LengthsSegmentsAndHeads) {
  const auto [families, head_dim] = GetParam();
  for (const std::int64_t n : {1, 17, 64, 129}) {
    for (const int heads : {3, 9}) {
      DecodeSpec spec;
      spec.head_dim = head_dim, spec.n_kv_heads = 1, spec.n_query_heads = heads, spec.tiles_a_chunk = 3;
      spec.sequences = {{{"bf16", "bf16", 4, 16}, {families.k, families.v, n}, {"bf16", "bf16", 30, 16, true}}};
      const DecodeCase decode(spec);
      decode.expect_close(decode.run_in_all_orders(n == 17 ? Accumulation::kTruncating : Accumulation::kExact, DecodePath::kTwoPass),
                          "length " + std::to_string(n) + " G " + std::to_string(heads));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Families, DecodeTwoPass, ::testing::Combine(::testing::ValuesIn(kTwoPass), ::testing::Values(64, 128, 256)), name_of_pair);
// Widths without a kernel of their own run padded; no channel behind the last one joins a sum.
INSTANTIATE_TEST_SUITE_P(Padded, DecodeTwoPass,
                         ::testing::Combine(::testing::Values(SchemePair{"int4.token.g", "int4.token.g"}, SchemePair{"int3.token.g", "int2.token.g"},
                                                              SchemePair{"fp8e4m3.token.g", "nuq3.token.g"}, SchemePair{"bf16", "bf16"},
                                                              SchemePair{"lm3.token.g", "int3.channel.g32"}, SchemePair{"int2.token.g4", "nuq2.channel.static"},
                                                              SchemePair{"nuq4.token.g", "fp8e4m3.token.g"}, SchemePair{"int8.channel.g32", "int8.token.g4"}),
                                            ::testing::Values(8, 72, 80, 96, 100, 192)),
                         name_of_pair);
// The same with groups that no lane has to itself, of every family on either side: parameters are looked up channel by channel.
INSTANTIATE_TEST_SUITE_P(PaddedGroups, DecodeTwoPass,
                         ::testing::Combine(::testing::Values(SchemePair{"int8.token.g4", "int2.token.g4"}, SchemePair{"int4.token.g2", "int4.token.g4"},
                                                              SchemePair{"int3.token.g4", "int3.token.g2"}, SchemePair{"fp8e4m3.token.g4", "fp8e4m3.token.g4"},
                                                              SchemePair{"lm4.token.g4", "lm2.token.g4"}, SchemePair{"lm3.token.g2", "lm4.token.g4"},
                                                              SchemePair{"lm2.token.g4", "lm3.token.g4"}, SchemePair{"int4.channel.g32", "int8.channel.g32"},
                                                              SchemePair{"int3.channel.g32", "int4.channel.g32"},
                                                              SchemePair{"int2.channel.g32", "int2.channel.g32"}),
                                            ::testing::Values(4, 72, 100, 132, 252)),
                         name_of_pair);

DecodeSpec one_sequence(const std::string& k, const std::string& v, std::int64_t n) {
  DecodeSpec spec;
  spec.n_kv_heads = 1;
  spec.sequences = {{{k, v, n}}};
  return spec;
}

// Stored orders of keys: parameters of token groups follow the model's channels, those of channel groups the stored ones.
TEST(DecodeNumerics, SpreadKeys) {
  for (const char* k : {"int4.token.g", "int4.token.g32", "int3.channel.g64", "nuq3.channel.static", "bf16", "int2.token.g16", "lm4.token.g64"}) {
    for (const int spread : {32, 64, 128}) {
      DecodeSpec spec;
      spec.n_kv_heads = 1;
      spec.sequences = {{{"bf16", "bf16", 4, 16}, {k, "int4.token.g", 130, 64, false, spread}}};
      const DecodeCase decode(spec);
      decode.expect_close(decode.run({}), std::string(k) + " spread" + std::to_string(spread));
    }
  }
}

TEST(DecodeNumerics, MeansAndSoftCap) {
  for (const char* scheme : {"int4.token.g", "int4.token.g32", "int4.channel.g64", "fp8e4m3.head", "nuq4.channel.static", "bf16"}) {
    for (const double soft_cap : {0.0, 2.5, 50.0}) {
      DecodeSpec spec;
      spec.n_kv_heads = 1, spec.soft_cap = soft_cap, spec.query_scale = 3;
      spec.sequences = {{{"bf16", "bf16", 4, 16}, {scheme, scheme, 130, 64, false, 0, true}}};
      const DecodeCase decode(spec);
      decode.expect_close(decode.run({}), scheme);
    }
  }
}

TEST(DecodeNumerics, EveryPageSize) {
  for (const int page_tokens : {16, 32, 64, 128}) {
    DecodeSpec spec;
    spec.n_kv_heads = 2;
    spec.sequences = {{{"int4.token.g", "int4.token.g", 200, page_tokens}}};
    const DecodeCase decode(spec);
    decode.expect_close(decode.run({}), "P " + std::to_string(page_tokens));
  }
}

// Weights of one sign and a bias of 1024 would drift in truncating accumulators; with alternating biases the error stays flat.
TEST(DecodeNumerics, ErrorDoesNotGrowWithLengthUnderTruncation) {
  Settings truncating;
  truncating.accumulation = Accumulation::kTruncating;
  for (const char* v : {"int4.token.g", "int8.token.g"}) {
    DecodeSpec spec = one_sequence(v, v, 20000);
    spec.query_scale = 0.05;  // a flat softmax: all tokens count
    spec.tiles_a_chunk = 1250;
    spec.n_query_heads = 2;
    const DecodeCase decode(spec);
    const DecodeOutput output = decode.run(truncating);
    decode.expect_close(output, v);
    double error = 0;
    for (std::size_t i = 0; i < output.out.size(); ++i) error = std::max(error, std::fabs(output.out[i] - decode.reference().out[i]));
    EXPECT_LT(error, 2e-3) << v;
  }
}

TEST(DecodeNumerics, HugeAndTinyQueriesStayInFp16) {
  for (const double scale : {1e-6, 1e-3, 100.0, 3e5}) {
    DecodeSpec spec = one_sequence("int4.token.g", "int4.token.g", 65);
    spec.query_scale = scale;
    const DecodeCase decode(spec);
    decode.expect_close(decode.run({}), "query scale " + std::to_string(scale));
  }
}

TEST(DecodeNumerics, KeysAndValuesFarFromZero) {
  for (const char* scheme : {"int4.token.g", "int4.token.g32", "int8.token.g"}) {
    DecodeSpec spec = one_sequence(scheme, scheme, 129);
    spec.key_offset = 40, spec.value_offset = -500;
    const DecodeCase decode(spec);
    decode.expect_close(decode.run({}), scheme);
  }
}

TEST(DecodeNumerics, EmptySegmentsAndManySplits) {
  DecodeSpec spec;
  spec.sequences = {{{"int4.token.g", "int4.token.g", 0}, {"bf16", "bf16", 1, 16}}, {{"int4.token.g", "int4.token.g", 0}},
                    {{"int4.token.g", "int4.token.g", 400}}};
  spec.tiles_a_chunk = 1;
  const DecodeCase decode(spec);
  decode.expect_close(decode.run({}), "one tile a chunk");
}

// Each byte of codes and parameters is read by few lanes and never twice from another page: bytes of a step stay near the cache's size.
TEST(DecodeWork, BytesReadFollowTheCache) {
  DecodeSpec spec = one_sequence("int4.token.g", "int4.token.g", 4096);
  spec.tiles_a_chunk = 256;
  const DecodeCase decode(spec);
  const DecodeOutput output = decode.run({});
  ASSERT_EQ(output.error, "");
  const double codes = 4096.0 * 128;  // K + V, half a byte a code
  EXPECT_GE(static_cast<double>(output.counts.load_bytes), codes);
  EXPECT_LT(static_cast<double>(output.counts.load_bytes), 3 * codes);  // parameters are read by each lane that needs them, from L1
  EXPECT_EQ(output.counts.matrix_products, 4096 / 16 * 16);
}

DecodeUnit unit_of(DecodeFamily k, DecodeFamily v, int head_dim) { return {k, v, KeyPairs::kNone, head_dim}; }

TEST(DecodeRefusals, ByName) {
  DecodeArgs args{};
  args.n_query_heads = 8, args.head_dim = 128;
  EXPECT_NE(decode_cuda(args, unit_of(DecodeFamily::kB16, DecodeFamily::kI8, 128), DecodePath::kFused, nullptr).text().find("K b16 with V i8"), std::string::npos);
  EXPECT_NE(decode_cuda(args, unit_of(DecodeFamily::kB16, DecodeFamily::kI8, 128), DecodePath::kTwoPass, nullptr).text().find("no memory for scores"),
            std::string::npos);
  EXPECT_EQ(decode_cuda(args, unit_of(DecodeFamily::kI8, DecodeFamily::kI8, 64), DecodePath::kFused, nullptr).code(), Code::kArgument);
  Scheme scheme;
  std::string error;
  DecodeFamily family;
  for (const char* text : {"fp8e5m2.token.g", "nvfp4", "q4_0"}) {
    ASSERT_TRUE(parse_scheme(text, &scheme, &error));
    EXPECT_FALSE(decode_family(make_page_codec(scheme, code_bits(scheme.format), 128, 64), &family, &error)) << text;
    EXPECT_NE(error.find("no kernel"), std::string::npos);
  }
  ASSERT_TRUE(parse_scheme("int4.token.g", &scheme, &error));
  EXPECT_FALSE(decode_family(make_page_codec(scheme, 4, 320, 64), &family, &error));
  EXPECT_NE(error.find("not 320"), std::string::npos);
}

TEST(DecodePaths, FollowInstances) {
  DecodePath path;
  std::string error;
  const auto path_of = [&](DecodeFamily k, DecodeFamily v, int dim) { return choose_decode_path(unit_of(k, v, dim), &path, &error); };
  using F = DecodeFamily;
  ASSERT_TRUE(path_of(F::kI4, F::kI3, 128));
  EXPECT_EQ(path, DecodePath::kFused);
  for (const F k : {F::kB16, F::kE8, F::kI8, F::kI4, F::kI3, F::kI2, F::kC4, F::kC3, F::kC2}) {
    for (const F v : {F::kB16, F::kE8, F::kI8, F::kI4, F::kI3, F::kI2, F::kC4, F::kC3, F::kC2}) {
      for (const int dim : {8, 64, 72, 80, 96, 100, 128, 192, 256}) EXPECT_TRUE(path_of(k, v, dim)) << error;
    }
  }
  ASSERT_TRUE(path_of(F::kI3, F::kI4, 128));
  EXPECT_EQ(path, DecodePath::kTwoPass);
  ASSERT_TRUE(path_of(F::kI4, F::kI4, 96));
  EXPECT_EQ(path, DecodePath::kTwoPass);
}

}  // namespace
}  // namespace kvrt::simt

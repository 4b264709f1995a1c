// Fused decode on the executor against the double reference: every family, head size and head count, the lengths around page, tile
// and warp borders, exact segments and rings beside coded pages, both accumulation modes.

#include <cmath>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "tests/kernels/simt/decode_case.h"

namespace kvrt::simt {
namespace {

struct Families {
  const char *k, *v;
};
constexpr Families kFamilies[] = {
    {"int4.token.g", "int4.token.g"},     {"int4.token.g64", "int4.token.g32"}, {"bf16", "bf16"}, {"fp16", "fp16"},
    {"int8.token.g", "int8.token.g"},     {"int8.token.g32", "int8.token.g64"}, {"int8.token.g", "int4.token.g"},
};

class Decode : public ::testing::TestWithParam<std::tuple<Families, int>> {};

TEST_P(Decode, EveryLengthInEveryOrder) {
  const auto [families, head_dim] = GetParam();
  for (const std::int64_t n : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129}) {
    DecodeSpec spec;
    spec.head_dim = head_dim, spec.n_kv_heads = 1, spec.sequences = {{{families.k, families.v, n}}};
    const DecodeCase decode(spec);
    decode.expect_close(run_in_all_orders(decode, Accumulation::kExact), "length " + std::to_string(n));
  }
}

TEST_P(Decode, RaggedBatchWithSinksAndRing) {
  const auto [families, head_dim] = GetParam();
  DecodeSpec spec;
  spec.head_dim = head_dim;
  spec.sequences = {{{"bf16", "bf16", 4, 16}, {families.k, families.v, 391}, {"bf16", "bf16", 30, 16, true}},
                    {{families.k, families.v, 64}, {"bf16", "bf16", 17, 16, true}}};
  const DecodeCase decode(spec);
  for (const Accumulation a : {Accumulation::kExact, Accumulation::kTruncating}) decode.expect_close(run_in_all_orders(decode, a), "ragged");
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

std::string name_of(const ::testing::TestParamInfo<std::tuple<Families, int>>& info) {
  std::string name = std::string(std::get<0>(info.param).k) + "_" + std::get<0>(info.param).v + "_D" + std::to_string(std::get<1>(info.param));
  for (char& c : name) c = c == '.' ? '_' : c;
  return name;
}
INSTANTIATE_TEST_SUITE_P(Families, Decode, ::testing::Combine(::testing::ValuesIn(kFamilies), ::testing::Values(64, 128)), name_of);

DecodeSpec one_sequence(const std::string& k, const std::string& v, std::int64_t n) {
  DecodeSpec spec;
  spec.n_kv_heads = 1;
  spec.sequences = {{{k, v, n}}};
  return spec;
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
    const DecodeCase::Output output = decode.run(truncating);
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
  const DecodeCase::Output output = decode.run({});
  ASSERT_EQ(output.error, "");
  const double codes = 4096.0 * 128;  // K + V, half a byte a code
  EXPECT_GE(static_cast<double>(output.counts.load_bytes), codes);
  EXPECT_LT(static_cast<double>(output.counts.load_bytes), 3 * codes);  // parameters are read by each lane that needs them, from L1
  EXPECT_EQ(output.counts.matrix_products, 4096 / 16 * 16);
}

TEST(DecodeRefusals, ByName) {
  DecodeArgs args{};
  args.n_query_heads = 17, args.head_dim = 128;
  EXPECT_NE(decode_cuda(args, DecodeFamily::kI4, DecodeFamily::kI4, nullptr).text().find("not 17"), std::string::npos);
  args.n_query_heads = 8, args.head_dim = 80;
  EXPECT_NE(decode_cuda(args, DecodeFamily::kI4, DecodeFamily::kI4, nullptr).text().find("not 80"), std::string::npos);
  args.head_dim = 128;
  EXPECT_NE(decode_cuda(args, DecodeFamily::kB16, DecodeFamily::kI8, nullptr).text().find("K b16 with V i8"), std::string::npos);
  Scheme scheme;
  std::string error;
  DecodeFamily family;
  ASSERT_TRUE(parse_scheme("int3.token.g", &scheme, &error));
  EXPECT_FALSE(decode_family(make_page_codec(scheme, 3, 128, 64), &family, &error));
  EXPECT_NE(error.find("int8 and int4"), std::string::npos);
}

}  // namespace
}  // namespace kvrt::simt

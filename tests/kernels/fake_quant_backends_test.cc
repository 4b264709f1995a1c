// Every vector path gives the bits of the scalar page codecs, for every scheme, width and kind of data.

#include <cstring>
#include <functional>
#include <limits>

#include "kernels/core/isa.h"
#include "tests/kernels/fake_quant_fixture.h"
#include "tests/kernels/schemes.h"

namespace kvrt {
namespace {

using testing::Call;

const char* const kSchemes[] = {
    "bf16", "fp16", "bf16.pre", "int8.token.g", "int4.token.g", "int3.token.g", "int2.token.g", "int8.token.g32", "int4.token.g32",
    "int3.token.g32", "int2.token.g32", "int4.token.g64", "int3.token.g64", "int2.token.g64", "int4.token.g16", "int4.token.g8",
    "int4.token.g40", "int4.token.g128", "int4.token.g.had", "int4.token.g32.center", "int3.token.g64.center.had", "int2.token.g32.had",
    "int8.channel.g64.pre", "int4.channel.g32", "int4.channel.g64", "int4.channel.g128.pre", "int3.channel.g32", "int2.channel.g64",
    "int4.channel.g32.pre.center", "int3.channel.g32.center.had", "fp8e4m3.tensor", "fp8e4m3.head", "fp8e4m3.head.center.had",
    "fp8e4m3.token.g", "fp8e4m3.token.g32", "fp8e4m3.token.g.had", "fp8e5m2.tensor", "fp8e5m2.token.g32",
    "fp8e5m2.head.pre", "sint8.token.g", "sint4.token.g32", "sint4.token.g40.center", "sint8.token.g.had", "q8_0", "q4_0", "q4_1", "q5_0",
    "q5_1", "q8_0.had", "q4_0.had", "q5_1.had",
    "int8.tensor", "int4.head", "int3.tensor.center", "int8.channel.static.pre", "int4.channel.static", "int2.channel.static.pre.center",
    "sint8.head", "sint4.tensor", "sint4.token.g.smooth", "int4.token.g128.smooth", "int4.token.g.pre.center.smooth",
    "int4.token.g32.smooth.had", "int4.channel.g32.smooth", "fp8e4m3.head.smooth", "fp8e4m3.tensor.center.smooth.had", "lm4.token.g",
    "lm3.token.g", "lm2.token.g", "lm4.token.g.had", "lm3.token.g.had", "lm2.token.g.had", "lm4.token.g32.had", "lm3.token.g40",
    "lm2.token.g16", "lm4.token.g.center.had", "lm3.token.g.pre.center", "lm4.token.g64.smooth.had", "iq4_nl", "nvfp4", "mxfp4", "nvfp4.had",
    "mxfp4.had", "iq4_nl.had",
    "nuq4.token.g", "nuq3.token.g", "nuq2.token.g", "nuq4.channel.static.pre", "nuq2.channel.static.pre.center", "nuq3.token.g.center.smooth",
    "int4.token.g.ef", "int3.token.g32.ef", "int2.token.g32.ef", "int4.channel.g32.ef", "int4.channel.g64.pre.ef", "int3.channel.g64.pre.center.ef",
    "int2.channel.g128.ef", "int4.channel.static.pre.ef", "int3.head.ef", "sint4.token.g.ef", "sint4.tensor.ef", "nuq4.token.g.ef",
    "nuq3.channel.static.pre.ef", "lm4.token.g.ef", "lm3.token.g.had.ef", "lm2.token.g32.had.ef", "lm3.token.g.pre.ef", "int4.token.g.center.had.ef",
    "int4.token.g32.smooth.ef",
    "int4.token.g.clip", "int3.token.g32.center.clip", "int2.channel.g32.pre.clip", "int2.channel.g128.clip.ef", "fp8e4m3.token.g32.clip", "sint4.token.g.clip",
    "nuq4.token.g.clip", "int4.channel.g32.pair", "int4.channel.g64.pre.clip.pair.ef", "int4.token.g.pair", "int3.token.g32.clip.pair", "int4.token.g8.pair",
    "int4.token.g.out1", "int3.token.g32.out2", "int2.token.g.out0.5.ef", "int4.channel.g64.pre.out1", "int3.channel.g32.out2.ef", "int2.channel.g128.out0.5",
    "int4.channel.g32.clip.out1.pair", "int4.channel.static.pre.out1", "nuq3.channel.static.pre.out1", "nuq3.channel.static.pre.out2.ef", "nuq4.token.g.out1",
    "nuq2.token.g.clip.out2.ef", "int8.tensor.out1", "int4.head.center.out2", "int3.channel.g64.pre.center.smooth.clip.out1.pair.ef", "int4.token.g.had.out1",
    "int4.token.g.pre.lowrank32", "int8.token.g.lowrank8", "int3.token.g16.lowrank48", "int2.token.g.pre.lowrank20", "int8.token.g.pre.lowrank64",
    "fp8e4m3.token.g.lowrank36", "fp8e5m2.token.g8.pre.lowrank24", "lm4.token.g.pre.lowrank56", "lm3.token.g12.lowrank36", "lm2.token.g.lowrank7"};

/// Data that reach every branch: normal, one-sided, tiny, huge, constant rows, zeros, ties, values that are not finite.
void fill_mixed(Call* call, std::uint64_t seed) {
  calib::Rng rng(seed);
  const std::size_t row = static_cast<std::size_t>(call->n_heads * call->head_dim);
  const float inf = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < call->x.size(); ++i) {
    float v = static_cast<float>(rng.normal());
    switch (i / row % 16) {
      case 3: v = 600 + 0.01f * v; break;
      case 4: v *= 1e-6f; break;
      case 5: v *= 1e-40f; break;
      case 6: v *= 1e30f; break;
      case 7: v = 3.25f; break;
      case 8: v = 0; break;
      case 9: v = -0.0f; break;
      case 10: v = std::round(v * 4) / 4; break;
      case 11: v *= 3e4f; break;
      case 12: if (rng.below(9) == 0) v = rng.below(2) ? inf : NAN; break;
      case 13: v = static_cast<float>(rng.below(2) ? 2 : -2); break;
      case 14: v *= 3e38f; break;
      case 15: v *= 5e-5f; break;
      default: break;
    }
    call->x[i] = v;
  }
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b, const std::string& where) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    ASSERT_EQ(f32_bits(a[i]), f32_bits(b[i])) << where << " value " << i << ": " << a[i] << " against " << b[i];
  }
}

class Backends : public ::testing::TestWithParam<const char*> {};

TEST_P(Backends, EveryPathGivesTheBitsOfThePageCodecs) {
  const std::vector<WritePath> backends = write_paths();
  int n_shapes = 0;
  for (const int d : {64, 80, 96, 128, 192, 256, 72, 8, 100}) {
    for (const bool bf16 : {false, true}) {
      Call call(GetParam(), 128, 2, d);
      if (!check_shape(call.scheme, d, call.is_key).empty()) continue;
      ++n_shapes;
      // Half-split pairs, or side by side where halves cannot map groups onto groups.
      call.interleaved =
          call.scheme.pair && call.scheme.granularity == Granularity::kToken && call.scheme.group > 0 && !pairs_map_groups(d, false, d, call.scheme.group);
      call.bf16 = bf16;
      fill_mixed(&call, static_cast<std::uint64_t>(d));
      if (is_llamacpp_block(call.scheme.format)) {
        for (int i = 0; i < d; ++i) call.block_order.push_back(i % 2 ? d / 2 + i / 2 : i / 2);
      }
      FakeQuantCounters expected;
      const std::vector<float> reference = call.reference(&expected);
      for (const WritePath& backend : backends) {
        FakeQuantCounters counters;
        const std::string where = std::string(GetParam()) + " " + backend.name + " D " + std::to_string(d);
        expect_same_bits(call.on(backend, &counters), reference, where);
        EXPECT_EQ(counters.non_finite, expected.non_finite) << where;
        EXPECT_EQ(counters.saturated, expected.saturated) << where;
        EXPECT_EQ(counters.floored, expected.floored) << where;
      }
    }
  }
  EXPECT_GT(n_shapes, 0);
}

INSTANTIATE_TEST_SUITE_P(Schemes, Backends, ::testing::ValuesIn(kSchemes), [](const auto& info) { return testing::test_name(info.param); });

TEST(FakeQuant, InPlaceStridedAndParallelCallsGiveTheSame) {
  for (const char* scheme : {"int4.token.g32.center.had", "int3.channel.g64", "q4_0", "fp8e4m3.token.g"}) {
    Call call(scheme, 704, 3, 64);
    call.fill_normal(7);
    const std::vector<float> expected = call.run();
    std::vector<float> in_place = call.x;
    FakeQuantArgs args = call.args(in_place.data());
    args.x = in_place.data();
    ASSERT_TRUE(fake_quant(args).ok());
    expect_same_bits(in_place, expected, scheme);

    const std::int64_t stride = 3 * 64 + 5;
    std::vector<float> wide(static_cast<std::size_t>(704 * stride), -7.0f), out(wide);
    for (std::size_t t = 0; t < 704; ++t) std::memcpy(&wide[t * stride], &call.x[t * 192], 192 * sizeof(float));
    args = call.args(out.data());
    args.x = wide.data();
    args.x_token_stride = args.out_token_stride = stride;
    const std::function<void(std::int64_t, const std::function<void(std::int64_t)>&)> backwards =
        [](std::int64_t n, const std::function<void(std::int64_t)>& body) {
          for (std::int64_t i = n; i-- > 0;) body(i);
        };
    args.parallel_for = &backwards;
    ASSERT_TRUE(fake_quant(args).ok());
    for (std::size_t t = 0; t < 704; ++t) {
      for (std::size_t i = 0; i < 192; ++i) ASSERT_EQ(f32_bits(out[t * stride + i]), f32_bits(expected[t * 192 + i]));
      for (std::size_t i = 192; i < static_cast<std::size_t>(stride); ++i) ASSERT_EQ(out[t * stride + i], -7.0f);
    }
  }
}

TEST(FakeQuant, TheForcedBackendIsTakenAndAnUnknownOneRefused) {
  Call call("int4.token.g", 16, 1, 64);
  call.fill_normal(1);
  const std::vector<float> expected = call.run();
  for (const char* name : {"ref", kBaselineName}) {
    setenv("KVRT_FORCE_BACKEND", name, 1);
    expect_same_bits(call.run(), expected, name);
  }
  setenv("KVRT_FORCE_BACKEND", "sse9", 1);
  std::vector<float> out(call.x.size());
  const Status status = fake_quant(call.args(out.data()));
  unsetenv("KVRT_FORCE_BACKEND");
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.text().find("'sse9'"), std::string::npos);
}

TEST(FakeQuant, BadCallsAreRefusedByName) {
  struct Case { const char *scheme, *part; Code code; void (*spoil)(FakeQuantArgs*); };
  static const std::int32_t twice[64] = {};
  static const float too_wide[1] = {1.5f};
  static const float bad[64] = {NAN}, twice_as_float[64] = {}, no_diagonal[64 * 65 / 2] = {};
  static const float off_grid[16] = {-1, -0.9f, -0.8f, -0.7f, -0.6f, -0.5f, -0.4f, -0.3f, 0, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f, 1};
  const Case cases[] = {
      {"int4.channel.g64", "n_tokens", Code::kArgument, [](FakeQuantArgs* a) { a->n_tokens = 65; }},
      {"int4.token.g32.center", "mean", Code::kArgument, [](FakeQuantArgs* a) { a->mean = nullptr; }},
      {"int4.token.g32.center", "finite", Code::kArgument, [](FakeQuantArgs* a) { a->mean = bad; }},
      {"fp8e4m3.head", "clip_hi", Code::kArgument, [](FakeQuantArgs* a) { a->clip_hi = nullptr; }},
      {"fp8e4m3.tensor", "clip_hi[0]", Code::kArgument, [](FakeQuantArgs* a) { a->clip_hi = bad; }},
      {"nvfp4", "clip_hi", Code::kArgument, [](FakeQuantArgs* a) { a->clip_hi = nullptr; }},
      {"int8.channel.static", "clip_lo is missing; expected 64", Code::kArgument, [](FakeQuantArgs* a) { a->clip_lo = nullptr; }},
      {"int4.head", "clip_hi is missing; expected 1", Code::kArgument, [](FakeQuantArgs* a) { a->clip_hi = nullptr; }},
      {"int8.channel.static", "clip_lo[0]", Code::kArgument, [](FakeQuantArgs* a) { a->clip_lo = bad; }},
      {"sint8.tensor", "in order", Code::kArgument, [](FakeQuantArgs* a) { std::swap(a->clip_lo, a->clip_hi); }},
      {"nuq4.token.g", "codebook is missing", Code::kArgument, [](FakeQuantArgs* a) { a->codebook = nullptr; }},
      {"nuq4.token.g", "multiple", Code::kArgument, [](FakeQuantArgs* a) { a->codebook = off_grid; }},
      {"nuq4.token.g", "ascending", Code::kArgument, [](FakeQuantArgs* a) { a->codebook = bad; }},
      {"int4.token.g.ef", "ef_u is missing", Code::kArgument, [](FakeQuantArgs* a) { a->ef_u = nullptr; }},
      {"int4.token.g.ef", "ef_order is missing", Code::kArgument, [](FakeQuantArgs* a) { a->ef_order = nullptr; }},
      {"int4.token.g.ef", "ef_order of head 0", Code::kArgument, [](FakeQuantArgs* a) { a->ef_order = twice; }},
      {"int4.token.g.ef", "diagonal element 0", Code::kArgument, [](FakeQuantArgs* a) { a->ef_u = no_diagonal; }},
      {"int4.token.g32.smooth", "smooth is missing", Code::kArgument, [](FakeQuantArgs* a) { a->smooth = nullptr; }},
      {"int4.token.g32.smooth", "smooth[0]", Code::kArgument, [](FakeQuantArgs* a) { a->smooth = twice_as_float; }},
      {"int4.token.g32", "x or out", Code::kArgument, [](FakeQuantArgs* a) { a->out = nullptr; }},
      {"int4.token.g32", "stride", Code::kArgument, [](FakeQuantArgs* a) { a->x_token_stride = 1; }},
      {"int4.token.g32", "token.g32", Code::kArgument, [](FakeQuantArgs* a) { a->head_dim = 40; }},
      {"int4.token.g32.pre", "'pre'", Code::kArgument, [](FakeQuantArgs* a) { a->is_key = false; }},
      {"int4.token.g32", "block_order", Code::kArgument, [](FakeQuantArgs* a) { a->block_order = twice; }},
      {"q4_0", "permutation", Code::kArgument, [](FakeQuantArgs* a) { a->block_order = twice; }},
      {"int4.token.g.lowrank8", "'pre'", Code::kArgument, [](FakeQuantArgs* a) { a->is_key = true; }},
      {"int4.token.g.pre.lowrank8", "basis_mean is missing; expected [n_heads, head_dim]", Code::kArgument, [](FakeQuantArgs* a) { a->basis_mean = nullptr; }},
      {"int4.token.g.pre.lowrank8", "basis_in is missing; expected [n_heads, head_dim, 8]", Code::kArgument, [](FakeQuantArgs* a) { a->basis_in = nullptr; }},
      {"int4.token.g.lowrank8", "basis is missing; expected [n_heads, 8, head_dim]", Code::kArgument, [](FakeQuantArgs* a) { a->basis = nullptr; }},
      {"int4.token.g.lowrank1", "basis holds a value that is not finite", Code::kArgument, [](FakeQuantArgs* a) { a->basis = bad; }},
      {"int4.token.g.lowrank64", "wider than head_dim 40", Code::kArgument, [](FakeQuantArgs* a) { a->head_dim = 40; }},
      {"int4.token.g16.lowrank24", "token.g16 does not divide rank 24", Code::kArgument, [](FakeQuantArgs*) {}},
      {"int4.token.g32.clip", "clip_alpha is missing", Code::kArgument, [](FakeQuantArgs* a) { a->clip_alpha = nullptr; }},
      {"int4.channel.g32.clip", "at most 1", Code::kArgument, [](FakeQuantArgs* a) { a->clip_alpha = too_wide; }},
      {"int4.channel.g32.clip", "more than 0", Code::kArgument, [](FakeQuantArgs* a) { a->clip_alpha = bad; }},
      {"int4.channel.g32.pair", "rotary_dim is 0", Code::kArgument, [](FakeQuantArgs* a) { a->rotary_dim = 0; }},
      {"int4.token.g32.pair", "do not map groups of 32", Code::kArgument, [](FakeQuantArgs* a) { a->rotary_dim = 48; }},
      {"int4.channel.g32.out1", "page_tokens is 48", Code::kArgument, [](FakeQuantArgs* a) { a->page_tokens = 48; }}};
  for (const Case& c : cases) {
    Call call(c.scheme, 64, 1, 64);
    std::vector<float> out(call.x.size());
    FakeQuantArgs args = call.args(out.data());
    c.spoil(&args);
    for (const Status& status : {fake_quant(args), fake_quant_reference(args)}) {
      EXPECT_EQ(status.code(), c.code) << c.scheme;
      EXPECT_NE(status.text().find(c.part), std::string::npos) << status.text();
    }
  }
}

}  // namespace
}  // namespace kvrt

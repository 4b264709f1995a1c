#include "libcalib/sens/evaluate.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "kernels/core/layout.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/expect_error.h"

namespace calib::sens {
namespace {

using test_fixture::no_params;
using test_fixture::OpenModel;
using test_fixture::random_documents;

EvalResult evaluate_all(const model::StreamingModel& model, const std::vector<text::Document>& documents, const std::vector<std::string>& names,
                        bool second_half = false, std::vector<Contender> extra = {}) {
  std::vector<Contender> contenders = std::move(extra);
  for (const std::string& name : names) contenders.push_back(uniform_contender(name, model.identity(), {4, 16}, no_params()));
  EvaluateOptions options;
  options.second_half = second_half;
  ThreadPool pool(1);
  EvalResult result;
  result.model = model.identity();
  evaluate(model, documents, contenders, options, pool, &result);
  return result;
}

Contender exact(const model::StreamingModel& model) {
  Contender c;
  c.header.name = "exact";
  c.header.kind = "uniform";
  c.layers.resize(static_cast<std::size_t>(model.n_layers()));
  for (LayerChange& layer : c.layers) layer.tiers = {0, 16, 4, 0};
  return c;
}

TEST(Evaluate, ExactCacheEqualsTheReference) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const EvalResult r = evaluate_all(m.model, random_documents(3, 90, 256), {"bf16:bf16"}, false, {exact(m.model)});
  ASSERT_EQ(r.contenders.size(), 2u);
  // The same keys and values met through the mixed path: what remains is rounding, as in the floor.
  EXPECT_LE(r.contenders[0].total.kld.mean, 3 * r.noise_floor.kld.mean + 1e-12);
  EXPECT_TRUE(r.contenders[0].total.same_top_p.mean == 100.0);
  EXPECT_GT(r.contenders[1].total.kld.mean, r.contenders[0].total.kld.mean);
  EXPECT_LT(r.contenders[1].total.kld.mean, 1e-3);
  EXPECT_GT(r.negative_control->total.kld.mean, 10 * r.noise_floor.kld.mean);
}

TEST(Evaluate, MoreBitsLoseLess) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const EvalResult r = evaluate_all(m.model, random_documents(4, 96, 256), {"int8.token.g:int8.token.g", "int4.token.g:int4.token.g", "int2.token.g:int2.token.g"});
  EXPECT_LT(r.contenders[0].total.kld.mean, 0.1 * r.contenders[1].total.kld.mean);
  EXPECT_LT(r.contenders[1].total.kld.mean, 0.3 * r.contenders[2].total.kld.mean);
  EXPECT_GT(*r.contenders[0].effective_bits_2048, *r.contenders[1].effective_bits_2048);
  EXPECT_FALSE(r.contenders[2].indistinguishable);
}

TEST(Evaluate, DocumentsInAnyOrderAndContendersAlone) {
  OpenModel m(test::make_tiny_model("m-mistral"));
  auto documents = random_documents(4, 60, 256);
  documents[2].ids.resize(41);
  const EvalResult a = evaluate_all(m.model, documents, {"int4.token.g:int3.token.g", "int3.token.g.pre:int4.token.g"});
  std::reverse(documents.begin(), documents.end());
  const EvalResult b = evaluate_all(m.model, documents, {"int3.token.g.pre:int4.token.g"});
  EXPECT_NEAR(a.contenders[1].total.kld.mean, b.contenders[0].total.kld.mean, 1e-12);
  EXPECT_NEAR(a.contenders[1].total.ppl_ratio.mean, b.contenders[0].total.ppl_ratio.mean, 1e-12);
  EXPECT_NEAR(a.contenders[1].total.kld.se, b.contenders[0].total.kld.se, 1e-12);
  EXPECT_EQ(a.contenders[1].total.kld_percentiles, b.contenders[0].total.kld_percentiles);
}

TEST(Evaluate, SecondHalfScoresThoseRowsOnly) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const EvalResult all = evaluate_all(m.model, random_documents(2, 80, 256), {"int4.token.g:int4.token.g"});
  const EvalResult half = evaluate_all(m.model, random_documents(2, 80, 256), {"int4.token.g:int4.token.g"}, true);
  EXPECT_EQ(all.settings.n_rows, 2 * (79 - 4));
  EXPECT_EQ(half.settings.n_rows, 2 * (79 - 40));
  EXPECT_EQ(half.contenders[0].total.n_rows, half.settings.n_rows);
}

// A preset without window and sinks reads even its own token coded; the same schemes with a window longer than the text lose only rounding.
TEST(Evaluate, WindowsProtect) {
  OpenModel m(test::make_tiny_model("m-qwen3"));
  std::vector<Contender> contenders;
  for (const std::int64_t window : {0, 16, 500}) contenders.push_back(uniform_contender("int2.token.g:int2.token.g", m.model.identity(), {0, window}, no_params()));
  const EvalResult r = evaluate_all(m.model, random_documents(3, 64, 256), {"bf16:bf16"}, false, contenders);
  EXPECT_GT(r.contenders[0].total.kld.mean, r.contenders[1].total.kld.mean);
  EXPECT_GT(r.contenders[1].total.kld.mean, 20 * r.contenders[2].total.kld.mean);
  EXPECT_NEAR(r.contenders[2].total.kld.mean, r.contenders[3].total.kld.mean, 0.5 * r.contenders[3].total.kld.mean);
}

// Layers of which every visible key is exact lose what BF16 does, whatever their scheme: only full layers are coded here.
TEST(Evaluate, MixedSlidingAndFullLayers) {
  OpenModel m(test::make_tiny_model("m-gemma3"));
  const auto documents = random_documents(3, 90, 256);
  ParamsProvider none = no_params();
  const auto contender = [&](const char* k) { return uniform_contender(std::string(k) + ":bf16", m.model.identity(), {4, 16}, none); };
  Contender sliding_coded = contender("bf16"), full_coded = contender("bf16");
  const Contender coded = contender("int2.token.g");
  for (std::size_t l = 0; l < 4; ++l) (l % 2 == 0 ? sliding_coded : full_coded).layers[l] = coded.layers[l];
  sliding_coded.header.name = "sliding", full_coded.header.name = "full";
  const EvalResult r = evaluate_all(m.model, documents, {"bf16:bf16"}, false, {sliding_coded, full_coded});
  ASSERT_EQ(r.contenders.size(), 3u);
  EXPECT_NEAR(r.contenders[0].total.kld.mean, r.contenders[2].total.kld.mean, 1e-3 * r.contenders[2].total.kld.mean);
  EXPECT_GT(r.contenders[1].total.kld.mean, 100 * r.contenders[2].total.kld.mean);
}

TEST(Evaluate, EffectiveBitsCountWhatTheRuntimeAllocates) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const Contender c = uniform_contender("bf16:bf16", m.model.identity(), {0, 0}, no_params());
  kvrt::LayerLayout layout;
  const LayerGeometry& g = m.model.identity().layers[0];
  layout.n_kv_heads = g.n_kv_heads;
  layout.head_dim = g.head_dim;
  layout.k = layout.v = kvrt::Scheme{};
  layout.tiers = {0, 0, 1, 0};
  const double bytes = static_cast<double>(kvrt::cache_bytes(layout, kvrt::CacheSide::kK, 2048) + kvrt::cache_bytes(layout, kvrt::CacheSide::kV, 2048));
  EXPECT_DOUBLE_EQ(*c.header.effective_bits_2048, bytes * 8 / (2.0 * 2048 * g.n_kv_heads * g.head_dim));
  EXPECT_GE(*c.header.effective_bits_2048, 16);
}

// SN-07: the scales that a plan stores are the scales that are measured.
TEST(Evaluate, StoredScalesAreApplied) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const ParamsProvider wide = [](std::size_t, Side, const kvrt::Scheme&, std::int64_t) {
    quant::SchemeParams p;
    p.clip_lo = {-16};
    p.clip_hi = {16};
    return p;
  };
  const auto contender = [&] { return uniform_contender("fp8e4m3.tensor:fp8e4m3.tensor", m.model.identity(), {4, 16}, wide); };
  Contender saturating = contender(), one_unit = contender();
  for (LayerChange& layer : saturating.layers) layer.k->params.clip_hi = layer.v->params.clip_hi = {0.25};
  one_unit.layers[1].k->params.clip_hi = {0.25};
  const EvalResult r = evaluate_all(m.model, random_documents(2, 70, 256), {}, false, {contender(), contender(), one_unit, saturating});
  EXPECT_EQ(r.contenders[0].total.kld.mean, r.contenders[1].total.kld.mean);
  EXPECT_GT(r.contenders[2].total.kld.mean, 2 * r.contenders[0].total.kld.mean);
  EXPECT_GT(r.contenders[3].total.kld.mean, r.contenders[2].total.kld.mean);
}

TEST(Evaluate, RefusesShortTextsAndUncalibratedSchemes) {
  OpenModel m(test::make_tiny_model("m-llama"));
  test::expect_error([&] { evaluate_all(m.model, random_documents(2, 5, 256), {"int4.token.g:int4.token.g"}); }, ErrorKind::kInfeasible, {"4"});
  test::expect_error([&] { uniform_contender("fp8e4m3.head:bf16", m.model.identity(), {4, 16}, no_params()); }, ErrorKind::kUsage, {"fp8e4m3.head"});
  test::expect_error([&] { uniform_contender("no-such-preset", m.model.identity(), {4, 16}, no_params()); }, ErrorKind::kUsage, {"no-such-preset"});
}

}  // namespace
}  // namespace calib::sens

#include "libcalib/plan/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "libcalib/plan/decision.h"
#include "libcalib/plan/verify.h"
#include "synthetic_sens.h"

namespace calib::plan {
namespace {

using plan_test::synthetic_sens;
using plan_test::tiny_model;
using testing::HasSubstr;

const std::vector<std::string> kSchemes = {"bf16", "fp8e4m3.head", "int8.token.g", "int4.token.g32", "int4.token.g64.center.had",
                                           "int4.channel.g64.pre", "int3.channel.g32.pre", "int3.token.g64", "int2.token.g32"};

SearchRequest request(const char* budget) {
  SearchRequest r;
  r.limits.budget = parse_budget(budget);
  r.limit_text = budget;
  return r;
}

sens::SensResult uneven(int n_layers = 10) {
  return synthetic_sens(tiny_model(n_layers), kSchemes, {0, 128}, [](int l, Side s) { return std::exp(2 * std::sin(3.7 * l + (s == Side::kK ? 1 : 0))); });
}

TEST(Planner, SearchedPlanHoldsTogether) {
  const sens::SensResult sens = uneven();
  EvidenceByLayer evidence;
  for (int l = 0; l < 10; ++l) evidence[l] = {14.2, 3.0, 2.0, 0.4, 1.5, 0.1};
  const Plan plan = search_plan(sens, evidence, request("4.5"));
  EXPECT_THAT(verify_plan(plan), testing::IsEmpty());
  EXPECT_LE(plan.summary.effective_bits, 4.5);
  EXPECT_GT(plan.summary.effective_bits, 4.3);
  EXPECT_TRUE(plan.summary.proven);
  ASSERT_TRUE(plan.summary.predicted);
  EXPECT_TRUE(plan.summary.predicted->unfitted);
  EXPECT_EQ(plan.layers.size(), 10u);
  for (const LayerPlan& layer : plan.layers)
    for (const Side side : {Side::kK, Side::kV}) {
      const UnitPlan& unit = layer.unit(side);
      EXPECT_EQ(unit.params.mean.empty(), !unit.scheme.center);
      EXPECT_EQ(unit.params.clip_hi.empty(), unit.scheme.granularity != kvrt::Granularity::kHead);
      std::map<std::string, int> rules;
      for (const Reason& r : unit.why) ++rules[r.rule];
      EXPECT_EQ(rules["score"], 1);
      EXPECT_EQ(rules["price"], 1);
      EXPECT_EQ(rules["outlier_ratio"], 1);
      EXPECT_GE(rules["cheaper"] + rules["dearer"], 1);
      EXPECT_EQ(unit.chan_perm, unit.scheme.pre ? "spread32" : "natural");
    }
  ASSERT_GE(plan.frontier.size(), 20u);
  for (std::size_t i = 1; i < plan.frontier.size(); ++i) {
    EXPECT_GT(plan.frontier[i].bytes, plan.frontier[i - 1].bytes);
    EXPECT_LT(plan.frontier[i].score, plan.frontier[i - 1].score);
  }
}

TEST(Planner, NoBaselineWithinTheBudgetPredictsLess) {
  for (const char* budget : {"3.2", "4.5", "6"}) {
    const Plan plan = search_plan(uneven(), {}, request(budget));
    std::map<std::string, Baseline> by_name;
    for (const Baseline& b : plan.baselines) by_name[b.name] = b;
    for (const char* name : {"uniform", "data_free_uniform", "k8v4", "edges_8bit", "random_mean", "data_free_plan"}) ASSERT_TRUE(by_name.count(name)) << name;
    for (const auto& [name, b] : by_name) {
      EXPECT_EQ(b.feasible, b.bytes <= plan.request.budget_bytes) << name;
      if (!b.feasible) continue;
      EXPECT_LE(plan.summary.predicted->score, b.score * (1 + 1e-12)) << name << ' ' << budget;
    }
    EXPECT_LT(plan.summary.predicted->score, by_name["random_mean"].score);
    // A uniform baseline is a pair that uniform_plan can rebuild to the same bytes.
    const Baseline& uniform = by_name["uniform"];
    quant::Preset preset = quant::resolve_preset(uniform.pair, 64);
    preset.window = uniform.window_tokens;
    const FitUnit fit = [](const LayerGeometry&, Side, const kvrt::Scheme&, std::vector<std::string>*) { return quant::SchemeParams{}; };
    EXPECT_EQ(uniform_plan(tiny_model(10), preset, Accounting{}, {}, fit).summary.bytes, uniform.bytes);
  }
}

TEST(Planner, LadderIsNestedAndEndsAtEightBits) {
  const sens::SensResult sens = uneven();
  const Plan plan = search_plan(sens, {}, request("3.2"));
  ASSERT_FALSE(plan.fallback.empty());
  std::map<std::pair<int, Side>, int> bits;
  for (const LayerPlan& layer : plan.layers)
    for (const Side side : {Side::kK, Side::kV}) bits[{layer.index, side}] = kvrt::code_bits(layer.unit(side).scheme.format);
  std::int64_t below = plan.summary.bytes;
  for (const Rung& rung : plan.fallback) {
    EXPECT_GE(rung.changes.size(), 1u);
    EXPECT_LE(rung.changes.size(), 2u);  // a tenth of 20 units
    EXPECT_GT(rung.bytes, below);
    below = rung.bytes;
    for (const RungChange& change : rung.changes) {
      int& now = bits[{change.layer, change.side}];
      EXPECT_GT(kvrt::code_bits(change.scheme.format), now);
      now = kvrt::code_bits(change.scheme.format);
      EXPECT_FALSE(kvrt::needs_calibration(change.scheme));
    }
  }
  for (const auto& [unit, width] : bits) EXPECT_GE(width, 8) << unit.first;
}

TEST(Planner, SameInputsGiveTheSamePlan) {
  const Plan a = search_plan(uneven(), {}, request("4.5")), b = search_plan(uneven(), {}, request("4.5"));
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (std::size_t l = 0; l < a.layers.size(); ++l) {
    EXPECT_EQ(a.layers[l].k.scheme, b.layers[l].k.scheme);
    EXPECT_EQ(a.layers[l].k.why, b.layers[l].k.why);
  }
  for (std::size_t i = 0; i < a.baselines.size(); ++i) EXPECT_EQ(a.baselines[i].score, b.baselines[i].score);
}

TEST(Planner, WindowPerLayer) {
  SearchRequest r = request("4.5");
  r.limits.window_per_layer = true;
  const Plan plan = search_plan(uneven(), {}, r);
  EXPECT_THAT(verify_plan(plan), testing::IsEmpty());
  EXPECT_TRUE(plan.request.window_per_layer);
}

TEST(Planner, MissingConstantsAreNamed) {
  sens::SensResult sens = synthetic_sens(tiny_model(2), {"fp8e4m3.head"}, {0}, [](int, Side) { return 1.0; });
  sens.params.erase("1/v/fp8e4m3.head");
  try {
    search_plan(sens, {}, request("9"));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kMismatch);
    EXPECT_THAT(e.what(), HasSubstr("layer 1 V fp8e4m3.head"));
  }
}

TEST(Planner, Uniform) {
  const ModelIdentity model = tiny_model(3);
  int fitted = 0;
  const FitUnit fit = [&](const LayerGeometry& g, Side, const kvrt::Scheme&, std::vector<std::string>* notes) {
    ++fitted;
    if (g.index == 1) notes->push_back("zero range in the unit: scale 1");
    quant::SchemeParams p;
    p.clip_hi = {2.0f};
    return p;
  };
  const Plan fp8 = uniform_plan(model, quant::resolve_preset("fp8-vllm", 64), Accounting{}, {}, fit);
  EXPECT_THAT(verify_plan(fp8), testing::IsEmpty());
  EXPECT_EQ(fitted, 6);
  EXPECT_EQ(fp8.sink_tokens, 0);
  EXPECT_EQ(fp8.window_tokens, 0);
  EXPECT_DOUBLE_EQ(fp8.summary.effective_bits, 8.0);
  EXPECT_EQ(fp8.summary.constants_bytes, 6 * 4);
  EXPECT_EQ(fp8.layers[1].k.why.back().rule, "fit");
  const Plan kivi = uniform_plan(model, quant::resolve_preset("kivi4", 64), Accounting{}, {}, fit);
  EXPECT_EQ(fitted, 6);  // data-free
  EXPECT_EQ(kivi.window_tokens, 128);
}

TEST(Planner, ReasonsSayWhatASchemeDoesAboutOutliers) {
  quant::UnitEvidence evidence;
  evidence.k_outlier_ratio = evidence.k_pre_outlier_ratio = 14.2;
  struct Row { const char *scheme, *remedy; };
  for (const Row& r : {Row{"int4.channel.g32", "ranges per channel keep them apart"}, Row{"nuq3.channel.static.pre", "ranges per channel keep them apart"},
                       Row{"int4.token.g.had", "rotation spreads"}, Row{"int4.token.g.smooth", "`smooth` shrink"}, Row{"int4.token.g.out1", "beside the codes"},
                       Row{"int8.token.g", "8 bits and more bear them"}, Row{"int4.token.g", "ranges per token"}}) {
    const std::vector<Reason> reasons = evidence_reasons(quant::parse_scheme(r.scheme), Side::kK, evidence);
    ASSERT_EQ(reasons[0].rule, "outlier_ratio");
    EXPECT_THAT(reasons[0].text, testing::AllOf(HasSubstr("key channel outlier ratio 14.2 > 6"), HasSubstr(r.remedy))) << r.scheme;
    EXPECT_THAT(evidence_reasons(quant::parse_scheme(r.scheme), Side::kV, evidence)[0].text, HasSubstr("no channel stands out"));
  }
}

// Layers without a cache have numbers, too: the first and last two with one are what the edges baseline protects.
TEST(Planner, EdgesAreTheFirstAndLastLayersThatHaveACache) {
  ModelIdentity gaps = tiny_model(6), plain = gaps;
  const int numbers[] = {3, 7, 11, 15, 19, 23};
  for (std::size_t l = 0; l < 6; ++l) gaps.layers[l].index = numbers[l];
  gaps.n_layers = 24;
  const auto edges = [](const ModelIdentity& model, const auto& position) {
    const sens::SensResult sens =
        synthetic_sens(model, {"bf16", "int8.token.g", "int4.token.g", "int3.token.g"}, {128}, [&](int layer, Side) { return 1.0 + position(layer); });
    const Plan plan = search_plan(sens, {}, request("5.5"));
    for (const Baseline& b : plan.baselines)
      if (b.name == "edges_8bit") return std::pair(b.bytes, b.score);
    ADD_FAILURE() << "no baseline of that name";
    return std::pair<std::int64_t, double>(0, 0);
  };
  EXPECT_EQ(edges(gaps, [](int layer) { return (layer - 3) / 4; }), edges(plain, [](int layer) { return layer; }));
}

// CASES.md PL-02: shapes that do not fit are refused with sizes that would.
TEST(Planner, UniformChecksShapes) {
  for (const int head_dim : {96, 80, 100, 72}) {
    try {
      uniform_plan(tiny_model(2, 4, 2, head_dim), quant::resolve_preset("int4.token.g64:int4.token.g64", head_dim), Accounting{}, {}, {});
      ADD_FAILURE() << head_dim;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUsage);
      EXPECT_THAT(e.what(), HasSubstr("token.g64"));
      EXPECT_THAT(e.what(), HasSubstr(fmt::format("head_dim {}", head_dim)));
      EXPECT_THAT(e.what(), HasSubstr(head_dim == 96 ? "32, 48 or 96" : "use "));
    }
  }
}

TEST(Planner, BlockOrderFollowsTheFamily) {
  ModelIdentity model = tiny_model(1);
  EXPECT_EQ(block_order(quant::parse_scheme("q4_0"), Side::kK, model.layers[0]), "half_split");
  model.layers[0].llamacpp_adjacent_pairs = true;
  EXPECT_EQ(block_order(quant::parse_scheme("q4_0"), Side::kK, model.layers[0]), "adjacent");
  EXPECT_EQ(block_order(quant::parse_scheme("q4_0"), Side::kV, model.layers[0]), "");
  EXPECT_EQ(block_order(quant::parse_scheme("int4.token.g"), Side::kK, model.layers[0]), "");
}

}  // namespace
}  // namespace calib::plan

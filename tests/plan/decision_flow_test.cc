#include "libcalib/plan/decision_flow.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "libcalib/plan/planner.h"
#include "libcalib/plan/verify.h"
#include "synthetic_sens.h"

namespace calib::plan {
namespace {

using plan_test::synthetic_sens;
using plan_test::tiny_model;
using testing::HasSubstr;

const std::vector<std::string> kSchemes = {
    "bf16",           "int8.token.g",         "int4.token.g32", "int4.token.g64.had", "int4.token.g64.center.had", "int4.channel.g64.pre", "int4.channel.g64",
    "int3.token.g64", "int3.channel.g32.pre", "int2.token.g32"};

sens::SensResult uneven(int n_layers = 8) {
  return synthetic_sens(tiny_model(n_layers), kSchemes, {0, 128}, [](int l, Side s) { return std::exp(2 * std::sin(3.7 * l + (s == Side::kK ? 1 : 0))); });
}

SearchRequest request(const char* budget, std::int64_t context = 8192) {
  SearchRequest r;
  r.limits.budget = parse_budget(budget);
  r.limit_text = budget;
  r.accounting.context_tokens = context;
  return r;
}

std::map<std::string, Reason> steps_of(const Plan& plan) {
  std::map<std::string, Reason> steps;
  for (const Reason& step : plan.decision) EXPECT_TRUE(steps.emplace(step.rule, step).second) << step.rule << " twice";
  return steps;
}
std::map<std::string, double> numbers_of(const Reason& step) { return {step.numbers.begin(), step.numbers.end()}; }

TEST(DecisionFlow, EveryQuestionIsAnswered) {
  EvidenceByLayer evidence;
  for (int l = 0; l < 8; ++l) evidence[l] = {l < 3 ? 14.2 : 2.0, 3.0, 2.0, 0.4, 1.5, 0.1};
  const Plan plan = search_plan(uneven(), evidence, request("4.5"));
  std::map<std::string, Reason> steps = steps_of(plan);
  for (const char* rule : {"asked", "bf16", "candidates", "outliers", "frame", "ranges", "bits", "group", "rotation", "transforms", "window", "curves", "chosen"})
    EXPECT_TRUE(steps.count(rule)) << rule;
  EXPECT_THAT(steps["asked"].text, HasSubstr("4.5 effective bits at 8192 tokens x batch 1"));
  EXPECT_THAT(steps["bf16"].text, HasSubstr("3.56 times the budget: not affordable"));
  EXPECT_THAT(steps["outliers"].text, HasSubstr("keys 3 of 8 after RoPE"));
  EXPECT_EQ(numbers_of(steps["chosen"])["score"], plan.summary.predicted->score);
  // No alternative at the same bytes predicts less than what was chosen.
  for (const char* rule : {"frame", "ranges", "bits", "group", "rotation", "window"}) {
    const std::map<std::string, double> numbers = numbers_of(steps[rule]);
    EXPECT_FALSE(numbers.empty()) << rule;
    for (const auto& [name, score] : numbers) EXPECT_GE(score, plan.summary.predicted->score * (1 - 1e-12)) << rule << ' ' << name;
  }
  EXPECT_TRUE(steps_of(search_plan(uneven(), {}, request("4.5")))["outliers"].numbers.empty());
}

TEST(DecisionFlow, AlternativesAreTheirOwnOptima) {
  const sens::SensResult sens = uneven();
  const Plan plan = search_plan(sens, {}, request("4.5"));
  // "All after RoPE" is the plan of a candidate list without `pre`.
  std::vector<std::string> post;
  for (const std::string& s : kSchemes)
    if (s.find(".pre") == std::string::npos) post.push_back(s);
  Restrictions r;
  r.k = post;
  const Candidates c(sens, Accounting{}, "", {}, r);
  Limits limits;
  limits.budget = parse_budget("4.5");
  EXPECT_NEAR(numbers_of(steps_of(plan)["frame"])["all after"], search(c, limits).score, 1e-15);
}

TEST(DecisionFlow, SixteenBitsThatFitAreTaken) {
  // Exactly 16 bits: bf16 without tiers takes no more.
  for (const char* budget : {"16", "40", "1GiB"}) {
    const Plan plan = search_plan(uneven(), {}, request(budget));
    EXPECT_THAT(verify_plan(plan), testing::IsEmpty()) << budget;
    for (const LayerPlan& layer : plan.layers)
      for (const Side side : {Side::kK, Side::kV}) {
        EXPECT_EQ(kvrt::to_string(layer.unit(side).scheme), "bf16");
        EXPECT_EQ(layer.unit(side).why.front().rule, "bf16");
      }
    EXPECT_EQ(plan.summary.effective_bits, 16);
    EXPECT_EQ(plan.sink_tokens + plan.window_tokens, 0);
    EXPECT_THAT(steps_of(plan)["bf16"].text, HasSubstr("affordable: nothing needs to be compressed"));
    EXPECT_FALSE(plan.summary.predicted);
  }
  // The same bytes for eight times the batch are not enough; neither is a list that does not hold bf16.
  SearchRequest many = request("60MiB");
  EXPECT_EQ(kvrt::to_string(search_plan(uneven(), {}, many).layers[0].k.scheme), "bf16");
  many.accounting.batch = 8;
  EXPECT_LE(search_plan(uneven(), {}, many).summary.bytes, 60 << 20);
  SearchRequest narrow = request("16");
  narrow.restrictions.k = {"int8.token.g"};
  EXPECT_EQ(kvrt::to_string(search_plan(uneven(), {}, narrow).layers[0].k.scheme), "int8.token.g");
  EXPECT_LT(search_plan(uneven(), {}, request("15.99")).summary.effective_bits, 16);
}

/// Scores of two schemes with the same bytes: centred (calibrated) and not; gain of the centred one as a share.
Plan margin_plan(double gain, double relative_se) {
  sens::SensResult sens = synthetic_sens(tiny_model(4), {"int4.token.g64.had", "int4.token.g64.center.had", "int8.token.g"}, {0}, [](int, Side) { return 1.0; });
  sens::ScoreTable& table = sens.scores["fisher_vec"];
  for (std::size_t u = 0; u < sens.units.size(); ++u) {
    const bool key = u % 2 == 0;
    table.mean[sens.index(u, 1, 0)] *= key ? 1 - gain : 1.0;
    for (std::size_t s = 0; s < 3; ++s) table.se[sens.index(u, s, 0)] = relative_se * table.mean[sens.index(u, s, 0)];
  }
  return search_plan(sens, {}, request("4.6"));
}

// METHODS.md 8: calibrated beats data-free by more than 2 SE, or the simpler one is emitted.
TEST(DecisionFlow, MarginRule) {
  const auto centred = [](const Plan& plan) { return std::count_if(plan.layers.begin(), plan.layers.end(), [](const LayerPlan& l) { return l.k.scheme.center; }); };
  // K: mean m and (1 - g) m with SE r of each, independent: the rule asks for g > 2 r sqrt(1 + (1 - g)^2).
  const Plan clear = margin_plan(0.5, 0.2), doubtful = margin_plan(0.5, 0.25);
  EXPECT_EQ(centred(clear), 4);
  EXPECT_EQ(centred(doubtful), 0);
  EXPECT_THAT(verify_plan(doubtful), testing::IsEmpty());
  EXPECT_EQ(doubtful.summary.constants_bytes, 0);
  std::map<std::string, double> numbers = numbers_of(steps_of(doubtful)["margin"]);
  EXPECT_NEAR(numbers["data_free"] - numbers["calibrated"], 4 * 0.5 * std::pow(4.0, -4), 1e-12);
  EXPECT_NEAR(numbers["se"], 4 * 0.25 * std::pow(4.0, -4) * std::sqrt(1.25), 1e-12);
  EXPECT_THAT(steps_of(doubtful)["margin"].text, HasSubstr("the data-free plan is taken"));
  EXPECT_THAT(steps_of(clear)["margin"].text, HasSubstr("calibration pays"));
  EXPECT_EQ(doubtful.summary.predicted->score, numbers["data_free"]);
  // Nothing calibrated is held against a data-free plan afterwards.
  for (const LayerPlan& layer : doubtful.layers)
    for (const Reason& r : layer.k.why) EXPECT_THAT(r.text, testing::Not(HasSubstr("center"))) << r.rule;
  for (const auto& [name, score] : numbers_of(steps_of(doubtful)["bits"])) EXPECT_GE(score, numbers["data_free"] * (1 - 1e-12)) << name;
  // A plan that needs no calibration has nothing to prove.
  EXPECT_EQ(steps_of(margin_plan(-0.5, 0.2)).count("margin"), 0u);
}

TEST(DecisionFlow, LimitsOnLossAreNotTraded) {
  SearchRequest r;
  r.limits.max_score = 0.02;
  r.limit_text = "max-kl 0.02";
  const Plan plan = search_plan(uneven(), {}, r);
  EXPECT_LE(plan.summary.predicted->score, 0.02);
  std::map<std::string, Reason> steps = steps_of(plan);
  EXPECT_EQ(steps.count("margin"), 0u);
  EXPECT_THAT(steps["asked"].text, HasSubstr("max-kl 0.02"));
  EXPECT_THAT(steps["bf16"].text, HasSubstr("no byte limit"));
}

}  // namespace
}  // namespace calib::plan

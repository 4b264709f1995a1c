// METHODS.md 5.6: a low-rank scheme may be chosen only where it beats the best plain one of its unit at equal or fewer bytes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>

#include "libcalib/plan/baseline.h"
#include "libcalib/plan/decision.h"
#include "libcalib/plan/planner.h"
#include "libcalib/plan/verify.h"
#include "synthetic_sens.h"

namespace calib::plan {
namespace {

using plan_test::synthetic_sens;
using plan_test::tiny_model;
using testing::AllOf;
using testing::HasSubstr;

// Of head_dim 64 int4 at rank 48 has 24 bytes of codes and 4 of ranges a token and head, as int3 has.
enum : std::size_t { kBf16, kInt8, kInt4, kInt3Channel, kInt3, kInt2, kLowRankK, kLowRankV, kNumber };
const std::vector<std::string> kSchemes = {
    "bf16", "int8.token.g", "int4.token.g", "int3.channel.g64.pre", "int3.token.g", "int2.token.g", "int4.token.g.pre.lowrank48", "int4.token.g.lowrank48"};

/// Scores by which low rank pays on both sides: attention losses of 8 (2 bits), 1 (3 bits), 0.2 (4 bits), 0.002 (8 bits), low rank 0.5, all +- 0.1
/// of themselves but for the plain ones of 3 bits and low rank, +- 0.1.
sens::SensResult paying(std::vector<std::int64_t> windows = {128}, const ModelIdentity& model = tiny_model(4)) {
  sens::SensResult sens = synthetic_sens(model, kSchemes, windows, [](int, Side) { return 1.0; });
  sens.data.documents_sha256 = std::string(64, 'e'), sens.calibration_data.documents_sha256 = std::string(64, 'd');
  sens::ScoreTable& spent = sens.scores["fisher_vec"];
  for (std::size_t u = 0; u < sens.units.size(); ++u)
    for (std::size_t w = 0; w < windows.size(); ++w) {
      spent.mean[sens.index(u, kLowRankK + u % 2, w)] = 0.2 * spent.mean[sens.index(u, kInt3, w)];
      spent.se[sens.index(u, kLowRankK + u % 2, w)] = 0.02 * spent.mean[sens.index(u, kInt3, w)];
    }
  const double losses[kNumber] = {1e-6, 0.002, 0.2, 1, 1, 8, 0.5, 0.5};
  for (const char* metric : {"attn_out", "attn_kl"}) {
    sens::ScoreTable& table = sens.scores[metric] = spent;
    for (std::size_t u = 0; u < sens.units.size(); ++u)
      for (std::size_t s = 0; s < kNumber; ++s)
        for (std::size_t w = 0; w < windows.size(); ++w) {
          const bool scored = sens.valid[u * kNumber + s] != 0;
          table.mean[sens.index(u, s, w)] = scored ? losses[s] : std::numeric_limits<double>::quiet_NaN();
          table.se[sens.index(u, s, w)] = scored ? (s >= kInt3Channel && s != kInt2 ? 0.1 : 0.1 * losses[s]) : std::numeric_limits<double>::quiet_NaN();
        }
  }
  return sens;
}
/// Of every key, or every value.
void set(sens::SensResult& sens, const char* metric, Side side, std::size_t scheme, double mean, std::size_t window = 0) {
  for (std::size_t u = 0; u < sens.units.size(); ++u)
    if (sens.units[u].side == side) sens.scores[metric].mean[sens.index(u, scheme, window)] = mean;
}

SearchRequest request(const char* budget) {
  SearchRequest r;
  r.limits.budget = parse_budget(budget);
  r.limit_text = budget;
  return r;
}
bool allowed(const sens::SensResult& sens, Side side) { return Candidates(sens, Accounting{}, "").allowed(0, side, side == Side::kK ? kLowRankK : kLowRankV); }
/// Of layer 0.
LowRankVerdict verdict(const sens::SensResult& sens, Side side) {
  const Candidates c(sens, Accounting{}, "");
  for (const LowRankVerdict& v : c.low_rank())
    if (v.layer == 0 && v.side == side) return v;
  ADD_FAILURE() << "no verdict";
  return {};
}
double number(const LowRankVerdict& v, const char* name) {
  for (const auto& [key, value] : v.numbers)
    if (key == name) return value;
  ADD_FAILURE() << name;
  return 0;
}
Reason step_of(const Plan& plan, const char* rule) {
  for (const Reason& step : plan.decision)
    if (step.rule == rule) return step;
  return {};
}

TEST(LowRankAcceptance, WhatPaysIsTakenAndShown) {
  const sens::SensResult sens = paying();
  const Plan plan = search_plan(sens, {}, request("4.2"));
  EXPECT_THAT(verify_plan(plan), testing::IsEmpty());
  for (const LayerPlan& layer : plan.layers) {
    EXPECT_EQ(kvrt::to_string(layer.k.scheme), "int4.token.g.pre.lowrank48");
    EXPECT_EQ(kvrt::to_string(layer.v.scheme), "int4.token.g.lowrank48");
    EXPECT_EQ(layer.k.chan_perm, "natural");
    EXPECT_EQ(layer.k.params.basis_mean.size(), 128u);
    EXPECT_EQ(layer.v.params.basis.size(), 2u * 48 * 64);
    const auto why = std::find_if(layer.k.why.begin(), layer.k.why.end(), [](const Reason& r) { return r.rule == "lowrank"; });
    ASSERT_NE(why, layer.k.why.end());
    EXPECT_THAT(why->text, AllOf(HasSubstr("int4.token.g.pre.lowrank48 accepted: attn_out 5.000e-01"), HasSubstr("against 1.000e+00 of int3.channel.g64.pre"),
                                 HasSubstr("; attn_kl ")));
  }
  EXPECT_THAT(step_of(plan, "lowrank").text,
              AllOf(HasSubstr("a basis in 8 of 8 units"), HasSubstr("8 of 8 low-rank options beat the best plain scheme"), HasSubstr("; none ")));
  EXPECT_EQ(plan.summary.constants_bytes, 4 * 2 * 4 * (128 + 2 * 2 * 48 * 64));
  // Without such candidates there is nothing to tell.
  EXPECT_EQ(
      step_of(search_plan(synthetic_sens(tiny_model(2), {"int4.token.g", "int2.token.g"}, {0}, [](int, Side) { return 1.0; }), {}, request("4.5")), "lowrank")
          .text,
      "");
}

// Difference 0.5, standard error hypot(0.1, 0.1) = 0.1414: two of them are 0.283.
TEST(LowRankAcceptance, TwoStandardErrorsOnEveryMetricOfTheSide) {
  for (const auto& [loss, accepted] : {std::pair(0.71, true), std::pair(0.72, false), std::pair(1.5, false)}) {
    sens::SensResult sens = paying();
    set(sens, "attn_out", Side::kV, kLowRankV, loss);
    EXPECT_EQ(allowed(sens, Side::kV), accepted) << loss;
    EXPECT_TRUE(allowed(sens, Side::kK));
    for (const char* metric : {"attn_out", "attn_kl"}) {
      sens = paying();
      set(sens, metric, Side::kK, kLowRankK, loss);
      EXPECT_EQ(allowed(sens, Side::kK), accepted) << metric << loss;
      EXPECT_TRUE(allowed(sens, Side::kV));
    }
    // attn_kl says nothing of values.
    sens = paying();
    set(sens, "attn_kl", Side::kV, kLowRankV, loss);
    EXPECT_TRUE(allowed(sens, Side::kV));
  }
  sens::SensResult sens = paying();
  set(sens, "attn_kl", Side::kK, kLowRankK, 0.9);
  const LowRankVerdict left_out = verdict(sens, Side::kK);
  EXPECT_FALSE(left_out.accepted);
  EXPECT_THAT(left_out.text, AllOf(HasSubstr("int4.token.g.pre.lowrank48 left out: attn_kl 9.000e-01 at "),
                                   HasSubstr("against 1.000e+00 of int3.channel.g64.pre"), HasSubstr("not more than 2 SE (2.8e-01)")));
  EXPECT_DOUBLE_EQ(number(left_out, "attn_kl"), 0.9);
  EXPECT_DOUBLE_EQ(number(left_out, "attn_kl_plain"), 1.0);
  EXPECT_NEAR(number(left_out, "attn_kl_se"), 0.1414, 1e-4);
  std::vector<std::string> notes;
  LogSink log;
  log.note = [&](const std::string& text) { notes.push_back(text); };
  const Plan plan = search_plan(sens, {}, request("4.2"), log);
  for (const LayerPlan& layer : plan.layers) EXPECT_EQ(layer.k.scheme.lowrank, 0);
  for (const LayerPlan& layer : plan.layers) EXPECT_EQ(layer.v.scheme.lowrank, 48);
  EXPECT_THAT(step_of(plan, "lowrank").text, AllOf(HasSubstr("a basis in 4 of 8 units; 4 of 8 low-rank options beat"),
                                                   HasSubstr("4 options left out, first layer 0 K"), HasSubstr("9.000e-01")));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0], HasSubstr("4 of 8 low-rank options"));
  // A standard error that is not known is no proof.
  sens = paying();
  for (double& se : sens.scores["attn_out"].se) se = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(allowed(sens, Side::kV));
}

TEST(LowRankAcceptance, TheBestPlainSchemeOfItsBytesIsTheMeasure) {
  // The best of several at the same bytes.
  sens::SensResult sens = paying();
  set(sens, "attn_out", Side::kK, kInt3, 0.6);
  EXPECT_FALSE(allowed(sens, Side::kK));
  EXPECT_THAT(verdict(sens, Side::kK).text, HasSubstr("of int3.token.g at"));
  sens = paying();
  set(sens, "attn_out", Side::kV, kLowRankV, 1.5);
  EXPECT_THAT(verdict(sens, Side::kV).text, HasSubstr("5.00e-01 more (2 SE 2.8e-01)"));
  // A cheaper one that is better counts, a dearer one that is better does not.
  sens = paying();
  set(sens, "attn_out", Side::kV, kInt2, 0.4);
  EXPECT_FALSE(allowed(sens, Side::kV));
  sens = paying();
  set(sens, "attn_out", Side::kV, kInt4, 1e-5);
  EXPECT_TRUE(allowed(sens, Side::kV));
  // Between two plain ones in bytes, it must beat the next: 28 bytes a token and head against 36.
  sens = paying();
  for (std::size_t u = 1; u < sens.units.size(); u += 2) sens.valid[u * kNumber + kInt3] = 0;
  EXPECT_FALSE(allowed(sens, Side::kV));
  EXPECT_THAT(verdict(sens, Side::kV).text, HasSubstr("2.000e-01 of int4.token.g at"));
  set(sens, "attn_out", Side::kV, kLowRankV, 0.01);
  for (std::size_t u = 1; u < sens.units.size(); u += 2) sens.scores["attn_out"].se[sens.index(u, kLowRankV, 0)] = 0.001;
  EXPECT_TRUE(allowed(sens, Side::kV));
  // Where all plain ones are cheaper the best of them is the measure, and 16 bit is none.
  sens = paying();
  for (std::size_t u = 1; u < sens.units.size(); u += 2)
    for (const std::size_t s : {kInt8, kInt4, kInt3}) sens.valid[u * kNumber + s] = 0;
  EXPECT_TRUE(allowed(sens, Side::kV));
  EXPECT_THAT(verdict(sens, Side::kV).text, HasSubstr("of int2.token.g at"));
  for (std::size_t u = 1; u < sens.units.size(); u += 2) sens.valid[u * kNumber + kInt2] = 0;
  EXPECT_THAT(verdict(sens, Side::kV).text, HasSubstr("no plain scheme was scored beside it"));
  // What the target takes away is a measure all the same.
  SearchRequest narrow = request("8");
  narrow.restrictions.v = {"int8.token.g", "int4.token.g.lowrank48"};
  sens = paying();
  set(sens, "attn_out", Side::kV, kInt3, 0.5);
  EXPECT_FALSE(candidates_of(sens, narrow).allowed(0, Side::kV, kLowRankV));
}

TEST(LowRankAcceptance, EveryWindowCounts) {
  sens::SensResult sens = paying({0, 128});
  EXPECT_TRUE(allowed(sens, Side::kV));
  set(sens, "attn_out", Side::kV, kLowRankV, 0.9, 1);
  EXPECT_FALSE(allowed(sens, Side::kV));
  EXPECT_THAT(verdict(sens, Side::kV).text, HasSubstr(", window 128"));
}

TEST(LowRankAcceptance, WithoutHeldOutScoresItIsLeftOut) {
  sens::SensResult sens = paying();
  sens.scores.erase("attn_kl");
  EXPECT_THAT(verdict(sens, Side::kK).text, AllOf(HasSubstr("hold no attn_kl"), HasSubstr("--metric fisher_vec,attn_kl,attn_out")));
  EXPECT_TRUE(allowed(sens, Side::kV));
  sens.scores.erase("attn_out");
  EXPECT_THAT(verdict(sens, Side::kV).text, HasSubstr("hold no attn_out"));
  const Plan plan = search_plan(sens, {}, request("4.2"));
  EXPECT_THAT(step_of(plan, "lowrank").text, AllOf(HasSubstr("a basis in 0 of 8 units; 0 of 8"), HasSubstr("hold no attn_")));
  sens = paying();
  sens.calibration_data.documents_sha256 = sens.data.documents_sha256;
  EXPECT_THAT(verdict(sens, Side::kV).text, HasSubstr("the text that its basis was fitted on"));
  sens = paying();
  sens.scores["attn_out"].mean.pop_back();
  EXPECT_THROW(Candidates(sens, Accounting{}, ""), Error);
}

TEST(LowRankAcceptance, AUnitWithNothingElseIsNamed) {
  sens::SensResult sens = paying();
  set(sens, "attn_out", Side::kV, kLowRankV, 0.9);
  SearchRequest only = request("4.2");
  only.restrictions.v = {"int4.token.g.lowrank48"};
  try {
    candidates_of(sens, only);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInfeasible);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("layer 0 V"), HasSubstr("int4.token.g.lowrank48 left out: attn_out 9.000e-01")));
  }
}

TEST(LowRankAcceptance, TheBasisTakesTheMeanAndSpreadsChannels) {
  quant::UnitEvidence evidence;
  evidence.k_pre_outlier_ratio = 14, evidence.k_pre_mean_ratio = 3;
  const std::vector<Reason> reasons = evidence_reasons(quant::parse_scheme("int4.token.g.pre.lowrank48"), Side::kK, evidence);
  ASSERT_EQ(reasons.size(), 2u);
  EXPECT_THAT(reasons[0].text, HasSubstr("the basis spreads them"));
  EXPECT_THAT(reasons[1].text, HasSubstr("subtracted"));
}

// Widths are those of a channel: 4 bits at rank 48 of 64 are 3.
TEST(LowRankAcceptance, WidthsAreThoseOfAChannel) {
  EXPECT_EQ(channel_bits(quant::parse_scheme("int8.token.g.lowrank16"), 64), 2);
  EXPECT_EQ(channel_bits(quant::parse_scheme("int8.token.g"), 64), 8);
  // Wide groups keep 4 bits of keys.
  EXPECT_FALSE(Candidates(paying({128}, tiny_model(4, 8, 2)), Accounting{}, "").allowed(0, Side::kK, kLowRankK));
  // No baseline of 8-bit keys is a basis, and the ladder raises one by its own width.
  sens::SensResult sens = paying();
  sens.schemes[kLowRankV] = "int8.token.g.lowrank24";
  for (const LayerGeometry& g : sens.model.layers)
    sens.params[std::to_string(g.index) + "/v/int8.token.g.lowrank24"] = {{"basis_mean", {2, 64}, std::vector<float>(128, 0.1f)},
                                                                          {"basis_in", {2, 1536}, std::vector<float>(3072, 0.1f)},
                                                                          {"basis", {2, 1536}, std::vector<float>(3072, 0.1f)}};
  const Plan plan = search_plan(sens, {}, request("4.2"));
  EXPECT_THAT(verify_plan(plan), testing::IsEmpty());
  ASSERT_EQ(kvrt::to_string(plan.layers[0].v.scheme), "int8.token.g.lowrank24");
  for (const Baseline& b : plan.baselines)
    if (b.name == "k8v4" || b.name == "edges_8bit") {
      EXPECT_THAT(b.description.substr(0, b.description.find(", the others")), testing::Not(HasSubstr("lowrank"))) << b.name;
    }
  std::map<std::pair<int, Side>, kvrt::Scheme> top;
  for (const Rung& rung : plan.fallback)
    for (const RungChange& change : rung.changes) top[{change.layer, change.side}] = change.scheme;
  EXPECT_EQ(top.size(), 8u);
  for (const auto& [unit, scheme] : top) EXPECT_EQ(kvrt::to_string(scheme), "int8.token.g");
}

}  // namespace
}  // namespace calib::plan

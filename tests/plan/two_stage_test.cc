// Isolated runs in place of estimates: which are made, the slope, what a plan then costs.

#include "libcalib/plan/two_stage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "libcalib/plan/joint.h"
#include "libcalib/plan/planner.h"
#include "synthetic_sens.h"
#include "tests/support/expect_error.h"

namespace calib::plan {
namespace {

using plan_test::synthetic_sens;
using plan_test::tiny_model;
using test::expect_error;
using testing::HasSubstr;
using Score = std::function<double(int layer, Side side, std::size_t scheme, std::size_t window)>;

// Of one exit block but for the channel scheme, which only keys take; int4.token.g32 costs more than int4.token.g.
enum : std::size_t { kBf16, kInt8, kInt4, kInt4Fine, kInt3, kInt2, kInt2Channel, kNumber };
const std::vector<std::string> kSchemes = {"bf16", "int8.token.g", "int4.token.g", "int4.token.g32", "int3.token.g", "int2.token.g", "int2.channel.g64.pre"};
constexpr double kBaseBytes[kNumber] = {256, 132, 68, 72, 52, 36, 36};
constexpr double kAbove = 0.02;

/// Only 2 bits pass the limit, int4 and int3 lie in the range that is trusted, int4.token.g32 is dominated.
double estimate(std::size_t scheme) {
  constexpr double kEstimates[kNumber] = {2e-6, 1.5e-4, 0.003, 0.004, 0.012, 0.05, 0.04};
  return kEstimates[scheme];
}

sens::SensResult scores(const Score& score, int n_layers = 4, std::vector<std::int64_t> windows = {128}) {
  sens::SensResult sens = synthetic_sens(tiny_model(n_layers), kSchemes, windows, [](int, Side) { return 1.0; });
  sens::ScoreTable& table = sens.scores["fisher_vec"];
  for (std::size_t u = 0; u < sens.units.size(); ++u)
    for (std::size_t s = 0; s < kNumber; ++s) {
      if (!sens.valid[u * kNumber + s]) continue;
      sens.base_bytes_per_token[u * kNumber + s] = kBaseBytes[s];
      for (std::size_t w = 0; w < windows.size(); ++w) {
        table.mean[sens.index(u, s, w)] = score(sens.units[u].layer, sens.units[u].side, s, w);
        table.se[sens.index(u, s, w)] = 0.1 * table.mean[sens.index(u, s, w)];
      }
    }
  return sens;
}
sens::SensResult alike(int n_layers = 4) {
  return scores([](int, Side, std::size_t s, std::size_t) { return estimate(s); }, n_layers);
}

/// What kvsens isolate does, with `truth` for its runs, each +- a twentieth.
void isolate(sens::SensResult& sens, const Score& truth, const std::vector<int>& layers = {}) {
  const IsolatedChoice choice = choose_isolated(Candidates(sens, Accounting{}, "fisher_vec"), kAbove, layers);
  sens::IsolatedRuns runs;
  runs.metric = "fisher_vec";
  runs.above = kAbove;
  runs.taken_up = choice.taken_up;
  runs.mean.assign(choice.cells.size(), std::numeric_limits<double>::quiet_NaN());
  runs.se = runs.mean;
  for (std::size_t i = 0; i < choice.cells.size(); ++i) {
    if (!choice.cells[i]) continue;
    const std::size_t w = i % sens.windows.size(), s = i / sens.windows.size() % kNumber;
    const sens::UnitId unit = sens.units[i / (sens.windows.size() * kNumber)];
    runs.mean[i] = truth(unit.layer, unit.side, s, w), runs.se[i] = 0.05 * runs.mean[i];
  }
  fit_slopes(sens, &runs);
  sens.isolated = std::move(runs);
}

SearchRequest request(const char* budget) {
  SearchRequest r;
  r.limits.budget = parse_budget(budget);
  return r;
}
std::vector<std::size_t> measured_schemes(const sens::SensResult& sens, const std::vector<std::uint8_t>& cells, std::size_t unit, std::size_t window = 0) {
  std::vector<std::size_t> out;
  for (std::size_t s = 0; s < kNumber; ++s)
    if (cells[sens.index(unit, s, window)]) out.push_back(s);
  return out;
}

TEST(ChooseIsolated, AllSurvivingOptionsOfUnitsAboveTheLimitAndNoOthers) {
  // Layers 1 and 3 stay below the limit, layer 2 passes it with its values alone, and in window 0 only.
  const sens::SensResult sens = scores(
      [](int layer, Side side, std::size_t s, std::size_t w) {
        const bool large = layer == 0 || (layer == 2 && side == Side::kV && w == 0);
        return estimate(s) * (large ? 1.0 : 0.3) * (w == 1 && s == kInt4 ? 2.0 : 1.0);
      },
      4, {0, 128});
  const Candidates c(sens, Accounting{}, "");
  const IsolatedChoice choice = choose_isolated(c, kAbove, {});
  EXPECT_EQ(choice.taken_up, (std::vector<std::uint8_t>{1, 1, 0, 0, 0, 1, 0, 0}));
  using testing::ElementsAre;
  // In window 128 int4.token.g is estimated at twice its loss, so that the finer groups, which cost more, are no longer dominated.
  for (const std::size_t unit : {0u, 1u, 5u}) {
    const bool key = unit == 0;
    EXPECT_EQ(measured_schemes(sens, choice.cells, unit, 0), key ? (std::vector<std::size_t>{kBf16, kInt8, kInt4, kInt3, kInt2, kInt2Channel})
                                                                 : (std::vector<std::size_t>{kBf16, kInt8, kInt4, kInt3, kInt2}));
    EXPECT_EQ(measured_schemes(sens, choice.cells, unit, 1), key ? (std::vector<std::size_t>{kBf16, kInt8, kInt4, kInt4Fine, kInt3, kInt2, kInt2Channel})
                                                                 : (std::vector<std::size_t>{kBf16, kInt8, kInt4, kInt4Fine, kInt3, kInt2}));
  }
  EXPECT_EQ(choice.n_replacing, 6u + 7 + 2 * (5 + 6));
  // Of the five units that are left, each gives one option of the trusted range, a hundredth of the limit and more.
  EXPECT_EQ(choice.n_fitting, 5u);
  for (const std::size_t unit : {2u, 3u, 4u, 6u, 7u}) {
    std::size_t n = 0;
    for (std::size_t s = 0; s < kNumber; ++s)
      for (std::size_t w = 0; w < 2; ++w)
        if (choice.cells[sens.index(unit, s, w)]) {
          ++n;
          const double x = sens.scores.at("fisher_vec").mean[sens.index(unit, s, w)];
          EXPECT_TRUE(x >= kAbove / 100 && x <= kAbove) << x;
        }
    EXPECT_EQ(n, 1u) << unit;
  }

  // Restricted to layer 2, layer 0 may only serve the slope.
  const IsolatedChoice part = choose_isolated(c, kAbove, {2});
  EXPECT_EQ(part.taken_up, (std::vector<std::uint8_t>{0, 0, 0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(part.n_replacing, 5u + 6);
  EXPECT_EQ(part.n_fitting, 7u);
  expect_error([&] { choose_isolated(c, kAbove, {2, 9}); }, ErrorKind::kUsage, {"--layers", "no attention layer 9"});
  // The higher the limit the less is taken up.
  EXPECT_EQ(choose_isolated(c, 1.0, {}).n_replacing, 0u);
}

TEST(ChooseIsolated, NothingToFitASlopeToIsSaidBeforeAnythingIsMeasured) {
  const sens::SensResult sens = scores([](int, Side, std::size_t s, std::size_t) { return s == kBf16 ? 2e-6 : 10 * estimate(kInt2); });
  expect_error([&] { choose_isolated(Candidates(sens, Accounting{}, ""), kAbove, {}); }, ErrorKind::kInfeasible, {"--above", "0.0002", "0.02", "needs 3"});
}

TEST(Slopes, PooledWhereAlikeAndApartWhereNot) {
  // Values at factors 1.2 and 1.3 beside keys at 1.3 and 1.2: nothing to tell apart.
  sens::SensResult sens = alike();
  isolate(sens, [](int, Side side, std::size_t s, std::size_t) { return estimate(s) * ((s == kInt4) == (side == Side::kK) ? 1.2 : 1.3); });
  // int4 and int3 of eight units lie in the range.
  EXPECT_EQ(sens.isolated->k.n_pairs, 16);
  EXPECT_NEAR(sens.isolated->k.value, std::sqrt(1.2 * 1.3), 1e-12);
  EXPECT_EQ(sens.isolated->k.value, sens.isolated->v.value);
  // Sixteen values +- h about their mean: sd = h sqrt(16 / 15), over sqrt(16).
  EXPECT_NEAR(sens.isolated->k.se_ln, 0.5 * std::log(1.3 / 1.2) * std::sqrt(16.0 / 15) / 4, 1e-12);

  isolate(sens, [](int, Side side, std::size_t s, std::size_t) { return estimate(s) * (side == Side::kK ? (s == kInt4 ? 1.2 : 1.3) : 2.0); });
  EXPECT_NEAR(sens.isolated->k.value, std::sqrt(1.2 * 1.3), 1e-12);
  EXPECT_NEAR(sens.isolated->v.value, 2.0, 1e-12);
  EXPECT_EQ(sens.isolated->k.n_pairs, 8);
  EXPECT_EQ(sens.isolated->v.n_pairs, 8);
  EXPECT_NEAR(sens.isolated->v.se_ln, 0, 1e-12);
}

TEST(Truth, DecadesSayWhereEstimatesStopBeingTrue) {
  sens::SensResult sens = alike();
  isolate(sens, [](int layer, Side side, std::size_t s, std::size_t) {
    if (s == kInt2 || s == kInt2Channel) return estimate(s) * (side == Side::kK ? 1.25 : 5.0) * (layer == 3 && side == Side::kV ? 2.0 : 1.0);
    return 1.25 * estimate(s);
  });
  const std::vector<TruthBucket> buckets = truth_by_decade(sens, *sens.isolated);
  // bf16, int8, int4, then int3 and 2 bits in one decade.
  ASSERT_EQ(buckets.size(), 8u);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    EXPECT_EQ(buckets[i].side, i < 4 ? Side::kK : Side::kV);
    EXPECT_EQ(buckets[i].decade, (std::vector<int>{-6, -4, -3, -2})[i % 4]);
  }
  for (const std::size_t i : {0u, 1u, 2u, 3u, 4u, 5u, 6u}) {
    EXPECT_TRUE(buckets[i].holds) << i;
    EXPECT_NEAR(buckets[i].ratio, 1.25, 1e-12) << i;
    EXPECT_NEAR(buckets[i].sd, 0, 1e-7) << i;
    EXPECT_EQ(buckets[i].n, i == 3 ? 12u : 4u) << i;
  }
  // Values, 1e-2 to 1e-1: int3 of four units at 1.25, int2 of three at 5 and of one at 10.
  const TruthBucket& last = buckets.back();
  const double mean = (4 * std::log(1.25) + 3 * std::log(5.0) + std::log(10.0)) / 8;
  double squares = 0;
  for (const double x : {1.25, 1.25, 1.25, 1.25, 5.0, 5.0, 5.0, 10.0}) squares += std::pow(std::log(x) - mean, 2);
  EXPECT_EQ(last.n, 8u);
  EXPECT_NEAR(last.ratio, std::exp(mean), 1e-12);
  EXPECT_NEAR(last.sd, std::sqrt(squares / 7), 1e-12);
  EXPECT_FALSE(last.holds);
  EXPECT_EQ(farthest_cell(sens, *sens.isolated), static_cast<std::int64_t>(sens.index(7, kInt2, 0)));
}

TEST(StagedScores, MeasuredOverTheSlopeAndTheRestStaysDominated) {
  sens::SensResult sens = scores([](int layer, Side, std::size_t s, std::size_t) { return estimate(s) * (layer == 1 ? 0.3 : 1.0); });
  const Score truth = [](int layer, Side side, std::size_t s, std::size_t) {
    return estimate(s) * (layer == 1 ? 0.3 : 1.0) * (s == kInt2 ? 7.0 : side == Side::kK ? 1.25 : 1.5);
  };
  isolate(sens, truth);
  ASSERT_NE(sens.isolated->k.value, sens.isolated->v.value);
  const sens::ScoreTable& table = sens.scores.at("fisher_vec");
  const Candidates c(sens, Accounting{}, "");
  EXPECT_EQ(c.metric(), "fisher_vec");
  for (std::size_t l = 0; l < 4; ++l)
    for (const Side side : {Side::kK, Side::kV})
      for (std::size_t s = 0; s < kNumber; ++s) {
        const std::size_t cell = sens.index(c.unit(l, side), s, 0);
        if (!c.allowed(l, side, s)) continue;
        EXPECT_EQ(c.taken_up(l, side), l != 1);
        EXPECT_EQ(c.estimate(l, side, s, 0), table.mean[cell]);
        if (l == 1) {  // as it was, also where it was measured for the slope
          EXPECT_EQ(c.score(l, side, s, 0), table.mean[cell]);
          EXPECT_EQ(c.standard_error(l, side, s, 0), table.se[cell]);
          continue;
        }
        const sens::IsolatedRuns::Slope& slope = sens.isolated->slope(side);
        if (s == kInt4Fine) {
          // Dominated by int4.token.g, whose estimate lies nearest: moved as that was, and dominated still.
          EXPECT_NEAR(c.score(l, side, s, 0), table.mean[cell] * c.score(l, side, kInt4, 0) / estimate(kInt4), 1e-15);
          EXPECT_GT(c.score(l, side, s, 0), c.score(l, side, kInt4, 0));
          continue;
        }
        const double score = truth(0, side, s, 0) / slope.value;
        EXPECT_NEAR(c.score(l, side, s, 0), score, 1e-12 * score);
        EXPECT_NEAR(c.standard_error(l, side, s, 0), score * std::hypot(0.05, slope.se_ln), 1e-12 * score);
      }
  for (const LayerGroup& group : c.groups({0}))
    for (const LayerOption& o : group.options) EXPECT_TRUE(group.layers[0] == 1 || (o.k != kInt4Fine && o.v != kInt4Fine));
}

TEST(StagedScores, WhatNothingMeasuredDominatesIsLeftOut) {
  sens::SensResult sens = alike();
  isolate(sens, [](int, Side, std::size_t s, std::size_t) { return estimate(s); });
  const std::size_t lost = sens.index(3, kInt3, 0);  // as if kvsens isolate had not had it
  sens.isolated->mean[lost] = sens.isolated->se[lost] = std::numeric_limits<double>::quiet_NaN();
  std::vector<std::string> notes;
  LogSink log;
  log.note = [&](const std::string& text) { notes.push_back(text); };
  const Candidates c(sens, Accounting{}, "", log);
  for (std::size_t l = 0; l < 4; ++l)
    for (const Side side : {Side::kK, Side::kV}) EXPECT_EQ(c.allowed(l, side, kInt3), !(l == 1 && side == Side::kV));
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_THAT(notes[0],
              HasSubstr("8 of 8 units by isolated runs, where fisher_vec passes 0.02 nats (K of 0-3; V of 0-3); their score is logit_kl over 1.00 (16 pairs)"));
  EXPECT_THAT(notes[1], HasSubstr("1 option left out, first layer 1 V int3.token.g"));
}

// bf16 loses nothing that could be told from 0, and neither a logarithm nor a ratio may trip over it.
TEST(StagedScores, ZeroIsAMeasurement) {
  sens::SensResult sens = scores([](int, Side, std::size_t s, std::size_t) { return s == kBf16 ? 0.0 : estimate(s); });
  isolate(sens, [](int, Side, std::size_t s, std::size_t) { return s == kBf16 ? 0.0 : 1.1 * estimate(s); });
  const Candidates c(sens, Accounting{}, "");
  EXPECT_EQ(c.score(0, Side::kK, kBf16, 0), 0.0);
  EXPECT_EQ(c.standard_error(0, Side::kK, kBf16, 0), 0.0);
  EXPECT_NEAR(sens.isolated->k.value, 1.1, 1e-12);
  std::size_t n_exact = 0;
  for (const LayerPlan& layer : search_plan(sens, {}, request("15")).layers)
    for (const Side side : {Side::kK, Side::kV}) n_exact += layer.unit(side).scheme == quant::parse_scheme("bf16");
  EXPECT_GE(n_exact, 5u);
}

// What the stage is for: an order that the estimator has wrong, between units and inside one.
TEST(TwoStage, PlansOfFewBitsFollowTheMeasuredOrder) {
  // Estimated, values of layer 0 bear 2 bits best, and 2-bit keys are best per channel; measured, the former lose thirty times as much,
  // and the latter eight times as much as estimated.
  const Score estimated = [](int layer, Side side, std::size_t s, std::size_t) {
    return s == kInt2Channel ? 0.021 : estimate(s) * (layer == 0 && side == Side::kV ? 0.8 : 1.0);
  };
  const Score truth = [&](int layer, Side side, std::size_t s, std::size_t w) {
    const double factor = s == kInt2 && layer == 0 && side == Side::kV ? 30.0 : s == kInt2Channel ? 8.0 : 1.0;
    return factor * estimated(layer, side, s, w);
  };
  sens::SensResult sens = scores(estimated);
  const auto loss = [&](const Plan& plan) {
    double sum = 0;
    for (const LayerPlan& layer : plan.layers)
      for (const Side side : {Side::kK, Side::kV})
        for (std::size_t s = 0; s < kNumber; ++s)
          if (layer.unit(side).scheme == quant::parse_scheme(kSchemes[s])) sum += truth(layer.index, side, s, 0);
    return sum;
  };
  const Plan before = search_plan(sens, {}, request("3"));
  EXPECT_EQ(before.layers[0].v.scheme, quant::parse_scheme("int2.token.g"));
  const auto per_channel = [](const Plan& plan) {
    return std::count_if(plan.layers.begin(), plan.layers.end(), [](const LayerPlan& l) { return l.k.scheme == quant::parse_scheme("int2.channel.g64.pre"); });
  };
  EXPECT_GT(per_channel(before), 0);
  EXPECT_FALSE(before.summary.predicted->isolated);
  isolate(sens, truth);
  const Plan after = search_plan(sens, {}, request("3"));
  EXPECT_GT(kvrt::code_bits(after.layers[0].v.scheme.format), 2);
  EXPECT_EQ(per_channel(after), 0);
  EXPECT_LE(after.summary.bytes, after.request.budget_bytes);
  EXPECT_LT(loss(after), 0.5 * loss(before));
  EXPECT_NEAR(after.summary.predicted->score, loss(after), 1e-9) << "slope 1: the sum of what was measured";

  // Recorded as the joint fit is: with the prediction, in the flow, and unit by unit.
  ASSERT_TRUE(after.summary.predicted->isolated);
  EXPECT_EQ(after.summary.predicted->isolated->n_units, 8u);
  EXPECT_EQ(after.summary.predicted->isolated->above, kAbove);
  EXPECT_NEAR(after.summary.predicted->isolated->slope_k, 1, 1e-12);
  const auto step = std::find_if(after.decision.begin(), after.decision.end(), [](const Reason& r) { return r.rule == "isolated"; });
  ASSERT_NE(step, after.decision.end());
  EXPECT_THAT(step->text, HasSubstr("8 of 8 units by isolated runs"));
  const auto why = std::find_if(after.layers[0].v.why.begin(), after.layers[0].v.why.end(), [](const Reason& r) { return r.rule == "isolated"; });
  ASSERT_NE(why, after.layers[0].v.why.end());
  EXPECT_THAT(why->text, HasSubstr("measured by an isolated run; the estimate was"));
  EXPECT_TRUE(std::none_of(before.decision.begin(), before.decision.end(), [](const Reason& r) { return r.rule == "isolated"; }));
}

// Uniform baselines and ties take what every layer has, also schemes that a unit had pruned.
TEST(TwoStage, PrunedSchemesStillHaveAPriceWhereTheirBettersMayNotBeTaken) {
  sens::SensResult sens = alike();
  isolate(sens, [](int, Side, std::size_t s, std::size_t) { return 1.5 * estimate(s); });
  SearchRequest only = request("6");
  only.restrictions.k = only.restrictions.v = {"int4.token.g32"};
  const Plan plan = search_plan(sens, {}, only);
  EXPECT_NEAR(plan.summary.predicted->score, 8 * estimate(kInt4Fine), 1e-12) << "measured over slope is the estimate of what dominates it";
  EXPECT_THAT(std::find_if(plan.layers[0].k.why.begin(), plan.layers[0].k.why.end(), [](const Reason& r) { return r.rule == "isolated"; })->text,
              HasSubstr("not measured"));
}

TEST(TwoStage, TheMetricIsThatOfTheRuns) {
  sens::SensResult sens = alike();
  sens.scores["logit_kl"] = sens.scores["fisher"] = sens.scores["fisher_vec"];
  EXPECT_EQ(Candidates(sens, Accounting{}, "").metric(), "logit_kl");
  isolate(sens, [](int, Side, std::size_t s, std::size_t) { return estimate(s); });
  EXPECT_EQ(Candidates(sens, Accounting{}, "").metric(), "fisher_vec");
  EXPECT_EQ(Candidates(sens, Accounting{}, "fisher_vec").metric(), "fisher_vec");
  expect_error([&] { Candidates(sens, Accounting{}, "fisher"); }, ErrorKind::kUsage, {"--metric fisher", "use --metric fisher_vec", "kvsens isolate"});
  expect_error([&] { Candidates(sens, Accounting{}, "logit_kl"); }, ErrorKind::kUsage, {"--metric logit_kl", "fisher_vec"});
  sens.isolated->mean.pop_back();
  expect_error([&] { Candidates(sens, Accounting{}, ""); }, ErrorKind::kMismatch, {"/isolated"});
}

// Joint runs test the sums of what was replaced.
TEST(TwoStage, JointRunsAreFittedToReplacedScores) {
  sens::SensResult sens = alike(12);
  isolate(sens, [](int layer, Side, std::size_t s, std::size_t) { return estimate(s) * (s == kInt2 ? 3.0 + layer : 1.25); });
  std::vector<std::vector<LayerOption>> choices;
  {
    const Candidates c(sens, Accounting{}, "");
    choices = joint_samples(c, 0, 16, 1);
  }
  sens::JointRuns joint;
  joint.n_layers = 12;
  for (const auto& choice : choices) {
    for (const LayerOption& o : choice)
      joint.k.push_back(static_cast<std::int64_t>(o.k)), joint.v.push_back(static_cast<std::int64_t>(o.v)), joint.tier_class.push_back(0);
    joint.kld.push_back(1.1 * predicted_score(choice)), joint.kld_se.push_back(0), joint.ln_ppl_ratio.push_back(joint.kld.back());
  }
  sens.joint = joint;
  const Candidates c(sens, Accounting{}, "");
  ASSERT_TRUE(c.fit());
  EXPECT_NEAR(c.fit()->slope, 1.1, 1e-9);
  EXPECT_NEAR(c.fit()->worst_factor, 1.0, 1e-9);
  EXPECT_NEAR(c.score(5, Side::kK, kInt2, 0), 1.1 * 8.0 * estimate(kInt2) / 1.25, 1e-9);
  sens.isolated.reset();
  EXPECT_GT(Candidates(sens, Accounting{}, "").fit()->worst_factor, 1.5) << "the estimates alone do not explain these runs";
}

}  // namespace
}  // namespace calib::plan

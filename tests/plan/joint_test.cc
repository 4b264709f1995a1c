#include "libcalib/plan/joint.h"

#include <cmath>
#include <functional>
#include <set>

#include <gtest/gtest.h>

#include "libcalib/base/error.h"
#include "libcalib/plan/planner.h"
#include "tests/plan/synthetic_sens.h"

namespace calib::plan {
namespace {

const std::vector<std::string> kSchemes = {"bf16", "int8.token.g", "int4.token.g32", "int3.token.g64", "int2.token.g64"};

sens::SensResult scores(int n_layers) {
  return plan_test::synthetic_sens(plan_test::tiny_model(n_layers), kSchemes, {32, 128},
                                   [](int layer, Side side) { return (1.0 + layer) * (side == Side::kK ? 3.0 : 1.0); });
}

/// n runs of each of two windows, whose measured loss is `loss(window index, sum of the scores)`, perplexity by `kappa`.
void add_joint_runs(sens::SensResult& sens, const std::function<double(std::size_t, double)>& loss, double kappa, std::size_t n = 6) {
  const Candidates candidates(sens, Accounting{}, "");
  sens::JointRuns joint;
  joint.n_layers = candidates.n_layers();
  for (const std::size_t window : {0u, 1u})
    for (const auto& choice : joint_samples(candidates, window, n, 1)) {
      for (const LayerOption& o : choice)
        joint.k.push_back(static_cast<std::int64_t>(o.k)), joint.v.push_back(static_cast<std::int64_t>(o.v)),
            joint.tier_class.push_back(static_cast<std::int64_t>(o.tier_class));
      joint.kld.push_back(loss(window, predicted_score(choice))), joint.kld_se.push_back(0), joint.ln_ppl_ratio.push_back(kappa * joint.kld.back());
    }
  sens.joint = std::move(joint);
}
void add_joint_runs(sens::SensResult& sens, double slope, double kappa) {
  add_joint_runs(sens, [&](std::size_t, double sum) { return slope * sum; }, kappa);
}

TEST(JointFit, ExactRunsGiveTheirSlope) {
  std::vector<JointRun> runs;
  for (int i = 1; i <= 10; ++i) runs.push_back({std::pow(10.0, -i / 3.0), 0.8 * std::pow(10.0, -i / 3.0), 0.9 * 0.8 * std::pow(10.0, -i / 3.0)});
  const JointFit fit = fit_joint(runs);
  EXPECT_EQ(fit.n_runs, 10u);
  EXPECT_NEAR(fit.slope, 0.8, 1e-12);
  EXPECT_NEAR(fit.kappa, 0.9, 1e-12);
  EXPECT_NEAR(fit.r2, 1.0, 1e-12);
  EXPECT_NEAR(fit.spearman, 1.0, 1e-12);
  EXPECT_NEAR(fit.worst_factor, 1.0, 1e-12);
  EXPECT_TRUE(fit.reliable());
}

TEST(JointFit, EachWindowHasItsSlope) {
  std::vector<JointRun> runs;
  for (int i = 1; i <= 6; ++i) {
    runs.push_back({std::exp(-i), 0.5 * std::exp(-i), 0, 0});
    runs.push_back({std::exp(-i), 1.25 * std::exp(-i), 0, 128});
  }
  runs.push_back({0.3, 0.3, 0, 32});  // alone: the slope of all
  const JointFit fit = fit_joint(runs);
  EXPECT_NEAR(fit.slope, std::exp((6 * std::log(0.5) + 6 * std::log(1.25)) / 13), 1e-12);
  ASSERT_EQ(fit.windows.size(), 2u);
  EXPECT_NEAR(fit.slope_of(0), 0.5, 1e-12);
  EXPECT_NEAR(fit.slope_of(128), 1.25, 1e-12);
  EXPECT_EQ(fit.slope_of(32), fit.slope);
  EXPECT_NEAR(fit.worst_factor, 1 / fit.slope, 1e-12);
}

TEST(JointFit, LargeLossesAmplifyEachOther) {
  std::vector<JointRun> runs;
  for (int i = 1; i <= 6; ++i)
    for (const auto& [window, slope] : {std::pair<std::int64_t, double>{0, 0.7}, {128, 1.1}}) {
      const double s = slope * std::exp(-i);
      runs.push_back({std::exp(-i), s * std::pow(s / 0.01, 0.1), 0, window});
    }
  const JointFit fit = fit_joint(runs);
  EXPECT_NEAR(fit.exponent, 1.1, 1e-9);
  EXPECT_NEAR(fit.worst_factor, 1, 1e-9);
  for (const JointRun& run : runs) {
    const double s = fit.slope_of(run.window) * run.predicted;
    EXPECT_NEAR(s * fit.level(s), run.kld, 1e-9 * run.kld);
  }
  runs.resize(10);
  EXPECT_EQ(fit_joint(runs).exponent, 1) << "too few to bend the line";
}

TEST(JointFit, RunsWeighByTheirError) {
  std::vector<JointRun> runs;
  for (int i = 1; i <= 12; ++i) runs.push_back({std::exp(-i), std::exp(-i), 0, 128, 0.01 * std::exp(-i)});
  for (std::size_t i = 9; i < 12; ++i) runs[i].kld *= 1.5, runs[i].kld_se = 0.5 * runs[i].kld;  // small losses, hardly measured
  const JointFit fit = fit_joint(runs);
  EXPECT_NEAR(fit.exponent, 1, 0.01);
  EXPECT_NEAR(fit.slope * fit.level(fit.slope * std::exp(-5)), 1, 0.01);
}

TEST(JointFit, PlansTakeTheCurveAtTheirOwnLoss) {
  sens::SensResult sens = scores(12);
  const auto curve = [](double s) { return 1.1 * s * std::pow(1.1 * s / 0.5, 0.15); };
  add_joint_runs(sens, [&](std::size_t, double sum) { return curve(sum); }, 1.0, 8);
  for (const char* budget : {"3.3", "4.5", "7"}) {
    SearchRequest request;
    request.limits.budget = parse_budget(budget);
    const Plan plan = search_plan(sens, {}, request);
    EXPECT_NEAR(plan.summary.predicted->kl(), curve(plan.summary.predicted->score), 2e-3 * plan.summary.predicted->kl()) << budget;
    EXPECT_NEAR(plan.baselines.front().score, curve(plan.baselines.front().score / plan.summary.predicted->joint->slope), 0.2 * plan.baselines.front().score)
        << "near the plan";
  }
  SearchRequest request;
  request.limits.max_score = 1.0;
  const Plan plan = search_plan(sens, {}, request);
  EXPECT_LE(curve(plan.summary.predicted->score), 1.003);
  EXPECT_GT(curve(plan.summary.predicted->score), 0.85);
}

TEST(JointFit, PlansTakeTheSlopeOfTheirWindow) {
  sens::SensResult sens = scores(12);
  const sens::SensResult plain = sens;
  const Candidates candidates(plain, Accounting{}, "");
  add_joint_runs(sens, [](std::size_t window, double sum) { return (window == 0 ? 0.8 : 1.2) * sum; }, 1.0);
  const Candidates fitted(sens, Accounting{}, "");
  for (const std::size_t window : {0u, 1u})
    EXPECT_NEAR(fitted.score(3, Side::kK, 2, window), (window == 0 ? 0.8 : 1.2) * candidates.score(3, Side::kK, 2, window), 1e-12);
  SearchRequest request;
  request.limits.budget = parse_budget("4.5");
  const Plan plan = search_plan(sens, {}, request);
  EXPECT_NEAR(plan.summary.predicted->joint->slope, plan.window_tokens == 32 ? 0.8 : 1.2, 1e-9);
  const std::vector<LayerOption> choice = choice_of(fitted, plan);
  EXPECT_NEAR(plan.summary.predicted->kl(), predicted_score(choice), 1e-12);
  EXPECT_NEAR(plan.summary.predicted->score, unfitted_score(fitted, choice), 1e-12);
}

TEST(JointFit, OneRunOffIsTheWorstAndDisorderIsUnreliable) {
  std::vector<JointRun> runs;
  for (int i = 0; i < 9; ++i) runs.push_back({std::exp(-i), std::exp(-i) * (i == 4 ? std::exp(0.9) : 1.0), 0});
  const JointFit fit = fit_joint(runs);
  EXPECT_NEAR(fit.slope, std::exp(0.1), 1e-12);
  EXPECT_NEAR(fit.worst_factor, std::exp(0.8), 1e-12);
  EXPECT_TRUE(fit.reliable());
  for (int i = 0; i < 9; ++i) runs[static_cast<std::size_t>(i)].kld = std::exp(-(i * 5 % 9));
  EXPECT_FALSE(fit_joint(runs).reliable());
  for (int i = 0; i < 9; ++i) runs[static_cast<std::size_t>(i)].kld = 2 * std::exp(-i);
  EXPECT_FALSE(fit_joint(runs).reliable()) << "twice the prediction is outside the limits however well ordered";
}

TEST(JointFit, ScoresFileWithRunsGivesFittedPlans) {
  sens::SensResult sens = scores(12);
  SearchRequest request;
  request.limits.budget = parse_budget("4.5");
  const Plan plain = search_plan(sens, {}, request);
  EXPECT_TRUE(plain.summary.predicted->unfitted);
  add_joint_runs(sens, 1.4, 0.5);
  const Plan fitted = search_plan(sens, {}, request);
  ASSERT_TRUE(fitted.summary.predicted->joint);
  EXPECT_FALSE(fitted.summary.predicted->unfitted);
  EXPECT_EQ(fitted.summary.predicted->joint->n_runs, 12u);
  EXPECT_NEAR(fitted.summary.predicted->joint->slope, 1.4, 1e-9);
  EXPECT_NEAR(fitted.summary.predicted->score, plain.summary.predicted->score, 1e-12);
  EXPECT_NEAR(fitted.summary.predicted->kl(), 1.4 * plain.summary.predicted->score, 1e-12);
  EXPECT_NEAR(fitted.summary.predicted->ln_ppl_ratio(), 0.7 * plain.summary.predicted->score, 1e-12);
  ASSERT_FALSE(fitted.baselines.empty());
  EXPECT_NEAR(fitted.baselines.front().score, 1.4 * plain.baselines.front().score, 1e-12);
  // A metric without nats predicts no KL, with or without runs.
  sens.scores["attn_out"] = sens.scores["fisher_vec"];
  EXPECT_FALSE(Candidates(sens, Accounting{}, "attn_out").fit());
}

TEST(JointFit, LimitsAreOnTheFittedLoss) {
  sens::SensResult sens = scores(12);
  add_joint_runs(sens, 1.4, 0.5);
  SearchRequest request;
  request.limits.max_score = 2.0;
  const Plan kl = search_plan(sens, {}, request);
  EXPECT_LE(kl.summary.predicted->kl(), 2.0);
  EXPECT_GT(kl.summary.predicted->kl(), 1.9);  // twelve layers of five schemes come close
  EXPECT_EQ(kl.request.max_kl, 2.0);
  request.limits.as_ppl_ratio = true;
  const Plan ratio = search_plan(sens, {}, request);
  EXPECT_LE(ratio.summary.predicted->ln_ppl_ratio(), 2.0);
  EXPECT_GT(ratio.summary.predicted->kl(), 3.0);
  EXPECT_EQ(ratio.request.max_kl, 2.0);
}

TEST(JointFit, UnreliableRunsWarn) {
  sens::SensResult sens = scores(12);
  add_joint_runs(sens, 3.0, 1.0);
  std::vector<std::string> warnings;
  LogSink log;
  log.warning = [&](const std::string& text) { warnings.push_back(text); };
  const Candidates candidates(sens, Accounting{}, "", log);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings.front().find("slope of 3.00"), std::string::npos) << warnings.front();
}

TEST(JointSamples, SpreadOverTheFrontierAndDiffer) {
  const sens::SensResult sens = scores(12);
  const Candidates candidates(sens, Accounting{}, "");
  const auto samples = joint_samples(candidates, 1, 32, 7), again = joint_samples(candidates, 1, 32, 7);
  ASSERT_EQ(samples.size(), 32u);
  std::set<std::vector<std::pair<std::size_t, std::size_t>>> distinct;
  double least = 1e9, most = 0;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    std::vector<std::pair<std::size_t, std::size_t>> pairs;
    std::int64_t bytes = 0;
    ASSERT_EQ(samples[i].size(), 12u);
    for (std::size_t l = 0; l < samples[i].size(); ++l) {
      EXPECT_EQ(samples[i][l].tier_class, 1u);
      EXPECT_EQ(samples[i][l].k, again[i][l].k);
      pairs.emplace_back(samples[i][l].k, samples[i][l].v);
      bytes += samples[i][l].bytes;
    }
    distinct.insert(pairs);
    const double bits = effective_bits(bytes, candidates.elements());
    least = std::min(least, bits), most = std::max(most, bits);
  }
  EXPECT_EQ(distinct.size(), 32u);
  EXPECT_LT(least, 3.2);
  EXPECT_GT(most, 7.0);
  EXPECT_LT(most, 9.0);
}

TEST(JointSamples, FewCombinationsAreAllThereIs) {
  const sens::SensResult sens = plan_test::synthetic_sens(plan_test::tiny_model(1), {"int8.token.g", "int4.token.g32"}, {128}, [](int, Side) { return 1.0; });
  const Candidates candidates(sens, Accounting{}, "");
  EXPECT_LE(joint_samples(candidates, 0, 32, 7).size(), 4u);
}

TEST(ChoiceOf, IsWhatTheSearchChose) {
  const sens::SensResult sens = scores(6);
  SearchRequest request;
  request.limits.budget = parse_budget("4.5");
  Plan plan = search_plan(sens, {}, request);
  const Candidates candidates(sens, Accounting{}, "");
  const std::vector<LayerOption> choice = choice_of(candidates, plan);
  EXPECT_NEAR(predicted_score(choice), plan.summary.predicted->score, 1e-12);
  plan.layers[2].v.scheme = quant::parse_scheme("int8.token.g32");
  try {
    choice_of(candidates, plan);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kMismatch);
    EXPECT_NE(std::string(e.what()).find("layer 2 V"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("int8.token.g32"), std::string::npos) << e.what();
  }
  plan.layers[2].v.scheme = quant::parse_scheme("int8.token.g");
  plan.layers[3].window_tokens = 64;
  EXPECT_THROW(choice_of(candidates, plan), Error);
}

}  // namespace
}  // namespace calib::plan

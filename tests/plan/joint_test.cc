#include "libcalib/plan/joint.h"

#include <cmath>
#include <set>

#include <gtest/gtest.h>

#include "libcalib/base/error.h"
#include "libcalib/plan/planner.h"
#include "tests/plan/synthetic_sens.h"

namespace calib::plan {
namespace {

const std::vector<std::string> kSchemes = {"bf16", "int8.token.g", "int4.token.g32", "int3.token.g64", "int2.token.g64"};

sens::SensResult scores(int n_layers) {
  return plan_test::synthetic_sens(plan_test::tiny_model(n_layers), kSchemes, {32, 128}, [](int layer, Side side) { return (1.0 + layer) * (side == Side::kK ? 3.0 : 1.0); });
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

TEST(JointFit, PlansTakeTheSlopeOfTheirWindow) {
  sens::SensResult sens = scores(12);
  const Candidates candidates(sens, Accounting{}, "");
  sens::JointRuns joint;
  joint.n_layers = candidates.n_layers();
  for (const std::size_t window : {0u, 1u})
    for (const auto& choice : joint_samples(candidates, window, 6, 1)) {
      for (const LayerOption& o : choice)
        joint.k.push_back(static_cast<std::int64_t>(o.k)), joint.v.push_back(static_cast<std::int64_t>(o.v)), joint.tier_class.push_back(static_cast<std::int64_t>(o.tier_class));
      joint.kld.push_back((window == 0 ? 0.8 : 1.2) * predicted_score(choice)), joint.kld_se.push_back(0), joint.ln_ppl_ratio.push_back(joint.kld.back());
    }
  sens.joint = std::move(joint);
  const Candidates fitted(sens, Accounting{}, "");
  for (const std::size_t window : {0u, 1u}) EXPECT_NEAR(fitted.score(3, Side::kK, 2, window), (window == 0 ? 0.8 : 1.2) * candidates.score(3, Side::kK, 2, window), 1e-12);
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

/// The sums of `sens` times `slope` as measured loss, perplexity by `kappa`.
void add_joint_runs(sens::SensResult& sens, double slope, double kappa) {
  const Candidates candidates(sens, Accounting{}, "");
  sens::JointRuns joint;
  joint.n_layers = candidates.n_layers();
  for (const std::size_t window : {0u, 1u})
    for (const auto& choice : joint_samples(candidates, window, 6, 1)) {
      for (const LayerOption& o : choice)
        joint.k.push_back(static_cast<std::int64_t>(o.k)), joint.v.push_back(static_cast<std::int64_t>(o.v)), joint.tier_class.push_back(static_cast<std::int64_t>(o.tier_class));
      joint.kld.push_back(slope * predicted_score(choice)), joint.kld_se.push_back(0), joint.ln_ppl_ratio.push_back(kappa * joint.kld.back());
    }
  sens.joint = std::move(joint);
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

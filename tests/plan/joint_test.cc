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

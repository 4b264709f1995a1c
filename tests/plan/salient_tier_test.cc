// Plans with a salient tier: bytes, choice by layer, what the token saliency allows, the file.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "kernels/core/plan_loader.h"
#include "libcalib/artifacts/plan_file.h"
#include "libcalib/plan/joint.h"
#include "libcalib/plan/planner.h"
#include "libcalib/plan/verify.h"
#include "libcalib/quant/token_tiers.h"
#include "synthetic_sens.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::plan {
namespace {

using test::expect_error;
using testing::HasSubstr;

const std::vector<std::string> kSchemes = {"bf16",           "int8.token.g",  "int4.token.g64", "int4.channel.g128", "int4.channel.g32.pre",
                                           "int3.token.g64", "int2.token.g64"};
const std::vector<double> kShares = {0, 0.1, 0.2};

/// Windows 16 and 128, each without a tier and with 0.1 and 0.2; keeps(layer, share) = what a tier leaves of a narrow scheme's loss.
template <typename Keeps>
sens::SensResult tiered_sens(int n_layers, Keeps keeps) {
  const ModelIdentity model = plan_test::tiny_model(n_layers);
  sens::SensResult sens = plan_test::synthetic_sens(model, kSchemes, {16, 16, 16, 128, 128, 128},
                                                    [](int l, Side s) { return std::exp(std::sin(3.7 * l + (s == Side::kK ? 1 : 0))); });
  for (int w = 0; w < 2; ++w) sens.salient_fractions.insert(sens.salient_fractions.end(), kShares.begin(), kShares.end());
  sens.salient_scheme = "fp8e4m3.token.g", sens.salient_score = quant::kTierScore;
  for (const LayerGeometry& g : model.layers) {
    quant::SaliencyFactors& f = sens.saliency[g.index];
    f.rank = 16;
    f.a.assign(static_cast<std::size_t>(g.n_q_heads * g.head_dim), 0.5f + static_cast<float>(g.index));
    f.m.assign(f.a.size() * 16, 0.25f);
  }
  for (std::size_t u = 0; u < sens.units.size(); ++u)
    for (std::size_t s = 0; s < sens.schemes.size(); ++s)
      for (std::size_t w = 0; w < sens.windows.size(); ++w)
        for (std::vector<double>* column : {&sens.scores["fisher_vec"].mean, &sens.scores["fisher_vec"].se})
          if (quant::takes_tier(quant::parse_scheme(sens.schemes[s]))) (*column)[sens.index(u, s, w)] *= keeps(sens.units[u].layer, sens.salient_fractions[w]);
  return sens;
}

/// A tier helps the even layers a lot, the odd ones not at all.
sens::SensResult even_layers(int n_layers = 8) {
  return tiered_sens(n_layers, [](int l, double share) { return share == 0 ? 1.0 : l % 2 == 0 ? (share < 0.15 ? 0.15 : 0.1) : 0.99; });
}

TierRules everywhere(const sens::SensResult& sens) {
  TierRules rules;
  for (const LayerGeometry& g : sens.model.layers) rules.layers[g.index].hit_rate = {{0.1, 0.9}, {0.2, 0.95}};
  return rules;
}

SearchRequest request_of(const char* budget, TierRules tiers = {}) {
  SearchRequest r;
  r.limits.budget = parse_budget(budget);
  r.limit_text = budget;
  r.tiers = std::move(tiers);
  return r;
}

std::size_t n_tiers(const Plan& plan) {
  return static_cast<std::size_t>(std::count_if(plan.layers.begin(), plan.layers.end(), [](const LayerPlan& l) { return l.salient_fraction > 0; }));
}

const Reason* find(const std::vector<Reason>& reasons, const char* rule) {
  for (const Reason& r : reasons)
    if (r.rule == rule) return &r;
  return nullptr;
}

TEST(SalientTierPlans, BytesOfEveryPairAreTheLayouts) {
  const sens::SensResult sens = even_layers(1);
  for (const std::int64_t context : {500, 8192, 8191})
    for (const int page : {32, 64, 128}) {
      Accounting a;
      a.context_tokens = context, a.page_tokens = page;
      const Candidates c(sens, a, "", {}, {}, everywhere(sens));
      for (std::size_t w = 0; w < sens.windows.size(); ++w)
        for (std::size_t k = 0; k < kSchemes.size(); ++k)
          for (std::size_t v = 0; v < kSchemes.size(); ++v) {
            if (!c.allowed(0, Side::kK, k) || !c.allowed(0, Side::kV, v)) continue;
            kvrt::LayerLayout layout;
            layout.n_kv_heads = 2, layout.head_dim = 64, layout.page_tokens = page;
            layout.k = quant::parse_scheme(kSchemes[k]), layout.v = quant::parse_scheme(kSchemes[v]), layout.salient = quant::parse_scheme("fp8e4m3.token.g");
            layout.tiers = kvrt::finish_tiers(layout.k, layout.v, 4, sens.windows[w], sens.salient_fractions[w]);
            EXPECT_EQ(c.bytes(0, k, v, w), kvrt::cache_bytes(layout, kvrt::CacheSide::kK, context) + kvrt::cache_bytes(layout, kvrt::CacheSide::kV, context))
                << kSchemes[k] << ':' << kSchemes[v] << ' ' << c.class_text(w) << ' ' << context << ' ' << page;
          }
    }
}

TEST(SalientTierPlans, LayersThatGainTakeOne) {
  const sens::SensResult sens = even_layers();
  const Plan plan = search_plan(sens, {}, request_of("4.5", everywhere(sens)));
  EXPECT_THAT(verify_plan(plan), testing::IsEmpty());
  ASSERT_TRUE(plan.salient);
  EXPECT_EQ(kvrt::to_string(plan.salient->scheme), "fp8e4m3.token.g");
  EXPECT_EQ(plan.salient->score, "expected_attention");
  EXPECT_LE(plan.summary.effective_bits, 4.5);
  for (const LayerPlan& layer : plan.layers) {
    EXPECT_EQ(layer.salient_fraction > 0, layer.index % 2 == 0) << layer.index;
    EXPECT_EQ(layer.saliency.a.empty(), layer.salient_fraction == 0);
    const Reason* const tier = find(layer.k.why, "tier");
    EXPECT_EQ(tier != nullptr, layer.salient_fraction > 0);
    if (layer.salient_fraction == 0) continue;
    for (const Side side : {Side::kK, Side::kV}) EXPECT_LT(kvrt::code_bits(layer.unit(side).scheme.format), 8) << "a tier beside a base that is no narrower";
    EXPECT_EQ(layer.saliency.a.front(), 0.5f + static_cast<float>(layer.index));
    EXPECT_THAT(tier->text, HasSubstr("hit rate 0.9"));
    EXPECT_THAT(tier->text, HasSubstr("fp8e4m3.token.g by expected_attention"));
  }
  EXPECT_EQ(n_tiers(plan), 4u);
  const Reason* const step = find(plan.decision, "tier");
  ASSERT_TRUE(step);
  EXPECT_THAT(step->text, HasSubstr("in 4 of 8 layers"));
  EXPECT_THAT(step->text, HasSubstr("; none "));
  // Nothing is lost by the choice, and the plan without one is worse at the same bytes.
  const Plan without = search_plan(sens, {}, request_of("4.5"));
  EXPECT_EQ(n_tiers(without), 0u);
  EXPECT_FALSE(without.salient);
  EXPECT_LT(plan.summary.predicted->score, 0.9 * without.summary.predicted->score);
  EXPECT_THAT(find(without.decision, "tier")->text, HasSubstr("--saliency"));
  for (const Baseline& b : plan.baselines) EXPECT_THAT(b.description, testing::Not(HasSubstr("salient")));
  // Constants that a plan holds for its tiers are stated, and counted where a budget is of memory.
  EXPECT_EQ(plan.summary.constants_bytes - without.summary.constants_bytes, 4 * 4 * 64 * 17 * 4);
}

TEST(SalientTierPlans, LayersThatAbstainKeepNone) {
  const sens::SensResult sens = even_layers();
  TierRules rules = everywhere(sens);
  for (const int l : {0, 4}) rules.layers[l] = {{}, "0.1: hit rate 0.510 < 0.70, 0.2: hit rate 0.560 < 0.70"};
  rules.layers[6].hit_rate.erase(0.2);
  const Plan plan = search_plan(sens, {}, request_of("4.5", rules));
  EXPECT_THAT(verify_plan(plan), testing::IsEmpty());
  EXPECT_EQ(plan.layers[0].salient_fraction, 0);
  EXPECT_EQ(plan.layers[4].salient_fraction, 0);
  EXPECT_GT(plan.layers[2].salient_fraction, 0);
  EXPECT_EQ(plan.layers[6].salient_fraction, 0.1);
  EXPECT_EQ(find(plan.layers[0].v.why, "tier")->text, "no salient tier: 0.1: hit rate 0.510 < 0.70, 0.2: hit rate 0.560 < 0.70");
  EXPECT_THAT(find(plan.decision, "tier")->text, HasSubstr("2 layers may not have one"));
  // One pair for all layers has one tier for all: a single abstention takes it away.
  SearchRequest request = request_of("4.5", rules);
  request.restrictions.one_pair = true;
  EXPECT_EQ(n_tiers(search_plan(sens, {}, request)), 0u);
  request.tiers = everywhere(sens);
  const sens::SensResult all = tiered_sens(4, [](int, double share) { return share == 0 ? 1.0 : 0.1; });
  EXPECT_EQ(n_tiers(search_plan(all, {}, request)), 4u);
}

// A tier ranks by calibrated statistics: what does not beat the data-free plan by two standard errors gives way to it.
TEST(SalientTierPlans, ATierCountsAsCalibrated) {
  sens::SensResult sens = tiered_sens(4, [](int, double share) { return share == 0 ? 1.0 : 0.3; });
  SearchRequest request = request_of("4.5", everywhere(sens));
  EXPECT_GT(n_tiers(search_plan(sens, {}, request)), 0u);
  for (double& se : sens.scores["fisher_vec"].se) se *= 1000;
  const Plan plan = search_plan(sens, {}, request);
  EXPECT_EQ(n_tiers(plan), 0u);
  EXPECT_THAT(find(plan.decision, "margin")->text, HasSubstr("the data-free plan is taken"));
}

TEST(SalientTierPlans, RefinementKeepsThePlansOwnTiers) {
  const sens::SensResult sens = even_layers();
  const Plan plan = search_plan(sens, {}, request_of("4.5", everywhere(sens)));
  const Candidates c = candidates_of(sens, request_of("4.5", tier_rules(plan)));
  const std::vector<LayerOption> choice = choice_of(c, plan);
  for (std::size_t l = 0; l < choice.size(); ++l) {
    EXPECT_EQ(sens.salient_fraction(choice[l].tier_class), plan.layers[l].salient_fraction);
    EXPECT_EQ(sens.windows[choice[l].tier_class], plan.window_of(plan.layers[l]));
  }
  EXPECT_NEAR(predicted_score(choice), plan.summary.predicted->score, 1e-12);
  bool with = false, without = false;
  for (const std::vector<LayerOption>& sample : joint_samples(c, choice.front().tier_class, 16, 1))
    for (std::size_t l = 0; l < sample.size(); ++l) {
      const double share = sens.salient_fraction(sample[l].tier_class);
      EXPECT_TRUE(share == 0 || share == plan.layers[l].salient_fraction);
      EXPECT_EQ(sens.windows[sample[l].tier_class], sens.windows[choice.front().tier_class]);
      with = with || share > 0, without = without || (share == 0 && plan.layers[l].salient_fraction > 0);
    }
  EXPECT_TRUE(with && without);
  sens::SensResult other = sens;
  other.salient_scheme = "int8.token.g";
  expect_error([&] { choice_of(candidates_of(other, request_of("4.5", tier_rules(plan))), plan); }, ErrorKind::kMismatch, {"fp8e4m3.token.g", "int8.token.g"});
}

sens::SaliencyVerdicts verdicts_of(const sens::SensResult& sens) {
  sens::SaliencyVerdicts v;
  v.model = sens.model;
  v.settings = {2048, 4, 4, 128, 32, "int4.token.g64", "int4.token.g64", "fp8e4m3.token.g"};
  for (const double share : {0.1, 0.2}) {
    sens::SaliencyVerdicts::Fraction f{share, {}};
    for (const LayerGeometry& g : sens.model.layers) {
      f.layers["expected_attention"].push_back({g.index, 0.8, {}});
      f.layers["probe"].push_back({g.index, 0.1, {"hit rate 0.100 < 0.70"}});
    }
    v.fractions.push_back(f);
  }
  v.fractions[0].layers["expected_attention"][1] = {1, 0.6, {"hit rate 0.600 < 0.70", "query shift 0.700 > 0.5"}};
  return v;
}

TEST(TierRules, FollowTheScoreThatPlacedTokens) {
  const sens::SensResult sens = even_layers(3);
  std::vector<std::string> notes;
  LogSink log;
  log.note = [&](const std::string& text) { notes.push_back(text); };
  TierRules rules = tier_rules(sens, verdicts_of(sens), log);
  EXPECT_TRUE(notes.empty()) << notes.front();
  EXPECT_THAT(rules.layers[0].hit_rate, testing::ElementsAre(testing::Pair(0.1, 0.8), testing::Pair(0.2, 0.8)));
  EXPECT_THAT(rules.layers[1].hit_rate, testing::ElementsAre(testing::Pair(0.2, 0.8)));
  EXPECT_EQ(rules.layers[1].abstains, "0.1: hit rate 0.600 < 0.70, query shift 0.700 > 0.5");

  sens::SaliencyVerdicts other = verdicts_of(sens);
  other.settings.salient = "int8.token.g", other.settings.base_k = "int4.token.g", other.settings.window = 32;
  other.fractions.pop_back();
  rules = tier_rules(sens, other, log);
  EXPECT_EQ(rules.layers[0].hit_rate.size(), 1u);
  ASSERT_EQ(notes.size(), 4u);
  for (const char* part : {"int8.token.g", "int4.token.g,", "window of 32", "salient 0.2 is left out"})
    EXPECT_THAT(notes, testing::Contains(HasSubstr(part)));
  other.settings.n_sinks = 0;
  expect_error([&] { tier_rules(sens, other); }, ErrorKind::kMismatch, {"sinks", "--sinks 4"});
  other = verdicts_of(sens);
  for (sens::SaliencyVerdicts::Fraction& f : other.fractions) f.layers.erase("expected_attention");
  expect_error([&] { tier_rules(sens, other); }, ErrorKind::kMismatch, {"expected_attention"});
}

TEST(SalientTierPlans, ScoresMustHoldEveryWindowWithoutATierToo) {
  sens::SensResult sens = even_layers(2);
  sens.salient_fractions = {0.1, 0.1, 0.2, 0, 0.1, 0.2};
  expect_error([&] { Candidates c(sens, {}, ""); }, ErrorKind::kMismatch, {"window 16"});
  sens.salient_fractions.pop_back();
  expect_error([&] { Candidates c(sens, {}, ""); }, ErrorKind::kMismatch, {"/salient_fraction holds 5"});
  sens = even_layers(2);
  sens.saliency.erase(1);
  sens.saliency.erase(0);
  expect_error([&] { search_plan(sens, {}, request_of("4.5", everywhere(sens))); }, ErrorKind::kMismatch, {"layer 0", "run kvsens again"});
}

TEST(SalientTierPlans, UniformPresetAndItsGoldenBits) {
  const ModelIdentity model = plan_test::tiny_model(2, 8, 8, 128);
  const quant::Preset preset = quant::resolve_preset("tiered4", 128);
  const auto factors = [](const LayerGeometry& g) {
    quant::SaliencyFactors f{16, std::vector<float>(static_cast<std::size_t>(g.n_q_heads * g.head_dim), 1.0f), {}};
    f.m.assign(f.a.size() * 16, 0.5f);
    return f;
  };
  // KERNELS.md 10, row tiered4, as printed there with two decimals.
  const std::pair<std::int64_t, double> rows[] = {{2048, 6.05}, {8192, 5.33}, {32768, 5.16}, {131072, 5.11}};
  for (const auto& [context, bits] : rows) {
    Accounting a;
    a.context_tokens = context;
    const Plan plan = uniform_plan(model, preset, a, {}, {}, factors);
    EXPECT_NEAR(plan.summary.effective_bits, bits, 0.005) << context;
    EXPECT_THAT(verify_plan(plan), testing::IsEmpty());
    EXPECT_EQ(plan.window_tokens, 2);
    EXPECT_EQ(plan.layers[1].salient_fraction, 0.2);
    EXPECT_EQ(plan.summary.constants_bytes, 2 * 8 * 128 * 17 * 4);
    EXPECT_EQ(find(plan.layers[0].v.why, "tier")->text, "tiered4 asks for salient 0.2 at fp8e4m3.token.g by expected_attention");
    const kvrt::LayerLayout layout = make_layout(model.layers[0], plan.layers[0].k.scheme, plan.layers[0].v.scheme, plan.tiers_of(plan.layers[0]), a);
    if (context != 8192) continue;
    EXPECT_NEAR(8 * unpadded_bytes(layout, 8192) / (2.0 * 8 * 128 * 8192), 5.067871, 1e-6);  // METHODS.md G41
  }
}

class TieredPlanFile : public testing::Test {
 protected:
  void SetUp() override {
    const sens::SensResult sens = even_layers(4);
    plan_ = search_plan(sens, {}, request_of("4.5", everywhere(sens)));
    artifacts::write_plan(plan_, path());
  }
  std::string path() const { return folder_.file("plan.json"); }
  nlohmann::json document() const { return nlohmann::json::parse(test::read_file(path())); }
  void expect_refused(const nlohmann::json& j, ErrorKind kind, const std::vector<std::string>& parts) const {
    test::write_file(path(), j.dump());
    expect_error([&] { artifacts::read_plan(path()); }, kind, parts);
  }
  test::TempFolder folder_;
  Plan plan_;
};

TEST_F(TieredPlanFile, RoundTrip) {
  EXPECT_THAT(artifacts::plan_schema_problems(path()), testing::IsEmpty());
  const Plan read = artifacts::read_plan(path());
  EXPECT_EQ(read.salient, plan_.salient);
  for (std::size_t l = 0; l < 4; ++l) {
    EXPECT_EQ(read.layers[l].salient_fraction, plan_.layers[l].salient_fraction);
    EXPECT_EQ(read.layers[l].saliency, plan_.layers[l].saliency);
  }
  EXPECT_THAT(verify_plan(read), testing::IsEmpty());
  const nlohmann::json j = document(), &layer = j["layers"][0];
  EXPECT_EQ(j["tiers"]["salient"], (nlohmann::json{{"scheme", "fp8e4m3.token.g"}, {"score", "expected_attention"}}));
  EXPECT_GT(layer["salient_fraction"], 0);
  EXPECT_EQ(layer["saliency"]["m"], (nlohmann::json{{"tensor", "layers.0.saliency.m"}, {"shape", {4, 64, 16}}}));
  EXPECT_FALSE(j["layers"][1].contains("saliency"));
  const std::string first = test::read_file(path()), tensors = test::read_file(folder_.file("plan.safetensors"));
  artifacts::write_plan(read, path());
  EXPECT_EQ(test::read_file(path()), first);
  EXPECT_EQ(test::read_file(folder_.file("plan.safetensors")), tensors);
}

TEST_F(TieredPlanFile, RefusesWhatDoesNotHold) {
  const nlohmann::json good = document();
  const auto changed = [&](const char* pointer, const nlohmann::json& value) {
    nlohmann::json j = good;
    j[nlohmann::json::json_pointer(pointer)] = value;
    return j;
  };
  expect_refused(changed("/layers/0/salient_fraction", 0.7), ErrorKind::kFormat, {"/layers/0/salient_fraction", "0.5"});
  expect_refused(changed("/layers/0/salient_fraction", 0), ErrorKind::kFormat, {"/layers/0/saliency", "absent"});
  expect_refused(changed("/tiers/salient", nullptr), ErrorKind::kFormat, {"/layers/0/salient_fraction", "/tiers/salient is null"});
  expect_refused(changed("/tiers/salient/scheme", "int4.token.g"), ErrorKind::kUsage, {"/tiers/salient/scheme", "8-bit"});
  expect_refused(changed("/tiers/salient/score", "probe"), ErrorKind::kUnsupported, {"/tiers/salient/score", "probe"});
  expect_refused(changed("/layers/0/saliency/m/shape", {4, 64, 17}), ErrorKind::kFormat, {"/layers/0/saliency/m/shape", "rank 1 to 16"});
  expect_refused(changed("/layers/0/saliency/m/shape", {4, 64, 8}), ErrorKind::kMismatch, {"layers.0.saliency.m", "[4, 64, 8]"});
  expect_refused(changed("/layers/0/saliency/a/tensor", "layers.2.saliency.a"), ErrorKind::kFormat, {"layers.2.saliency.a"});
  nlohmann::json none = good;
  none["layers"][0].erase("saliency");
  expect_refused(none, ErrorKind::kFormat, {"/layers/0/saliency"});
  Plan plan = plan_;
  plan.layers[0].saliency.m.pop_back();
  EXPECT_THAT(verify_plan(plan), testing::Contains(HasSubstr("layer 0: saliency holds")));
  plan = plan_;
  plan.salient.reset();
  EXPECT_THAT(verify_plan(plan), testing::Contains(HasSubstr("names no salient tier")));
  plan = plan_;
  plan.layers[0].salient_fraction = 0.005;
  EXPECT_THAT(verify_plan(plan), testing::Contains(HasSubstr("rounds to no token")));
}

// The runtime library names what it does not offer.
TEST_F(TieredPlanFile, TheRuntimeRefusesItByName) {
  kvrt::Plan loaded;
  const kvrt::Status status = kvrt::load_plan(path().c_str(), folder_.file("plan.safetensors").c_str(), &loaded);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(status.text(), HasSubstr("salient"));
}

}  // namespace
}  // namespace calib::plan

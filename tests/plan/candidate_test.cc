#include "libcalib/plan/candidate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "libcalib/base/rng.h"
#include "synthetic_sens.h"
#include "tests/support/expect_error.h"

namespace calib::plan {
namespace {

using plan_test::synthetic_sens;
using plan_test::tiny_model;
using testing::HasSubstr;

const std::vector<std::string> kSchemes = {"bf16", "int8.token.g", "int4.token.g", "int4.channel.g64.pre", "int2.token.g"};

sens::SensResult simple() {
  return synthetic_sens(tiny_model(3), kSchemes, {0, 128}, [](int, Side) { return 1.0; });
}

Error error_of(const sens::SensResult& sens, const std::string& metric = "") {
  try {
    Candidates c(sens, Accounting{}, metric);
  } catch (const Error& e) {
    return e;
  }
  ADD_FAILURE() << "accepted";
  return Error(ErrorKind::kInternal, "", "");
}

TEST(Candidates, EveryAllowedPairOfEveryLayer) {
  const sens::SensResult sens = simple();
  const Candidates c(sens, Accounting{}, "");
  EXPECT_EQ(c.metric(), "fisher_vec");
  // Counted against all pairs: nothing that a group leaves out beats or equals what it keeps, and what it keeps is undominated.
  const std::vector<LayerGroup> groups = c.groups({0, 1});
  ASSERT_EQ(groups.size(), 3u);
  for (const LayerGroup& group : groups) {
    const std::size_t l = group.layers.at(0);
    std::size_t n_pairs = 0;
    OptionGroup all;
    for (std::size_t w = 0; w < 2; ++w)
      for (std::size_t k = 0; k < kSchemes.size(); ++k)
        for (std::size_t v = 0; v < kSchemes.size(); ++v) {
          if (!c.allowed(l, Side::kK, k) || !c.allowed(l, Side::kV, v)) continue;
          ++n_pairs;
          const LayerOption o = c.option(l, k, v, w);
          all.push_back({o.bytes, o.score});
          EXPECT_EQ(o.bytes, layer_bytes(sens.model.layers[l], c.scheme(k), c.scheme(v), sens.windows[w], c.accounting())) << kSchemes[k] << ':' << kSchemes[v];
        }
    EXPECT_EQ(n_pairs, 2u * 5 * 4);  // `pre` is for keys only
    const std::vector<std::size_t> best = undominated(all);
    ASSERT_EQ(group.options.size(), best.size());
    for (std::size_t i = 0; i < best.size(); ++i) {
      EXPECT_EQ(group.options[i].bytes, all[best[i]].bytes);
      EXPECT_EQ(group.options[i].score, all[best[i]].score);
    }
  }
  const LayerOption o = c.option(1, 2, 1, 1);
  EXPECT_DOUBLE_EQ(o.score, (std::pow(4.0, -4) + std::pow(4.0, -8)) / 1.125);
  EXPECT_EQ(o.bytes, layer_bytes(sens.model.layers[1], c.scheme(2), c.scheme(1), 128, c.accounting()));
}

// 80 layers, 200 schemes, one window: sides are pruned before they are paired, so 3.2 million pairs are never looked at.
TEST(Candidates, LargeModelIsPrunedAndSolvedFast) {
  std::vector<std::string> schemes = {"bf16", "fp8e4m3.token.g", "fp8e5m2.token.g", "nvfp4", "mxfp4", "q8_0", "q4_0", "q4_1", "q5_0",
                                      "q5_1", "iq4_nl",          "sint8.token.g"};
  for (const char* format : {"int8", "int4", "int3", "int2"}) {
    for (const char* granularity : {"token.g", "token.g32", "token.g64", "token.g16", "token.g8"})
      for (const char* modifier : {"", ".had", ".pre"}) schemes.push_back(std::string(format) + "." + granularity + modifier);
    for (const char* granularity : {"channel.g32", "channel.g64", "channel.g128"})
      for (const char* modifier : {"", ".pre"}) schemes.push_back(std::string(format) + "." + granularity + modifier);
  }
  for (const char* bits : {"4", "3", "2"})
    for (const char* granularity : {"token.g", "token.g32", "token.g64"})
      for (const char* modifier : {"", ".had"}) schemes.push_back(std::string("lm") + bits + "." + granularity + modifier);
  for (const char* format : {"fp8e4m3", "fp8e5m2", "sint8", "sint4"})
    for (const char* granularity : {"token.g32", "token.g16", "token.g8", "token.g4", "token.g2"})
      for (const char* modifier : {"", ".had", ".pre"}) schemes.push_back(std::string(format) + "." + granularity + modifier);
  for (const char* format : {"int4", "int3"})
    for (const char* granularity : {"token.g4", "token.g2", "token.g1"})
      for (const char* modifier : {"", ".had", ".pre"}) schemes.push_back(std::string(format) + "." + granularity + modifier);
  ASSERT_GE(schemes.size(), 190u);
  Rng rng(9);
  sens::SensResult sens = synthetic_sens(tiny_model(80), schemes, {128}, [](int l, Side s) { return std::exp(2 * std::sin(3.7 * l + (s == Side::kK ? 1 : 0))); });
  for (double& score : sens.scores["fisher_vec"].mean) score *= std::exp(0.7 * rng.normal());
  double first = 0, further = 0;
  const Candidates c(sens, Accounting{}, "");
  std::optional<Knapsack> problem;
  const auto solve_at = [&](double bits) {
    const std::optional<Solution> s = problem->solve(static_cast<std::int64_t>(bits / 8 * static_cast<double>(c.elements())));
    ASSERT_TRUE(s);
    EXPECT_TRUE(s->proven);
  };
  first = test::seconds_of([&] {
    problem.emplace(knapsack(c.groups({0})));
    solve_at(4.5);
  });
  for (const double bits : {3.0, 3.5, 5.0, 6.0, 8.0}) further = std::max(further, test::seconds_of([&] { solve_at(bits); }));
  // The goals are 250 ms and 10 ms in a release build; sanitizers and other builds take up to ten times as long.
  EXPECT_LT(first, 2.5);
  EXPECT_LT(further, 0.1);
  RecordProperty("first_milliseconds", std::to_string(1000 * first));
  RecordProperty("further_milliseconds", std::to_string(1000 * further));
}

// CASES.md PL-06.
TEST(Candidates, MissingUnitIsNamed) {
  sens::SensResult sens = simple();
  const std::size_t n = sens.schemes.size(), w = sens.windows.size();
  sens.units.erase(sens.units.begin() + 3);  // layer 1 V
  sens.valid.erase(sens.valid.begin() + 3 * n, sens.valid.begin() + 4 * n);
  for (auto* table : {&sens.scores["fisher_vec"].mean, &sens.scores["fisher_vec"].se})
    table->erase(table->begin() + 3 * n * w, table->begin() + 4 * n * w);
  const Error e = error_of(sens);
  EXPECT_EQ(e.kind(), ErrorKind::kMismatch);
  EXPECT_THAT(e.what(), HasSubstr("layer 1 V"));
}

TEST(Candidates, SchemeTwiceIsNamed) {
  sens::SensResult sens = simple();
  sens.schemes[2] = "int8.token.g";
  const Error e = error_of(sens);
  EXPECT_EQ(e.kind(), ErrorKind::kUsage);
  EXPECT_EQ(e.where(), "int8.token.g");
}

// CASES.md PJ-04.
TEST(Candidates, NanScoreIsNamed) {
  sens::SensResult sens = simple();
  sens.scores["fisher_vec"].mean[sens.index(2, 1, 1)] = std::nan("");  // layer 1 K int8.token.g
  const Error e = error_of(sens);
  EXPECT_EQ(e.kind(), ErrorKind::kNumeric);
  EXPECT_THAT(e.where(), HasSubstr("layer 1 K int8.token.g"));
}

TEST(Candidates, TablesOfOtherSizesAreRefused) {
  sens::SensResult sens = simple();
  sens.scores["fisher_vec"].mean.pop_back();
  EXPECT_EQ(error_of(sens).kind(), ErrorKind::kMismatch);
  sens = simple();
  sens.valid.pop_back();
  EXPECT_EQ(error_of(sens).kind(), ErrorKind::kMismatch);
  sens = simple();
  sens.units[1].layer = 9;
  EXPECT_THAT(error_of(sens).where(), HasSubstr("layer 9 V"));
}

TEST(Candidates, MetricOrderAndRefusals) {
  sens::SensResult sens = simple();
  EXPECT_EQ(error_of(sens, "lookahead").kind(), ErrorKind::kUsage);
  sens.scores["attn_out"] = sens.scores["fisher_vec"];
  EXPECT_EQ(Candidates(sens, Accounting{}, "").metric(), "fisher_vec");
  sens.scores["fisher_softmax"] = sens.scores["fisher_vec"];
  EXPECT_EQ(Candidates(sens, Accounting{}, "").metric(), "fisher_softmax");
  EXPECT_TRUE(Candidates(sens, Accounting{}, "").metric_in_nats());
  EXPECT_EQ(Candidates(sens, Accounting{}, "fisher_vec").metric(), "fisher_vec");
  sens.scores["logit_kl"] = sens.scores["fisher_vec"];
  EXPECT_EQ(Candidates(sens, Accounting{}, "").metric(), "logit_kl");
  EXPECT_EQ(Candidates(sens, Accounting{}, "attn_out").metric(), "attn_out");
  EXPECT_FALSE(Candidates(sens, Accounting{}, "attn_out").metric_in_nats());
  sens.scores["attn_kl"] = sens.scores["fisher_vec"];
  EXPECT_EQ(error_of(sens, "attn_kl").kind(), ErrorKind::kUsage);
  sens.scores = {{"attn_kl", sens.scores["attn_kl"]}};
  EXPECT_EQ(error_of(sens).kind(), ErrorKind::kMismatch);
}

TEST(Candidates, WideGroupsKeepKeyBits) {
  std::vector<std::string> notes;
  LogSink log;
  log.note = [&](const std::string& text) { notes.push_back(text); };
  const sens::SensResult sens = synthetic_sens(tiny_model(2, 8, 2), {"bf16", "int3.token.g", "int3.channel.g64.pre", "int2.channel.g64.pre", "int2.token.g"},
                                               {0}, [](int, Side) { return 1.0; });
  const Candidates c(sens, Accounting{}, "", log);
  EXPECT_TRUE(c.wide_groups());
  EXPECT_FALSE(c.allowed(0, Side::kK, 1));
  EXPECT_TRUE(c.allowed(0, Side::kK, 2));
  EXPECT_FALSE(c.allowed(0, Side::kK, 3));
  EXPECT_TRUE(c.allowed(0, Side::kV, 4));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0], HasSubstr("int3.token.g int2.channel.g64.pre int2.token.g"));
  // Three query heads per KV head keep everything.
  const sens::SensResult narrow = synthetic_sens(tiny_model(2, 9, 3), {"bf16", "int2.token.g"}, {0}, [](int, Side) { return 1.0; });
  EXPECT_TRUE(Candidates(narrow, Accounting{}, "").allowed(0, Side::kK, 1));
}

TEST(Candidates, EmptySetNamesTheLayer) {
  const sens::SensResult sens = simple();
  const Candidates c(sens, Accounting{}, "");
  try {
    c.groups({0}, [](std::size_t layer, Side side, std::size_t) { return layer != 2 || side != Side::kV; });
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInfeasible);
    EXPECT_EQ(e.where(), "layer 2 V");
  }
}

}  // namespace
}  // namespace calib::plan

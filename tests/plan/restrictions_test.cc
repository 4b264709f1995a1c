#include "libcalib/plan/restrictions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "libcalib/plan/planner.h"
#include "libcalib/plan/verify.h"
#include "synthetic_sens.h"
#include "tests/support/expect_error.h"

namespace calib::plan {
namespace {

using plan_test::synthetic_sens;
using plan_test::tiny_model;
using test::expect_error;
using testing::HasSubstr;

const std::vector<std::string> kSchemes = {"bf16", "fp8e4m3.head", "int8.token.g", "int4.token.g32", "int4.channel.g64.pre", "int3.token.g64", "int2.token.g32"};

sens::SensResult uneven(int n_layers = 6) {
  return synthetic_sens(tiny_model(n_layers), kSchemes, {0, 128}, [](int l, Side s) { return std::exp(2 * std::sin(3.7 * l + (s == Side::kK ? 1 : 0))); });
}

Plan plan_with(const Restrictions& restrictions, const char* budget = "5") {
  SearchRequest r;
  r.limits.budget = parse_budget(budget);
  r.limit_text = budget;
  r.restrictions = restrictions;
  Plan plan = search_plan(uneven(), {}, r);
  EXPECT_THAT(verify_plan(plan), testing::IsEmpty());
  return plan;
}

std::string rules_of(const UnitPlan& unit, const std::string& rule) {
  std::string texts;
  for (const Reason& r : unit.why)
    if (r.rule == rule) texts += r.text + "\n";
  return texts;
}

/// Least score of all plans that keep the restrictions, by trying every pair in every layer (two layers, one window).
double brute_force(const sens::SensResult& sens, const Restrictions& r, std::int64_t limit) {
  const Candidates c(sens, Accounting{}, "", {}, r);
  double best = std::numeric_limits<double>::infinity();
  const std::size_t n = sens.schemes.size();
  const auto fits = [&](std::size_t l, std::size_t k, std::size_t v) {
    return c.allowed(l, Side::kK, k) && c.allowed(l, Side::kV, v) && (!r.same_kv || c.skipped(l) || k == v);
  };
  for (std::size_t w = 0; w < sens.windows.size(); ++w)
    for (std::size_t code = 0; code < n * n * n * n; ++code) {
      const std::size_t k0 = code % n, v0 = code / n % n, k1 = code / (n * n) % n, v1 = code / (n * n * n);
      if (!fits(0, k0, v0) || !fits(1, k1, v1)) continue;
      if (r.one_pair && !c.skipped(0) && !c.skipped(1) && (k0 != k1 || v0 != v1)) continue;
      const LayerOption a = c.option(0, k0, v0, w), b = c.option(1, k1, v1, w);
      if (a.bytes + b.bytes <= limit) best = std::min(best, a.score + b.score);
    }
  return best;
}

TEST(Restrictions, OptimaAreThoseOfTryingEverything) {
  const sens::SensResult sens = uneven(2);
  std::vector<Restrictions> cases(8);
  cases[1].same_kv = true;
  cases[2].one_pair = true;
  cases[3].skip_layers = {1};
  cases[4].same_kv = cases[4].one_pair = true;
  cases[5].one_pair = true, cases[5].skip_layers = {0};
  cases[6].k = {"int8.token.g", "int4.channel.g64.pre"}, cases[6].v = {"int3.token.g64"};
  cases[7].arch = "sm_80", cases[7].same_kv = true;
  for (const Restrictions& r : cases)
    for (const double bits : {4.5, 6.0, 9.0, 12.0}) {
      const Candidates c(sens, Accounting{}, "", {}, r);
      Limits limits;
      limits.budget = Budget{Budget::Kind::kEffectiveBits, bits, "x"};
      const std::int64_t bytes = budget_bytes(*limits.budget, c.elements(), 1, 1);
      const double expected = brute_force(sens, r, bytes);
      if (!std::isfinite(expected)) {
        expect_error([&] { search(c, limits); }, ErrorKind::kInfeasible, {"minimum"});
        continue;
      }
      const Found found = search(c, limits);
      EXPECT_NEAR(found.score, expected, 1e-12 * expected) << restrictions_text(r) << ' ' << bits;
      EXPECT_LE(found.bytes, bytes);
    }
}

TEST(Restrictions, AllowedSchemesPerSide) {
  Restrictions r;
  r.k = {"int8.token.g", "int4.channel.g64.pre"};
  r.v = {"int3.token.g64"};
  const Plan plan = plan_with(r);
  for (const LayerPlan& layer : plan.layers) {
    EXPECT_THAT(r.k, testing::Contains(kvrt::to_string(layer.k.scheme)));
    EXPECT_EQ(kvrt::to_string(layer.v.scheme), "int3.token.g64");
  }
  for (const Rung& rung : plan.fallback)
    for (const RungChange& change : rung.changes) EXPECT_EQ(kvrt::to_string(change.scheme), "int8.token.g");
  r.k = {"int4.token.g"};
  expect_error([&] { plan_with(r); }, ErrorKind::kUsage, {"--allow-k int4.token.g", "int8.token.g"});
  expect_error([&] { scheme_list({"int4.token"}, "--allow-k"); }, ErrorKind::kUsage, {"--allow-k int4.token"});
  expect_error([&] { scheme_list({"int8.token.g", "int8.token.g"}, "--allow-v"); }, ErrorKind::kUsage, {"--allow-v", "twice"});
}

TEST(Restrictions, OneSchemeForBothSides) {
  Restrictions r;
  r.same_kv = true;
  const Plan plan = plan_with(r);
  for (const LayerPlan& layer : plan.layers) {
    EXPECT_EQ(layer.k.scheme, layer.v.scheme);
    EXPECT_FALSE(layer.k.scheme.pre);
    EXPECT_THAT(rules_of(layer.k, "restricted"), HasSubstr("--same-kv"));
  }
  for (const Rung& rung : plan.fallback) EXPECT_EQ(rung.changes.size() % 2, 0u);
  r.k = {"int4.channel.g64.pre"};
  expect_error([&] { plan_with(r); }, ErrorKind::kInfeasible, {"layer 0", "--same-kv"});
}

TEST(Restrictions, OnePairForTheWholeModel) {
  Restrictions r;
  r.one_pair = true;
  const Plan plan = plan_with(r);
  for (const LayerPlan& layer : plan.layers) {
    EXPECT_EQ(layer.k.scheme, plan.layers[0].k.scheme);
    EXPECT_EQ(layer.v.scheme, plan.layers[0].v.scheme);
    EXPECT_THAT(rules_of(layer.v, "restricted"), HasSubstr("--one-pair"));
  }
  // It is the best uniform pair, which is a baseline too.
  for (const Baseline& b : plan.baselines) {
    if (b.name != "uniform") continue;
    EXPECT_NEAR(plan.summary.predicted->score, b.score, 1e-12 * b.score);
  }
  ASSERT_FALSE(plan.fallback.empty());
  for (const Rung& rung : plan.fallback) EXPECT_EQ(rung.changes.size(), 6u);
  SearchRequest request;
  request.limits.budget = parse_budget("5");
  request.limits.window_per_layer = true;
  request.restrictions = r;
  expect_error([&] { search_plan(uneven(), {}, request); }, ErrorKind::kUsage, {"--one-pair", "--window-per-layer"});
}

TEST(Restrictions, SkippedLayersStayInBf16) {
  Restrictions r;
  r.skip_layers = {0, 5};
  const Plan plan = plan_with(r, "8");
  for (const LayerPlan& layer : plan.layers) EXPECT_EQ(kvrt::to_string(layer.k.scheme) == "bf16", layer.index == 0 || layer.index == 5) << layer.index;
  EXPECT_THAT(rules_of(plan.layers[0].k, "restricted"), HasSubstr("--skip-layers"));
  r.skip_layers = {9};
  expect_error([&] { plan_with(r); }, ErrorKind::kUsage, {"--skip-layers 9", "0 to 5"});
  // Without a score for bf16 there is nothing to keep them at.
  sens::SensResult sens = synthetic_sens(tiny_model(2), {"int8.token.g"}, {0}, [](int, Side) { return 1.0; });
  r.skip_layers = {1};
  expect_error([&] { Candidates(sens, Accounting{}, "", {}, r); }, ErrorKind::kInfeasible, {"layer 1 K", "bf16"});
}

// CASES.md PL-04.
TEST(Restrictions, DevicesWithoutFp8) {
  std::vector<std::string> notes;
  LogSink log;
  log.note = [&](const std::string& text) { notes.push_back(text); };
  // FP8 scores best of the 8-bit schemes, so a plan with room takes it where it may.
  sens::SensResult sens = synthetic_sens(tiny_model(3), {"fp8e4m3.head", "int8.token.g", "int4.token.g"}, {0}, [](int, Side) { return 1.0; });
  for (std::size_t u = 0; u < 6; ++u) sens.scores["fisher_vec"].mean[sens.index(u, 0, 0)] *= 0.5;
  SearchRequest request;
  request.limits.budget = parse_budget("9");
  for (const char* arch : {"sm_86", "sm_89", "sm_90", ""}) {
    request.restrictions.arch = arch;
    const Plan plan = search_plan(sens, {}, request, log);
    EXPECT_THAT(verify_plan(plan), testing::IsEmpty());
    for (const LayerPlan& layer : plan.layers) {
      const bool without = std::string(arch) == "sm_86";
      EXPECT_EQ(kvrt::to_string(layer.k.scheme), without ? "int8.token.g" : "fp8e4m3.head") << arch;
      EXPECT_EQ(rules_of(layer.k, "restricted").empty(), !without);
    }
  }
  EXPECT_THAT(notes, testing::Contains(HasSubstr("sm_86 has no FP8")));
  for (const char* arch : {"sm_5", "sm86", "gfx90a"}) expect_error([&] { check_arch(arch); }, ErrorKind::kUsage, {arch, "sm_86, sm_87, sm_89, sm_90"});
}

TEST(Restrictions, InfeasibleSaysWhatWouldDo) {
  Restrictions r;
  r.same_kv = true;
  r.k = r.v = {"int8.token.g", "int4.token.g32"};
  expect_error([&] { plan_with(r, "4.2"); }, ErrorKind::kInfeasible,
               {"4.2 effective bits", "--allow-k int8.token.g,int4.token.g32", "most layers int4.token.g32:int4.token.g32", "in place of"});
  // Where even the whole list does not do, a smaller window or other candidates might.
  expect_error([&] { plan_with(r, "2.7"); }, ErrorKind::kInfeasible, {"and without restrictions: ", "int2.token.g"});
  SearchRequest request;
  request.limits.max_score = 1e-3;
  request.restrictions.v = {"int2.token.g32"};
  expect_error([&] { search_plan(uneven(), {}, request); }, ErrorKind::kInfeasible, {"lowest limit", "with no restriction in place of --allow-v int2.token.g32"});
}

TEST(Restrictions, LongListsAreCounted) {
  Restrictions r;
  r.k = {"int8.token.g", "int4.token.g32", "int4.token.g"};
  r.v = {"int8.token.g", "int4.token.g32", "int4.token.g", "bf16"};
  r.skip_layers = {0, 1, 2, 3, 4};
  EXPECT_EQ(restrictions_text(r), "--allow-k int8.token.g,int4.token.g32,int4.token.g --allow-v (4 schemes) --skip-layers (5 layers)");
}

}  // namespace
}  // namespace calib::plan

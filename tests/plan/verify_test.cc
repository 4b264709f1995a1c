#include "libcalib/plan/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "libcalib/base/error.h"
#include "libcalib/plan/planner.h"
#include "synthetic_sens.h"

namespace calib::plan {
namespace {

using plan_test::synthetic_sens;
using plan_test::tiny_model;
using testing::Contains;
using testing::HasSubstr;

Plan good_plan() {
  SearchRequest r;
  r.limits.budget = parse_budget("5");
  return search_plan(synthetic_sens(tiny_model(3), {"int8.token.g", "int4.token.g64.center", "fp8e4m3.head"}, {0}, [](int l, Side) { return 1.0 + l; }), {}, r);
}

TEST(Verify, EachClaimIsChecked) {
  const Plan plan = good_plan();
  ASSERT_THAT(verify_plan(plan), testing::IsEmpty());
  const auto broken = [&](const std::function<void(Plan&)>& change) {
    Plan copy = plan;
    change(copy);
    return verify_plan(copy);
  };
  EXPECT_THAT(broken([](Plan& p) { p.summary.bytes += 128; }), Contains(HasSubstr("bytes, counted")));
  EXPECT_THAT(broken([](Plan& p) { p.summary.effective_bits += 0.01; }), Contains(HasSubstr("effective bits")));
  EXPECT_THAT(broken([](Plan& p) { p.summary.constants_bytes += 4; }), Contains(HasSubstr("constants")));
  EXPECT_THAT(broken([](Plan& p) { p.layers.pop_back(); }), Contains(HasSubstr("layer 2 of the model has no plan")));
  EXPECT_THAT(broken([](Plan& p) { p.layers[1].index = 0; }), Contains(HasSubstr("layer 0 is planned twice")));
  EXPECT_THAT(broken([](Plan& p) { p.request.budget_bytes = p.summary.bytes - 1; }), Contains(HasSubstr("exceed the budget")));
  EXPECT_THAT(broken([](Plan& p) { p.layers[0].k.scheme = quant::parse_scheme("int4.token.g48"); }), Contains(HasSubstr("token.g48")));
  EXPECT_THAT(broken([](Plan& p) { p.layers[0].k.params.mean.push_back(1); }), Contains(HasSubstr("mean holds")));
  EXPECT_THAT(broken([](Plan& p) { p.fallback.front().bytes = 1; }), Contains(HasSubstr("rung 0")));
}

TEST(Verify, LaddersAreNested) {
  const Plan plan = good_plan();
  ASSERT_GE(plan.fallback.size(), 2u);
  const auto broken = [&](const std::function<void(Plan&)>& change) {
    Plan copy = plan;
    change(copy);
    return verify_plan(copy);
  };
  const RungChange first = plan.fallback[0].changes.at(0);
  EXPECT_THAT(broken([&](Plan& p) {
                p.fallback[1].changes = {{first.layer, first.side, quant::parse_scheme("int2.token.g")}};
              }),
              Contains(HasSubstr("is lowered from 8 to 2 bits")));
  EXPECT_THAT(broken([&](Plan& p) { p.fallback[0].changes = {first, first}; }), Contains(HasSubstr("is changed twice")));
  EXPECT_THAT(broken([&](Plan& p) { p.fallback[0].changes.push_back(plan.fallback[1].changes.at(0)); }), Contains(HasSubstr("changes 2 units, a tenth is 1")));
  EXPECT_THAT(broken([&](Plan& p) { p.fallback[0].changes[0].layer = 7; }), Contains(HasSubstr("layer 7")));
  EXPECT_THAT(broken([&](Plan& p) { p.fallback[0].changes[0].scheme = quant::parse_scheme("fp8e4m3.head"); }), Contains(HasSubstr("needs constants")));
  EXPECT_THAT(broken([&](Plan& p) { p.fallback[1].bytes = p.fallback[0].bytes; }), Contains(HasSubstr("rung 1")));
}

TEST(Verify, RestrictionsOfTheRequestHold) {
  const auto broken = [&](const std::function<void(Restrictions&)>& change) {
    Plan plan = good_plan();
    change(plan.request.restrictions);
    return verify_plan(plan);
  };
  EXPECT_THAT(broken([](Restrictions& r) { r.k = {"bf16"}; }), Contains(HasSubstr("layer 0 K")));
  EXPECT_THAT(broken([](Restrictions& r) { r.v = {"bf16"}; }), Contains(HasSubstr("layer 2 V")));
  EXPECT_THAT(broken([](Restrictions& r) { r.skip_layers = {1}; }), Contains(HasSubstr("layer 1")));
  Plan plan = good_plan();
  plan.layers[1].k.scheme = quant::parse_scheme("bf16");
  plan.layers[1].k.params = {};
  plan.request.restrictions.same_kv = plan.request.restrictions.one_pair = true;
  EXPECT_THAT(verify_plan(plan), Contains(HasSubstr("the request wants one scheme")));
  EXPECT_THAT(verify_plan(plan), Contains(HasSubstr("the request wants one pair")));
  plan.layers[2].v.scheme = quant::parse_scheme("fp8e4m3.head");
  plan.request.restrictions = {};
  plan.request.restrictions.arch = "sm_80";
  EXPECT_THAT(verify_plan(plan), Contains(HasSubstr("sm_80 has no FP8")));
}

TEST(Verify, StaticScalesMustBePositive) {
  Plan plan = good_plan();
  UnitPlan& unit = plan.layers[0].v;
  unit.scheme = quant::parse_scheme("fp8e4m3.head");
  unit.params = {};
  unit.params.clip_hi = {1.0f, -0.0f};
  EXPECT_THAT(verify_plan(plan), Contains(HasSubstr("expected a finite number > 0")));
}

// CASES.md PL-06.
TEST(Verify, ModelsAreCompared) {
  const ModelIdentity a = tiny_model(3);
  check_same_model(a, "stats.h5", a, "sens.h5");
  ModelIdentity b = a;
  b.weights_sha256[0] = 'c';
  try {
    check_same_model(a, "stats.h5", b, "sens.h5");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(exit_code(e.kind()), 5);
    for (const char* part : {"stats.h5", "sens.h5", "weights sha256"}) EXPECT_THAT(e.what(), HasSubstr(part));
    EXPECT_THAT(e.what(), HasSubstr(a.weights_sha256));
    EXPECT_THAT(e.what(), HasSubstr(b.weights_sha256));
  }
  b = a;
  b.layers[1].inv_freq[3] *= 1.01;
  EXPECT_THROW(check_same_model(a, "a", b, "b"), Error);
  b = a;
  b.name = "another spelling of the path";
  check_same_model(a, "a", b, "b");
}

}  // namespace
}  // namespace calib::plan

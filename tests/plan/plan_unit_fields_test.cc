#include "libcalib/artifacts/plan_unit_fields.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "synthetic_sens.h"

namespace calib::artifacts {
namespace {

const LayerGeometry kLayer = plan_test::tiny_model(1, 4, 2, 64).layers[0];

kvrt::Scheme scheme(const char* text) { return quant::parse_scheme(text); }

TEST(PlanUnitFields, GroupSize) {
  EXPECT_EQ(group_size(scheme("int4.token.g"), kLayer), 64);
  EXPECT_EQ(group_size(scheme("int4.token.g32"), kLayer), 32);
  EXPECT_EQ(group_size(scheme("int4.channel.g128"), kLayer), 128);
  EXPECT_EQ(group_size(scheme("q4_0"), kLayer), 32);
  EXPECT_EQ(group_size(scheme("fp8e4m3.head"), kLayer), 0);
  EXPECT_EQ(group_size(scheme("bf16"), kLayer), 0);
}

TEST(PlanUnitFields, RotationSpellsOutHad) {
  EXPECT_TRUE(rotation_json(scheme("int4.token.g"), Side::kK, kLayer).is_null());
  LayerGeometry g = kLayer;
  g.head_dim = 96;  // 12 * 8
  EXPECT_EQ(rotation_json(scheme("int4.token.g32.had"), Side::kK, g)["size"], 96);
  EXPECT_EQ(rotation_json(scheme("int4.token.g32.had"), Side::kK, g)["base"], 12);
  g.head_dim = 256;  // llama.cpp: V in blocks of 64, K whole
  EXPECT_EQ(rotation_json(scheme("q4_0.had"), Side::kK, g)["size"], 256);
  EXPECT_EQ(rotation_json(scheme("q4_0.had"), Side::kV, g)["size"], 64);
}

TEST(PlanUnitFields, ShapesOfConstants) {
  using Shape = std::vector<std::int64_t>;
  EXPECT_EQ(expected_shape("mean", scheme("int4.token.g.center"), kLayer), (Shape{2, 64}));
  EXPECT_EQ(expected_shape("mean", scheme("int4.token.g"), kLayer), Shape{});
  EXPECT_EQ(expected_shape("clip_hi", scheme("fp8e4m3.tensor"), kLayer), Shape{1});
  EXPECT_EQ(expected_shape("clip_hi", scheme("fp8e4m3.head"), kLayer), Shape{2});
  EXPECT_EQ(expected_shape("clip_lo", scheme("fp8e4m3.head"), kLayer), Shape{});
  EXPECT_EQ(array_name(7, Side::kV, "clip_hi"), "layers.7.v.clip_hi");
}

// CASES.md QZ-08.
TEST(PlanUnitFields, StaticScale) {
  plan::UnitPlan unit;
  unit.scheme = scheme("fp8e4m3.tensor");
  unit.params.clip_hi = {18.265625f};
  EXPECT_EQ(static_scale(unit), 0.040771484375);
  unit.scheme = scheme("int4.token.g");
  EXPECT_EQ(static_scale(unit), 0);
}

TEST(PlanUnitFields, RopeClasses) {
  ModelIdentity model = plan_test::tiny_model(4);
  model.layers[1].inv_freq[0] = 0.5;
  model.layers[3].inv_freq[0] = 0.5;
  const nlohmann::ordered_json classes = rope_classes_json(model);
  ASSERT_EQ(classes.size(), 2u);
  EXPECT_EQ(classes[0]["layers"], nlohmann::ordered_json({0, 2}));
  EXPECT_EQ(classes[1]["layers"], nlohmann::ordered_json({1, 3}));
  EXPECT_EQ(classes[1]["inv_freq"][0], 0.5);
}

}  // namespace
}  // namespace calib::artifacts

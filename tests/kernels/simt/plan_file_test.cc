// Plans as files: every layer appends and decodes on the device as the reference does. KVRT_TEST_PLAN names a plan.json of kvplan to run
// instead of the small one.

#include <cstdlib>

#include "gtest/gtest.h"
#include "tests/kernels/gpu/context_check.h"
#include "tests/kernels/tiny_plan.h"

namespace kvrt::testing {
namespace {

TEST(PlanFile, EveryLayerGivesWhatTheReferenceGives) {
  const char* const named = std::getenv("KVRT_TEST_PLAN");
  std::string path = named ? named : "";
  if (path.empty()) {
    TinyPlan tiny;
    auto& k = tiny.document["layers"][0]["k"];
    k["scheme"] = "int4.channel.g32", k["frame"] = "post", k["chan_perm"] = "natural";  // head_dim 32 has no kernel before RoPE
    tiny.write(::testing::TempDir());
    path = ::testing::TempDir() + "/tiny.json";
  }
  PlanHandle plan;
  const Status loaded = PlanHandle::load(path, &plan);
  ASSERT_TRUE(loaded.ok()) << loaded.text();
  const kvrt_device device = {KVRT_BACKEND_CUDA, 0};
  kvrt_error err;
  EXPECT_EQ(kvrt_plan_check(plan.get(), &device, nullptr, nullptr, &err), KVRT_OK) << err.text;
  const kvrt_plan_view view = plan.view();
  for (int i = 0; i < view.n_layers; ++i) {
    const kvrt_layer_view& layer = view.layers[i];
    ContextResult reference, result;
    const Status first = run_layer(plan, layer.index, KVRT_BACKEND_REF, &reference), second = run_layer(plan, layer.index, KVRT_BACKEND_CUDA, &result);
    ASSERT_TRUE(first.ok()) << first.text();
    ASSERT_TRUE(second.ok()) << second.text();
    double worst = 0;
    EXPECT_EQ(compare_contexts(reference, result, &worst), "") << "layer " << layer.index << " K " << layer.k.scheme << " V " << layer.v.scheme;
    if (named) std::printf("layer %2d K %-28s V %-20s error %.3f of the tolerance\n", layer.index, layer.k.scheme, layer.v.scheme, worst);
  }
}

}  // namespace
}  // namespace kvrt::testing

#include "libcalib/quant/unit_evidence.h"

#include <gtest/gtest.h>

#include "layer_stats.h"

namespace calib::quant {
namespace {

TEST(UnitEvidence, RatiosOfKnownTensors) {
  // Keys alternate between +1 and -1; after RoPE channel 5 of head 1 is 14 times as large. Values have mean 3 and deviation 1.
  const auto swing = [](std::int64_t t) { return t % 2 == 0 ? 1.0f : -1.0f; };
  const stats::LayerStats layer = quant_test::layer_stats(
      quant_test::geometry(), 0, 400, [&](std::int64_t t, int, int) { return swing(t); },
      [&](std::int64_t t, int h, int c) { return swing(t) * (h == 1 && c == 5 ? 14.0f : 1.0f); }, [&](std::int64_t t, int, int) { return 3.0f + swing(t); });
  const UnitEvidence e = unit_evidence(layer);
  EXPECT_NEAR(e.k_pre_outlier_ratio, 1, 1e-9);
  EXPECT_NEAR(e.k_outlier_ratio, 14, 1e-6);
  EXPECT_NEAR(e.v_outlier_ratio, 1, 1e-9);
  EXPECT_NEAR(e.k_mean_ratio, 0, 1e-9);
  EXPECT_NEAR(e.v_mean_ratio, 3, 1e-9);
}

}  // namespace
}  // namespace calib::quant

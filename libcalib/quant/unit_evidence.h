#pragma once
// What the statistics say about a unit: the numbers that a plan quotes beside the measured scores.

namespace calib::stats {
class LayerStats;
}

namespace calib::quant {

/// Evidence of one layer, non-sink tokens; 0 where nothing was seen.
struct UnitEvidence {
  double k_outlier_ratio = 0;      ///< max over channels of absmax / median(absmax), post-RoPE keys, worst KV head
  double k_pre_outlier_ratio = 0;  ///< the same before RoPE
  double v_outlier_ratio = 0;
  double k_mean_ratio = 0;         ///< max over KV heads of ||mean|| / sqrt(sum of channel variances), post-RoPE keys
  double k_pre_mean_ratio = 0;     ///< the same before RoPE
  double v_mean_ratio = 0;
};

UnitEvidence unit_evidence(const stats::LayerStats& layer);

}  // namespace calib::quant

#include "libcalib/quant/unit_evidence.h"

#include <algorithm>
#include <cmath>

#include "libcalib/stats/kv_stats.h"

namespace calib::quant {
namespace {

double outlier_ratio(const stats::TensorStats& tensor) {
  double largest = 0;
  for (const double ratio : stats::channel_outlier_ratios(tensor)) largest = std::max(largest, ratio);
  return largest;
}

double mean_ratio(const stats::TensorStats& tensor) {
  double largest = 0;
  for (int h = 0; h < tensor.n_heads; ++h) {
    double mean_squares = 0, variances = 0;
    for (int c = 0; c < tensor.head_dim; ++c) {
      const stats::Moments& m = tensor.moments[tensor.index(h, c)];
      mean_squares += m.mean * m.mean;
      variances += m.variance();
    }
    if (variances > 0) largest = std::max(largest, std::sqrt(mean_squares / variances));
  }
  return largest;
}

}  // namespace

UnitEvidence unit_evidence(const stats::LayerStats& layer) {
  UnitEvidence e;
  e.k_outlier_ratio = outlier_ratio(layer.k_post.body);
  e.k_pre_outlier_ratio = outlier_ratio(layer.k_pre.body);
  e.v_outlier_ratio = outlier_ratio(layer.v.body);
  e.k_mean_ratio = mean_ratio(layer.k_post.body);
  e.k_pre_mean_ratio = mean_ratio(layer.k_pre.body);
  e.v_mean_ratio = mean_ratio(layer.v.body);
  return e;
}

}  // namespace calib::quant

#pragma once
// Mean and range of every channel of one unit, over the tokens that the plan quantises and in the coordinates of its scheme.

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/core/scheme.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/quant/scheme_params.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::quant {

/// Index: head * head_dim + channel.
struct ChannelSummary {
  std::int64_t n_tokens = 0;
  int n_heads = 0, head_dim = 0;
  std::vector<double> mean, lo, hi;
};

/// Statistics of the tensor that a scheme stores, sinks merged back if the plan quantises them.
stats::TensorStats coded_tensor(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, bool with_sinks);

/// Summary of `tensor` in stored coordinates; sets params.mean and params.smooth where the scheme has them. Ranges:
/// - those of all values, or with static ranges and out<p> the percentiles p/2 and 100 - p/2 of each channel;
/// - keys after RoPE with static ranges: of every position, bounded by the norms of RoPE pairs. Pairs that finish a turn within
///   max_distance positions keep what was seen of them (channel.static: only where that is percentiles);
/// - had: float formats, the norm of the channels' extremes; integers, mean +- sqrt(2 ln n) standard deviations of the rotated channels
///   (the largest of n normal values), within that norm.
/// Throws kNumeric naming what is not finite, kUnsupported where the rotated sinks are in no statistic.
ChannelSummary summarise(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, const stats::TensorStats& tensor, bool with_sinks,
                         std::int64_t max_distance, const std::string& where, SchemeParams& params);

}  // namespace calib::quant

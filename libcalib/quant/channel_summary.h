#pragma once
// Mean and range of every channel of one unit, over the tokens that the plan quantises and in the coordinates of its scheme.

#include <cstdint>
#include <vector>

namespace calib::quant {

/// Index: head * head_dim + channel.
struct ChannelSummary {
  std::int64_t n_tokens = 0;
  int n_heads = 0, head_dim = 0;
  std::vector<double> mean, lo, hi;
};

}  // namespace calib::quant

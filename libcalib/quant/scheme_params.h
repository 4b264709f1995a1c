#pragma once
// Constants of one (unit, scheme): what a plan stores beside the scheme string.

#include <vector>

namespace calib::quant {

/// Constants of one (unit, scheme), fitted from statistics. Empty vectors where the scheme needs none. H KV heads, D head_dim.
struct SchemeParams {
  std::vector<float> mean;              ///< [H, D] (center), in the scheme's frame
  std::vector<float> clip_lo, clip_hi;  ///< tensor [1], head [H], channel.static [H, D]
  std::vector<float> smooth;            ///< [H, D]

  bool empty() const { return mean.empty() && clip_lo.empty() && clip_hi.empty() && smooth.empty(); }
  bool operator==(const SchemeParams&) const = default;
};

}  // namespace calib::quant

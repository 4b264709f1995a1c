#pragma once
// What a plan keeps of a layer's future queries, to rank the tokens of an exit block by (expected_attention.h).

#include <vector>

namespace calib::quant {

/// z = a . k + |m' k|^2 / 2 for a key after RoPE, turned back by the length at which its block leaves the window. Legend: Q query
/// heads, D head_dim, R rank.
struct SaliencyFactors {
  static constexpr int kMostRank = 16;
  int rank = 0;
  std::vector<float> a;  ///< [Q, D]
  std::vector<float> m;  ///< [Q, D, R], columns by falling eigenvalue
  bool operator==(const SaliencyFactors&) const = default;
};

}  // namespace calib::quant

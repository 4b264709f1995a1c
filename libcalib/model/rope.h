#pragma once
// Rotary position embedding: frequencies of every scaling rule and the cos/sin tables made from them.

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "libcalib/model/config.h"

namespace calib::model {

/// Frequencies omega_i of the rotary_dim/2 pairs, in double, scaling applied: theta^(-2i/rotary_dim), divided by `factor`
/// (linear), bent by wavelength (llama3: unchanged below original/high, divided by factor above original/low, linear in
/// original/wavelength between) or divided by the file's freq_factors. Positions are never scaled.
/// Source: Su et al., arXiv 2104.09864; Llama 3.1 release (piecewise rule).
std::vector<double> rope_inv_freq(const RopeConfig& rope, std::int64_t rotary_dim);

/// cos and sin of t * omega_i, computed in double and rounded once to fp32.
struct RopeTable {
  std::int64_t n_positions = 0, n_pairs = 0;
  std::vector<float> cos, sin;  ///< [n_positions, n_pairs]
};

/// Tables shared by the layers with equal frequencies; grows on demand, thread-safe.
class RopeCache {
 public:
  explicit RopeCache(std::vector<double> inv_freq, double attention_factor = 1.0)
      : inv_freq_(std::move(inv_freq)), attention_factor_(attention_factor) {}
  /// A table of at least n_positions rows.
  std::shared_ptr<const RopeTable> table(std::int64_t n_positions) const;

 private:
  std::vector<double> inv_freq_;
  double attention_factor_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const RopeTable> table_;
};

}  // namespace calib::model

#pragma once
// Smallest and largest value of one fp32 sequence, as a monoid; merging is exact.

#include <algorithm>
#include <limits>

namespace calib::stats {

/// The default value is the neutral element: min = +inf, max = -inf, absmax() = 0.
struct Extrema {
  float min = std::numeric_limits<float>::infinity();
  float max = -std::numeric_limits<float>::infinity();

  /// Requires: x is finite.
  void add(float x) {
    min = std::min(min, x);
    max = std::max(max, x);
  }
  void merge(const Extrema& other) {
    min = std::min(min, other.min);
    max = std::max(max, other.max);
  }
  bool empty() const { return min > max; }
  float absmax() const { return empty() ? 0.0f : std::max(max, -min); }
};

}  // namespace calib::stats

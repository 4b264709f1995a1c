#pragma once
// Streaming mean and central moment sums up to the fourth power of one scalar sequence, as a monoid (METHODS.md 3, "Moments").

#include <cstdint>

namespace calib::stats {

/// n, mean and M2, M3, M4 = sums of the powered deviations from the mean. The default value is the neutral element.
struct Moments {
  std::int64_t n = 0;
  double mean = 0, m2 = 0, m3 = 0, m4 = 0;

  void add(double x) { merge(Moments{1, x, 0, 0, 0}); }
  /// Exact: n; the others to 1e-12 relative of one pass over both. Associative and commutative within that bound.
  /// Source: Chan, Golub, LeVeque 1979 (M2); Pébay 2008, eq. 2.1 (M3, M4).
  void merge(const Moments& other);

  double variance() const { return n > 0 ? m2 / static_cast<double>(n) : 0.0; }  ///< divided by n
  double skew() const;             ///< sqrt(n) M3 / M2^1.5; 0 if M2 = 0
  double excess_kurtosis() const;  ///< n M4 / M2^2 - 3; 0 if M2 = 0
};

}  // namespace calib::stats

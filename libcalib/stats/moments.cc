#include "libcalib/stats/moments.h"

#include <cmath>

namespace calib::stats {

void Moments::merge(const Moments& other) {
  if (other.n == 0) return;
  if (n == 0) {
    *this = other;
    return;
  }
  const double na = static_cast<double>(n), nb = static_cast<double>(other.n), total = na + nb;
  const double delta = other.mean - mean, delta_n = delta / total;
  const double delta_sq = delta * delta_n * na * nb;  // delta^2 na nb / n
  const double a2 = m2, a3 = m3;
  mean += delta_n * nb;
  m2 = a2 + other.m2 + delta_sq;
  m3 = a3 + other.m3 + delta_sq * delta_n * (na - nb) + 3.0 * delta_n * (na * other.m2 - nb * a2);
  m4 = m4 + other.m4 + delta_sq * delta_n * delta_n * (na * na - na * nb + nb * nb) +
       6.0 * delta_n * delta_n * (na * na * other.m2 + nb * nb * a2) + 4.0 * delta_n * (na * other.m3 - nb * a3);
  n += other.n;
}

double Moments::skew() const {
  if (m2 <= 0) return 0.0;
  return std::sqrt(static_cast<double>(n)) * m3 / (m2 * std::sqrt(m2));
}

double Moments::excess_kurtosis() const {
  if (m2 <= 0) return 0.0;
  return static_cast<double>(n) * m4 / (m2 * m2) - 3.0;
}

}  // namespace calib::stats

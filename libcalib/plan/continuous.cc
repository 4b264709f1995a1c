#include "libcalib/plan/continuous.h"

#include <cmath>
#include <set>

namespace calib::plan {

std::optional<DamageCurves> fit_damage_curves(const std::vector<std::vector<std::pair<double, double>>>& points) {
  // One slope, one intercept a unit: centre each unit's points on their own means.
  double covariance = 0, variance = 0;
  std::vector<std::pair<double, double>> mean;
  for (const auto& unit : points) {
    std::set<double> widths;
    double bits = 0, log_score = 0;
    for (const auto& [b, score] : unit) {
      if (!(score > 0)) return std::nullopt;
      widths.insert(b);
      bits += b;
      log_score += std::log(score);
    }
    if (widths.size() < 3) return std::nullopt;
    const double n = static_cast<double>(unit.size());
    mean.emplace_back(bits / n, log_score / n);
    for (const auto& [b, score] : unit) {
      covariance += (b - mean.back().first) * (std::log(score) - mean.back().second);
      variance += (b - mean.back().first) * (b - mean.back().first);
    }
  }
  if (points.empty() || !(covariance < 0)) return std::nullopt;
  const double slope = covariance / variance;
  DamageCurves curves;
  curves.base = std::exp(-slope);
  for (const auto& [bits, log_score] : mean) curves.weight.push_back(std::exp(log_score - slope * bits));
  return curves;
}

std::vector<double> continuous_bits(const DamageCurves& curves, double mean_bits) {
  std::vector<double> bits;
  double mean = 0;
  for (const double w : curves.weight) {
    bits.push_back(std::log(w) / std::log(curves.base));
    mean += bits.back() / static_cast<double>(curves.weight.size());
  }
  for (double& b : bits) b += mean_bits - mean;
  return bits;
}

}  // namespace calib::plan

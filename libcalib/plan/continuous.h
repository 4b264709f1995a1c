#pragma once
// Bits as if they were continuous: a check of the searched plan from the damage curves alone (METHODS.md 8).

#include <optional>
#include <utility>
#include <vector>

namespace calib::plan {

/// Damage curves D_u = weight_u * base^-bits with one base for all units.
struct DamageCurves {
  double base = 0;              ///< how many times less is lost per added bit
  std::vector<double> weight;   ///< per unit
};

/// Least squares of ln score on bits with an intercept for every unit. `points[u]` holds (bits, score > 0) of unit u.
/// Empty unless every unit has three widths or more and the base comes out above 1.
std::optional<DamageCurves> fit_damage_curves(const std::vector<std::vector<std::pair<double, double>>>& points);

/// Bits per unit that minimise the sum of the curves at this mean: mean + log_base(weight) - mean(log_base(weight)).
/// Requires: weights > 0, base > 1.
std::vector<double> continuous_bits(const DamageCurves& curves, double mean_bits);

}  // namespace calib::plan

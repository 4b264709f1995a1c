#pragma once
// How far a lossy block of keys and values is from the exact one, as attention sees it, and the refit of a block that drops keys
// (arXiv 2602.16284; METHODS.md 6). No Torch. Legend: R query rows, N keys, K kept keys, D head_dim.

#include <cstdint>
#include <span>
#include <vector>

namespace calib::sens {

/// E_out = sum |o - o^|^2 / sum |o|^2 and E_mass = mean (ln sum e^s - ln sum e^s^)^2, as sums that merge. A sampled row counts as often as
/// the rows it stands for.
struct AttentionMatch {
  double error = 0, norm = 0;  ///< sums of |o - o^|^2 and |o|^2
  double mass = 0;             ///< sum of squared differences of the log masses, nats^2
  double n_rows = 0;

  /// o, o_hat: [D] each; log_mass = ln sum_j e^{s_j}.
  void add_row(std::span<const double> o, std::span<const double> o_hat, double log_mass, double log_mass_hat);
  AttentionMatch& operator+=(const AttentionMatch& other);
  double e_out() const { return norm > 0 ? error / norm : 0.0; }
  double e_mass() const { return n_rows > 0 ? mass / n_rows : 0.0; }
};

/// Kept keys with a bias each (added to their scores) and values fitted anew.
struct CompactBlock {
  std::vector<double> beta;    ///< [K] in [-3, 3]
  std::vector<double> values;  ///< [K, D]
};

/// Minimises |X b - y|^2 over b = e^beta in [e^-3, e^3] (X = e^{s - max} on kept keys, y the full row sums) by coordinate descent from
/// b = 1, then the values by least squares on the compact attention, as a change of the kept values; where the normal matrix is
/// singular, a ridge of 1e-6 of its largest eigenvalue keeps that change small. All keys kept: beta 0 and the values themselves.
/// scores: [R, N] exact; kept: K distinct keys; values: [N, D]. Requires: R, K >= 1.
CompactBlock refit_compact(std::span<const double> scores, std::int64_t n_keys, std::span<const std::int32_t> kept, std::span<const double> values,
                           std::int64_t head_dim);

/// E_out and E_mass of a compact block against the exact one on the rows of `scores`.
AttentionMatch match_compact(std::span<const double> scores, std::int64_t n_keys, std::span<const std::int32_t> kept, std::span<const double> values,
                             std::int64_t head_dim, const CompactBlock& block);

}  // namespace calib::sens

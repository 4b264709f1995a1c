#pragma once
// How far fresh text has moved away from the statistics that a plan was fitted on (METHODS.md 10). Documents are the resampling unit.
// Legend: T tokens, H KV heads, Q query heads, D head_dim.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "libcalib/stats/kv_stats.h"

namespace calib::stats {

enum class DriftLevel { kOk, kWarn, kOut };
const char* drift_level_name(DriftLevel level);  ///< "ok", "warn", "out"

/// One number of one unit, taken at its worst head.
struct DriftSignal {
  const char* name = "";  ///< "range_exceedance", "range_ratio", "psi", "query_shift", "query_moment", "saturation"
  int head = 0;           ///< KV head, for query_shift the query head
  double value = 0, se = 0;      ///< se: jackknife over documents; 0 with a single document, and for the query signals
  double warn = 0, limit = 0;    ///< levels start above these
  DriftLevel level() const { return value > limit ? DriftLevel::kOut : value > warn ? DriftLevel::kWarn : DriftLevel::kOk; }
};

struct UnitDrift {
  int layer = 0;
  Side side = Side::kK;
  std::vector<DriftSignal> signals;
  /// The worst of the signals; query_shift moves token scores, not ranges, and counts as a warning at most.
  DriftLevel level() const;
};

/// Expected shares of |x| between the stored quantiles kAbsQuantiles.
inline constexpr std::array<double, kAbsQuantiles.size() + 1> kPsiExpected = {0.5, 0.4, 0.09, 0.005, 0.004, 0.001};
/// Population stability index, sum of (a - e) ln(a / e), with a floored at 1e-4 (G46). Units: nats.
double population_stability(std::span<const double> actual, std::span<const double> expected);

/// (m' - m)^T (S + 1e-3 tr(S)/d I)^-1 (m' - m) / d. S: [d, d] row-major. 0 for S = 0 and m' = m; infinite for S = 0 otherwise.
double mean_shift(std::span<const double> mean, std::span<const double> fresh_mean, const std::vector<double>& covariance);

/// Fresh documents of one layer against its calibration. Keys and queries before RoPE (the query moment after it); sinks are left out.
class LayerDrift {
 public:
  /// Keeps what it needs of `reference`, no sketches.
  explicit LayerDrift(const LayerStats& reference);

  /// Requires: finite values (LayerStats::add_document checks them).
  void add_document(const DocumentTensors& document, ThreadPool& pool);
  /// Values clamped and stored of one document under a plan's static thresholds. head -1 everywhere: they are counted per unit.
  void add_saturation(Side side, std::int64_t n_saturated, std::int64_t n_values);

  /// K, then V. Requires: a document with tokens past the sinks.
  std::vector<UnitDrift> finish() const;

 private:
  static constexpr int kBins = static_cast<int>(kPsiExpected.size());
  /// One side, from the calibration: per channel.
  struct Bounds {
    std::vector<float> edges;   ///< [H, D, kAbsQuantiles]
    std::vector<float> absmax;  ///< [H, D]
    double n_tokens = 0;        ///< of the calibration
  };
  struct Counts {
    std::vector<std::int64_t> bins;    ///< [documents, H, kBins]
    std::vector<std::int64_t> beyond;  ///< [documents, H] values past absmax
    std::vector<float> ratio;          ///< [H] largest |x| / absmax
    std::vector<std::int64_t> saturated, values;  ///< [documents]
  };
  void add_side(int side, const float* x, std::int64_t n_sink, std::int64_t n_tokens, ThreadPool& pool);
  std::vector<DriftSignal> range_signals(int side) const;

  LayerGeometry geometry_;
  std::int64_t n_sinks_ = 0, n_documents_ = 0, n_tokens_ = 0;
  Bounds bounds_[2];
  Counts counts_[2];
  GramAccumulator moment_;              ///< fresh query moment
  std::vector<double> query_sum_;       ///< [Q, D] fresh
  std::vector<double> query_mean_;      ///< [Q, D] calibrated
  std::vector<std::vector<double>> query_cov_, query_moment_;  ///< calibrated, per query head and per KV head
};

/// What the signals of all units, the plan's measured loss and the positions add up to.
enum class DriftDecision { kOk, kWatch, kStepUp, kRecalibrate };
const char* drift_decision_name(DriftDecision decision);  ///< "ok", "watch", "step_up", "recalibrate"

/// A measured loss against the plan's limit. The warning starts at 90 % of the way to it.
struct MonitorSignal {
  std::string name;       ///< "mean_kld", "ppl_ratio"
  double value = 0, se = 0, warn = 0, limit = 0;
  std::vector<double> buckets;  ///< by position bucket, ascending
  DriftLevel level() const { return value > limit ? DriftLevel::kOut : value > warn ? DriftLevel::kWarn : DriftLevel::kOk; }
};

struct DriftReport {
  std::vector<UnitDrift> units;
  std::vector<MonitorSignal> monitor;  ///< empty without a plan
  double unseen_share = 0;             ///< of the fresh tokens, at positions that the calibration never reached
  DriftDecision decision = DriftDecision::kOk;
  std::vector<std::string> reasons;    ///< one sentence each, the deciding one first
};
inline constexpr double kUnseenWarn = 0.01, kUnseenLimit = 0.10;

/// Fills decision and reasons: `recalibrate` if at least a tenth of the units is out, more than kUnseenLimit of the tokens stand at
/// positions never calibrated, or two neighbouring position buckets exceed a limit; else `step_up` if a monitor limit is hit; else
/// `watch` if anything warns; else `ok`.
void decide_drift(DriftReport& report);

}  // namespace calib::stats

#pragma once
// Two stages of scores: where a metric's estimates of a unit pass a limit, isolated runs (logit_kl) take the place of all of the unit's
// surviving options, brought to the metric's scale by the slope that both have where the metric holds.

#include <cstdint>
#include <string>
#include <vector>

#include "libcalib/plan/candidate.h"
#include "libcalib/sens/sens_result.h"

namespace calib::plan {

inline constexpr std::size_t kLeastIsolatedPairs = 3;
/// A slope is fitted to pairs whose estimate lies between the limit over this and the limit.
inline constexpr double kTrustedSpan = 100.0;

/// Isolated runs to make. A cell is a (unit, scheme, tier class), index as ScoreTable.
struct IsolatedChoice {
  std::vector<std::uint8_t> cells;     ///< 1 = measure
  std::vector<std::uint8_t> taken_up;  ///< [units]
  std::size_t n_replacing = 0;         ///< cells of units taken up; the others serve the slope alone
  std::size_t n_fitting = 0;
};

/// Surviving options: allowed, and in their tier class and exit block no other of the unit has no more base bytes and no higher score.
/// A unit of `layers` (layer numbers, empty = all) with one that scores above `above` nats is taken up with all of them. Of the other units
/// up to 16 of each side, evenly spread, give one option between above / kTrustedSpan and `above`. Throws: kUsage for a layer that is
/// not there; kInfeasible if a unit is taken up and fewer than kLeastIsolatedPairs cells can show the slope.
IsolatedChoice choose_isolated(const Candidates& candidates, double above, const std::vector<int>& layers);

/// Sets the slopes of `runs` from its measured cells: the geometric mean of logit_kl over score. Keys and values each have their own where
/// those differ by more than 2 standard errors. Throws kInfeasible with fewer than kLeastIsolatedPairs pairs while a unit is taken up; 1 if none is.
void fit_slopes(const sens::SensResult& sens, sens::IsolatedRuns* runs);

/// What was measured over what was estimated, in one decade of estimates of one side.
struct TruthBucket {
  Side side = Side::kK;
  int decade = 0;          ///< estimates of 10^decade up to 10^(decade + 1) nats
  std::size_t n = 0;
  double ratio = 1;        ///< geometric mean of measured / estimated
  double sd = 0;           ///< standard deviation of the logarithm
  /// Within [0.7, 1.5] of the side's slope, scattered by no more than a factor 2: the limits of JointFit::reliable().
  bool holds = true;
};
/// Decades of both sides that have measured cells, K first, ascending.
std::vector<TruthBucket> truth_by_decade(const sens::SensResult& sens, const sens::IsolatedRuns& runs);

/// The measured cell that lies farthest from slope x estimate; -1 without any.
std::int64_t farthest_cell(const sens::SensResult& sens, const sens::IsolatedRuns& runs);

/// Scores of the metric with those of units taken up replaced. Index as ScoreTable.
struct StagedScores {
  std::vector<double> mean, se;
  /// Valid cells of units taken up that were neither measured nor dominated by one that was: they have no score to go by.
  std::vector<std::uint8_t> unknown;
};
/// Measured: logit_kl / slope, with the slope's error in `se`. Not measured: the estimate, times the ratio by which the nearest measured
/// option that dominates it changed, so that it stays dominated. Throws: kMismatch if tables have other sizes.
StagedScores staged_scores(const sens::SensResult& sens, const sens::IsolatedRuns& runs);

/// "K of 0, 3-7; V of 1": the units taken up, by layer number.
std::string units_taken_up(const sens::SensResult& sens, const sens::IsolatedRuns& runs);

}  // namespace calib::plan

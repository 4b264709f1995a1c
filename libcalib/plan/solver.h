#pragma once
// The multiple-choice knapsack: one option per group, least total score within a byte budget, proven (METHODS.md 8).

#include <cstdint>
#include <optional>
#include <vector>

namespace calib::plan {

struct Option {
  std::int64_t bytes = 0;
  double score = 0;
};
using OptionGroup = std::vector<Option>;

struct Solution {
  std::vector<std::size_t> choice;  ///< per group: index into the group as given
  std::int64_t bytes = 0;
  double score = 0;
  double bound = 0;     ///< no choice within the budget scores less (rounding aside)
  double lambda = 0;    ///< price of a byte at the dual optimum, score per byte
  bool proven = false;  ///< score is the optimum
  double gap() const;   ///< (score - bound) / max(score, 1e-12); 0 if proven
};

/// One vertex of the dual's lower hull.
struct HullPoint {
  std::int64_t bytes = 0;
  double score = 0;
  std::vector<std::size_t> choice;
};

/// Options that no other beats or equals in both bytes and score, ascending bytes; ties go to the lower index.
std::vector<std::size_t> undominated(const OptionGroup& group);

std::int64_t minimum_bytes(const std::vector<OptionGroup>& groups);

/// Empty if even the cheapest options exceed the budget. Requires: finite scores, bytes >= 0, no empty group.
/// The dual optimum comes from one sweep over the groups' hulls; the primal from that sweep, filled greedily; the exact finish
/// is a search over the undominated partial sums (bytes exact, never rounded) of the options whose reduced cost is below the gap.
/// It stops unproven, with the best found and the gap, past `max_states` partial sums.
std::optional<Solution> solve(const std::vector<OptionGroup>& groups, std::int64_t budget, std::size_t max_states = std::size_t{1} << 22);

/// All vertices of the dual, ascending bytes: every budget's bound in one sweep.
std::vector<HullPoint> dual_sweep(const std::vector<OptionGroup>& groups);

/// Fewest bytes whose optimal score is <= limit; empty if no choice reaches it. Bisects the budget over exact solutions.
std::optional<Solution> least_bytes(const std::vector<OptionGroup>& groups, double score_limit);

}  // namespace calib::plan

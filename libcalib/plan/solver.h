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

/// A problem pruned and swept once, then solved for any number of budgets.
/// Requires: finite scores, bytes >= 0, no empty group.
class Knapsack {
 public:
  explicit Knapsack(const std::vector<OptionGroup>& groups);

  std::size_t n_groups() const { return lists_.size(); }
  std::int64_t minimum_bytes() const { return minimum_bytes_; }
  double minimum_score() const { return minimum_score_; }

  /// Empty if even the cheapest options exceed the budget. The dual optimum comes from one sweep over the groups' hulls; the primal
  /// from that sweep, filled greedily; the exact finish is a search over the undominated partial sums (bytes exact, never rounded)
  /// within a reduced cost that widens until it holds a solution, which is then the optimum.
  /// It stops unproven, with the best found and the gap, past `max_states` partial sums.
  std::optional<Solution> solve(std::int64_t budget, std::size_t max_states = std::size_t{1} << 22) const;

  /// Fewest bytes whose optimal score is <= limit; empty if no choice reaches it. Bisects the budget over exact solutions.
  std::optional<Solution> least_bytes(double score_limit) const;

  /// All vertices of the dual, ascending bytes: every budget's bound in one sweep.
  std::vector<HullPoint> dual_sweep() const;

 private:
  /// One step along a group's lower hull; `from` and `to` are positions in its undominated list.
  struct Step {
    std::size_t group = 0, from = 0, to = 0;
    std::int64_t bytes = 0;
    double gain = 0;  ///< score saved, > 0
    double price() const { return gain / static_cast<double>(bytes); }
  };
  struct Primal {
    std::vector<std::size_t> position;  ///< per group, in its undominated list
    std::int64_t bytes = 0;
  };
  enum class Search { kFound, kNothing, kTooMany };

  double total_score(const std::vector<std::size_t>& position) const;
  std::vector<std::size_t> choice_of(const std::vector<std::size_t>& position) const;
  void fill(std::int64_t budget, Primal& primal) const;
  bool exact_finish(std::int64_t budget, double bound, double lambda, std::size_t max_states, Primal& best) const;
  Search search_within(std::int64_t budget, double lambda, double reach, const std::vector<std::vector<double>>& reduced,
                       std::size_t* states_left, Primal& found) const;

  std::vector<OptionGroup> lists_;                 ///< undominated, ascending bytes
  std::vector<std::vector<std::size_t>> origin_;   ///< index into the group as given
  std::vector<Step> steps_;                        ///< all hull steps, best price first
  std::int64_t minimum_bytes_ = 0, maximum_bytes_ = 0;
  double minimum_score_ = 0;
};

/// One budget, one vertex list, one limit of a problem that is used once.
std::optional<Solution> solve(const std::vector<OptionGroup>& groups, std::int64_t budget, std::size_t max_states = std::size_t{1} << 22);
std::vector<HullPoint> dual_sweep(const std::vector<OptionGroup>& groups);
std::optional<Solution> least_bytes(const std::vector<OptionGroup>& groups, double score_limit);

}  // namespace calib::plan

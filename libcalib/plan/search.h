#pragma once
// Finds the plan's choices: least score within bytes, or least bytes within a score, over the scored tier classes.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libcalib/plan/budget.h"
#include "libcalib/plan/candidate.h"
#include "libcalib/plan/solver.h"

namespace calib::plan {

/// Exactly one of budget, max_score and profile.
struct Limits {
  std::optional<Budget> budget;
  double max_score = 0;          ///< predicted KL in nats, or the ln of a perplexity ratio; 0 = none
  bool as_ppl_ratio = false;     ///< max_score is the ln of a perplexity ratio (kappa x KL)
  std::string asked;             ///< max_score as it was typed, for messages; empty = the number
  std::string profile;           ///< "accuracy", "compact" or empty
  bool window_per_layer = false;
};

/// One set of tier classes: the groups of layers and their knapsack, pruned and swept once for any number of budgets.
struct Problem {
  std::vector<LayerGroup> groups;
  Knapsack knapsack;
};
std::vector<Problem> problems_of(const Candidates& candidates, bool window_per_layer, const Candidates::Filter& filter = {}, bool with_constants = false,
                                 bool with_tiers = true);

struct Found {
  std::vector<LayerOption> choice;  ///< per layer
  Solution solution;                ///< of the knapsack behind it
  std::int64_t bytes = 0;           ///< without constants
  double score = 0, se = 0;
  std::int64_t limit_bytes = 0;     ///< what a byte budget allowed; 0 without one
  double limit_score = 0;           ///< what a score limit allowed; 0 without one
  bool data_free = false;           ///< the margin rule left only schemes without calibrated constants
};

/// A choice that no search made: sums, without limits.
Found found_of(const Candidates& candidates, std::vector<LayerOption> choice);
/// The best solution of all problems within `limit` bytes; empty if none fits.
std::optional<Found> best_within(const Candidates& candidates, const std::vector<Problem>& problems, std::int64_t limit);

/// Throws: kInfeasible with the least that is achievable and the cheapest change that would do, kUsage (a KL limit on a metric
/// that is not in nats).
Found search(const Candidates& candidates, const Limits& limits);

/// Band and limits of a profile (METHODS.md 8). Throws kUsage naming the known ones.
struct Profile {
  double min_bits = 0, max_bits = 0;
  double max_ppl_ratio = 1, max_kl = 0;  ///< both hold
};
Profile profile_of(const std::string& name);

/// The sets of tier classes that a search tries: one window for the whole model each, or all at once per layer; the share of a salient
/// tier is a layer's own either way. Without `with_tiers`, classes that have none.
std::vector<std::vector<std::size_t>> class_sets(const Candidates& candidates, bool per_layer, bool with_tiers = true);

}  // namespace calib::plan

#include "libcalib/plan/solver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "libcalib/base/error.h"

namespace calib::plan {
namespace {

/// One step along a group's lower hull.
struct Step {
  std::size_t group = 0, from = 0, to = 0;  ///< from, to: positions in the group's undominated list
  std::int64_t bytes = 0;
  double gain = 0;   ///< score saved, > 0
  double price() const { return gain / static_cast<double>(bytes); }
};

/// Positions of the lower convex hull of an undominated list (bytes ascending, score descending).
std::vector<std::size_t> hull_of(const OptionGroup& list) {
  std::vector<std::size_t> hull;
  for (std::size_t i = 0; i < list.size(); ++i) {
    while (hull.size() >= 2) {
      const Option &a = list[hull[hull.size() - 2]], &b = list[hull.back()], &c = list[i];
      const double slope_ab = (a.score - b.score) / static_cast<double>(b.bytes - a.bytes);
      const double slope_bc = (b.score - c.score) / static_cast<double>(c.bytes - b.bytes);
      if (slope_ab > slope_bc) break;
      hull.pop_back();
    }
    hull.push_back(i);
  }
  return hull;
}

/// The pruned problem: undominated options per group, and where they came from.
struct Pruned {
  std::vector<OptionGroup> lists;
  std::vector<std::vector<std::size_t>> origin;
  std::vector<Step> steps;  ///< all hull steps, best price first
};

Pruned prune(const std::vector<OptionGroup>& groups) {
  Pruned p;
  for (const OptionGroup& group : groups) {
    CALIB_CHECK(!group.empty());
    p.origin.push_back(undominated(group));
    OptionGroup list;
    for (const std::size_t i : p.origin.back()) list.push_back(group[i]);
    const std::vector<std::size_t> hull = hull_of(list);
    for (std::size_t h = 1; h < hull.size(); ++h) {
      const Option &a = list[hull[h - 1]], &b = list[hull[h]];
      p.steps.push_back({p.lists.size(), hull[h - 1], hull[h], b.bytes - a.bytes, a.score - b.score});
    }
    p.lists.push_back(std::move(list));
  }
  // Prices fall along a hull, so a stable order by price keeps every group's own order.
  std::stable_sort(p.steps.begin(), p.steps.end(), [](const Step& a, const Step& b) { return a.price() > b.price(); });
  return p;
}

struct Primal {
  std::vector<std::size_t> position;  ///< per group, in its undominated list
  std::int64_t bytes = 0;
};

double total_score(const Pruned& p, const std::vector<std::size_t>& position) {
  double sum = 0;
  for (std::size_t g = 0; g < position.size(); ++g) sum += p.lists[g][position[g]].score;
  return sum;
}

/// Spends what is left on the single move with the best price until none fits.
void fill(const Pruned& p, std::int64_t budget, Primal& primal) {
  for (;;) {
    double best_price = 0;
    std::size_t best_group = 0, best_position = 0;
    for (std::size_t g = 0; g < p.lists.size(); ++g) {
      const OptionGroup& list = p.lists[g];
      const Option& now = list[primal.position[g]];
      for (std::size_t i = primal.position[g] + 1; i < list.size() && primal.bytes + list[i].bytes - now.bytes <= budget; ++i) {
        const double price = (now.score - list[i].score) / static_cast<double>(list[i].bytes - now.bytes);
        if (price > best_price) best_price = price, best_group = g, best_position = i;
      }
    }
    if (best_price <= 0) return;
    primal.bytes += p.lists[best_group][best_position].bytes - p.lists[best_group][primal.position[best_group]].bytes;
    primal.position[best_group] = best_position;
  }
}

struct State {
  std::int64_t bytes = 0;
  double score = 0, reduced = 0;  ///< reduced: sum of reduced costs so far
  std::uint32_t parent = 0, option = 0;
};

/// Search over undominated partial sums. Returns false past max_states; else improves `best` to the optimum.
bool exact_finish(const Pruned& p, std::int64_t budget, double bound, double lambda, std::size_t max_states, Primal& best) {
  const std::size_t n = p.lists.size();
  const double incumbent = total_score(p, best.position);
  const double tolerance = 1e-12 * std::max(std::fabs(incumbent), std::fabs(bound));
  const double gap = incumbent - bound + tolerance;

  // Reduced cost of an option = what it adds to the bound at this price; options at or above the gap cannot win.
  std::vector<std::vector<std::pair<std::uint32_t, double>>> core(n);
  std::vector<std::int64_t> least(n + 1, 0), most(n + 1, 0);
  for (std::size_t g = 0; g < n; ++g) {
    double floor = std::numeric_limits<double>::infinity();
    for (const Option& o : p.lists[g]) floor = std::min(floor, o.score + lambda * static_cast<double>(o.bytes));
    for (std::size_t i = 0; i < p.lists[g].size(); ++i) {
      const Option& o = p.lists[g][i];
      const double reduced = std::max(0.0, o.score + lambda * static_cast<double>(o.bytes) - floor);
      if (reduced <= gap) core[g].emplace_back(static_cast<std::uint32_t>(i), reduced);
    }
    CALIB_CHECK(!core[g].empty());
  }
  for (std::size_t g = n; g-- > 0;) {
    least[g] = least[g + 1] + p.lists[g][core[g].front().first].bytes;
    most[g] = most[g + 1] + p.lists[g][core[g].back().first].bytes;
  }

  std::vector<std::vector<State>> levels(n + 1);
  levels[0].push_back({});
  std::size_t n_states = 1;
  for (std::size_t g = 0; g < n; ++g) {
    std::vector<State> next;
    for (std::uint32_t s = 0; s < levels[g].size(); ++s) {
      const State& from = levels[g][s];
      for (const auto& [option, reduced] : core[g]) {
        const Option& o = p.lists[g][option];
        const State state{from.bytes + o.bytes, from.score + o.score, from.reduced + reduced, s, option};
        if (state.bytes + least[g + 1] > budget) continue;
        const std::int64_t unspent = std::max<std::int64_t>(0, budget - state.bytes - most[g + 1]);
        if (state.reduced + lambda * static_cast<double>(unspent) > gap) continue;
        next.push_back(state);
      }
    }
    std::sort(next.begin(), next.end(), [](const State& a, const State& b) {
      if (a.bytes != b.bytes) return a.bytes < b.bytes;
      if (a.score != b.score) return a.score < b.score;
      return a.parent != b.parent ? a.parent < b.parent : a.option < b.option;
    });
    std::vector<State>& kept = levels[g + 1];
    for (const State& state : next)
      if (kept.empty() || state.score < kept.back().score) kept.push_back(state);
    n_states += kept.size();
    if (n_states > max_states) return false;
    if (kept.empty()) return true;  // nothing beats the incumbent
  }
  // Undominated states fall in score as bytes grow: the last one is the best.
  std::vector<std::size_t> position(n);
  std::uint32_t at = static_cast<std::uint32_t>(levels[n].size() - 1);
  const std::int64_t bytes = levels[n][at].bytes;
  for (std::size_t g = n; g-- > 0;) {
    position[g] = levels[g + 1][at].option;
    at = levels[g + 1][at].parent;
  }
  const double found = total_score(p, position);
  if (found < incumbent || (found == incumbent && bytes < best.bytes)) {
    best.position = std::move(position);
    best.bytes = bytes;
  }
  return true;
}

}  // namespace

double Solution::gap() const { return proven ? 0.0 : (score - bound) / std::max(score, 1e-12); }

std::vector<std::size_t> undominated(const OptionGroup& group) {
  std::vector<std::size_t> order(group.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (group[a].bytes != group[b].bytes) return group[a].bytes < group[b].bytes;
    if (group[a].score != group[b].score) return group[a].score < group[b].score;
    return a < b;
  });
  std::vector<std::size_t> kept;
  for (const std::size_t i : order)
    if (kept.empty() || group[i].score < group[kept.back()].score) kept.push_back(i);
  return kept;
}

std::int64_t minimum_bytes(const std::vector<OptionGroup>& groups) {
  std::int64_t sum = 0;
  for (const OptionGroup& group : groups) {
    CALIB_CHECK(!group.empty());
    sum += std::min_element(group.begin(), group.end(), [](const Option& a, const Option& b) { return a.bytes < b.bytes; })->bytes;
  }
  return sum;
}

std::optional<Solution> solve(const std::vector<OptionGroup>& groups, std::int64_t budget, std::size_t max_states) {
  const Pruned p = prune(groups);
  Primal primal;
  primal.position.assign(groups.size(), 0);
  for (const OptionGroup& list : p.lists) primal.bytes += list.front().bytes;
  if (primal.bytes > budget) return std::nullopt;

  // The sweep up to the first step that does not fit is the relaxation's optimum: its price is the dual's.
  Solution solution;
  bool all_fit = true;
  for (const Step& step : p.steps) {
    if (primal.bytes + step.bytes > budget) {
      solution.lambda = step.price();
      solution.bound = total_score(p, primal.position) - solution.lambda * static_cast<double>(budget - primal.bytes);
      all_fit = false;
      break;
    }
    primal.bytes += step.bytes;
    primal.position[step.group] = step.to;
  }
  if (all_fit) {
    solution.bound = total_score(p, primal.position);
    solution.proven = true;
  } else {
    fill(p, budget, primal);
    solution.proven = exact_finish(p, budget, solution.bound, solution.lambda, max_states, primal);
  }
  solution.score = total_score(p, primal.position);
  solution.bytes = primal.bytes;
  for (std::size_t g = 0; g < groups.size(); ++g) solution.choice.push_back(p.origin[g][primal.position[g]]);
  return solution;
}

std::vector<HullPoint> dual_sweep(const std::vector<OptionGroup>& groups) {
  const Pruned p = prune(groups);
  std::vector<std::size_t> position(groups.size(), 0);
  std::int64_t bytes = 0;
  for (const OptionGroup& list : p.lists) bytes += list.front().bytes;
  std::vector<HullPoint> points;
  const auto record = [&] {
    HullPoint point{bytes, total_score(p, position), {}};
    for (std::size_t g = 0; g < groups.size(); ++g) point.choice.push_back(p.origin[g][position[g]]);
    points.push_back(std::move(point));
  };
  record();
  for (const Step& step : p.steps) {
    bytes += step.bytes;
    position[step.group] = step.to;
    record();
  }
  return points;
}

std::optional<Solution> least_bytes(const std::vector<OptionGroup>& groups, double score_limit) {
  std::int64_t most = 0;
  for (const OptionGroup& group : groups)
    most += std::max_element(group.begin(), group.end(), [](const Option& a, const Option& b) { return a.bytes < b.bytes; })->bytes;
  std::optional<Solution> best = solve(groups, most);
  if (!best || best->score > score_limit) return std::nullopt;
  // Optimal scores never rise with the budget. Every solution found caps the search at its own bytes.
  std::int64_t too_small = minimum_bytes(groups) - 1, enough = best->bytes;
  while (enough - too_small > 1) {
    const std::int64_t middle = too_small + (enough - too_small) / 2;
    const std::optional<Solution> found = solve(groups, middle);
    if (found && found->score <= score_limit) {
      best = found;
      enough = found->bytes;
    } else {
      too_small = middle;
    }
  }
  return best;
}

}  // namespace calib::plan

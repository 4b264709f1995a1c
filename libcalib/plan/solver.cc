#include "libcalib/plan/solver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "libcalib/base/error.h"

namespace calib::plan {
namespace {

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

/// A partial sum of the exact search.
struct State {
  std::int64_t bytes = 0;
  double score = 0, reduced = 0;  ///< reduced: sum of reduced costs so far
  std::uint32_t parent = 0, option = 0;
};

/// Sorted by bytes, then score; ties by parent and option, so that the result never depends on the order of making.
bool before(const State& a, const State& b) {
  if (a.bytes != b.bytes) return a.bytes < b.bytes;
  if (a.score != b.score) return a.score < b.score;
  return a.parent != b.parent ? a.parent < b.parent : a.option < b.option;
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

Knapsack::Knapsack(const std::vector<OptionGroup>& groups) {
  for (const OptionGroup& group : groups) {
    CALIB_CHECK(!group.empty());
    origin_.push_back(undominated(group));
    OptionGroup list;
    for (const std::size_t i : origin_.back()) list.push_back(group[i]);
    const std::vector<std::size_t> hull = hull_of(list);
    for (std::size_t h = 1; h < hull.size(); ++h) {
      const Option &a = list[hull[h - 1]], &b = list[hull[h]];
      steps_.push_back({lists_.size(), hull[h - 1], hull[h], b.bytes - a.bytes, a.score - b.score});
    }
    minimum_bytes_ += list.front().bytes;
    maximum_bytes_ += list.back().bytes;
    minimum_score_ += list.back().score;
    lists_.push_back(std::move(list));
  }
  // Prices fall along a hull, so a stable order by price keeps every group's own order.
  std::stable_sort(steps_.begin(), steps_.end(), [](const Step& a, const Step& b) { return a.price() > b.price(); });
}

double Knapsack::total_score(const std::vector<std::size_t>& position) const {
  double sum = 0;
  for (std::size_t g = 0; g < position.size(); ++g) sum += lists_[g][position[g]].score;
  return sum;
}

std::vector<std::size_t> Knapsack::choice_of(const std::vector<std::size_t>& position) const {
  std::vector<std::size_t> choice;
  for (std::size_t g = 0; g < position.size(); ++g) choice.push_back(origin_[g][position[g]]);
  return choice;
}

/// Spends what is left on the single move with the best price until none fits.
void Knapsack::fill(std::int64_t budget, Primal& primal) const {
  for (;;) {
    double best_price = 0;
    std::size_t best_group = 0, best_position = 0;
    for (std::size_t g = 0; g < lists_.size(); ++g) {
      const OptionGroup& list = lists_[g];
      const Option& now = list[primal.position[g]];
      for (std::size_t i = primal.position[g] + 1; i < list.size() && primal.bytes + list[i].bytes - now.bytes <= budget; ++i) {
        const double price = (now.score - list[i].score) / static_cast<double>(list[i].bytes - now.bytes);
        if (price > best_price) best_price = price, best_group = g, best_position = i;
      }
    }
    if (best_price <= 0) return;
    primal.bytes += lists_[best_group][best_position].bytes - lists_[best_group][primal.position[best_group]].bytes;
    primal.position[best_group] = best_position;
  }
}

/// Best solution among all whose reduced costs and unspent bytes (at price lambda) sum to at most `reach`.
Knapsack::Search Knapsack::search_within(std::int64_t budget, double lambda, double reach, const std::vector<std::vector<double>>& reduced,
                                         std::size_t* states_left, Primal& found) const {
  const std::size_t n = lists_.size();
  std::vector<std::vector<std::uint32_t>> core(n);
  std::vector<std::size_t> open;  // groups with a choice left; the others add a constant
  State start;
  for (std::size_t g = 0; g < n; ++g) {
    for (std::size_t i = 0; i < lists_[g].size(); ++i)
      if (reduced[g][i] <= reach) core[g].push_back(static_cast<std::uint32_t>(i));
    if (core[g].size() > 1) {
      open.push_back(g);
      continue;
    }
    start.bytes += lists_[g][core[g].front()].bytes;
    start.score += lists_[g][core[g].front()].score;
    start.reduced += reduced[g][core[g].front()];
  }
  std::vector<std::int64_t> least(open.size() + 1, 0), most(open.size() + 1, 0);
  for (std::size_t at = open.size(); at-- > 0;) {
    least[at] = least[at + 1] + lists_[open[at]][core[open[at]].front()].bytes;
    most[at] = most[at + 1] + lists_[open[at]][core[open[at]].back()].bytes;
  }
  const auto worth_keeping = [&](const State& s, std::size_t next) {
    if (s.bytes + least[next] > budget) return false;
    const std::int64_t unspent = std::max<std::int64_t>(0, budget - s.bytes - most[next]);
    return s.reduced + lambda * static_cast<double>(unspent) <= reach;
  };

  if (!worth_keeping(start, 0)) return Search::kNothing;
  std::vector<std::vector<State>> levels(open.size() + 1);
  levels[0].push_back(start);
  std::vector<State> next;
  for (std::size_t at = 0; at < open.size(); ++at) {
    const std::size_t g = open[at];
    next.clear();
    for (std::uint32_t s = 0; s < levels[at].size(); ++s)
      for (const std::uint32_t option : core[g]) {
        const State& from = levels[at][s];
        const Option& o = lists_[g][option];
        const State state{from.bytes + o.bytes, from.score + o.score, from.reduced + reduced[g][option], s, option};
        if (worth_keeping(state, at + 1)) next.push_back(state);
      }
    std::sort(next.begin(), next.end(), before);
    std::vector<State>& kept = levels[at + 1];
    for (const State& state : next)
      if (kept.empty() || state.score < kept.back().score) kept.push_back(state);
    if (kept.empty()) return Search::kNothing;
    if (kept.size() > *states_left) return Search::kTooMany;
    *states_left -= kept.size();
  }
  // Undominated states fall in score as bytes grow: the last one is the best.
  std::uint32_t at_state = static_cast<std::uint32_t>(levels.back().size() - 1);
  found.bytes = levels.back()[at_state].bytes;
  found.position.assign(n, 0);
  for (std::size_t g = 0; g < n; ++g) found.position[g] = core[g].front();
  for (std::size_t at = open.size(); at-- > 0;) {
    found.position[open[at]] = levels[at + 1][at_state].option;
    at_state = levels[at + 1][at_state].parent;
  }
  return Search::kFound;
}

/// Returns false past max_states; else `best` is the optimum.
bool Knapsack::exact_finish(std::int64_t budget, double bound, double lambda, std::size_t max_states, Primal& best) const {
  const double incumbent = total_score(best.position);
  const double tolerance = 1e-12 * std::max(std::fabs(incumbent), std::fabs(bound));
  const double gap = incumbent - bound + tolerance;

  // Reduced cost of an option = what it adds to the bound at this price; a solution whose sum is above the gap cannot win.
  std::vector<std::vector<double>> reduced(lists_.size());
  for (std::size_t g = 0; g < lists_.size(); ++g) {
    double floor = std::numeric_limits<double>::infinity();
    for (const Option& o : lists_[g]) floor = std::min(floor, o.score + lambda * static_cast<double>(o.bytes));
    for (const Option& o : lists_[g]) reduced[g].push_back(std::max(0.0, o.score + lambda * static_cast<double>(o.bytes) - floor));
  }
  // The optimum is usually far closer to the bound than the greedy primal is, and the work grows steeply with the reach.
  // All solutions within a reach are searched, so the best of the first reach that holds one is the best of all.
  std::size_t states_left = max_states;
  for (double reach = gap / 64;; reach *= 2) {
    reach = std::min(reach, gap);
    Primal found;
    switch (search_within(budget, lambda, reach, reduced, &states_left, found)) {
      case Search::kTooMany: return false;
      case Search::kFound: {
        const double score = total_score(found.position);
        if (score < incumbent || (score == incumbent && found.bytes < best.bytes)) best = std::move(found);
        return true;
      }
      case Search::kNothing:
        if (reach >= gap) return true;
    }
  }
}

std::optional<Solution> Knapsack::solve(std::int64_t budget, std::size_t max_states) const {
  if (minimum_bytes_ > budget) return std::nullopt;
  Primal primal{std::vector<std::size_t>(lists_.size(), 0), minimum_bytes_};

  // The sweep up to the first step that does not fit is the relaxation's optimum: its price is the dual's.
  Solution solution;
  bool all_fit = true;
  for (const Step& step : steps_) {
    if (primal.bytes + step.bytes > budget) {
      solution.lambda = step.price();
      solution.bound = total_score(primal.position) - solution.lambda * static_cast<double>(budget - primal.bytes);
      all_fit = false;
      break;
    }
    primal.bytes += step.bytes;
    primal.position[step.group] = step.to;
  }
  if (all_fit) {
    solution.bound = total_score(primal.position);
    solution.proven = true;
  } else {
    fill(budget, primal);
    solution.proven = exact_finish(budget, solution.bound, solution.lambda, max_states, primal);
  }
  solution.score = total_score(primal.position);
  solution.bytes = primal.bytes;
  solution.choice = choice_of(primal.position);
  return solution;
}

std::vector<HullPoint> Knapsack::dual_sweep() const {
  std::vector<std::size_t> position(lists_.size(), 0);
  std::vector<HullPoint> points = {{minimum_bytes_, total_score(position), choice_of(position)}};
  std::int64_t bytes = minimum_bytes_;
  for (const Step& step : steps_) {
    bytes += step.bytes;
    position[step.group] = step.to;
    points.push_back({bytes, total_score(position), choice_of(position)});
  }
  return points;
}

std::optional<Solution> Knapsack::least_bytes(double score_limit) const {
  std::optional<Solution> best = solve(maximum_bytes_);
  if (!best || best->score > score_limit) return std::nullopt;
  // Optimal scores never rise with the budget. Every solution found caps the search at its own bytes.
  std::int64_t too_small = minimum_bytes_ - 1, enough = best->bytes;
  while (enough - too_small > 1) {
    const std::int64_t middle = too_small + (enough - too_small) / 2;
    const std::optional<Solution> found = solve(middle);
    if (found && found->score <= score_limit) {
      best = found;
      enough = found->bytes;
    } else {
      too_small = middle;
    }
  }
  return best;
}

std::optional<Solution> solve(const std::vector<OptionGroup>& groups, std::int64_t budget, std::size_t max_states) {
  return Knapsack(groups).solve(budget, max_states);
}
std::vector<HullPoint> dual_sweep(const std::vector<OptionGroup>& groups) { return Knapsack(groups).dual_sweep(); }
std::optional<Solution> least_bytes(const std::vector<OptionGroup>& groups, double score_limit) { return Knapsack(groups).least_bytes(score_limit); }

}  // namespace calib::plan

#include "libcalib/plan/frontier.h"

#include <algorithm>

#include "libcalib/plan/search.h"

namespace calib::plan {

std::vector<FrontierPoint> frontier(const Candidates& candidates, bool window_per_layer, std::size_t n_points) {
  CALIB_CHECK(n_points >= 2);
  OptionGroup vertices;
  for (const Problem& problem : problems_of(candidates, window_per_layer))
    for (const HullPoint& point : problem.knapsack.dual_sweep()) vertices.push_back({point.bytes, point.score});
  const std::vector<std::size_t> kept = undominated(vertices);

  std::vector<FrontierPoint> points;
  const double first = static_cast<double>(vertices[kept.front()].bytes), last = static_cast<double>(vertices[kept.back()].bytes);
  const double step = (last - first) / static_cast<double>(n_points - 1);
  double next = first;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const Option& o = vertices[kept[i]];
    // Few vertices are all kept; many are thinned to the first past each step.
    if (kept.size() > n_points && static_cast<double>(o.bytes) < next && i + 1 != kept.size()) continue;
    points.push_back({o.bytes, effective_bits(o.bytes, candidates.elements()), o.score});
    while (next <= static_cast<double>(o.bytes) && step > 0) next += step;
  }
  return points;
}

}  // namespace calib::plan

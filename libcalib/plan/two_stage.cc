#include "libcalib/plan/two_stage.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>

#include "libcalib/quant/scheme.h"
#include "libcalib/quant/token_tiers.h"

namespace calib::plan {
namespace {

constexpr std::size_t kFittingUnits = 16;  // of a side
constexpr double kHoldsFrom = 0.7, kHoldsTo = 1.5, kHoldsScatter = 2.0;

/// Base bytes and exit blocks of a grid, and which of its cells a plan could take.
class Grid {
 public:
  explicit Grid(const sens::SensResult& sens) : sens_(sens) {
    for (const std::string& text : sens.schemes) {
      schemes_.push_back(quant::parse_scheme(text));
      exits_.push_back(kvrt::finish_tiers(schemes_.back(), schemes_.back(), 0, 0, 0.0).block_base);
    }
  }
  bool takes(std::size_t scheme, std::size_t tier_class) const { return sens_.salient_fraction(tier_class) == 0 || quant::takes_tier(schemes_[scheme]); }
  std::int64_t exit(std::size_t scheme) const { return exits_[scheme]; }
  double bytes(std::size_t unit, std::size_t scheme) const { return sens_.base_bytes_per_token[unit * schemes_.size() + scheme]; }
  std::size_t n_schemes() const { return schemes_.size(); }

 private:
  const sens::SensResult& sens_;
  std::vector<kvrt::Scheme> schemes_;
  std::vector<std::int64_t> exits_;
};

/// Cells of a unit that nothing in their tier class and exit block beats or equals.
std::vector<std::size_t> surviving_cells(const Grid& grid, const Candidates& c, std::size_t layer, Side side, const std::vector<double>& estimate) {
  const sens::SensResult& sens = c.sens();
  const std::size_t unit = c.unit(layer, side);
  std::vector<std::size_t> cells;
  for (std::size_t w = 0; w < sens.windows.size(); ++w) {
    std::map<std::int64_t, std::pair<std::vector<std::size_t>, OptionGroup>> by_exit;
    for (std::size_t s = 0; s < grid.n_schemes(); ++s) {
      if (!c.allowed(layer, side, s) || !grid.takes(s, w)) continue;
      auto& [schemes, costs] = by_exit[grid.exit(s)];
      schemes.push_back(s);
      // Bytes a token are fractions of whole pages.
      costs.push_back({std::llround(grid.bytes(unit, s) * (1 << 20)), estimate[sens.index(unit, s, w)]});
    }
    for (const auto& [exit, group] : by_exit)
      for (const std::size_t i : undominated(group.second)) cells.push_back(sens.index(unit, group.first[i], w));
  }
  return cells;
}

struct LogRatios {
  std::vector<double> values;
  double mean() const { return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size()); }
  double sd() const {
    double squares = 0;
    for (const double x : values) squares += (x - mean()) * (x - mean());
    return values.size() < 2 ? 0.0 : std::sqrt(squares / static_cast<double>(values.size() - 1));
  }
  sens::IsolatedRuns::Slope slope() const {
    return {std::exp(mean()), sd() / std::sqrt(static_cast<double>(values.size())), static_cast<std::int64_t>(values.size())};
  }
};

bool in_trusted_range(double estimate, double above) { return estimate >= above / kTrustedSpan && estimate <= above; }

[[noreturn]] void too_few_pairs(std::size_t n, double above) {
  fail(ErrorKind::kInfeasible, "--above",
       "{} of the undominated options lie between {:g} and {:g} nats, a slope needs {}; score more schemes, or choose another limit", n, above / kTrustedSpan,
       above, kLeastIsolatedPairs);
}

/// Calls (side, cell, estimate, measured) for every measured cell whose logarithms exist.
template <typename Call>
void each_pair(const sens::SensResult& sens, const sens::IsolatedRuns& runs, Call call) {
  const std::vector<double>& estimate = sens.scores.at(runs.metric).mean;
  CALIB_CHECK(runs.mean.size() == estimate.size() && runs.se.size() == estimate.size() && runs.taken_up.size() == sens.units.size());
  const std::size_t per_unit = sens.schemes.size() * sens.windows.size();
  for (std::size_t cell = 0; cell < estimate.size(); ++cell)
    if (runs.mean[cell] > 0 && estimate[cell] > 0) call(sens.units[cell / per_unit].side, cell, estimate[cell], runs.mean[cell]);  // false for NaN, too
}

}  // namespace

IsolatedChoice choose_isolated(const Candidates& candidates, double above, const std::vector<int>& layers) {
  const sens::SensResult& sens = candidates.sens();
  const std::vector<double>& estimate = sens.scores.at(candidates.metric()).mean;
  const Grid grid(sens);
  for (const int index : layers)
    if (std::none_of(sens.model.layers.begin(), sens.model.layers.end(), [&](const LayerGeometry& g) { return g.index == index; }))
      fail(ErrorKind::kUsage, "--layers", "the model has no attention layer {} (it has {} of them)", index, sens.model.layers.size());
  IsolatedChoice out;
  out.cells.assign(estimate.size(), 0);
  out.taken_up.assign(sens.units.size(), 0);
  for (const Side side : {Side::kK, Side::kV}) {
    std::vector<std::vector<std::size_t>> trusted;  // of units not taken up, ascending estimates
    for (std::size_t l = 0; l < candidates.n_layers(); ++l) {
      std::vector<std::size_t> cells = surviving_cells(grid, candidates, l, side, estimate);
      const bool asked = layers.empty() || std::find(layers.begin(), layers.end(), sens.model.layers[l].index) != layers.end();
      if (asked && std::any_of(cells.begin(), cells.end(), [&](std::size_t i) { return estimate[i] > above; })) {
        out.taken_up[candidates.unit(l, side)] = 1;
        out.n_replacing += cells.size();
        for (const std::size_t i : cells) out.cells[i] = 1;
        continue;
      }
      std::erase_if(cells, [&](std::size_t i) { return !in_trusted_range(estimate[i], above); });
      std::sort(cells.begin(), cells.end(), [&](std::size_t a, std::size_t b) { return estimate[a] != estimate[b] ? estimate[a] < estimate[b] : a < b; });
      if (!cells.empty()) trusted.push_back(std::move(cells));
    }
    const std::size_t n = std::min(kFittingUnits, trusted.size());
    for (std::size_t i = 0; i < n; ++i) {
      const std::vector<std::size_t>& cells = trusted[i * trusted.size() / n];
      const double along = std::fmod(0.618034 * static_cast<double>(i), 1.0);  // fills the range evenly, whatever n is
      out.cells[cells[static_cast<std::size_t>(along * static_cast<double>(cells.size()))]] = 1;
    }
    out.n_fitting += n;
  }
  std::size_t n_pairs = 0;
  for (std::size_t i = 0; i < out.cells.size(); ++i) n_pairs += out.cells[i] && in_trusted_range(estimate[i], above);
  if (out.n_replacing > 0 && n_pairs < kLeastIsolatedPairs) too_few_pairs(n_pairs, above);
  return out;
}

void fit_slopes(const sens::SensResult& sens, sens::IsolatedRuns* runs) {
  LogRatios k, v, both;
  each_pair(sens, *runs, [&](Side side, std::size_t, double estimate, double measured) {
    if (!in_trusted_range(estimate, runs->above)) return;
    (side == Side::kK ? k : v).values.push_back(std::log(measured / estimate));
    both.values.push_back(std::log(measured / estimate));
  });
  if (both.values.size() < kLeastIsolatedPairs) {
    runs->k = runs->v = {};
    if (std::find(runs->taken_up.begin(), runs->taken_up.end(), 1) == runs->taken_up.end()) return;
    too_few_pairs(both.values.size(), runs->above);
  }
  if (k.values.size() >= kLeastIsolatedPairs && v.values.size() >= kLeastIsolatedPairs &&
      std::fabs(k.mean() - v.mean()) > 2 * std::hypot(k.slope().se_ln, v.slope().se_ln))
    runs->k = k.slope(), runs->v = v.slope();
  else
    runs->k = runs->v = both.slope();
}

std::vector<TruthBucket> truth_by_decade(const sens::SensResult& sens, const sens::IsolatedRuns& runs) {
  std::map<std::pair<bool, int>, LogRatios> buckets;
  each_pair(sens, runs, [&](Side side, std::size_t, double estimate, double measured) {
    buckets[{side == Side::kV, static_cast<int>(std::floor(std::log10(estimate)))}].values.push_back(std::log(measured / estimate));
  });
  std::vector<TruthBucket> out;
  for (const auto& [key, ratios] : buckets) {
    TruthBucket b{key.first ? Side::kV : Side::kK, key.second, ratios.values.size(), std::exp(ratios.mean()), ratios.sd(), true};
    const double off = b.ratio / runs.slope(b.side).value;
    b.holds = off >= kHoldsFrom && off <= kHoldsTo && b.sd <= std::log(kHoldsScatter);
    out.push_back(b);
  }
  return out;
}

std::int64_t farthest_cell(const sens::SensResult& sens, const sens::IsolatedRuns& runs) {
  std::int64_t farthest = -1;
  double most = -1;
  each_pair(sens, runs, [&](Side side, std::size_t cell, double estimate, double measured) {
    if (const double off = std::fabs(std::log(measured / (estimate * runs.slope(side).value))); off > most) most = off, farthest = static_cast<std::int64_t>(cell);
  });
  return farthest;
}

StagedScores staged_scores(const sens::SensResult& sens, const sens::IsolatedRuns& runs) {
  const sens::ScoreTable& table = sens.scores.at(runs.metric);
  const std::size_t n_schemes = sens.schemes.size();
  if (runs.taken_up.size() != sens.units.size() || runs.mean.size() != table.mean.size() || runs.se.size() != table.mean.size())
    fail(ErrorKind::kMismatch, "the scores", "/isolated holds {} means and {} standard errors for {} units, expected {} for {}", runs.mean.size(), runs.se.size(),
         runs.taken_up.size(), table.mean.size(), sens.units.size());
  const Grid grid(sens);
  StagedScores out{table.mean, table.se, std::vector<std::uint8_t>(table.mean.size(), 0)};
  for (std::size_t u = 0; u < sens.units.size(); ++u) {
    if (!runs.taken_up[u]) continue;
    const sens::IsolatedRuns::Slope& slope = runs.slope(sens.units[u].side);
    for (std::size_t w = 0; w < sens.windows.size(); ++w) {
      const auto cell = [&](std::size_t s) { return sens.index(u, s, w); };
      for (std::size_t s = 0; s < n_schemes; ++s) {
        if (!runs.measured(cell(s))) continue;
        const double score = runs.mean[cell(s)] / slope.value, se = std::isfinite(runs.se[cell(s)]) ? runs.se[cell(s)] / slope.value : 0.0;
        out.mean[cell(s)] = score;
        out.se[cell(s)] = std::hypot(se, score * slope.se_ln);
      }
      for (std::size_t s = 0; s < n_schemes; ++s) {
        if (!sens.valid[u * n_schemes + s] || !grid.takes(s, w) || runs.measured(cell(s))) continue;
        std::optional<std::size_t> nearest;
        for (std::size_t m = 0; m < n_schemes; ++m)
          if (runs.measured(cell(m)) && grid.exit(m) == grid.exit(s) && grid.bytes(u, m) <= grid.bytes(u, s) && table.mean[cell(m)] <= table.mean[cell(s)] &&
              (!nearest || table.mean[cell(m)] > table.mean[cell(*nearest)]))
            nearest = m;
        if (!nearest) {
          out.unknown[cell(s)] = 1;
          continue;
        }
        const double before = table.mean[cell(*nearest)], now = out.mean[cell(*nearest)];
        out.mean[cell(s)] = before > 0 ? table.mean[cell(s)] * (now / before) : std::max(table.mean[cell(s)], now);
        out.se[cell(s)] = before > 0 ? table.se[cell(s)] * (now / before) : std::max(table.se[cell(s)], out.se[cell(*nearest)]);
      }
    }
  }
  return out;
}

std::string units_taken_up(const sens::SensResult& sens, const sens::IsolatedRuns& runs) {
  std::string text;
  for (const Side side : {Side::kK, Side::kV}) {
    std::vector<int> layers;
    for (std::size_t u = 0; u < sens.units.size(); ++u)
      if (runs.taken_up[u] && sens.units[u].side == side) layers.push_back(sens.units[u].layer);
    if (layers.empty()) continue;
    std::sort(layers.begin(), layers.end());
    std::string list;
    for (std::size_t i = 0; i < layers.size();) {
      std::size_t end = i + 1;
      while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
      list += fmt::format("{}{}", list.empty() ? "" : ", ", end - i > 1 ? fmt::format("{}-{}", layers[i], layers[end - 1]) : fmt::format("{}", layers[i]));
      i = end;
    }
    text += fmt::format("{}{} of {}", text.empty() ? "" : "; ", side_name(side), list);
  }
  return text;
}

}  // namespace calib::plan

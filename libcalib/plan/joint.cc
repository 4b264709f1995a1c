#include "libcalib/plan/joint.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "libcalib/base/plural.h"
#include "libcalib/base/rng.h"
#include "libcalib/plan/search.h"

namespace calib::plan {
namespace {

constexpr std::size_t kRates = 8;
constexpr double kMostBits = 8.0;

/// Ranks from 1, ties share their mean rank.
std::vector<double> ranks(const std::vector<double>& x) {
  std::vector<std::size_t> order(x.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return x[a] < x[b]; });
  std::vector<double> out(x.size());
  for (std::size_t i = 0; i < order.size();) {
    std::size_t end = i;
    while (end < order.size() && x[order[end]] == x[order[i]]) ++end;
    for (std::size_t j = i; j < end; ++j) out[order[j]] = 0.5 * static_cast<double>(i + end + 1);
    i = end;
  }
  return out;
}

double correlation(const std::vector<double>& x, const std::vector<double>& y) {
  const auto n = static_cast<double>(x.size());
  const double mx = std::accumulate(x.begin(), x.end(), 0.0) / n, my = std::accumulate(y.begin(), y.end(), 0.0) / n;
  double xy = 0, xx = 0, yy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) xy += (x[i] - mx) * (y[i] - my), xx += (x[i] - mx) * (x[i] - mx), yy += (y[i] - my) * (y[i] - my);
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0.0;
}

std::size_t scheme_index(const Candidates& c, std::size_t layer, Side side, const kvrt::Scheme& scheme) {
  for (std::size_t s = 0; s < c.sens().schemes.size(); ++s)
    if (c.scheme(s) == scheme && c.allowed(layer, side, s)) return s;
  fail(ErrorKind::kMismatch, fmt::format("layer {} {}", c.sens().model.layers[layer].index, side_name(side)),
       "the plan stores it as {}, which the scores do not have for this unit; give the sens.h5 that the plan was made from", kvrt::to_string(scheme));
}

}  // namespace

JointFit fit_joint(std::span<const JointRun> runs) {
  CALIB_CHECK(runs.size() >= kLeastJointRuns);
  JointFit fit;
  fit.n_runs = runs.size();
  std::vector<double> predicted, measured, weight;
  std::map<std::int64_t, std::vector<std::size_t>> by_window;
  double kl_square = 0, product = 0;
  for (const JointRun& run : runs) {
    CALIB_CHECK(run.predicted > 0 && run.kld > 0);
    predicted.push_back(std::log(run.predicted)), measured.push_back(std::log(run.kld));
    weight.push_back(1 / (kScatter * kScatter + run.kld_se * run.kld_se / (run.kld * run.kld)));
    kl_square += run.kld * run.kld, product += run.kld * run.ln_ppl_ratio;
    by_window[run.window].push_back(predicted.size() - 1);
  }
  const auto mean_of = [&](const std::vector<double>& x, const std::vector<std::size_t>& members) {
    double sum = 0, total = 0;
    for (const std::size_t i : members) sum += weight[i] * x[i], total += weight[i];
    return sum / total;
  };
  std::vector<std::size_t> all(runs.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  const double mean_predicted = mean_of(predicted, all), mean_measured = mean_of(measured, all);
  double xy = 0, xx = 0;  // within windows
  for (const auto& [window, members] : by_window) {
    const double x = mean_of(predicted, members), y = mean_of(measured, members);
    for (const std::size_t i : members) xy += weight[i] * (predicted[i] - x) * (measured[i] - y), xx += weight[i] * (predicted[i] - x) * (predicted[i] - x);
  }
  if (runs.size() >= kLeastCurveRuns && xx > 0) fit.exponent = std::clamp(xy / xx, 1 - kMostBend, 1 + kMostBend);
  fit.pivot = std::exp(mean_measured);
  // ln measured = exponent (ln predicted + ln slope) - (exponent - 1) ln pivot goes through the mean point of the runs of a slope.
  const auto log_slope = [&](double x, double y) { return (y + (fit.exponent - 1) * mean_measured) / fit.exponent - x; };
  fit.slope = std::exp(log_slope(mean_predicted, mean_measured));
  for (const auto& [window, members] : by_window) {
    const bool own = window >= 0 && members.size() >= kLeastJointRuns;
    const double shift = own ? log_slope(mean_of(predicted, members), mean_of(measured, members)) : std::log(fit.slope);
    if (own) fit.windows.push_back({window, members.size(), std::exp(shift)});
    for (const std::size_t i : members) predicted[i] = std::log(std::exp(predicted[i] + shift) * fit.level(std::exp(predicted[i] + shift)));
  }
  double residual = 0, total = 0, worst = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const double r = measured[i] - predicted[i];
    residual += r * r, total += (measured[i] - mean_measured) * (measured[i] - mean_measured), worst = std::max(worst, std::fabs(r));
  }
  fit.kappa = product / kl_square;
  fit.r2 = total > 0 ? 1 - residual / total : 0.0;
  fit.spearman = correlation(ranks(predicted), ranks(measured));
  fit.worst_factor = std::exp(worst);
  return fit;
}

double predicted_score(const std::vector<LayerOption>& choice) {
  double sum = 0;
  for (const LayerOption& o : choice) sum += o.score;
  return sum;
}

double unfitted_score(const Candidates& candidates, const std::vector<LayerOption>& choice) {
  double sum = 0;
  for (const LayerOption& o : choice) sum += o.score / candidates.slope(o.tier_class);
  return sum;
}

std::vector<std::vector<LayerOption>> joint_samples(const Candidates& candidates, std::size_t tier_class, std::size_t n, std::uint64_t seed) {
  std::vector<std::size_t> classes;
  for (const std::vector<std::size_t>& set : class_sets(candidates, false))
    if (std::find(set.begin(), set.end(), tier_class) != set.end()) classes = set;
  const std::vector<LayerGroup> tied = candidates.groups(classes);
  const std::vector<OptionGroup> groups = knapsack(tied);
  std::vector<std::vector<std::size_t>> useful;  // per group: undominated options
  for (const OptionGroup& group : groups) useful.push_back(undominated(group));
  std::vector<HullPoint> points = dual_sweep(groups);
  while (points.size() > 1 && effective_bits(points.back().bytes, candidates.elements()) > kMostBits) points.pop_back();

  std::vector<std::vector<LayerOption>> out;
  std::set<std::vector<std::size_t>> seen;
  const auto keep = [&](const std::vector<std::size_t>& choice) {
    if (out.size() >= n || !seen.insert(choice).second) return;
    std::vector<LayerOption> layers(candidates.n_layers());
    for (std::size_t g = 0; g < choice.size(); ++g) {
      const LayerOption& taken = tied[g].options[choice[g]];
      for (const std::size_t l : tied[g].layers) layers[l] = candidates.option(l, taken.k, taken.v, taken.tier_class);
    }
    out.push_back(std::move(layers));
  };
  const double first = static_cast<double>(points.front().bytes), last = static_cast<double>(points.back().bytes);
  std::vector<const HullPoint*> bases;
  for (std::size_t i = 0; i < kRates; ++i) {
    const double bytes = first + (last - first) * static_cast<double>(i) / static_cast<double>(kRates - 1);
    const auto nearest = std::min_element(points.begin(), points.end(), [&](const HullPoint& a, const HullPoint& b) {
      return std::fabs(static_cast<double>(a.bytes) - bytes) < std::fabs(static_cast<double>(b.bytes) - bytes);
    });
    bases.push_back(&*nearest);
    keep(nearest->choice);
  }
  // Small models have few combinations: give up after a fair number of attempts.
  for (std::uint64_t attempt = 0; out.size() < n && attempt < 20 * n; ++attempt) {
    Rng rng = Rng::for_item(seed, attempt, 0x5f17);
    std::vector<std::size_t> choice = bases[attempt % bases.size()]->choice;
    const std::size_t n_swaps = std::max<std::size_t>(1, choice.size() / 6);
    for (std::size_t s = 0; s < n_swaps; ++s) {
      const std::size_t layer = rng.below(choice.size());
      choice[layer] = useful[layer][rng.below(useful[layer].size())];
    }
    keep(choice);
  }
  return out;
}

std::vector<LayerOption> choice_of(const Candidates& candidates, const Plan& plan) {
  const sens::SensResult& sens = candidates.sens();
  if (plan.sink_tokens != sens.n_sinks)
    fail(ErrorKind::kMismatch, "sinks", "the plan keeps {} exact, the scores were made with {}", counted(plan.sink_tokens, "token"), sens.n_sinks);
  CALIB_CHECK(plan.layers.size() == candidates.n_layers());
  std::vector<LayerOption> choice;
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    const LayerPlan& layer = plan.layers[l];
    if (layer.salient_fraction > 0 && kvrt::to_string(plan.salient->scheme) != sens.salient_scheme)
      fail(ErrorKind::kMismatch, fmt::format("layer {}", layer.index), "the plan's salient tier is at {}, the scores have {}", kvrt::to_string(plan.salient->scheme),
           sens.salient_scheme.empty() ? "none" : sens.salient_scheme);
    std::size_t tiers = 0;
    while (tiers < sens.windows.size() && (sens.windows[tiers] != plan.window_of(layer) || sens.salient_fraction(tiers) != layer.salient_fraction)) ++tiers;
    if (tiers == sens.windows.size())
      fail(ErrorKind::kMismatch, fmt::format("layer {}", layer.index), "the plan's window of {}{} was not scored", counted(plan.window_of(layer), "token"),
           layer.salient_fraction > 0 ? fmt::format(" with {:g} salient", layer.salient_fraction) : "");
    choice.push_back(candidates.option(l, scheme_index(candidates, l, Side::kK, layer.k.scheme), scheme_index(candidates, l, Side::kV, layer.v.scheme),
                                       tiers));
  }
  return choice;
}

}  // namespace calib::plan

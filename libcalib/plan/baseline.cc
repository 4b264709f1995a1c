#include "libcalib/plan/baseline.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>

#include "libcalib/base/rng.h"
#include "libcalib/plan/search.h"

namespace calib::plan {
namespace {

constexpr int kRandomPlans = 20;
constexpr std::size_t kEdgeLayers = 2;

using SchemeFilter = std::function<bool(const kvrt::Scheme&)>;

SchemeFilter plain_of_bits(int bits) {
  return [bits](const kvrt::Scheme& s) { return kvrt::code_bits(s.format) == bits && s.lowrank == 0; };
}

/// One pair for a set of layers; those that the restrictions skip stay in bf16.
struct Pair {
  std::size_t k = 0, v = 0, tier_class = 0;
  std::int64_t bytes = 0;
  double score = 0;
};

std::vector<std::size_t> common_schemes(const Candidates& c, Side side, const SchemeFilter& filter) {
  std::vector<std::size_t> list;
  for (std::size_t s = 0; s < c.sens().schemes.size(); ++s) {
    bool everywhere = !filter || filter(c.scheme(s));
    for (std::size_t l = 0; everywhere && l < c.n_layers(); ++l) everywhere = c.skipped(l) || c.allowed(l, side, s);
    if (everywhere) list.push_back(s);
  }
  return list;
}

std::vector<Pair> pairs_over(const Candidates& c, const std::vector<std::size_t>& layers, std::size_t tier_class, const SchemeFilter& k_filter,
                             const SchemeFilter& v_filter) {
  std::vector<Pair> pairs;
  const std::vector<std::string>& names = c.sens().schemes;
  const auto bf16 = static_cast<std::size_t>(std::find(names.begin(), names.end(), "bf16") - names.begin());
  for (const std::size_t k : common_schemes(c, Side::kK, k_filter))
    for (const std::size_t v : common_schemes(c, Side::kV, v_filter)) {
      if (c.restrictions().same_kv && k != v) continue;
      Pair pair{k, v, tier_class, 0, 0};
      for (const std::size_t l : layers) {
        const LayerOption o = c.skipped(l) ? c.option(l, bf16, bf16, tier_class) : c.option(l, k, v, tier_class);
        pair.bytes += o.bytes;
        pair.score += o.score;
      }
      pairs.push_back(pair);
    }
  return pairs;
}

std::vector<Pair> undominated_pairs(const std::vector<Pair>& pairs) {
  OptionGroup costs;
  for (const Pair& p : pairs) costs.push_back({p.bytes, p.score});
  std::vector<Pair> kept;
  for (const std::size_t i : undominated(costs)) kept.push_back(pairs[i]);
  return kept;
}

/// Keeps the better of two: feasible first, then score (feasible) or bytes (not), then bytes.
bool better(const Baseline& a, const Baseline& b) {
  if (a.feasible != b.feasible) return a.feasible;
  if (!a.feasible) return a.bytes < b.bytes;
  return a.score != b.score ? a.score < b.score : a.bytes < b.bytes;
}

class Builder {
 public:
  Builder(const Candidates& candidates, std::int64_t limit, std::vector<Baseline>& out) : c_(candidates), limit_(limit), out_(out) {
    for (std::size_t l = 0; l < c_.n_layers(); ++l) all_.push_back(l);
    for (std::size_t w = 0; w < c_.sens().windows.size(); ++w)
      if (c_.sens().salient_fraction(w) == 0) plain_.push_back(w);
  }

  void uniform(const char* name, const char* what, const SchemeFilter& k, const SchemeFilter& v) {
    std::optional<Baseline> best;
    for (const std::size_t w : plain_)
      for (const Pair& pair : pairs_over(c_, all_, w, k, v)) {
        Baseline b = make(name, fmt::format("{}: {}", what, text(pair)), pair.bytes, pair.score);
        b.pair = c_.sens().schemes[pair.k] + ":" + c_.sens().schemes[pair.v];
        b.window_tokens = c_.sens().windows[pair.tier_class];
        if (!best || better(b, *best)) best = b;
      }
    if (best) out_.push_back(*best);
  }

  void edges_at_8_bits() {
    if (c_.n_layers() <= 2 * kEdgeLayers || c_.restrictions().one_pair) return;
    std::vector<std::size_t> edge, inner;
    for (const std::size_t l : all_) (l < kEdgeLayers || l + kEdgeLayers >= c_.n_layers() ? edge : inner).push_back(l);
    const SchemeFilter eight = plain_of_bits(8);
    std::optional<Baseline> best;
    for (const std::size_t w : plain_) {
      const std::vector<Pair> inner_pairs = undominated_pairs(pairs_over(c_, inner, w, {}, {}));
      for (const Pair& e : undominated_pairs(pairs_over(c_, edge, w, eight, eight)))
        for (const Pair& i : inner_pairs) {
          const Baseline b = make("edges_8bit", "", e.bytes + i.bytes, e.score + i.score);
          if (best && !better(b, *best)) continue;
          best = b;
          best->description = fmt::format("first and last two layers {}, the others {}", text(e), text(i));
        }
    }
    if (best) out_.push_back(*best);
  }

  void data_free_plan() {
    const std::optional<Found> found = best_data_free(c_, limit_, false);
    if (!found) return;
    Baseline b = make("data_free_plan", "", found->bytes, found->score);
    b.description = fmt::format("optimal plan of schemes without calibrated constants, window {}", c_.sens().windows[found->choice.front().tier_class]);
    out_.push_back(std::move(b));
  }

  void random_plans(std::uint64_t seed) {
    std::vector<std::vector<LayerGroup>> fitting;  // per window within reach of the limit
    for (const std::size_t w : plain_)
      if (std::vector<LayerGroup> groups = c_.groups({w}); minimum_bytes(knapsack(groups)) <= limit_) fitting.push_back(std::move(groups));
    if (fitting.empty()) return;
    double score_sum = 0, bytes_sum = 0;
    for (int i = 0; i < kRandomPlans; ++i) {
      Rng rng = Rng::for_item(seed, static_cast<std::uint64_t>(i));
      const auto [bytes, score] = random_plan(fitting[rng.below(fitting.size())], rng);
      bytes_sum += static_cast<double>(bytes);
      score_sum += score;
    }
    out_.push_back(make("random_mean", fmt::format("mean of {} random plans", kRandomPlans), static_cast<std::int64_t>(bytes_sum / kRandomPlans),
                        score_sum / kRandomPlans));
  }

 private:
  Baseline make(const char* name, std::string description, std::int64_t bytes, double score) const {
    return {name, std::move(description), bytes <= limit_, bytes, effective_bits(bytes, c_.elements()), score, "", 0};
  }
  std::string text(const Pair& p) const {
    return fmt::format("{}:{} window {}", c_.sens().schemes[p.k], c_.sens().schemes[p.v], c_.sens().windows[p.tier_class]);
  }

  /// Layers in random order take a random option among those that nothing beats and that leave room for the cheapest of the rest.
  /// Requires: the cheapest options fit the limit.
  std::pair<std::int64_t, double> random_plan(const std::vector<LayerGroup>& groups, Rng& rng) const {
    const auto cheapest = [](const std::vector<LayerOption>& o) {
      return std::min_element(o.begin(), o.end(), [](const LayerOption& a, const LayerOption& b) { return a.bytes < b.bytes; })->bytes;
    };
    std::int64_t rest = 0, bytes = 0;
    for (const LayerGroup& g : groups) rest += cheapest(g.options);
    std::vector<std::size_t> order;
    for (std::size_t g = 0; g < groups.size(); ++g) order.push_back(g);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
    double score = 0;
    for (std::size_t at = 0; at < order.size(); ++at) {
      const std::vector<LayerOption>& o = groups[order[at]].options;
      rest -= cheapest(o);
      // An even share of what is left keeps the last layers from paying for the first ones.
      const std::int64_t room = limit_ - bytes - rest, share = (limit_ - bytes) / static_cast<std::int64_t>(order.size() - at);
      std::vector<std::size_t> fitting;
      for (std::size_t i = 0; i < o.size(); ++i)
        if (o[i].bytes <= room && o[i].bytes <= std::max(2 * share, cheapest(o))) fitting.push_back(i);
      const LayerOption& pick = o[fitting[rng.below(fitting.size())]];
      bytes += pick.bytes;
      score += pick.score;
    }
    return {bytes, score};
  }

  const Candidates& c_;
  std::int64_t limit_;
  std::vector<Baseline>& out_;
  std::vector<std::size_t> all_, plain_;  ///< layers; classes without a salient tier
};

}  // namespace

std::optional<Found> best_data_free(const Candidates& c, std::int64_t limit_bytes, bool window_per_layer) {
  const Candidates::Filter filter = [&](std::size_t, Side, std::size_t s) { return !kvrt::needs_calibration(c.scheme(s)); };
  for (std::size_t l = 0; l < c.n_layers(); ++l)
    for (const Side side : {Side::kK, Side::kV}) {
      bool any = false;
      for (std::size_t s = 0; s < c.sens().schemes.size(); ++s) any = any || (c.allowed(l, side, s) && filter(l, side, s));
      if (!any) return std::nullopt;
    }
  const std::vector<Problem> problems = problems_of(c, window_per_layer, filter, false, /*with_tiers=*/false);
  if (std::optional<Found> found = best_within(c, problems, limit_bytes)) return found;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const Problem& p : problems) least = std::min(least, p.knapsack.minimum_bytes());
  return best_within(c, problems, least);
}

std::vector<Baseline> baselines(const Candidates& candidates, std::int64_t limit_bytes, std::uint64_t seed) {
  std::vector<Baseline> list;
  Builder builder(candidates, limit_bytes, list);
  const SchemeFilter data_free = [](const kvrt::Scheme& s) { return !kvrt::needs_calibration(s); };
  builder.uniform("uniform", "best uniform pair", {}, {});
  builder.uniform("data_free_uniform", "best uniform pair without calibrated constants", data_free, data_free);
  builder.uniform("k8v4", "K at 8 bits, V at 4", plain_of_bits(8), plain_of_bits(4));
  builder.edges_at_8_bits();
  builder.random_plans(seed);
  builder.data_free_plan();
  return list;
}

}  // namespace calib::plan

#include "libcalib/plan/search.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "libcalib/quant/scheme.h"

namespace calib::plan {
namespace {

constexpr double kWideGroupFactor = 1.25;  // METHODS.md 8, GQA-conservative margin

Found found_of(const Candidates& candidates, const Problem& problem, const Solution& solution) {
  std::vector<LayerOption> choice(candidates.n_layers());
  for (std::size_t g = 0; g < problem.groups.size(); ++g) {
    const LayerOption& taken = problem.groups[g].options[solution.choice[g]];
    for (const std::size_t l : problem.groups[g].layers) choice[l] = candidates.option(l, taken.k, taken.v, taken.tier_class);
  }
  Found found = plan::found_of(candidates, std::move(choice));
  found.solution = solution;
  return found;
}

/// Fewest bytes over all problems, with the plan's constants if the budget counts them.
std::int64_t least_bytes_of(const std::vector<Problem>& problems) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const Problem& p : problems) least = std::min(least, p.knapsack.minimum_bytes());
  return least;
}

/// Fewest bytes if the window were `window`, scored or not, and `extra` schemes were candidates on both sides.
std::int64_t hypothetical_least(const Candidates& c, std::int64_t window, const std::vector<kvrt::Scheme>& extra) {
  std::int64_t sum = 0;
  for (std::size_t l = 0; l < c.n_layers(); ++l) {
    const LayerGeometry& geometry = c.sens().model.layers[l];
    std::vector<kvrt::Scheme> of_side[2];
    for (const Side side : {Side::kK, Side::kV}) {
      std::vector<kvrt::Scheme>& list = of_side[side == Side::kK ? 0 : 1];
      for (std::size_t s = 0; s < c.sens().schemes.size(); ++s)
        if (c.allowed(l, side, s)) list.push_back(c.scheme(s));
      const bool keeps_bits = side == Side::kK && geometry.n_q_heads >= 4 * geometry.n_kv_heads;  // the margin of wide query groups
      for (const kvrt::Scheme& s : extra)
        if (!keeps_bits && kvrt::check_shape(s, geometry.head_dim, side == Side::kK).empty()) list.push_back(s);
    }
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (const kvrt::Scheme& k : of_side[0])
      for (const kvrt::Scheme& v : of_side[1]) least = std::min(least, layer_bytes(geometry, k, v, window, c.accounting()));
    sum += least;
  }
  return sum;
}

/// The cheapest change that makes `limit` bytes reachable, as a sentence part.
std::string cheapest_fix(const Candidates& c, std::int64_t limit) {
  const std::int64_t smallest = *std::min_element(c.sens().windows.begin(), c.sens().windows.end());
  const auto bits = [&](std::int64_t bytes) { return bits_that_allow(bytes, c.elements()); };
  for (const std::int64_t window : {64, 32, 16, 0}) {
    if (window >= smallest) continue;
    const std::int64_t bytes = hypothetical_least(c, window, {});
    if (bytes <= limit) return fmt::format("window {} gives {} (kvsens --window {})", window, bits(bytes), window);
  }
  const std::vector<kvrt::Scheme> narrow = {quant::parse_scheme("int2.token.g"), quant::parse_scheme("int2.token.g64")};
  const std::int64_t bytes = hypothetical_least(c, smallest, narrow);
  if (bytes <= limit) return fmt::format("candidates with int2.token.g64 or int2.token.g give {} (kvsens --candidates)", bits(bytes));
  const std::int64_t both = hypothetical_least(c, 0, narrow);
  if (both <= limit) return fmt::format("window 0 together with int2.token.g candidates gives {} (kvsens --window 0 --candidates default,int2.token.g)", bits(both));
  return "no window or candidate of this build reaches it; ask for more";
}

/// What the restrictions cost: the limit would be reachable without them. Empty if it would not, or there are none.
template <typename Reachable>
std::string restriction_fix(const Candidates& c, const Reachable& reachable) {
  const Restrictions& r = c.restrictions();
  if (!r.any()) return "";
  std::vector<Restrictions> looser;  // one rule less at a time, then none
  const auto without = [&](const auto& drop) {
    Restrictions less = r;
    drop(less);
    if (restrictions_text(less) != restrictions_text(r)) looser.push_back(std::move(less));
  };
  without([](Restrictions& x) { x.one_pair = false; });
  without([](Restrictions& x) { x.same_kv = false; });
  without([](Restrictions& x) { x.skip_layers.clear(); });
  without([](Restrictions& x) { x.k.clear(); });
  without([](Restrictions& x) { x.v.clear(); });
  without([](Restrictions& x) { x.arch.clear(); });
  looser.push_back({});
  for (const Restrictions& less : looser) {
    const std::string gain = reachable(Candidates(c.sens(), c.accounting(), c.metric(), {}, less, c.tier_rules()));
    if (gain.empty()) continue;
    const std::string left = restrictions_text(less);
    return fmt::format("with {} in place of {} {}", left.empty() ? "no restriction" : left, restrictions_text(r), gain);
  }
  return "";
}

/// The scheme pair and window that most layers have, for messages.
std::string typical_choice(const Candidates& c, const std::vector<LayerOption>& choice) {
  std::size_t best = 0, best_count = 0;
  const auto same = [](const LayerOption& a, const LayerOption& b) { return a.k == b.k && a.v == b.v && a.tier_class == b.tier_class; };
  for (std::size_t l = 0; l < choice.size(); ++l) {
    const auto count = static_cast<std::size_t>(std::count_if(choice.begin(), choice.end(), [&](const LayerOption& o) { return same(o, choice[l]); }));
    if (count > best_count) best = l, best_count = count;
  }
  const LayerOption& o = choice[best];
  return fmt::format("{}:{} {}", c.sens().schemes[o.k], c.sens().schemes[o.v], c.class_text(o.tier_class));
}

[[noreturn]] void fail_budget(const Candidates& c, const Budget& budget, const std::vector<Problem>& problems, std::int64_t limit, std::int64_t least,
                              bool window_per_layer, bool with_constants) {
  const Accounting& a = c.accounting();
  std::string asked, minimum;
  if (budget.kind == Budget::Kind::kEffectiveBits) {
    asked = fmt::format("{} effective bits at T={}", budget.text, a.context_tokens);
    minimum = bits_that_allow(least, c.elements());
  } else {
    asked = fmt::format("{} at T={} x batch {} ({} bytes)", budget.text, a.context_tokens, a.batch, limit);
    minimum = fmt::format("{} bytes ({}, {:.2f} effective bits)", least, format_bytes(least), effective_bits(least, c.elements()));
    const std::int64_t n_tokens = a.context_tokens * a.batch;
    if (budget.kind == Budget::Kind::kBytesPerToken) minimum = fmt::format("{}B/token, {}", (least + n_tokens - 1) / n_tokens, minimum);
  }
  const std::string loosened = restriction_fix(c, [&](const Candidates& free) -> std::string {
    const std::int64_t bytes = least_bytes_of(problems_of(free, window_per_layer, {}, with_constants));
    return bytes <= limit ? fmt::format("the minimum is {} effective bits", bits_that_allow(bytes, c.elements())) : "";
  });
  const std::optional<Found> smallest = best_within(c, problems, least);
  CALIB_CHECK(smallest);
  fail(ErrorKind::kInfeasible, asked, "minimum {} with these candidates{} (most layers {}); {}", minimum,
       c.restrictions().any() ? " and " + restrictions_text(c.restrictions()) : "", typical_choice(c, smallest->choice),
       !loosened.empty()        ? loosened
       : c.restrictions().any() ? "and without restrictions: " + cheapest_fix(Candidates(c.sens(), a, c.metric(), {}, {}, c.tier_rules()), limit)
                                : cheapest_fix(c, limit));
}

double lowest_score(const std::vector<Problem>& problems) {
  double lowest = std::numeric_limits<double>::infinity();
  for (const Problem& p : problems) lowest = std::min(lowest, p.knapsack.minimum_score());
  return lowest;
}

/// Fewest bytes whose score is at most `aim`.
std::optional<Found> cheapest_within(const Candidates& c, const std::vector<Problem>& problems, double aim) {
  std::optional<Found> best;
  for (const Problem& p : problems)
    if (const std::optional<Solution> s = p.knapsack.least_bytes(aim))
      if (!best || s->bytes < best->solution.bytes || (s->bytes == best->solution.bytes && s->score < best->solution.score)) best = found_of(c, p, *s);
  return best;
}

/// What a limit on loss must allow for a choice: the margin of wide query groups adds the plan's own standard error.
double needed_limit(const Candidates& c, const Found& found) { return c.wide_groups() ? kWideGroupFactor * found.score + found.se : found.solution.score; }

/// The lowest limit that can be met.
double lowest_limit(const Candidates& c, const std::vector<Problem>& problems) {
  const std::optional<Found> best = cheapest_within(c, problems, lowest_score(problems));
  CALIB_CHECK(best);
  return needed_limit(c, *best);
}

/// A limit on KL as it was asked for. Rounded up, so that it is met when it is typed back in.
std::string limit_text(const Candidates& c, const Limits& limits, double nats) {
  // expm1: a ratio just above 1 keeps its digits.
  if (!limits.as_ppl_ratio) return rounded_up(nats);
  const double excess = std::strtod(rounded_up(std::expm1(c.kappa() * nats)).c_str(), nullptr);
  return fmt::format("{:.{}f}", 1 + excess, std::clamp(2 - static_cast<int>(std::floor(std::log10(excess))), 0, 15));
}

Found within_score(const Candidates& c, const std::vector<Problem>& problems, double limit, const Limits& limits) {
  // The standard error is known only of a solution: aim lower until the limit holds, at last at the lowest score there is.
  const double lowest = lowest_score(problems);
  double aim = c.wide_groups() ? limit / kWideGroupFactor : limit;
  constexpr int kMostRounds = 64;
  for (int round = 0; aim >= lowest && round <= kMostRounds; ++round, aim = round < kMostRounds ? std::max(0.9 * aim, lowest) : lowest) {
    if (aim == lowest || !c.wide_groups()) round = kMostRounds;
    std::optional<Found> best = cheapest_within(c, problems, aim);
    if (!best || needed_limit(c, *best) > limit) continue;
    best->limit_score = limit;
    return *best;
  }
  const std::string loosened = restriction_fix(c, [&](const Candidates& free) -> std::string {
    const double reached = lowest_limit(free, problems_of(free, limits.window_per_layer));
    return reached <= limit ? fmt::format("{} can be met", limit_text(c, limits, reached)) : "";
  });
  const char* const what = limits.as_ppl_ratio ? "PPL ratio" : "KL";
  fail(ErrorKind::kInfeasible, fmt::format("predicted {} <= {}", what, limits.asked.empty() ? fmt::format("{:.6g}", limit) : limits.asked),
       "the lowest limit that these candidates{} can meet is {}{}; {}", c.restrictions().any() ? " and " + restrictions_text(c.restrictions()) : "",
       limit_text(c, limits, lowest_limit(c, problems)),
       c.wide_groups() ? fmt::format(" ({} x prediction + 1 SE: 4 or more query heads per KV head)", kWideGroupFactor) : "",
       loosened.empty() ? "ask for that, or score wider schemes (kvsens --candidates bf16,int8.channel.g64.pre,…)" : loosened);
}

}  // namespace

std::vector<Problem> problems_of(const Candidates& candidates, bool window_per_layer, const Candidates::Filter& filter, bool with_constants, bool with_tiers) {
  std::vector<Problem> problems;
  for (const std::vector<std::size_t>& classes : class_sets(candidates, window_per_layer, with_tiers)) {
    std::vector<LayerGroup> groups = candidates.groups(classes, filter, with_constants);
    Knapsack knapsack_of_groups(knapsack(groups, with_constants));
    problems.push_back({std::move(groups), std::move(knapsack_of_groups)});
  }
  return problems;
}

std::optional<Found> best_within(const Candidates& c, const std::vector<Problem>& problems, std::int64_t limit) {
  std::optional<Found> best;
  for (const Problem& p : problems)
    if (const std::optional<Solution> s = p.knapsack.solve(limit))
      if (!best || s->score < best->solution.score || (s->score == best->solution.score && s->bytes < best->solution.bytes)) best = found_of(c, p, *s);
  return best;
}

std::vector<std::vector<std::size_t>> class_sets(const Candidates& candidates, bool per_layer, bool with_tiers) {
  const std::vector<std::int64_t>& windows = candidates.sens().windows;
  std::vector<std::vector<std::size_t>> sets;
  for (std::size_t w = 0; w < windows.size(); ++w) {
    if (!with_tiers && candidates.sens().salient_fraction(w) > 0) continue;
    const auto same = std::find_if(sets.begin(), sets.end(), [&](const std::vector<std::size_t>& set) { return per_layer || windows[set.front()] == windows[w]; });
    if (same == sets.end()) sets.push_back({w});
    else same->push_back(w);
  }
  return sets;
}

Profile profile_of(const std::string& name) {
  if (name == "accuracy") return {16.0 / 3.0, 8.0, 1.02, std::numeric_limits<double>::infinity()};
  if (name == "compact") return {16.0 / 6.0, 4.0, 1.10, 0.05};
  fail(ErrorKind::kUsage, "--profile " + name, "unknown profile; known: accuracy (8.0 to 5.33 effective bits), compact (4.0 to 2.67)");
}

Found found_of(const Candidates& candidates, std::vector<LayerOption> choice) {
  Found found;
  for (std::size_t l = 0; l < choice.size(); ++l) {
    const LayerOption& o = choice[l];
    found.bytes += o.bytes;
    found.score += o.score;
    found.se += candidates.standard_error(l, Side::kK, o.k, o.tier_class) + candidates.standard_error(l, Side::kV, o.v, o.tier_class);
  }
  found.choice = std::move(choice);
  return found;
}

Found search(const Candidates& c, const Limits& limits) {
  if (c.restrictions().one_pair && limits.window_per_layer)
    fail(ErrorKind::kUsage, "--one-pair, --window-per-layer", "contradict each other: one pair for all layers has one window");
  if (limits.budget) {
    const bool with_constants = limits.budget->kind == Budget::Kind::kBytes;
    const std::int64_t limit = budget_bytes(*limits.budget, c.elements(), c.accounting().context_tokens, c.accounting().batch);
    const std::vector<Problem> problems = problems_of(c, limits.window_per_layer, {}, with_constants);
    if (const std::int64_t least = least_bytes_of(problems); least > limit)
      fail_budget(c, *limits.budget, problems, limit, least, limits.window_per_layer, with_constants);
    Found found = *best_within(c, problems, limit);
    found.limit_bytes = limit;
    return found;
  }
  if (!c.metric_in_nats())
    fail(ErrorKind::kUsage, "--metric " + c.metric(), "a limit on KL or PPL needs a metric in nats (fisher_softmax, logit_kl); use --budget instead");
  const std::vector<Problem> problems = problems_of(c, limits.window_per_layer);
  if (limits.profile.empty()) {
    Found found = within_score(c, problems, limits.as_ppl_ratio ? limits.max_score / c.kappa() : limits.max_score, limits);
    found.limit_score = limits.max_score;
    return found;
  }

  const Profile profile = profile_of(limits.profile);
  const double max_kl = std::min(profile.max_kl, std::log(profile.max_ppl_ratio) / c.kappa());
  Found found = within_score(c, problems, max_kl, limits);
  const auto bytes_at = [&](double bits) { return budget_bytes({Budget::Kind::kEffectiveBits, bits, ""}, c.elements(), 1, 1); };
  if (found.bytes > bytes_at(profile.max_bits))
    fail(ErrorKind::kInfeasible, "--profile " + limits.profile,
         "predicted KL <= {:.6f} needs {} effective bits at T={}, the profile ends at {:.2f}; use --profile accuracy, --max-kl or --budget", max_kl,
         bits_that_allow(found.bytes, c.elements()), c.accounting().context_tokens, profile.max_bits);
  if (found.bytes < bytes_at(profile.min_bits)) {  // the band's lower end buys accuracy that the profile's users expect
    const std::int64_t limit = std::max(bytes_at(profile.min_bits), least_bytes_of(problems));
    found = *best_within(c, problems, limit);
    found.limit_bytes = limit;
  }
  found.limit_score = max_kl;
  return found;
}

}  // namespace calib::plan

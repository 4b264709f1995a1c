#include "libcalib/plan/search.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "libcalib/quant/scheme.h"

namespace calib::plan {
namespace {

constexpr double kWideGroupFactor = 1.25;  // METHODS.md 8, GQA-conservative margin

struct Problem {
  std::vector<std::vector<LayerOption>> options;
  std::vector<OptionGroup> groups;
};

std::vector<Problem> problems_of(const Candidates& candidates, bool per_layer, bool with_constants) {
  std::vector<Problem> problems;
  for (const std::vector<std::size_t>& windows : window_sets(candidates, per_layer)) {
    Problem p;
    p.options = candidates.options(windows);
    p.groups = knapsack(p.options, with_constants);
    problems.push_back(std::move(p));
  }
  return problems;
}

Found found_of(const Candidates& candidates, const Problem& problem, const Solution& solution) {
  std::vector<LayerOption> choice;
  for (std::size_t l = 0; l < problem.options.size(); ++l) choice.push_back(problem.options[l][solution.choice[l]]);
  Found found = plan::found_of(candidates, std::move(choice));
  found.solution = solution;
  return found;
}

/// Fewest bytes over all problems, with the plan's constants if the budget counts them.
std::int64_t least_bytes_of(const std::vector<Problem>& problems) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const Problem& p : problems) least = std::min(least, minimum_bytes(p.groups));
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
      for (const kvrt::Scheme& s : extra)
        if (kvrt::check_shape(s, geometry.head_dim, side == Side::kK).empty()) list.push_back(s);
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
  const auto bits = [&](std::int64_t bytes) { return fmt::format("{:.2f}", effective_bits(bytes, c.elements())); };
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

[[noreturn]] void fail_budget(const Candidates& c, const Budget& budget, std::int64_t limit, std::int64_t least) {
  const Accounting& a = c.accounting();
  std::string asked, minimum;
  if (budget.kind == Budget::Kind::kEffectiveBits) {
    asked = fmt::format("{} effective bits at T={}", budget.text, a.context_tokens);
    minimum = fmt::format("{:.2f}", effective_bits(least, c.elements()));
  } else {
    asked = fmt::format("{} at T={} x batch {} ({} bytes)", budget.text, a.context_tokens, a.batch, limit);
    minimum = fmt::format("{} bytes ({}, {:.2f} effective bits)", least, format_bytes(least), effective_bits(least, c.elements()));
  }
  fail(ErrorKind::kInfeasible, asked, "minimum {} with these candidates; {}", minimum, cheapest_fix(c, limit));
}

Found within_bytes(const Candidates& c, const std::vector<Problem>& problems, std::int64_t limit) {
  std::optional<Found> best;
  for (const Problem& p : problems)
    if (const std::optional<Solution> s = solve(p.groups, limit))
      if (!best || s->score < best->solution.score || (s->score == best->solution.score && s->bytes < best->solution.bytes))
        best = found_of(c, p, *s);
  CALIB_CHECK(best);
  return *best;
}

Found within_score(const Candidates& c, const std::vector<Problem>& problems, double limit) {
  double aim = c.wide_groups() ? limit / kWideGroupFactor : limit;
  double lowest = std::numeric_limits<double>::infinity();
  // The margin of wide query groups adds the plan's own standard error, known only afterwards: aim lower until it holds.
  for (int round = 0; round < 64; ++round, aim *= 0.9) {
    std::optional<Found> best;
    for (const Problem& p : problems) {
      if (const std::optional<Solution> s = least_bytes(p.groups, aim)) {
        if (!best || s->bytes < best->solution.bytes || (s->bytes == best->solution.bytes && s->score < best->solution.score))
          best = found_of(c, p, *s);
      } else {
        double sum = 0;
        for (const OptionGroup& g : p.groups)
          sum += std::min_element(g.begin(), g.end(), [](const Option& a, const Option& b) { return a.score < b.score; })->score;
        lowest = std::min(lowest, sum);
      }
    }
    if (!best) break;
    if (!c.wide_groups() || kWideGroupFactor * best->score + best->se <= limit) {
      best->limit_score = limit;
      return *best;
    }
    lowest = std::min(lowest, best->score);
  }
  fail(ErrorKind::kInfeasible, fmt::format("predicted KL <= {}", limit), "the lowest prediction with these candidates is {:.3g}{}; ask for that, or score wider schemes (kvsens --candidates bf16,int8.channel.g64.pre,…)",
       lowest, c.wide_groups() ? fmt::format(" (limits hold for {} x prediction + 1 SE: 4 or more query heads per KV head)", kWideGroupFactor) : "");
}

}  // namespace

std::vector<std::vector<std::size_t>> window_sets(const Candidates& candidates, bool per_layer) {
  std::vector<std::vector<std::size_t>> sets;
  std::vector<std::size_t> all;
  for (std::size_t w = 0; w < candidates.sens().windows.size(); ++w) {
    all.push_back(w);
    sets.push_back({w});
  }
  if (per_layer) return {all};
  return sets;
}

Profile profile_of(const std::string& name) {
  if (name == "accuracy") return {16.0 / 3.0, 8.0, std::log(1.02)};
  if (name == "compact") return {16.0 / 6.0, 4.0, 0.05};  // mean KLD <= 0.05 is tighter than ln 1.10
  fail(ErrorKind::kUsage, "--profile " + name, "unknown profile; known: accuracy (8.0 to 5.33 effective bits), compact (4.0 to 2.67)");
}

Found found_of(const Candidates& candidates, std::vector<LayerOption> choice) {
  Found found;
  for (std::size_t l = 0; l < choice.size(); ++l) {
    const LayerOption& o = choice[l];
    found.bytes += o.bytes;
    found.score += o.score;
    found.se += candidates.standard_error(l, Side::kK, o.k, o.window) + candidates.standard_error(l, Side::kV, o.v, o.window);
  }
  found.choice = std::move(choice);
  return found;
}

Found search(const Candidates& c, const Limits& limits) {
  if (limits.budget) {
    const bool with_constants = limits.budget->kind == Budget::Kind::kBytes;
    const std::int64_t limit = budget_bytes(*limits.budget, c.elements(), c.accounting().context_tokens, c.accounting().batch);
    const std::vector<Problem> problems = problems_of(c, limits.window_per_layer, with_constants);
    if (const std::int64_t least = least_bytes_of(problems); least > limit) fail_budget(c, *limits.budget, limit, least);
    Found found = within_bytes(c, problems, limit);
    found.limit_bytes = limit;
    return found;
  }
  if (!c.metric_in_nats())
    fail(ErrorKind::kUsage, "--metric " + c.metric(), "a limit on KL or PPL needs a metric in nats (fisher_softmax, logit_kl); use --budget instead");
  const std::vector<Problem> problems = problems_of(c, limits.window_per_layer, false);
  if (limits.profile.empty()) return within_score(c, problems, limits.max_score);

  const Profile profile = profile_of(limits.profile);
  Found found = within_score(c, problems, profile.max_kl);
  const auto bytes_at = [&](double bits) { return budget_bytes({Budget::Kind::kEffectiveBits, bits, ""}, c.elements(), 1, 1); };
  if (found.bytes > bytes_at(profile.max_bits))
    fail(ErrorKind::kInfeasible, "--profile " + limits.profile, "predicted KL <= {:.6f} needs {:.2f} effective bits at T={}, the profile ends at {:.2f}; use --profile accuracy, --max-kl or --budget",
         profile.max_kl, effective_bits(found.bytes, c.elements()), c.accounting().context_tokens, profile.max_bits);
  if (found.bytes < bytes_at(profile.min_bits)) {  // the band's lower end buys accuracy that the profile's users expect
    const std::int64_t limit = std::max(bytes_at(profile.min_bits), least_bytes_of(problems));
    found = within_bytes(c, problems, limit);
    found.limit_bytes = limit;
  }
  found.limit_score = profile.max_kl;
  return found;
}

}  // namespace calib::plan

#include "libcalib/plan/solver.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>

#include "libcalib/base/rng.h"

namespace calib::plan {
namespace {

/// METHODS.md G39.
std::vector<OptionGroup> golden_groups() {
  return {{{16, 0}, {9, .5}, {8, 1}, {4, 6}}, {{16, 0}, {9, .2}, {8, .9}, {4, 2}}, {{16, 0}, {9, 1.6}, {8, 4}, {4, 9}}};
}

double brute_force(const std::vector<OptionGroup>& groups, std::int64_t budget) {
  double best = std::numeric_limits<double>::infinity();
  std::function<void(std::size_t, std::int64_t, double)> walk = [&](std::size_t g, std::int64_t bytes, double score) {
    if (bytes > budget) return;
    if (g == groups.size()) {
      best = std::min(best, score);
      return;
    }
    for (const Option& o : groups[g]) walk(g + 1, bytes + o.bytes, score + o.score);
  };
  walk(0, 0, 0);
  return best;
}

TEST(Solver, GoldenBudgets) {
  const std::vector<OptionGroup> groups = golden_groups();
  const std::pair<int, double> expected[] = {{21, 4.6}, {25, 3.5}, {26, 2.8}, {33, 1.2}, {34, .7}};
  for (const auto& [budget, score] : expected) {
    const std::optional<Solution> s = solve(groups, budget);
    ASSERT_TRUE(s) << budget;
    EXPECT_NEAR(s->score, score, 1e-9) << budget;
    EXPECT_TRUE(s->proven);
    EXPECT_EQ(s->gap(), 0);
    EXPECT_LE(s->bytes, budget);
  }
  EXPECT_NEAR(solve(groups, 25)->bound, 3.02, 1e-9);
  EXPECT_NEAR(solve(groups, 26)->bound, 2.66, 1e-9);
  EXPECT_FALSE(solve(groups, 11));
  EXPECT_EQ(minimum_bytes(groups), 12);
}

TEST(Solver, HullAloneIsNotEnough) {
  // The last vertex of the dual within 26 bytes scores 4.1; the optimum is 2.8.
  double best = std::numeric_limits<double>::infinity();
  for (const HullPoint& p : dual_sweep(golden_groups()))
    if (p.bytes <= 26) best = std::min(best, p.score);
  EXPECT_NEAR(best, 4.1, 1e-9);
}

TEST(Solver, AgreesWithBruteForce) {
  Rng rng(7);
  int feasible = 0;
  for (int instance = 0; instance < 1000; ++instance) {
    std::vector<OptionGroup> groups(1 + rng.below(5));
    std::int64_t least = 0, most = 0;
    for (OptionGroup& group : groups) {
      group.resize(1 + rng.below(7));
      std::int64_t lo = std::numeric_limits<std::int64_t>::max(), hi = 0;
      const bool coarse = instance % 3 == 0;  // many ties in bytes and scores
      for (Option& o : group) {
        o.bytes = coarse ? static_cast<std::int64_t>(rng.below(6)) : static_cast<std::int64_t>(rng.below(1000));
        o.score = coarse ? static_cast<double>(rng.below(5)) : std::exp(3 * rng.normal());
        lo = std::min(lo, o.bytes);
        hi = std::max(hi, o.bytes);
      }
      least += lo;
      most += hi;
    }
    const std::int64_t budget = least - 2 + static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(most - least) + 4));
    const double expected = brute_force(groups, budget);
    const std::optional<Solution> s = solve(groups, budget);
    ASSERT_EQ(s.has_value(), std::isfinite(expected)) << instance;
    if (!s) continue;
    ++feasible;
    ASSERT_NEAR(s->score, expected, 1e-12 * std::max(1.0, expected)) << instance;
    ASSERT_TRUE(s->proven);
    ASSERT_LE(s->bound, s->score + 1e-9 * std::max(1.0, s->score));
    double score = 0;
    std::int64_t bytes = 0;
    for (std::size_t g = 0; g < groups.size(); ++g) score += groups[g][s->choice[g]].score, bytes += groups[g][s->choice[g]].bytes;
    ASSERT_NEAR(score, s->score, 1e-12 * std::max(1.0, score));
    ASSERT_EQ(bytes, s->bytes);
    ASSERT_LE(bytes, budget);
  }
  EXPECT_GT(feasible, 900);
}

TEST(Solver, LeastBytesInvertsSolve) {
  Rng rng(11);
  for (int instance = 0; instance < 100; ++instance) {
    std::vector<OptionGroup> groups(4);
    for (OptionGroup& group : groups)
      for (int i = 0; i < 5; ++i) group.push_back({static_cast<std::int64_t>(1 + rng.below(60)), std::exp(rng.normal())});
    double floor = 0, ceiling = 0;
    for (const OptionGroup& group : groups) {
      double lo = 1e9, hi = 0;
      for (const Option& o : group) lo = std::min(lo, o.score), hi = std::max(hi, o.score);
      floor += lo;
      ceiling += hi;
    }
    const double limit = floor + (ceiling - floor) * rng.uniform();
    const std::optional<Solution> s = least_bytes(groups, limit);
    ASSERT_TRUE(s);
    EXPECT_LE(s->score, limit);
    EXPECT_GT(brute_force(groups, s->bytes - 1), limit);
    EXPECT_FALSE(least_bytes(groups, floor * 0.999));
  }
}

TEST(Solver, StopsHonestlyAtItsStateLimit) {
  Rng rng(3);
  std::vector<OptionGroup> groups(20);
  for (OptionGroup& group : groups)
    for (int i = 0; i < 20; ++i) group.push_back({static_cast<std::int64_t>(1 + rng.below(100000)), std::exp(rng.normal())});
  const std::int64_t budget = minimum_bytes(groups) + 300000;
  const std::optional<Solution> cut = solve(groups, budget, 2), full = solve(groups, budget);
  ASSERT_TRUE(cut && full);
  EXPECT_TRUE(full->proven);
  EXPECT_FALSE(cut->proven);
  EXPECT_GT(cut->gap(), 0);
  EXPECT_LE(cut->bound, full->score * (1 + 1e-12));
  EXPECT_LE(full->score, cut->score);
}

TEST(Solver, EqualScoresTakeFewerBytesAndTheFirstOption) {
  const std::vector<OptionGroup> groups = {{{10, 1}, {8, 1}, {8, 1}}, {{5, 0}, {5, 0}}};
  const std::optional<Solution> s = solve(groups, 100);
  ASSERT_TRUE(s);
  EXPECT_EQ(s->choice, (std::vector<std::size_t>{1, 0}));
  EXPECT_EQ(s->bytes, 13);
}

TEST(Solver, SweepOfALargeModelIsFast) {
  Rng rng(5);
  std::vector<OptionGroup> groups(30);
  for (OptionGroup& group : groups) {
    const double weight = std::exp(3 * rng.normal());
    for (int i = 0; i < 285; ++i) {
      const double bits = 2 + 14 * rng.uniform();
      group.push_back({static_cast<std::int64_t>(bits * 8192 * 48) / 384 * 384, weight * std::pow(4.0, -bits) * std::exp(rng.normal())});
    }
  }
  const auto start = std::chrono::steady_clock::now();
  const std::vector<HullPoint> sweep = dual_sweep(groups);
  ASSERT_GE(sweep.size(), 20u);
  for (std::size_t i = 1; i < sweep.size(); ++i) {
    EXPECT_GT(sweep[i].bytes, sweep[i - 1].bytes);
    EXPECT_LT(sweep[i].score, sweep[i - 1].score);
  }
  for (int i = 0; i < 20; ++i) {
    const std::optional<Solution> s = solve(groups, sweep.front().bytes + (sweep.back().bytes - sweep.front().bytes) * i / 20);
    ASSERT_TRUE(s);
    EXPECT_TRUE(s->proven);
  }
  RecordProperty("milliseconds", std::to_string(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count()));
}

}  // namespace
}  // namespace calib::plan

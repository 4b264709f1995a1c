#include "libcalib/sens/saliency.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "libcalib/sens/metrics.h"
#include "libcalib/sens/saliency_tally.h"

namespace calib::sens {
namespace {

LayerGeometry layer_of(int d, int rotary, RopeStyle style = RopeStyle::kHalfSplit, double factor = 1.0) {
  LayerGeometry g;
  g.n_q_heads = g.n_kv_heads = 1, g.head_dim = d, g.rotary_dim = rotary, g.rope_style = style, g.attention_factor = factor;
  g.softmax_scale = 1 / std::sqrt(static_cast<double>(d));
  for (int i = 0; i < rotary / 2; ++i) g.inv_freq.push_back(std::pow(100.0, -2.0 * i / rotary));
  return g;
}

std::vector<double> normals(std::size_t n, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<double> x(n);
  for (double& a : x) a = rng.normal();
  return x;
}

double dot(std::span<const double> a, std::span<const double> b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

TEST(ExpectedAttention, G36) {
  const LayerGeometry g = layer_of(2, 2);
  const std::vector<double> mean{1, 0}, none(4, 0.0), half{.5, 0, 0, .5};
  const std::vector<std::int64_t> positions{0, 1, 2, 3};
  const float k[] = {1, 0};
  const FutureQuery q = future_query(g, mean, none, positions);
  EXPECT_NEAR(expected_logits(q, g, 0, k, 2, 1)[0], .176260, 1e-6);
  EXPECT_NEAR(q.linear[0], .023717, 1e-6) << "what the averaged rotation alone would give";
  EXPECT_NEAR(expected_logits(future_query(g, mean, half, positions), g, 0, k, 2, 1)[0], .301260, 1e-6);
}

// z = mean a + (mean b + var a) / 2 from the definition, position by position, at a length of its own.
TEST(ExpectedAttention, EqualsTheSumOverPositions) {
  for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved, RopeStyle::kNone}) {
    const LayerGeometry g = layer_of(10, style == RopeStyle::kNone ? 0 : 6, style, 1.25);
    const std::size_t d = 10;
    const std::vector<double> mean = normals(d, 1), root = normals(d * d, 2);
    std::vector<double> covariance(d * d, 0.0);
    for (std::size_t r = 0; r < d; ++r)
      for (std::size_t c = 0; c < d; ++c)
        for (std::size_t u = 0; u < d; ++u) covariance[r * d + c] += root[r * d + u] * root[c * d + u];
    const std::vector<std::int64_t> distances = future_distances(5);
    const FutureQuery q = future_query(g, mean, covariance, distances);
    const std::int64_t length = 1234;
    const std::vector<double> keys = normals(3 * d, 3);
    const std::vector<float> k(keys.begin(), keys.end());
    const std::vector<double> z = expected_logits(q, g, length, k.data(), static_cast<std::int64_t>(d), 3);
    for (std::size_t j = 0; j < 3; ++j) {
      double a = 0, a2 = 0, b = 0;
      const double m = static_cast<double>(distances.size());
      for (const std::int64_t delta : distances) {
        std::vector<double> query = mean, key(k.begin() + static_cast<std::ptrdiff_t>(j * d), k.begin() + static_cast<std::ptrdiff_t>((j + 1) * d));
        rotate_row(g, length + delta, query.data());
        const double score = g.softmax_scale * dot(query, key);
        a += score / m, a2 += score * score / m;
        // k' R Sigma R' k, column by column of R.
        std::vector<double> turned(d);
        for (std::size_t c = 0; c < d; ++c) {
          std::vector<double> unit(d, 0.0);
          unit[c] = 1;
          rotate_row(g, length + delta, unit.data());
          turned[c] = dot(unit, key);
        }
        for (std::size_t r = 0; r < d; ++r)
          for (std::size_t c = 0; c < d; ++c) b += g.softmax_scale * g.softmax_scale * turned[r] * covariance[r * d + c] * turned[c] / m;
      }
      const double want = a + 0.5 * (b + a2 - a * a);
      EXPECT_NEAR(z[j], want, 1e-9 * (1 + std::abs(want))) << static_cast<int>(style) << " key " << j;
    }
  }
}

TEST(ExpectedAttention, ScoresArePermutedWithTheKeysAndWeighedByTheirValues) {
  const LayerGeometry g = layer_of(8, 8);
  const std::size_t n = 20;
  const std::vector<double> keys = normals(n * 8, 4), covariance = normals(64, 5), norm = [] {
    std::vector<double> x = normals(20, 6);
    for (double& a : x) a = std::abs(a) + 0.1;
    return x;
  }();
  std::vector<double> symmetric(64);
  for (std::size_t r = 0; r < 8; ++r)
    for (std::size_t c = 0; c < 8; ++c) symmetric[r * 8 + c] = 0.5 * (covariance[r * 8 + c] + covariance[c * 8 + r]);
  std::vector<float> k(keys.begin(), keys.end()), reversed;
  for (std::size_t j = n; j-- > 0;)
    reversed.insert(reversed.end(), k.begin() + static_cast<std::ptrdiff_t>(8 * j), k.begin() + static_cast<std::ptrdiff_t>(8 * j + 8));
  const FutureQuery q1 = future_query(g, normals(8, 7), symmetric, future_distances(0)), q2 = future_query(g, normals(8, 8), symmetric, future_distances(0));
  const auto scores = [&](const std::vector<float>& x, std::vector<double> values) {
    const std::vector<std::vector<double>> logits{expected_logits(q1, g, 300, x.data(), 8, static_cast<std::int64_t>(n)),
                                                  expected_logits(q2, g, 300, x.data(), 8, static_cast<std::int64_t>(n))};
    return expected_attention(logits, values);
  };
  const std::vector<double> straight = scores(k, norm);
  std::vector<double> back = scores(reversed, {norm.rbegin(), norm.rend()});
  std::reverse(back.begin(), back.end());
  double sum = 0;
  for (std::size_t j = 0; j < n; ++j) {
    EXPECT_NEAR(straight[j], back[j], 1e-15 + 1e-12 * straight[j]);
    sum += straight[j] / norm[j];
  }
  EXPECT_NEAR(sum, 1.0, 1e-12) << "without the values it is a distribution";
}

/// Causal map with p_tj = value(t, j).
template <typename F>
AttentionMap map_of(std::int64_t n, F&& value, std::int64_t window = 0) {
  AttentionMap map(n, window);
  for (std::int64_t t = 0; t < n; ++t)
    for (std::int64_t j = map.first_key(t); j <= t; ++j) map.row(t)[j] = static_cast<float>(value(t, j));
  return map;
}

TEST(ProbeAttention, G37) {
  const double c = 0.25;
  const AttentionMap map = map_of(100, [&](std::int64_t, std::int64_t) { return c; });
  const std::vector<std::int64_t> probes{10, 30, 50, 70, 90, 95, 96, 97, 98, 99};
  const std::vector<double> scores = probe_scores(map, probes, 0, 100);
  for (std::size_t j = 0; j < 100; ++j) EXPECT_EQ(scores[j], c) << j;
  // The divisor of the published code, all later rows.
  const auto by_later_rows = [&](std::int64_t j) {
    double sum = 0;
    for (const std::int64_t t : probes) sum += t >= j ? static_cast<double>(map.row(t)[j]) : 0.0;
    return sum / static_cast<double>(100 - j);
  };
  EXPECT_DOUBLE_EQ(by_later_rows(0), .1 * c);
  EXPECT_DOUBLE_EQ(by_later_rows(20), .1125 * c);
  EXPECT_DOUBLE_EQ(by_later_rows(60), .175 * c);
  EXPECT_DOUBLE_EQ(by_later_rows(95), c);
}

TEST(ProbeAttention, AKeyThatNoProbeSeesRanksLast) {
  const AttentionMap map = map_of(100, [](std::int64_t, std::int64_t) { return 0.0; }, 10);
  const std::vector<double> scores = probe_scores(map, std::vector<std::int64_t>{99}, 80, 100);
  for (std::size_t j = 0; j < 20; ++j) EXPECT_EQ(scores[j], j < 10 ? -1.0 : 0.0) << j;
}

TEST(ProbeAttention, ProbesAreTheLastRowsAndAsManyOthers) {
  const std::vector<std::int64_t> rows = probe_rows(2000, Rng(3));
  ASSERT_EQ(rows.size(), 200u);
  EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()) && std::adjacent_find(rows.begin(), rows.end()) == rows.end());
  EXPECT_EQ(rows[100], 1900);
  EXPECT_EQ(rows.back(), 1999);
  EXPECT_LT(rows[99], 1900);
  EXPECT_LT(rows[50], 1300) << "spread over the rows before: the median of 100 of 1900 is 950 +- 95";
  EXPECT_EQ(probe_rows(300, Rng(3)).size(), 64u) << "never fewer";
  EXPECT_EQ(probe_rows(64, Rng(3)).size(), 64u);
  EXPECT_EQ(probe_rows(5, Rng(3)), (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_NE(probe_rows(2000, Rng(4)), rows);
}

TEST(AccumulatedAttention, SumsColumnsInDouble) {
  Rng rng(1);
  const AttentionMap map = map_of(60, [&](std::int64_t, std::int64_t) { return rng.uniform(); });
  const std::vector<double> scores = accumulated_scores(map, 50, 4, 40);
  for (std::int64_t j = 4; j < 40; ++j) {
    double want = 0;
    for (std::int64_t t = j; t < 50; ++t) want += static_cast<double>(map.row(t)[j]);
    EXPECT_NEAR(scores[static_cast<std::size_t>(j - 4)], want, 1e-12);
  }
  const AttentionMap uniform = map_of(60, [](std::int64_t t, std::int64_t) { return 1.0 / static_cast<double>(t + 1); });
  const std::vector<double> falling = accumulated_scores(uniform, 60, 0, 60);
  EXPECT_TRUE(std::is_sorted(falling.rbegin(), falling.rend())) << "biased to early keys where all matter alike";
}

TEST(TopSet, TiesGoToTheLowerIndexAndBlocksAreTheirOwn) {
  const std::vector<double> x{1, 5, 5, 5, 0, 2, 9, 2};
  EXPECT_EQ(top_set(x, 3), (std::vector<std::int32_t>{1, 2, 6}));
  EXPECT_EQ(top_set(x, 0), (std::vector<std::int32_t>{}));
  EXPECT_EQ(top_set(x, 8).size(), 8u);
  EXPECT_EQ(top_set_by_block(x, 4, 2), (std::vector<std::int32_t>{1, 2, 5, 6}));
  EXPECT_EQ(top_set_by_block(x, 2, 1), (std::vector<std::int32_t>{1, 2, 5, 6}));
  EXPECT_EQ(n_common(std::vector<std::int32_t>{1, 4, 7, 9}, std::vector<std::int32_t>{0, 4, 8, 9, 12}), 2);
}

TEST(HitRate, UniformAttentionLosesNothingWithAnyChoice) {
  const std::vector<double> mass(80, 0.37), gain(80, 0.2);
  std::vector<std::int32_t> anything;
  for (std::int32_t i = 3; i < 19; ++i) anything.push_back(i);
  const SaliencyCell cell = judge_choice(mass, gain, anything, top_set_by_block(gain, 80, 16), 100);
  EXPECT_EQ(cell.caught, cell.catchable);
  EXPECT_EQ(cell.gain, cell.best_gain);
  EXPECT_EQ(cell.common, 13) << "the best set of equal masses is the first 16: the sets differ, the mass does not";
}

TEST(HitRate, IsTheShareOfTheBestSetOfEqualSize) {
  const std::vector<double> mass{4, 1, 3, 2}, gain{0, 1, 0, 3};
  const SaliencyCell cell = judge_choice(mass, gain, std::vector<std::int32_t>{0, 1}, std::vector<std::int32_t>{0, 2}, 10);
  EXPECT_EQ(cell.caught, 5);
  EXPECT_EQ(cell.prompt_caught, 7);
  EXPECT_EQ(cell.catchable, 7);
  EXPECT_EQ(cell.gain, 1);
  EXPECT_EQ(cell.best_gain, 4);
  EXPECT_EQ(cell.common, 1);
  EXPECT_EQ(cell.chosen, 2);
  EXPECT_EQ(cell.rows, 10);
}

// Over all keys of a row the gain is the fall of the first-order output error (METHODS.md 2, identity 4).
TEST(Oracle, GainsAddUpToTheFirstOrderError) {
  const std::size_t n = 12, d = 4;
  std::vector<double> p = normals(n, 1), v = normals(n * d, 2), o(d, 0.0);
  double sum = 0;
  for (double& x : p) sum += x = std::exp(x);
  for (double& x : p) x /= sum;
  std::vector<float> p32(p.begin(), p.end());
  for (std::size_t j = 0; j < n; ++j) p[j] = static_cast<double>(p32[j]);
  for (std::size_t j = 0; j < n; ++j)
    for (std::size_t c = 0; c < d; ++c) o[c] += p[j] * v[j * d + c];
  std::vector<float> v_dot_o;
  std::vector<double> norm2, key(n, 0.0), value(n, 0.0);
  for (std::size_t j = 0; j < n; ++j) {
    const std::span<const double> row(v.data() + j * d, d);
    v_dot_o.push_back(static_cast<float>(dot(row, o))), norm2.push_back(dot(row, row));
  }
  add_gain_row(p32.data(), v_dot_o.data(), norm2.data(), dot(o, o), 7.0, static_cast<std::int64_t>(n), key.data(), value.data());
  const std::vector<double> gain = oracle_gain(key, value, 0.5, static_cast<int>(d), {0.3, 0.2});
  const double want = first_order_output_error(p, v, o, 7.0, 0.5, 0.3, 0.2);
  EXPECT_NEAR(std::accumulate(gain.begin(), gain.end(), 0.0), want, 1e-6 * want) << "v . o is fp32";
}

TEST(Abstain, EachLimitHasItsReason) {
  const SaliencyEvidence good{0.8, 0.1, 0.5, true, 1000, 0.1};
  EXPECT_TRUE(abstain_reasons(good).empty());
  const auto only = [&](auto&& change, const std::string& part) {
    SaliencyEvidence e = good;
    change(e);
    const std::vector<std::string> reasons = abstain_reasons(e);
    ASSERT_EQ(reasons.size(), 1u) << part;
    EXPECT_NE(reasons[0].find(part), std::string::npos) << reasons[0];
  };
  only([](SaliencyEvidence& e) { e.hit_rate = 0.699; }, "hit rate 0.699 < 0.70");
  only([](SaliencyEvidence& e) { e.normalised_entropy = 0.95; }, "entropy 0.950 of ln n > 0.9");
  only([](SaliencyEvidence& e) { e.n_statistics_rows = 63; }, "63 query rows in the statistics < 64");
  only([](SaliencyEvidence& e) { e.query_shift = 0.51; }, "query shift 0.510 > 0.5");
  only([](SaliencyEvidence& e) { e.catchable = 0; }, "nothing to catch");
  SaliencyEvidence measured = good;
  measured.fitted = false, measured.n_statistics_rows = 0, measured.query_shift = 9;
  EXPECT_TRUE(abstain_reasons(measured).empty()) << "a score of the text itself needs no statistics";
}

TEST(JudgedBuckets, NeedRowsAndACodedBlock) {
  const auto firsts = [](std::int64_t n, const kvrt::Tiers& t) {
    std::vector<std::int64_t> out;
    for (const JudgedRows& r : judged_buckets(n, {&t, 1})) out.push_back(r.first);
    return out;
  };
  const kvrt::Tiers tiers{4, 128, 64, 16};
  EXPECT_EQ(firsts(319, tiers), (std::vector<std::int64_t>{}));
  EXPECT_EQ(firsts(320, tiers), (std::vector<std::int64_t>{256}));
  EXPECT_EQ(firsts(1024, tiers), (std::vector<std::int64_t>{256, 512}));
  EXPECT_EQ(firsts(1024, {4, 256, 64, 16}), (std::vector<std::int64_t>{512})) << "at 256 the window still holds everything";
  EXPECT_EQ(judged_buckets(600, {&tiers, 1}).back().end, 600);
}

TEST(Tally, RatesAreRatiosOfSumsAndVerdictsFollow) {
  SaliencyTally tally(1, {1, 2}, 1, 2);
  const auto set = [&](std::size_t score, std::size_t layer, int head, double hit) {
    for (std::size_t d = 0; d < 2; ++d) {
      SaliencyCell& c = tally.cell(0, score, layer, head, 0, d);
      c.catchable = layer == 0 ? 30 : 10, c.caught = hit * c.catchable, c.prompt_caught = c.catchable, c.best_gain = c.gain = 1, c.chosen = 4, c.common = 2,
      c.rows = 100;
    }
  };
  for (std::size_t s = 0; s < kTokenScores; ++s) set(s, 0, 0, 0.1), set(s, 1, 0, 0.1), set(s, 1, 1, 0.1);
  set(1, 0, 0, 0.9), set(1, 1, 0, 0.8), set(1, 1, 1, 0.4);
  set(7, 0, 0, 0.9), set(7, 1, 0, 0.75), set(7, 1, 1, 0.71);
  set(8, 0, 0, 1.0), set(8, 1, 0, 0.9), set(8, 1, 1, 0.4);
  SaliencyResult result;
  result.layers = {{3, 0.5, 0, 1000}, {7, 0.5, 0, 1000}};
  result.fractions.resize(1);
  tally.finish(&result);
  const SaliencyFraction& f = result.fractions[0];
  EXPECT_NEAR(f.scores[1].total.hit.mean, (0.9 * 30 + 0.8 * 10 + 0.4 * 10) / 50, 1e-12);
  EXPECT_NEAR(f.scores[1].total.hit.se, 0, 1e-12) << "both documents alike";
  EXPECT_NEAR(f.scores[1].total.catchable, 50.0 / 300, 1e-12);
  EXPECT_NEAR(f.scores[1].layers[1].rates.hit.mean, 0.6, 1e-12);
  EXPECT_EQ(f.scores[1].layers[1].worst_head, 1);
  EXPECT_NEAR(f.scores[1].layers[1].worst_head_hit, 0.4, 1e-12);
  EXPECT_TRUE(f.scores[1].layers[0].abstain.empty());
  ASSERT_EQ(f.scores[1].layers[1].abstain.size(), 1u);
  EXPECT_EQ(f.best, 1u);
  EXPECT_EQ(f.runner_up, 0u) << "ties: the earlier score";
  EXPECT_NEAR(f.lead.mean, f.scores[1].total.hit.mean - 0.1, 1e-12);
  EXPECT_EQ(f.scores[1].total.overlap.mean, 0.5);
  ASSERT_EQ(f.scores[1].buckets.size(), 1u);
  EXPECT_EQ(f.scores[1].buckets[0].first_position, 256);
  EXPECT_TRUE(last_layer_verdict(f, 7).allowed);
  const LastLayerVerdict v = last_layer_verdict(f, 8);
  EXPECT_FALSE(v.allowed);
  EXPECT_EQ(v.worst_layer, 1u);
  EXPECT_NEAR(v.worst_hit, 0.65, 1e-12);
}

TEST(Tally, NothingToCatchIsAHitRateOfOneAndAReasonToAbstain) {
  SaliencyTally tally(1, {1}, 1, 1);
  for (std::size_t s = 0; s < kTokenScores; ++s) tally.cell(0, s, 0, 0, 0, 0).rows = 10;
  SaliencyResult result;
  result.layers = {{0, 0.5, 0, 1000}};
  result.fractions.resize(1);
  tally.finish(&result);
  EXPECT_EQ(result.fractions[0].scores[0].total.hit.mean, 1.0);
  EXPECT_FALSE(result.fractions[0].scores[0].layers[0].abstain.empty());
}

}  // namespace
}  // namespace calib::sens

#include "libcalib/quant/token_tiers.h"

#include <algorithm>
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/core/layout.h"
#include "layer_stats.h"
#include "libcalib/quant/expected_attention.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/scheme.h"
#include "tests/support/expect_error.h"

namespace calib::quant {
namespace {

using ::testing::ElementsAre;

LayerGeometry plain(int q_heads, int kv_heads, int d) {
  LayerGeometry g;
  g.n_q_heads = q_heads, g.n_kv_heads = kv_heads, g.head_dim = d, g.rotary_dim = 0, g.rope_style = RopeStyle::kNone;
  g.softmax_scale = 1;
  return g;
}

std::vector<float> normals(std::size_t n, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(n);
  for (float& a : x) a = static_cast<float>(rng.normal());
  return x;
}

// Two KV heads of one channel, no RoPE; a = 1 for head 0 and -1 for head 1, m = 0: exit blocks of 3 + 2, one sink.
TEST(TokenTiers, TheBestOfEachBlockByHand) {
  const LayerGeometry g = plain(2, 2, 1);
  const SaliencyFactors factors{1, {1, -1}, {0, 0}};
  const kvrt::Tiers tiers{1, 2, 3, 2};
  const std::vector<float> by_head_0 = {9, 1, 4, 2, 5, 3, /*block 2*/ 0, 0, 0, 7, 0, /*window*/ 9, 9};
  std::vector<float> k, v;
  for (const float x : by_head_0) k.insert(k.end(), {x, x}), v.insert(v.end(), {1, -1});  // only the length of a value counts
  ThreadPool pool(2);
  const TierMap map = place_tokens(g, factors, tiers, 13, k.data(), v.data(), pool);
  EXPECT_EQ(map.first, 1);
  ASSERT_EQ(map.n_tokens, 10);
  const auto chosen = [&](std::size_t head) {
    std::vector<int> tokens;
    for (std::size_t t = 0; t < 10; ++t)
      if (map.salient[2 * t + head]) tokens.push_back(static_cast<int>(t) + 1);
    return tokens;
  };
  EXPECT_THAT(chosen(0), ElementsAre(2, 4, 6, 9)) << "4 and 5 of 1 4 2 5 3; 7, then the oldest of four equal ones";
  EXPECT_THAT(chosen(1), ElementsAre(1, 3, 6, 7)) << "the lowest two; of four equal ones the oldest two";
  // A longer value outweighs: token 1 has 1/e^3 of the softmax of token 2, and now 100 times its length.
  v[2] = 100;
  EXPECT_THAT([&] {
    const TierMap other = place_tokens(g, factors, tiers, 13, k.data(), v.data(), pool);
    std::vector<int> tokens;
    for (std::size_t t = 0; t < 5; ++t)
      if (other.salient[2 * t]) tokens.push_back(static_cast<int>(t) + 1);
    return tokens;
  }(), ElementsAre(1, 4));
  // Nothing has left: W + E - 1 tokens past the sink.
  EXPECT_EQ(place_tokens(g, factors, tiers, 7, k.data(), v.data(), pool).n_tokens, 0);
}

// Two query heads that want opposite tokens: the mean of their softmaxes, not of their logits.
TEST(TokenTiers, QueryHeadsOfAGroupAreAveragedAfterTheSoftmax) {
  const LayerGeometry g = plain(2, 1, 1);
  const SaliencyFactors factors{1, {1, -1}, {0, 0}};
  const std::vector<float> k = {3, 0, -2}, v = {1, 1, 1};
  const std::vector<double> s = exit_block_scores(g, factors, 0, 3, k.data(), v.data(), 1, 3);
  const double up = std::exp(3) + 1 + std::exp(-2), down = std::exp(-3) + 1 + std::exp(2);
  EXPECT_NEAR(s[0], 0.5 * (std::exp(3) / up + std::exp(-3) / down), 1e-12);
  EXPECT_NEAR(s[1], 0.5 * (1 / up + 1 / down), 1e-12);
  EXPECT_NEAR(s[2], 0.5 * (std::exp(-2) / up + std::exp(2) / down), 1e-12);
}

// Up to 16 channels the factors hold the whole moment; z then is that of the quadratic form at positions of the future.
TEST(TokenTiers, FactorsOfFewChannelsAreExact) {
  const LayerGeometry g = quant_test::geometry(1, 16);
  std::vector<FutureQuery> queries;
  for (int q = 0; q < g.n_q_heads; ++q) {
    const std::vector<float> root = normals(256, 10 + static_cast<std::uint64_t>(q)), mean = normals(16, 20 + static_cast<std::uint64_t>(q));
    std::vector<double> covariance(256, 0.0);
    for (std::size_t r = 0; r < 16; ++r)
      for (std::size_t c = 0; c < 16; ++c)
        for (std::size_t u = 0; u < 16; ++u) covariance[r * 16 + c] += static_cast<double>(root[r * 16 + u]) * static_cast<double>(root[c * 16 + u]);
    queries.push_back(future_query(g, std::vector<double>(mean.begin(), mean.end()), covariance, future_distances(1)));
  }
  const SaliencyFactors factors = saliency_factors(queries);
  ASSERT_EQ(factors.rank, 16);
  const std::int64_t length = 700, n = 9;
  const std::vector<float> k = normals(16 * n, 30), v = normals(16 * n, 31);
  const std::vector<double> scores = exit_block_scores(g, factors, 0, length, k.data(), v.data(), 16, n);
  std::vector<double> want(n, 0.0);
  for (const FutureQuery& q : queries) {
    std::vector<double> z(n);
    double sum = 0;
    for (std::size_t j = 0; j < n; ++j) {
      std::vector<double> key(k.begin() + static_cast<std::ptrdiff_t>(16 * j), k.begin() + static_cast<std::ptrdiff_t>(16 * j + 16));
      RopeTurn(g, -length, 1).apply(key.data());
      for (std::size_t r = 0; r < 16; ++r) {
        z[j] += q.linear[r] * key[r];
        for (std::size_t c = 0; c < 16; ++c) z[j] += key[r] * q.quadratic[r * 16 + c] * key[c];
      }
      sum += z[j] = std::exp(z[j]);
    }
    for (std::size_t j = 0; j < n; ++j) want[j] += z[j] / sum / g.n_q_heads;
  }
  for (std::size_t j = 0; j < n; ++j) {
    double norm2 = 0;
    for (std::size_t c = 0; c < 16; ++c) norm2 += static_cast<double>(v[16 * j + c]) * static_cast<double>(v[16 * j + c]);
    // fp32 factors: 6e-8 relative on each of the terms of z, which reach some tens here.
    EXPECT_NEAR(scores[j], want[j] * std::sqrt(norm2), 2e-5 * want[j] * std::sqrt(norm2)) << j;
  }
}

// The turn back makes scores depend on how far a key lies behind the exit, not on where the block stands.
TEST(TokenTiers, ScoresMoveWithTheBlock) {
  const LayerGeometry g = quant_test::geometry(1, 32);
  const SaliencyFactors factors{2, normals(64, 1), normals(128, 2)};
  const std::vector<float> key = normals(32, 3), v(5 * 32, 0.5f);
  const auto scores = [&](std::int64_t first) {
    std::vector<float> k;
    for (std::int64_t j = 0; j < 5; ++j) {
      std::vector<double> row(key.begin(), key.end());
      RopeTurn(g, first + j, 1).apply(row.data());
      k.insert(k.end(), row.begin(), row.end());
    }
    return exit_block_scores(g, factors, 0, first + 5 + 8, k.data(), v.data(), 32, 5);
  };
  const std::vector<double> here = scores(4), there = scores(5004);
  for (std::size_t j = 0; j < 5; ++j) EXPECT_NEAR(here[j], there[j], 1e-5 * here[j]);
  EXPECT_GT(std::abs(here[0] - here[4]), 1e-3 * here[0]) << "distances do count";
}

// Channel groups run over consecutive base tokens of a head: as if the others had never been there.
TEST(TokenTiers, ChannelGroupsHoldBaseTokensAlone) {
  const LayerGeometry g = quant_test::geometry(2, 64);
  const kvrt::Scheme base = parse_scheme("int4.channel.g32"), salient = parse_scheme("fp8e4m3.token.g");
  const kvrt::Tiers tiers = kvrt::finish_tiers(base, base, 4, 16, 0.2);
  ASSERT_EQ(tiers.block_base, 64);
  ASSERT_EQ(tiers.block_salient, 16);
  const std::int64_t n = 4 + 16 + 2 * 80 + 5, row = 2 * 64;
  std::vector<float> x = normals(static_cast<std::size_t>(n * row), 5);
  const std::vector<float> v = normals(static_cast<std::size_t>(n * row), 6);
  ThreadPool pool(2);
  const SaliencyFactors factors{3, normals(4 * 64, 7), normals(4 * 64 * 3, 8)};
  const TierMap map = place_tokens(g, factors, tiers, n, x.data(), v.data(), pool);
  ASSERT_EQ(map.n_tokens, 160);
  std::vector<float> out = x;
  fake_quant_tier(base, Side::kK, g, {}, map, false, x.data(), out.data(), pool);
  LayerGeometry one = g;
  one.n_kv_heads = 1, one.n_q_heads = 2;
  std::vector<std::vector<std::int64_t>> of_base(2);
  for (std::int64_t h = 0; h < 2; ++h) {
    std::vector<float> dense;
    for (std::int64_t t = 0; t < map.n_tokens; ++t) {
      if (map.salient[static_cast<std::size_t>(2 * t + h)]) continue;
      of_base[static_cast<std::size_t>(h)].push_back(map.first + t);
      dense.insert(dense.end(), x.begin() + (map.first + t) * row + h * 64, x.begin() + (map.first + t) * row + (h + 1) * 64);
    }
    ASSERT_EQ(of_base[static_cast<std::size_t>(h)].size(), 128u);
    std::vector<float> want(dense.size());
    fake_quant_document(base, Side::kK, one, {}, 0, true, 128, dense.data(), want.data(), pool);
    for (std::size_t i = 0; i < 128; ++i)
      for (std::int64_t c = 0; c < 64; ++c)
        ASSERT_EQ(out[static_cast<std::size_t>(of_base[static_cast<std::size_t>(h)][i] * row + h * 64 + c)], want[i * 64 + static_cast<std::size_t>(c)])
            << h << ' ' << i;
  }
  EXPECT_NE(of_base[0], of_base[1]) << "heads choose for themselves";
  // Values of salient tokens do not reach the base tier, nor its the salient one; sinks and the window are nobody's.
  std::vector<float> loud = x, again = x;
  for (std::int64_t t = 0; t < map.n_tokens; ++t)
    for (std::int64_t h = 0; h < 2; ++h)
      if (map.salient[static_cast<std::size_t>(2 * t + h)])
        for (std::int64_t c = 0; c < 64; ++c) loud[static_cast<std::size_t>((map.first + t) * row + h * 64 + c)] *= 1000;
  fake_quant_tier(base, Side::kK, g, {}, map, false, loud.data(), again.data(), pool);
  EXPECT_EQ(again, out);
  fake_quant_tier(salient, Side::kK, g, {}, map, true, x.data(), out.data(), pool);
  std::vector<float> token(x.size());
  fake_quant_document(salient, Side::kK, g, {}, 4, true, n, x.data(), token.data(), pool);
  for (std::int64_t t = 0; t < n; ++t)
    for (std::int64_t h = 0; h < 2; ++h) {
      const bool coded = t >= map.first && t < map.first + map.n_tokens, best = coded && map.salient[static_cast<std::size_t>(2 * (t - map.first) + h)];
      const std::int64_t at = t * row + h * 64;
      if (best || !coded) {
        EXPECT_TRUE(std::equal(out.begin() + at, out.begin() + at + 64, (best ? token : x).begin() + at)) << t << ' ' << h;
      }
    }
}

TEST(TokenTiers, SchemesOfTheTier) {
  EXPECT_EQ(kvrt::to_string(parse_salient_scheme("int8.token.g32", "--salient-scheme")), "int8.token.g32");
  for (const char* text : {"int4.token.g", "fp8e4m3.head", "int8.channel.g32", "q8_0", "bf16", "int8.token.g.pre", "fp8e4m3.token.g.center"})
    test::expect_error([&] { parse_salient_scheme(text, "--salient-scheme"); }, ErrorKind::kUsage, {"--salient-scheme", text, "fp8e4m3.token.g"});
  EXPECT_TRUE(takes_tier(parse_scheme("int4.token.g")));
  EXPECT_FALSE(takes_tier(parse_scheme("int8.token.g")));
  EXPECT_FALSE(takes_tier(parse_scheme("bf16")));
}

TEST(TokenTiers, FactorsComeFromTheStatistics) {
  const LayerGeometry g = quant_test::geometry();
  const auto zero = [](std::int64_t, int, int) { return 0.0f; };
  const stats::LayerStats layer = quant_test::layer_stats(g, 4, 200, zero, zero, zero);
  const SaliencyFactors factors = saliency_factors(layer);
  EXPECT_EQ(factors.rank, 16);
  ASSERT_EQ(factors.a.size(), 4u * 64);
  ASSERT_EQ(factors.m.size(), 4u * 64 * 16);
  // Columns by falling length; each an eigenvector times the root of its eigenvalue, so orthogonal.
  const auto product = [&](std::size_t i, std::size_t j) {
    double sum = 0;
    for (std::size_t c = 0; c < 64; ++c) sum += static_cast<double>(factors.m[c * 16 + i]) * static_cast<double>(factors.m[c * 16 + j]);
    return sum;
  };
  for (std::size_t i = 0; i + 1 < 16; ++i) {
    EXPECT_GE(product(i, i), product(i + 1, i + 1));
    EXPECT_NEAR(product(i, i + 1), 0, 1e-5 * product(i, i));
  }
}

}  // namespace
}  // namespace calib::quant

#include "libcalib/sens/saliency_walk.h"

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "kernels/core/layout.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/sens/saliency.h"
#include "libcalib/sens/saliency_tally.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/expect_error.h"

namespace calib::sens {
namespace {

using test_fixture::no_params;
using test_fixture::OpenModel;
using test_fixture::random_documents;

SaliencyOptions options_of(const std::string& base = "int4.token.g") {
  SaliencyOptions o;
  o.window = 64;
  o.base_k = quant::parse_scheme(base), o.base_v = quant::parse_scheme("int4.token.g"), o.salient = quant::parse_scheme("fp8e4m3.token.g");
  return o;
}

/// Statistics of every layer from documents.
std::vector<stats::LayerStats> statistics_of(const model::StreamingModel& model, const std::vector<text::Document>& documents) {
  struct Tap final : model::LayerTap {
    explicit Tap(ThreadPool& p) : pool(p) {}
    void begin_layer(const LayerGeometry& g) override { layers.emplace_back(g, 4); }
    void on_document(const model::LayerCapture& c) override { layers.back().add_document(c.tensors, pool); }
    void end_layer(const LayerGeometry&) override {}
    ThreadPool& pool;
    std::vector<stats::LayerStats> layers;
  };
  ThreadPool pool(1);
  Tap tap(pool);
  model::RunnerOptions walk;
  walk.reference_nll = false;
  model::run_streaming(model, documents, walk, &tap);
  return tap.layers;
}

SaliencyResult measure(const model::StreamingModel& model, const std::vector<text::Document>& documents, const SaliencyOptions& options, int n_threads = 1) {
  const std::vector<stats::LayerStats> statistics = statistics_of(model, random_documents(2, 300, 256, 77));
  ThreadPool pool(n_threads);
  SaliencyResult result;
  result.model = model.identity();
  measure_saliency(model, documents, [&](std::size_t i) { return statistics[i]; }, no_params(), options, pool, &result);
  return result;
}

TEST(SaliencyWalk, RatesAreSharesAndTheOracleGainsMost) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const std::vector<text::Document> documents = random_documents(3, 560, 256);
  const SaliencyResult r = measure(m.model, documents, options_of());
  ASSERT_EQ(r.fractions.size(), 2u);
  ASSERT_EQ(r.layers.size(), static_cast<std::size_t>(m.model.n_layers()));
  for (const SaliencyFraction& f : r.fractions) {
    const SaliencyScore& oracle = f.scores[static_cast<std::size_t>(TokenScore::kOracle)];
    for (std::size_t s = 0; s < kTokenScores; ++s) {
      const SaliencyScore& score = f.scores[s];
      ASSERT_EQ(score.buckets.size(), 1u) << "the second bucket has only 48 rows";
      EXPECT_EQ(score.buckets[0].n_documents, 3);
      for (const sens::SaliencyLayer& layer : score.layers) {
        EXPECT_GT(layer.rates.hit.mean, 0);
        EXPECT_LE(layer.rates.hit.mean, 1 + 1e-12);
        EXPECT_LE(layer.rates.prompt_hit.mean, 1 + 1e-12);
        EXPECT_LE(layer.rates.gain.mean, 1 + 1e-12);
        EXPECT_GE(layer.rates.overlap.mean, 0);
        EXPECT_LE(layer.rates.overlap.mean, 1);
      }
      EXPECT_LE(score.total.gain.mean, oracle.total.gain.mean + 1e-12) << kTokenScoreNames[s];
    }
    for (std::size_t l = 0; l < r.layers.size(); ++l) {
      EXPECT_LT(f.e_out_salient[l], f.e_out_base[l]);
      EXPECT_LT(*oracle.layers[l].e_out, f.e_out_base[l]);
    }
  }
  EXPECT_EQ(r.fractions[0].block_salient, 7);
  EXPECT_NEAR(r.fractions[1].achieved, 0.2, 1e-12);
}

TEST(SaliencyWalk, ThreadsAndCallsDoNotChangeIt) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const std::vector<text::Document> documents = random_documents(2, 400, 256);
  const SaliencyResult a = measure(m.model, documents, options_of()), b = measure(m.model, documents, options_of(), 2);
  for (std::size_t f = 0; f < 2; ++f)
    for (std::size_t s = 0; s < kTokenScores; ++s)
      for (std::size_t l = 0; l < a.layers.size(); ++l) {
        EXPECT_EQ(a.fractions[f].scores[s].layers[l].rates.hit.mean, b.fractions[f].scores[s].layers[l].rates.hit.mean) << s << " " << l;
        EXPECT_EQ(a.fractions[f].scores[s].layers[l].e_out, b.fractions[f].scores[s].layers[l].e_out);
      }
}

// Queries of zero: every key weighs alike, no choice loses anything, and entropy says so.
TEST(SaliencyWalk, UniformAttentionHitsWithEveryScoreAndAbstains) {
  test::TinyModel tiny = test::make_tiny_model("m-llama");
  for (test::TinyTensor& t : tiny.tensors)
    if (t.name.find("q_proj") != std::string::npos) std::fill(t.values.begin(), t.values.end(), 0.0f);
  OpenModel m(tiny);
  const SaliencyResult r = measure(m.model, random_documents(2, 400, 256), options_of());
  for (const SaliencyFraction& f : r.fractions)
    for (std::size_t s = 0; s < kTokenScores; ++s)
      for (std::size_t l = 0; l < r.layers.size(); ++l) {
        EXPECT_NEAR(f.scores[s].layers[l].rates.hit.mean, 1.0, 1e-6);
        ASSERT_EQ(f.scores[s].layers[l].abstain.size(), 1u);
        EXPECT_NE(f.scores[s].layers[l].abstain[0].find("entropy"), std::string::npos);
      }
  EXPECT_NEAR(r.layers[0].normalised_entropy, 1.0, 1e-6);
}

// Hit rates of two scores from the captured tensors, in double and from the definitions alone.
TEST(SaliencyWalk, EqualsADoubleReference) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const std::int64_t n = 480, first = 256, n_sinks = 4;
  const std::vector<text::Document> documents = random_documents(1, static_cast<std::size_t>(n), 256, 9);
  struct Tap final : model::LayerTap {
    void begin_layer(const LayerGeometry& g) override { geometry = g; }
    void on_document(const model::LayerCapture& c) override {
      const auto& x = c.tensors;
      q.assign(x.q_post, x.q_post + x.n_tokens * geometry.n_q_heads * geometry.head_dim);
      k.assign(x.k_post, x.k_post + x.n_tokens * geometry.n_kv_heads * geometry.head_dim);
    }
    void end_layer(const LayerGeometry&) override { layers.push_back({q, k}); }
    LayerGeometry geometry;
    std::vector<float> q, k;
    std::vector<std::pair<std::vector<float>, std::vector<float>>> layers;
  } tap;
  model::RunnerOptions walk;
  walk.reference_nll = false;
  model::run_streaming(m.model, documents, walk, &tap);
  const SaliencyOptions options = options_of();
  const SaliencyResult r = measure(m.model, documents, options);
  const kvrt::Tiers tiers = saliency_tiers(options)[1];
  const std::int64_t block = tiers.exit_block(), n_coded = kvrt::coded_end(tiers, first) - n_sinks;
  ASSERT_GE(n_coded, 2 * block);
  const LayerGeometry& g = tap.geometry;
  const int group = g.n_q_heads / g.n_kv_heads;
  for (std::size_t l = 0; l < tap.layers.size(); ++l) {
    double caught_recency = 0, caught_accumulated = 0, best_sum = 0;
    for (int h = 0; h < g.n_kv_heads; ++h) {
      std::vector<double> mass(static_cast<std::size_t>(n_coded), 0.0), past_at_exit(static_cast<std::size_t>(n_coded), 0.0);
      for (int u = 0; u < group; ++u)
        for (std::int64_t t = 0; t < n; ++t) {
          std::vector<double> p;
          double sum = 0;
          for (std::int64_t j = 0; j <= t; ++j) {
            double s = 0;
            for (int c = 0; c < g.head_dim; ++c)
              s += static_cast<double>(tap.layers[l].first[static_cast<std::size_t>((t * g.n_q_heads + h * group + u) * g.head_dim + c)]) *
                   static_cast<double>(tap.layers[l].second[static_cast<std::size_t>((j * g.n_kv_heads + h) * g.head_dim + c)]);
            p.push_back(std::exp(s * g.softmax_scale)), sum += p.back();
          }
          for (std::int64_t j = n_sinks; j < std::min(t + 1, n_sinks + n_coded); ++j) {
            const auto i = static_cast<std::size_t>(j - n_sinks);
            const std::int64_t exit_length = n_sinks + ((j - n_sinks) / block + 1) * block + tiers.window;
            if (t >= first) mass[i] += p[static_cast<std::size_t>(j)] / sum / group;
            if (t < exit_length) past_at_exit[i] += p[static_cast<std::size_t>(j)] / sum / group;
          }
        }
      std::vector<std::int64_t> order(static_cast<std::size_t>(n_coded));
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
      std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return mass[static_cast<std::size_t>(a)] > mass[static_cast<std::size_t>(b)]; });
      for (std::int64_t i = 0; i < n_coded / block * tiers.block_salient; ++i) best_sum += mass[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])];
      for (std::int64_t b = 0; b < n_coded / block; ++b) {
        for (std::int64_t i = (b + 1) * block - tiers.block_salient; i < (b + 1) * block; ++i) caught_recency += mass[static_cast<std::size_t>(i)];
        std::vector<std::int64_t> in_block;
        for (std::int64_t i = b * block; i < (b + 1) * block; ++i) in_block.push_back(i);
        std::sort(in_block.begin(), in_block.end(),
                  [&](std::int64_t x, std::int64_t y) { return past_at_exit[static_cast<std::size_t>(x)] > past_at_exit[static_cast<std::size_t>(y)]; });
        for (std::int64_t i = 0; i < tiers.block_salient; ++i) caught_accumulated += mass[static_cast<std::size_t>(in_block[static_cast<std::size_t>(i)])];
      }
    }
    // fp32 scores of size 1 to 10: 1e-6 relative in p, and two tokens so near to each other in rank weigh the same.
    EXPECT_NEAR(r.fractions[1].scores[static_cast<std::size_t>(TokenScore::kRecency)].layers[l].rates.hit.mean, caught_recency / best_sum, 1e-4) << l;
    EXPECT_NEAR(r.fractions[1].scores[static_cast<std::size_t>(TokenScore::kAccumulated)].layers[l].rates.hit.mean, caught_accumulated / best_sum, 1e-4) << l;
  }
}

// KV heads of the last layer that are copies of each other rank alike, so the mean that it lends is each head's own ranking.
TEST(SaliencyWalk, TheLastLayerLendsItsOwnRanking) {
  test::TinyModel tiny = test::make_tiny_model("m-llama");
  const std::string last = "layers." + std::to_string(tiny.n_layers - 1) + ".";
  for (test::TinyTensor& t : tiny.tensors) {
    if (t.name.find(last) == std::string::npos || t.name.find("self_attn") == std::string::npos || t.shape.size() != 2) continue;
    const bool columns = t.name.find("o_proj") != std::string::npos;
    const std::int64_t part = t.shape[columns ? 1 : 0] / tiny.n_kv_heads;
    const std::vector<float> from = t.values;
    for (std::int64_t r = 0; r < t.shape[0]; ++r)
      for (std::int64_t c = 0; c < t.shape[1]; ++c)
        t.values[static_cast<std::size_t>(r * t.shape[1] + c)] = from[static_cast<std::size_t>((columns ? r : r % part) * t.shape[1] + (columns ? c % part : c))];
  }
  OpenModel m(tiny);
  const SaliencyResult r = measure(m.model, random_documents(2, 400, 256), options_of());
  for (std::size_t s = 0; s < kAttentionScores; ++s) {
    const std::vector<SaliencyLayer>&own = r.fractions[0].scores[s].layers, &lent = r.fractions[0].scores[kOwnScores + s].layers;
    EXPECT_NEAR(own.back().rates.hit.mean, lent.back().rates.hit.mean, 1e-6) << s;
    EXPECT_LT(lent.front().rates.hit.mean, own.front().rates.hit.mean - 1e-3) << s;
  }
}

// Layers whose rows see fewer keys than stay exact never read a coded token: no loss, and no reason for a tier.
TEST(SaliencyWalk, ASlidingWindowInsideTheExactOneLeavesNothingToCatch) {
  OpenModel m(test::make_tiny_model("m-gemma3"));
  SaliencyOptions options = options_of();
  options.window = 128;
  const SaliencyResult r = measure(m.model, random_documents(2, 400, 256), options);
  int n_sliding = 0;
  for (std::size_t l = 0; l < r.layers.size(); ++l) {
    const std::int64_t seen = m.model.identity().layers[l].sliding_window;
    const sens::SaliencyLayer& layer = r.fractions[0].scores[1].layers[l];
    if (seen > 0) {
      ASSERT_LE(seen, options.window);
      ++n_sliding;
      EXPECT_EQ(layer.rates.hit.mean, 1.0);
      EXPECT_EQ(layer.rates.catchable, 0.0);
      EXPECT_EQ(*layer.e_out, 0.0) << "every row reads exact tokens alone";
      ASSERT_FALSE(layer.abstain.empty());
      EXPECT_NE(layer.abstain[0].find("nothing to catch"), std::string::npos);
    } else {
      EXPECT_GT(layer.rates.catchable, 0.0);
      EXPECT_GT(*layer.e_out, 0.0);
    }
  }
  EXPECT_GT(n_sliding, 0);
  EXPECT_LT(n_sliding, static_cast<int>(r.layers.size()));
}

TEST(SaliencyWalk, KeysBeforeRopeAreTurnedBackToTheirPositions) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const std::vector<text::Document> documents = random_documents(1, 400, 256);
  const SaliencyResult post = measure(m.model, documents, options_of("int8.token.g")), pre = measure(m.model, documents, options_of("int8.token.g.pre"));
  for (std::size_t l = 0; l < post.layers.size(); ++l) {
    // 8 bits lose a few 1e-5 in either frame; keys left unrotated would lose the order of 1.
    EXPECT_LT(pre.fractions[0].e_out_base[l], 10 * post.fractions[0].e_out_base[l] + 1e-6);
    EXPECT_GT(pre.fractions[0].e_out_base[l], 0);
  }
}

TEST(SaliencyWalk, WhatCannotBeJudgedIsRefusedBeforeTheWalk) {
  OpenModel m(test::make_tiny_model("m-llama"));
  test::expect_error([&] { check_saliency(options_of(), m.model.identity(), random_documents(2, 300, 256)); }, ErrorKind::kInfeasible,
                     {"300 tokens", "exit block of 80"});
  SaliencyOptions tiny_share = options_of();
  tiny_share.fractions = {0.001};
  test::expect_error([&] { saliency_tiers(tiny_share); }, ErrorKind::kUsage, {"--fraction", "0.001", "64 tokens"});
  test::expect_error([&] { check_saliency(options_of("int4.token.g96"), m.model.identity(), random_documents(1, 400, 256)); }, ErrorKind::kUsage,
                     {"int4.token.g96"});
}

}  // namespace
}  // namespace calib::sens

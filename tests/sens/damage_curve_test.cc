#include "libcalib/sens/damage_curve.h"

#include <cmath>
#include <memory>

#include <gtest/gtest.h>

#include "libcalib/sens/joint_run.h"
#include "tests/sens/sampled_text.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/shared_data.h"

namespace calib::sens {
namespace {

using test_fixture::no_params;
using test_fixture::OpenModel;
using test_fixture::random_documents;

TEST(Pearson, AgreesWithTheHandComputation) {
  const auto of = [](const std::vector<float>& x, const std::vector<float>& y) { return pearson(x, y); };
  // Means 2.5 and 5.25; sums of products 11.5, of squares 5 and 26.75.
  EXPECT_NEAR(*of({1, 2, 3, 4}, {2, 4, 6, 9}), 11.5 / std::sqrt(5 * 26.75), 1e-12);
  // Blind to shift and scale, not to sign.
  EXPECT_NEAR(*of({1, 2, 4, -3}, {1003, 1006, 1012, 991}), 1, 1e-12);
  EXPECT_NEAR(*of({1, 2, 4, -3}, {-1, -2, -4, 3}), -1, 1e-12);
  EXPECT_NEAR(*of({-1, 1, -1, 1}, {1, 1, -1, -1}), 0, 1e-12);
  EXPECT_EQ(*of({1, 2, 3}, {5, 5, 5}), 0);
  EXPECT_FALSE(of({5, 5, 5}, {1, 2, 3}));
  EXPECT_FALSE(of({5}, {1}));
}

TEST(DamageCurve, InterpolatesWithoutEverFalling) {
  // Out of order, with a ratio that falls back and one below 1.
  const std::vector<DamagePoint> points = {{.4, .2, 1.2}, {.01, .01, .99}, {.1, .1, 1.5}, {.8, .3, 8}};
  EXPECT_EQ(predicted_ppl_ratio(points, 0), 1);
  EXPECT_EQ(predicted_ppl_ratio(points, -1), 1);
  EXPECT_EQ(predicted_ppl_ratio(points, .01), 1);
  EXPECT_NEAR(predicted_ppl_ratio(points, .055), std::sqrt(1.5), 1e-12);
  for (const double x : {.1, .15, .2}) EXPECT_NEAR(predicted_ppl_ratio(points, x), 1.5, 1e-12) << x;
  EXPECT_NEAR(predicted_ppl_ratio(points, .25), std::sqrt(1.5 * 8), 1e-12);
  for (const double x : {.3, .9, 2.0}) EXPECT_NEAR(predicted_ppl_ratio(points, x), 8, 1e-12) << x;
  double last = 0;
  for (double x = -.1; x < .5; x += .001) {
    EXPECT_GE(predicted_ppl_ratio(points, x), last) << x;
    last = predicted_ppl_ratio(points, x);
  }
  // Where a ratio is reached, and that it is predicted there.
  EXPECT_NEAR(*damage_at_ratio(points, 5), .2 + .1 * std::log(5 / 1.5) / std::log(8 / 1.5), 1e-12);
  EXPECT_NEAR(predicted_ppl_ratio(points, *damage_at_ratio(points, 5)), 5, 1e-9);
  EXPECT_NEAR(*damage_at_ratio(points, 1.5), .1, 1e-12);
  EXPECT_NEAR(*damage_at_ratio(points, 8), .3, 1e-12);
  EXPECT_FALSE(damage_at_ratio(points, 8.1));
  EXPECT_EQ(predicted_ppl_ratio({}, .5), 1);
  EXPECT_FALSE(damage_at_ratio({}, 5));
}

TEST(DamageCurve, TakesTheFirstDocumentsThatAreLongEnough) {
  auto documents = random_documents(5, 70, 256);
  documents[0].ids.resize(63), documents[2].ids.resize(64);
  const auto chosen = damage_documents(documents, 4);
  ASSERT_EQ(chosen.size(), 2u);
  EXPECT_EQ(chosen[0].ids, documents[1].ids);
  EXPECT_EQ(chosen[1].ids, documents[2].ids);
  EXPECT_TRUE(damage_documents(random_documents(3, 63, 256), 4).empty());
  EXPECT_TRUE(damage_documents(random_documents(3, 100, 256), 99).empty()) << "no row is scored";
}

struct Gate {
  Gate(const model::StreamingModel& model, std::vector<text::Document> documents, std::uint64_t seed = 0)
      : gate(model, damage_documents(documents, 4), {4, false, 128, seed}, pool) {}
  ThreadPool pool{1};
  DamageGate gate;
};

Contender uniform(const model::StreamingModel& model, const std::string& pair, PairTiers tiers) {
  return uniform_contender(pair, model.identity(), tiers, no_params());
}

// x of one contender, row by row from what a row reads: all rows of the document that see 64 keys are sampled, each weighs 1.
TEST(DamageGate, IsTheCorrelationOfWhatRowsRead) {
  for (const char* name : {"m-llama", "m-gemma3"}) {  // gemma: layers that see 8 keys
    OpenModel m(test::make_tiny_model(name));
    const auto documents = random_documents(1, 90, 256);
    const Contender contender = uniform(m.model, "int3.token.g.pre:int8.token.g", {4, 16});
    Gate g(m.model, documents);
    const EvalDamage judged = g.gate.judge({contender}).front();

    const c10::NoGradGuard no_grad;
    at::Tensor x = m.model.load_embedding()->lookup(documents[0].ids);
    double worst = -1;
    int worst_layer = -1;
    for (std::int64_t l = 0; l < m.model.n_layers(); ++l) {
      const auto block = m.model.load_block(l);
      const LayerGeometry& layer = block->geometry();
      const model::Projected p = block->project(x);
      const at::Tensor q = block->rotate(p.q_pre).contiguous(), k = block->rotate(p.k_pre).contiguous();
      const ChangedCache cache = change_cache(*block, p.k_pre, k, p.v, contender.layers[static_cast<std::size_t>(l)], g.pool);
      const at::Tensor coded = cache.k_coded.contiguous(), exact = cache.k_exact.contiguous();
      double sum = 0;
      int n = 0;
      for (std::int64_t t = 63; t < 90; ++t)
        for (std::int64_t h = 0; h < layer.n_q_heads; ++h) {
          const std::int64_t kv = h / (layer.n_q_heads / layer.n_kv_heads);
          std::vector<double> s, s_hat;
          for (std::int64_t j = layer.sliding_window > 0 ? t + 1 - layer.sliding_window : 0; j <= t; ++j) {
            // Window 16, exit block 1: row t reads j coded once 16 newer tokens stand behind it, sinks never.
            const bool is_coded = j >= 4 && j + 16 <= t;
            double a = 0, b = 0;
            for (std::int64_t c = 0; c < layer.head_dim; ++c) {
              const auto at_key = [&](const at::Tensor& of) { return static_cast<double>(of.data_ptr<float>()[(j * layer.n_kv_heads + kv) * layer.head_dim + c]); };
              const double query = q.data_ptr<float>()[(t * layer.n_q_heads + h) * layer.head_dim + c];
              a += query * at_key(k), b += query * at_key(is_coded ? coded : exact);
            }
            s.push_back(a), s_hat.push_back(b);
          }
          double ms = 0, mh = 0, ss = 0, hh = 0, sh = 0;
          for (std::size_t i = 0; i < s.size(); ++i) ms += s[i] / static_cast<double>(s.size()), mh += s_hat[i] / static_cast<double>(s.size());
          for (std::size_t i = 0; i < s.size(); ++i) ss += (s[i] - ms) * (s[i] - ms), hh += (s_hat[i] - mh) * (s_hat[i] - mh), sh += (s[i] - ms) * (s_hat[i] - mh);
          sum += sh / std::sqrt(ss * hh), ++n;
        }
      if (1 - sum / n > worst) worst = 1 - sum / n, worst_layer = layer.index;
      x = block->finish(x, block->attend(q, k, p.v));
    }
    EXPECT_NEAR(judged.x, worst, 1e-3 * worst) << name;
    EXPECT_EQ(judged.worst_layer, worst_layer) << name;
    EXPECT_GT(judged.x, 1e-3) << name;
  }
}

TEST(DamageGate, CurveOfNoise) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto documents = random_documents(3, 120, 256);
  const Gate a(m.model, documents), same(m.model, documents), other(m.model, documents, 1);
  const DamageCurve &curve = a.gate.curve(), &again = same.gate.curve();
  EXPECT_EQ(curve.n_documents, 2);
  EXPECT_EQ(curve.n_tokens, 240);
  ASSERT_EQ(curve.points.size(), kDamageSigmas.size());
  for (std::size_t i = 0; i < curve.points.size(); ++i) {
    EXPECT_EQ(curve.points[i].sigma, kDamageSigmas[i]);
    EXPECT_EQ(curve.points[i].x, again.points[i].x);
    EXPECT_EQ(curve.points[i].ppl_ratio, again.points[i].ppl_ratio);
    EXPECT_NE(curve.points[i].x, other.gate.curve().points[i].x);
    if (i > 0) {
      EXPECT_GT(curve.points[i].x, curve.points[i - 1].x);
    }
  }
  // Small noise: 1 - 1 / sqrt(1 + c sigma^2) = c sigma^2 / 2. From .005 to .02 the same draws, sixteen times the x (third order: 2 %).
  EXPECT_NEAR(curve.points[2].x / curve.points[0].x, 16, 0.5);
  // Its own noise stands on the curve: the gate predicts what was measured there.
  const std::vector<EvalDamage> judged = a.gate.judge({noise_contender(m.model.identity(), .8, 0, 4), noise_contender(m.model.identity(), .8, 1, 4)});
  EXPECT_EQ(judged[0].x, curve.points.back().x);
  EXPECT_NE(judged[1].x, judged[0].x);
  EXPECT_NEAR(judged[1].x, judged[0].x, 0.2 * judged[0].x);
  // Text that nothing predicts: no noise makes it five times worse, and nothing is rejected, not even 2 bits.
  EXPECT_FALSE(curve.rejects_from);
  const EvalDamage control = a.gate.judge({negative_control(m.model.identity())}).front();
  EXPECT_GT(control.x, 0.01);
  EXPECT_FALSE(control.rejected);
}

// Wider codes, longer windows and sinks leave scores in better order; values do not count.
TEST(DamageGate, FollowsWhatIsCoded) {
  OpenModel m(test::make_tiny_model("m-qwen3"));
  const Gate g(m.model, random_documents(2, 150, 256));
  const auto x = [&](const std::string& pair, PairTiers tiers = {4, 16}) { return g.gate.judge({uniform(m.model, pair, tiers)}).front().x; };
  EXPECT_LT(x("bf16:int2.token.g"), 1e-4);
  EXPECT_LT(x("int8.token.g:bf16"), 0.05 * x("int4.token.g:bf16"));
  EXPECT_LT(x("int4.token.g:bf16"), 0.3 * x("int2.token.g:bf16"));
  EXPECT_LT(x("int2.token.g:bf16", {4, 96}), 0.8 * x("int2.token.g:bf16"));
  EXPECT_NEAR(x("int2.token.g:int2.token.g"), x("int2.token.g:bf16"), 1e-12);
}

// The trained stories260K on text of its own: keys of 2 bits per token ruin it, of 8 bits do not, and the gate tells them apart.
TEST(DamageGate, RejectsTwoBitKeysOfATrainedModelAndNotEight) {
  CALIB_SHARED_FILE(file, "models/stories260K.bin");
  OpenModel m(*test::restore_s260k());
  const auto documents = test_fixture::sampled_sequences(m.model);
  const Gate g(m.model, documents);
  ASSERT_TRUE(g.gate.curve().rejects_from);
  const std::vector<Contender> contenders = {uniform(m.model, "int2.token.g:bf16", {4, 0}), uniform(m.model, "int8.token.g:bf16", {4, 0}),
                                             uniform(m.model, "bf16:bf16", {4, 0})};
  const std::vector<EvalDamage> judged = g.gate.judge(contenders);
  EXPECT_TRUE(judged[0].rejected) << judged[0].x << " against " << *g.gate.curve().rejects_from;
  EXPECT_GE(judged[0].predicted_ppl_ratio, kRuinedPplRatio);
  EXPECT_FALSE(judged[1].rejected) << judged[1].x << " against " << *g.gate.curve().rejects_from;
  EXPECT_LT(judged[1].predicted_ppl_ratio, kRuinedPplRatio);
  EXPECT_LT(judged[2].x, judged[1].x);
  // Rightly so.
  ThreadPool pool(1);
  EvalResult result;
  evaluate(m.model, damage_documents(documents, 4), contenders, {}, pool, &result);
  EXPECT_GE(result.contenders[0].total.ppl_ratio.mean, kRuinedPplRatio);
  EXPECT_LT(result.contenders[1].total.ppl_ratio.mean, 2);
}

}  // namespace
}  // namespace calib::sens

// The salient tier as evaluation, sweep and generation see it, against definitions written out token by token.

#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "kernels/core/layout.h"
#include "libcalib/quant/expected_attention.h"
#include "libcalib/sens/evaluate.h"
#include "libcalib/sens/generate.h"
#include "libcalib/sens/isolated.h"
#include "libcalib/sens/joint_run.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/expect_error.h"

namespace calib::sens {
namespace {

using test_fixture::no_params;
using test_fixture::OpenModel;
using test_fixture::random_documents;

constexpr std::int64_t kSinks = 4;

/// Factors of no text: any will do where both sides of a comparison use them.
quant::SaliencyFactors factors_of(const LayerGeometry& g, int rank = 3) {
  quant::SaliencyFactors f;
  f.rank = rank;
  Rng rng = Rng::for_item(99, static_cast<std::uint64_t>(g.index));
  for (int i = 0; i < g.n_q_heads * g.head_dim; ++i) f.a.push_back(static_cast<float>(rng.normal()));
  for (int i = 0; i < g.n_q_heads * g.head_dim * rank; ++i) f.m.push_back(static_cast<float>(0.5 * rng.normal()));
  return f;
}

SaliencyProvider provider_of(const model::StreamingModel& model) {
  return [&model](std::size_t l) { return factors_of(model.layer(static_cast<std::int64_t>(l))); };
}

LayerChange change_of(const LayerGeometry& g, const char* k, const char* v, double fraction, std::int64_t window) {
  LayerChange c;
  c.k = UnitCandidate{0, quant::parse_scheme(k), {}}, c.v = UnitCandidate{0, quant::parse_scheme(v), {}};
  c.tiers = kvrt::finish_tiers(c.k->scheme, c.v->scheme, kSinks, window, fraction);
  c.salient = std::make_shared<const quant::SalientTier>(quant::SalientTier{quant::parse_scheme("fp8e4m3.token.g"), factors_of(g)});
  return c;
}

Contender contender_of(const model::StreamingModel& model, const char* k, const char* v, double fraction, std::int64_t window) {
  Contender c;
  c.header.name = "tiered", c.header.kind = "plan", c.header.n_sinks = kSinks, c.header.window = window;
  for (std::int64_t l = 0; l < model.n_layers(); ++l) c.layers.push_back(change_of(model.layer(l), k, v, fraction, window));
  return c;
}

using Rows = std::vector<double>;  ///< one token of all KV heads, [H, D]

/// One token through a token-wise scheme, alone.
Rows coded_alone(const char* scheme, Side side, const LayerGeometry& g, const at::Tensor& x_THD, std::int64_t t) {
  ThreadPool pool(1);
  const at::Tensor row = x_THD[t].contiguous();
  std::vector<float> out(static_cast<std::size_t>(row.numel()));
  quant::fake_quant_document(quant::parse_scheme(scheme), side, g, {}, 0, true, 1, row.data_ptr<float>(), out.data(), pool);
  return {out.begin(), out.end()};
}

/// Attention over a tiered cache, row by row and key by key from the definition: sinks, then whole exit blocks of 64 + n_s past them, of
/// which each head keeps the n_s best by the rule of schemas/plan.md, then tokens that stay BF16.
at::Tensor naive_attention(const model::Block& block, const at::Tensor& x, const char* k_scheme, const char* v_scheme, std::int64_t n_salient, std::int64_t window) {
  const LayerGeometry& g = block.geometry();
  const model::Projected p = block.project(x);
  const at::Tensor q = on_cpu(block.rotate(p.q_pre)), k_pre = on_cpu(p.k_pre), k = on_cpu(block.rotate(p.k_pre)), v = on_cpu(p.v);
  const bool pre = quant::parse_scheme(k_scheme).pre;
  const std::int64_t n = x.size(0), heads = g.n_kv_heads, d = g.head_dim, group = g.n_q_heads / heads, block_size = 64 + n_salient;
  const quant::SaliencyFactors f = factors_of(g);
  const auto rotated = [&](Rows row, std::int64_t t) {
    for (std::int64_t h = 0; h < heads; ++h) quant::RopeTurn(g, t, g.attention_factor).apply(row.data() + h * d);
    return row;
  };
  const auto value = [](const at::Tensor& y, std::int64_t t, std::int64_t h, std::int64_t c) {
    return static_cast<double>(y.data_ptr<float>()[(t * y.size(1) + h) * y.size(2) + c]);
  };
  std::vector<Rows> exact_k, exact_v, base_k, base_v, best_k, best_v;
  for (std::int64_t t = 0; t < n; ++t) {
    const auto bf16 = [&](const at::Tensor& y) {
      const at::Tensor row = y[t].contiguous();
      std::vector<float> out(static_cast<std::size_t>(row.numel()));
      quant::round_bf16(row.data_ptr<float>(), out.data(), row.numel());
      return Rows(out.begin(), out.end());
    };
    exact_k.push_back(pre ? rotated(bf16(k_pre), t) : bf16(k)), exact_v.push_back(bf16(v));
    base_k.push_back(pre ? rotated(coded_alone(k_scheme, Side::kK, g, k_pre, t), t) : coded_alone(k_scheme, Side::kK, g, k, t));
    base_v.push_back(coded_alone(v_scheme, Side::kV, g, v, t));
    best_k.push_back(coded_alone("fp8e4m3.token.g", Side::kK, g, k, t)), best_v.push_back(coded_alone("fp8e4m3.token.g", Side::kV, g, v, t));
  }
  // salient[h][t]
  std::vector<std::vector<bool>> salient(static_cast<std::size_t>(heads), std::vector<bool>(static_cast<std::size_t>(n), false));
  for (std::int64_t first = kSinks; first + block_size + window <= n; first += block_size)
    for (std::int64_t h = 0; h < heads; ++h) {
      std::vector<double> score(static_cast<std::size_t>(block_size), 0.0);
      for (std::int64_t u = 0; u < group; ++u) {
        std::vector<double> z;
        double sum = 0;
        for (std::int64_t j = first; j < first + block_size; ++j) {
          std::vector<double> key;
          for (std::int64_t c = 0; c < d; ++c) key.push_back(value(k, j, h, c));
          quant::RopeTurn(g, -(first + block_size + window), 1).apply(key.data());
          const std::int64_t query = h * group + u;
          double a = 0, squares = 0;
          for (std::int64_t c = 0; c < d; ++c) a += static_cast<double>(f.a[static_cast<std::size_t>(query * d + c)]) * key[static_cast<std::size_t>(c)];
          for (int r = 0; r < f.rank; ++r) {
            double along = 0;
            for (std::int64_t c = 0; c < d; ++c)
              along += static_cast<double>(f.m[static_cast<std::size_t>((query * d + c) * f.rank + r)]) * key[static_cast<std::size_t>(c)];
            squares += along * along;
          }
          z.push_back(std::exp(a + 0.5 * squares)), sum += z.back();
        }
        for (std::size_t i = 0; i < z.size(); ++i) score[i] += z[i] / sum / static_cast<double>(group);
      }
      std::vector<std::int64_t> order(score.size());
      std::iota(order.begin(), order.end(), 0);
      for (std::size_t i = 0; i < score.size(); ++i) {
        double norm2 = 0;
        for (std::int64_t c = 0; c < d; ++c) norm2 += std::pow(value(v, first + static_cast<std::int64_t>(i), h, c), 2);
        score[i] *= std::sqrt(norm2);
      }
      std::stable_sort(order.begin(), order.end(),
                       [&](std::int64_t a, std::int64_t b) { return score[static_cast<std::size_t>(a)] > score[static_cast<std::size_t>(b)]; });
      for (std::int64_t i = 0; i < n_salient; ++i) salient[static_cast<std::size_t>(h)][static_cast<std::size_t>(first + order[static_cast<std::size_t>(i)])] = true;
    }
  at::Tensor o = at::zeros({n, g.n_q_heads * d}, at::kDouble);
  double* const o_data = o.data_ptr<double>();
  for (std::int64_t t = 0; t < n; ++t) {
    const std::int64_t out_blocks = std::max<std::int64_t>(0, (t + 1 - kSinks - window)) / block_size, end = kSinks + out_blocks * block_size;
    for (std::int64_t query = 0; query < g.n_q_heads; ++query) {
      const std::int64_t h = query / group, first = g.sliding_window > 0 ? std::max<std::int64_t>(0, t - g.sliding_window + 1) : 0;
      const auto part = [&](const std::vector<Rows>& exact, const std::vector<Rows>& base, const std::vector<Rows>& best, std::int64_t j) {
        const Rows& row = (j < kSinks || j >= end                                              ? exact
                           : salient[static_cast<std::size_t>(h)][static_cast<std::size_t>(j)] ? best
                                                                                               : base)[static_cast<std::size_t>(j)];
        return row.data() + h * d;
      };
      std::vector<double> weight;
      double sum = 0;
      for (std::int64_t j = first; j <= t; ++j) {
        const double* const key = part(exact_k, base_k, best_k, j);
        double s = 0;
        for (std::int64_t c = 0; c < d; ++c) s += value(q, t, query, c) * key[c];
        weight.push_back(std::exp(s * g.softmax_scale)), sum += weight.back();
      }
      for (std::int64_t j = first; j <= t; ++j) {
        const double* const row = part(exact_v, base_v, best_v, j);
        for (std::int64_t c = 0; c < d; ++c) o_data[(t * g.n_q_heads + query) * d + c] += weight[static_cast<std::size_t>(j - first)] / sum * row[c];
      }
    }
  }
  return o.to(at::kFloat);
}

TEST(SalientTier, ALayerEqualsATokenByTokenReference) {
  struct Case {
    const char *model, *k, *v;
    std::int64_t n_salient, window;
    double fraction;
  };
  for (const Case& c : {Case{"m-llama", "int2.token.g", "int3.token.g", 16, 2, 0.2}, Case{"m-llama", "int2.token.g.pre", "int2.token.g", 7, 20, 0.1}}) {
    SCOPED_TRACE(c.k);
    OpenModel m(test::make_tiny_model(c.model));
    ThreadPool pool(1);
    const c10::NoGradGuard no_grad;
    const auto document = random_documents(1, 190, 256)[0];  // two exit blocks leave
    const auto block = m.model.load_block(0);
    const at::Tensor x = m.model.load_embedding()->lookup(document.ids);
    const LayerChange change = change_of(block->geometry(), c.k, c.v, c.fraction, c.window);
    ASSERT_EQ(change.tiers.block_salient, c.n_salient);
    ASSERT_EQ(kvrt::blocks_out(change.tiers, 190), 2);
    const at::Tensor expected = block->finish(x, naive_attention(*block, x, c.k, c.v, c.n_salient, c.window)), got = run_block(*block, x, &change, kQueryTile, pool);
    LayerChange without = change;
    without.tiers.block_salient = 0, without.tiers.block_base = 1, without.salient = nullptr;
    const at::Tensor plain = run_block(*block, x, &without, kQueryTile, pool);
    const double scale = (plain - expected).abs().max().item<double>();
    // fp32 softmax and products of size 1 to 10: 1e-5; what the tier changes is far above.
    EXPECT_GT(scale, 1e-2);
    EXPECT_LT((got - expected).abs().max().item<double>(), 1e-4);
  }
}

TEST(SalientTier, DecodingEqualsTheForwardPass) {
  // 70 tokens of prompt and 40 of reply: with window 2 and blocks of 71 one leaves while decoding; with window 0 and a fifth of them at 84.
  for (const char* name : {"m-llama", "m-gemma3"}) {
    OpenModel m(test::make_tiny_model(name));
    struct Case {
      const char *k, *v;
      double fraction;
      std::int64_t window;
    };
    for (const Case& c : {Case{"int2.token.g.pre", "int2.token.g", 0.1, 2}, Case{"int2.channel.g32", "int4.token.g", 0.2, 0}}) {
      SCOPED_TRACE(std::string(name) + " " + c.k);
      const Contender contender = contender_of(m.model, c.k, c.v, c.fraction, c.window);
      const auto prompts = random_documents(2, 70, 256);
      GenerateOptions options;
      options.depth = 70, options.n_tokens = 40;
      ThreadPool pool(1);
      const auto replies = greedy_replies(m.model, prompts, &contender, options, pool);
      const c10::NoGradGuard no_grad;
      for (std::size_t d = 0; d < prompts.size(); ++d) {
        std::vector<text::TokenId> ids = prompts[d].ids;
        ids.insert(ids.end(), replies[d].begin(), replies[d].end());
        at::Tensor x = m.model.load_embedding()->lookup(ids);
        for (std::int64_t l = 0; l < m.model.n_layers(); ++l)
          x = run_block(*m.model.load_block(l), x, &contender.layers[static_cast<std::size_t>(l)], kQueryTile, pool);
        const at::Tensor top = at::argmax(m.model.load_head()->logits(x), -1);
        for (std::int64_t t = 0; t < 40; ++t) EXPECT_EQ(replies[d][static_cast<std::size_t>(t)], top[69 + t].item<std::int64_t>()) << d << ' ' << t;
      }
    }
  }
}

TEST(SalientTier, EvaluateTakesThePresetAndItLiesBetweenItsTiers) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const ModelIdentity& model = m.model.identity();
  std::vector<Contender> contenders = {uniform_contender("tiered4", model, {}, no_params(), {}, provider_of(m.model))};
  contenders.push_back(uniform_contender("int4.token.g:int4.token.g", model, {4, 2}, no_params()));
  contenders.push_back(uniform_contender("fp8e4m3.token.g:fp8e4m3.token.g", model, {4, 2}, no_params()));
  // Blocks of 80 stay longer in the ring than tokens that leave one by one: the same exit blocks make the comparison fair.
  for (std::size_t c = 1; c < 3; ++c)
    for (LayerChange& layer : contenders[c].layers) layer.tiers.block_base = 80;
  EXPECT_EQ(contenders[0].header.description, "K int4.token.g, V int4.token.g, sinks 4, window 2, salient 0.2 at fp8e4m3.token.g");
  EXPECT_EQ(contenders[0].layers[0].tiers.exit_block(), 80);
  ThreadPool pool(1);
  EvalResult r;
  r.model = model;
  evaluate(m.model, random_documents(3, 260, 256), contenders, {}, pool, &r);
  EXPECT_LT(r.contenders[0].total.kld.mean, r.contenders[1].total.kld.mean);
  EXPECT_GT(r.contenders[0].total.kld.mean, r.contenders[2].total.kld.mean);
  kvrt::LayerLayout layout;
  layout.n_kv_heads = model.layers[0].n_kv_heads, layout.head_dim = model.layers[0].head_dim;
  layout.k = layout.v = quant::parse_scheme("int4.token.g"), layout.salient = quant::parse_scheme("fp8e4m3.token.g");
  layout.tiers = kvrt::finish_tiers(layout.k, layout.v, 4, 2, 0.2);
  const double bytes = static_cast<double>(kvrt::cache_bytes(layout, kvrt::CacheSide::kK, 2048) + kvrt::cache_bytes(layout, kvrt::CacheSide::kV, 2048));
  EXPECT_DOUBLE_EQ(*contenders[0].header.effective_bits_2048, bytes * 8 / (2.0 * 2048 * layout.n_kv_heads * layout.head_dim));
  test::expect_error([&] { uniform_contender("tiered4", model, {}, no_params()); }, ErrorKind::kUsage, {"tiered4", "--stats"});
  EvaluateOptions packed;
  packed.packed = true;
  test::expect_error([&] { evaluate(m.model, random_documents(1, 100, 256), {contenders[0]}, packed, pool, &r); }, ErrorKind::kUnsupported,
                     {"salient tier", "--backend fake"});
}

struct TierGrid {
  std::vector<std::string> k, v;
  std::vector<double> fractions = {0, 0.2};
};

SensResult scores_of(const model::StreamingModel& model, const std::vector<text::Document>& documents, const TierGrid& grid, std::vector<std::string> metrics,
                     std::vector<std::int64_t> windows) {
  SensResult r;
  r.model = model.identity();
  r.n_sinks = kSinks;
  r.salient_scheme = "fp8e4m3.token.g", r.salient_score = quant::kTierScore;
  for (const LayerGeometry& g : r.model.layers) r.saliency[g.index] = factors_of(g);
  lay_out_grid({"custom", grid.k, grid.v}, {}, &r, {});
  SweepOptions options;
  options.metrics = std::move(metrics), options.windows = std::move(windows), options.salient_fractions = grid.fractions;
  options.n_sinks = kSinks, options.rows_per_document = 1 << 20;
  ThreadPool pool(1);
  run_sweep(model, documents, options, no_params(), pool, &r);
  return r;
}

// attn_kl of an isolated key unit in both frames, from the cache that a joint run would read.
TEST(SalientTier, SweepScoresTheTierOfTheUnitAlone) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto documents = random_documents(1, 200, 256);
  const SensResult r = scores_of(m.model, documents, {{"int2.token.g", "int2.channel.g32.pre", "int2.channel.g32"}, {"int2.token.g"}},
                                 {"attn_kl", "attn_out", "fisher_vec"}, {0, 16});
  ASSERT_EQ(r.windows, (std::vector<std::int64_t>{0, 0, 16, 16}));
  ASSERT_EQ(r.salient_fractions, (std::vector<double>{0, 0.2, 0, 0.2}));
  const c10::NoGradGuard no_grad;
  ThreadPool pool(1);
  const auto block = m.model.load_block(0);
  const LayerGeometry& g = block->geometry();
  const model::Projected p = block->project(m.model.load_embedding()->lookup(documents[0].ids));
  const at::Tensor q = block->rotate(p.q_pre), k = block->rotate(p.k_pre);
  const std::int64_t n = 200, group = g.n_q_heads / g.n_kv_heads;
  for (const char* scheme : {"int2.token.g", "int2.channel.g32.pre", "int2.channel.g32"})
    for (const std::size_t w : {std::size_t{1}, std::size_t{3}}) {
      LayerChange change = change_of(g, scheme, "bf16", 0.2, r.windows[w]);
      change.v.reset();
      change.tiers = isolated_tiers(change.k->scheme, kSinks, r.windows[w], 0.2);
      const ChangedCache cache = change_cache(*block, p.k_pre, k, p.v, change, pool);
      double sum = 0;
      for (std::int64_t t = kSinks; t < n; ++t)
        for (std::int64_t query = 0; query < g.n_q_heads; ++query) {
          const std::int64_t end = kvrt::coded_end(change.tiers, t + 1), h = query / group;
          const at::Tensor read =
              at::cat({cache.k_coded.slice(0, 0, std::min(end, t + 1)), cache.k_exact.slice(0, std::min(end, t + 1), t + 1)}).select(1, h).to(at::kDouble);
          const at::Tensor row = q[t][query].to(at::kDouble) * g.softmax_scale;
          const at::Tensor log_p = at::log_softmax(at::mv(k.slice(0, 0, t + 1).select(1, h).to(at::kDouble), row), 0), log_q = at::log_softmax(at::mv(read, row), 0);
          sum += (log_p.exp() * (log_p - log_q)).sum().item<double>();
        }
      const double want = sum / static_cast<double>((n - kSinks) * g.n_q_heads);
      EXPECT_NEAR(test_fixture::score(r, "attn_kl", g.index, Side::kK, scheme, w), want, 1e-4 * want) << scheme << " class " << w;
    }
  // In nats as elsewhere: a tier takes loss away, on both sides, and a class without one scores as it does alone.
  const SensResult plain = scores_of(m.model, documents, {{"int2.token.g", "int2.channel.g32.pre", "int2.channel.g32"}, {"int2.token.g"}, {0}},
                                     {"attn_kl", "attn_out", "fisher_vec"}, {0, 16});
  for (int l = 0; l < m.model.n_layers(); ++l)
    for (const char* metric : {"attn_out", "fisher_vec"})
      for (const Side side : {Side::kK, Side::kV}) {
        EXPECT_LT(test_fixture::score(r, metric, l, side, "int2.token.g", 3), test_fixture::score(r, metric, l, side, "int2.token.g", 2)) << metric << l;
        EXPECT_GT(test_fixture::score(r, metric, l, side, "int2.token.g", 3), 0.1 * test_fixture::score(r, metric, l, side, "int2.token.g", 2)) << metric << l;
        EXPECT_EQ(test_fixture::score(r, metric, l, side, "int2.token.g", 2), test_fixture::score(plain, metric, l, side, "int2.token.g", 1)) << metric << l;
      }
}

// The Fisher estimate of small errors follows the isolated run, tier and all: by how much a tier lowers it.
TEST(SalientTier, LogitKlOfAUnitWithATierIsThatOfItsJointRun) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto documents = random_documents(2, 120, 256);
  const SensResult r = scores_of(m.model, documents, {{"int4.token.g"}, {"int4.token.g.had"}}, {"logit_kl"}, {8});
  ThreadPool pool(1);
  for (const Side side : {Side::kK, Side::kV}) {
    Contender c = contender_of(m.model, "int4.token.g", "int4.token.g.had", 0.2, 8);
    for (std::size_t l = 0; l < c.layers.size(); ++l) {
      (side == Side::kK ? c.layers[l].v : c.layers[l].k).reset();
      if (l != 1) c.layers[l] = LayerChange{};
      if (l != 1) c.layers[l].tiers = {0, 0, 1, 0};
    }
    EvalResult e;
    e.model = m.model.identity();
    evaluate(m.model, documents, {c}, {}, pool, &e);
    const double got = test_fixture::score(r, "logit_kl", 1, side, side == Side::kK ? "int4.token.g" : "int4.token.g.had", 1);
    EXPECT_NEAR(got, e.contenders[0].total.kld.mean, 1e-3 * got);
    EXPECT_LT(got, test_fixture::score(r, "logit_kl", 1, side, side == Side::kK ? "int4.token.g" : "int4.token.g.had", 0));
  }
}

}  // namespace
}  // namespace calib::sens

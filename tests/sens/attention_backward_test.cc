#include "libcalib/sens/attention_backward.h"

#include "libcalib/sens/attention_objective.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

namespace calib::sens {
namespace {

// Brute force: every row attends with its own K and V, chosen entry by entry, in one dense masked softmax in double.
struct Dense {
  at::Tensor q, k_coded, v_coded, k_exact, v_exact;  // [T, heads, D], double
  at::Tensor coded;                                  // bool [T rows, T keys]
  at::Tensor seen;                                   // bool [T, T]
};

at::Tensor dense_attention(const Dense& x, double scale) {
  const std::int64_t t = x.q.size(0), heads = x.q.size(1), n_kv = x.k_coded.size(1), group = heads / n_kv;
  std::vector<at::Tensor> outputs;
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t kv = h / group;
    const at::Tensor q = x.q.select(1, h);
    const at::Tensor s_coded = at::matmul(q, x.k_coded.select(1, kv).t()), s_exact = at::matmul(q, x.k_exact.select(1, kv).t());
    const at::Tensor s = at::where(x.coded, s_coded, s_exact) * scale;
    const at::Tensor p = at::softmax(s.masked_fill(~x.seen, -std::numeric_limits<double>::infinity()), -1);
    const at::Tensor coded = x.coded.to(at::kDouble);
    outputs.push_back(at::matmul(p * coded, x.v_coded.select(1, kv)) + at::matmul(p * (1 - coded), x.v_exact.select(1, kv)));
  }
  return at::stack(outputs, 1).reshape({t, -1});
}

at::Tensor coded_mask(std::int64_t n, const kvrt::Tiers& tiers) {
  at::Tensor m = at::zeros({n, n}, at::kBool);
  auto a = m.accessor<bool, 2>();
  for (std::int64_t t = 0; t < n; ++t)
    for (std::int64_t j = tiers.n_sinks; j < kvrt::coded_end(tiers, t + 1); ++j) a[t][j] = true;
  return m;
}

at::Tensor seen_mask(std::int64_t n, std::int64_t sliding) {
  at::Tensor m = at::zeros({n, n}, at::kBool);
  auto a = m.accessor<bool, 2>();
  for (std::int64_t t = 0; t < n; ++t)
    for (std::int64_t j = 0; j <= t; ++j) a[t][j] = sliding == 0 || j > t - sliding;
  return m;
}

double relative(const at::Tensor& got, const at::Tensor& want) {
  const double top = want.abs().max().item<double>();
  return (got.to(at::kDouble) - want).abs().max().item<double>() / (top > 0 ? top : 1.0);
}

struct Case {
  std::int64_t n, heads, kv, d, sliding;
  kvrt::Tiers tiers;
};

class Windows : public testing::TestWithParam<Case> {};

// fp32 against double: T products of unit variance accumulate about sqrt(T) ulp; 2e-5 leaves a factor of ten.
constexpr double kTolerance = 2e-5;

TEST_P(Windows, GradientsMatchMaskedAutograd) {
  const Case c = GetParam();
  at::manual_seed(3);
  const auto f64 = at::TensorOptions(at::kDouble);
  const double scale = 1 / std::sqrt(static_cast<double>(c.d));
  const std::int64_t draws = 2;
  Dense x;
  x.q = at::randn({c.n, c.heads, c.d}, f64).requires_grad_();
  const at::Tensor k = at::randn({c.n, c.kv, c.d}, f64), v = at::randn({c.n, c.kv, c.d}, f64);
  x.k_coded = k.clone().requires_grad_();
  x.v_coded = v.clone().requires_grad_();
  x.k_exact = k.clone().requires_grad_();
  x.v_exact = v.clone().requires_grad_();
  x.coded = coded_mask(c.n, c.tiers);
  x.seen = seen_mask(c.n, c.sliding);
  const at::Tensor d_o = at::randn({c.n, draws, c.heads * c.d}, f64);
  const at::Tensor o = dense_attention(x, scale);

  const AttentionShape shape{scale, c.sliding, 7};
  const AttentionGradients g = attention_backward(x.q.detach().to(at::kFloat), k.to(at::kFloat), v.to(at::kFloat), d_o.to(at::kFloat), shape,
                                                  {c.tiers, {0, 0, 1, 0}}, {c.tiers});
  for (std::int64_t r = 0; r < draws; ++r) {
    const auto want = torch::autograd::grad({o}, {x.q, x.k_coded, x.v_coded, x.k_exact, x.v_exact}, {d_o.select(1, r).contiguous()}, true, false, true);
    const auto or_zero = [&](const at::Tensor& w, const at::Tensor& like) { return w.defined() ? w : at::zeros_like(like); };
    EXPECT_LT(relative(g.d_q.select(1, r), want[0]), kTolerance);
    EXPECT_LT(relative(g.d_k.select(1, r), or_zero(want[1], k) + or_zero(want[3], k)), kTolerance);
    EXPECT_LT(relative(g.d_v.select(1, r), or_zero(want[2], v) + or_zero(want[4], v)), kTolerance);
    EXPECT_LT(relative(g.exact_k[0].select(1, r), or_zero(want[3], k)), kTolerance);
    EXPECT_LT(relative(g.exact_v[0].select(1, r), or_zero(want[4], v)), kTolerance);
    EXPECT_LT(relative(coded_gradient(g.d_k, g.exact_k[0], c.tiers).select(1, r), or_zero(want[1], k)), kTolerance);
    EXPECT_LT(relative(coded_gradient(g.d_v, g.exact_v[0], c.tiers).select(1, r), or_zero(want[2], v)), kTolerance);
    EXPECT_EQ(g.exact_k[1].abs().max().item<float>(), 0.0f);  // S = W = 0, E = 1: the plain gradient is all coded
  }
}

TEST_P(Windows, MixedForwardMatchesEntryByEntry) {
  const Case c = GetParam();
  at::manual_seed(5);
  const auto f64 = at::TensorOptions(at::kDouble);
  const double scale = 1 / std::sqrt(static_cast<double>(c.d));
  Dense x;
  x.q = at::randn({c.n, c.heads, c.d}, f64);
  x.k_exact = at::randn({c.n, c.kv, c.d}, f64);
  x.v_exact = at::randn({c.n, c.kv, c.d}, f64);
  x.k_coded = x.k_exact + 0.5 * at::randn({c.n, c.kv, c.d}, f64);
  x.v_coded = x.v_exact + 0.5 * at::randn({c.n, c.kv, c.d}, f64);
  x.coded = coded_mask(c.n, c.tiers);
  x.seen = seen_mask(c.n, c.sliding);
  const at::Tensor want = dense_attention(x, scale);
  at::Tensor k = x.k_coded.clone(), v = x.v_coded.clone();
  const std::int64_t sinks = std::min(c.n, c.tiers.n_sinks);
  k.slice(0, 0, sinks).copy_(x.k_exact.slice(0, 0, sinks));
  v.slice(0, 0, sinks).copy_(x.v_exact.slice(0, 0, sinks));
  const auto f = [](const at::Tensor& t) { return t.to(at::kFloat); };
  for (const std::int64_t tile : {5, 64}) {
    const at::Tensor got = mixed_attention(f(x.q), {f(k), f(v), f(x.k_exact), f(x.v_exact), c.tiers}, {scale, c.sliding, tile});
    EXPECT_LT(relative(got, want), kTolerance) << tile;
  }
}

TEST_P(Windows, AttentionLossMatchesDenseRows) {
  const Case c = GetParam();
  at::manual_seed(7);
  const auto f64 = at::TensorOptions(at::kDouble);
  LayerGeometry layer;
  layer.n_q_heads = static_cast<int>(c.heads), layer.n_kv_heads = static_cast<int>(c.kv), layer.head_dim = static_cast<int>(c.d), layer.sliding_window = c.sliding;
  layer.softmax_scale = 1 / std::sqrt(static_cast<double>(c.d));
  const at::Tensor k = at::randn({c.n, c.kv, c.d}, f64), v = at::randn({c.n, c.kv, c.d}, f64);
  Dense x;
  x.q = at::randn({c.n, c.heads, c.d}, f64);
  x.k_exact = k + 0.1 * at::randn({c.n, c.kv, c.d}, f64), x.v_exact = v + 0.1 * at::randn({c.n, c.kv, c.d}, f64);
  x.k_coded = k + 0.5 * at::randn({c.n, c.kv, c.d}, f64), x.v_coded = v + 0.5 * at::randn({c.n, c.kv, c.d}, f64);
  x.coded = coded_mask(c.n, c.tiers);
  x.seen = seen_mask(c.n, c.sliding);
  // Every second row, the first of them standing for three.
  SampledPositions sampled;
  for (std::int64_t t = c.tiers.n_sinks; t < c.n; t += 2) sampled.rows.push_back(t), sampled.weight.push_back(sampled.rows.size() == 1 ? 3.0 : 1.0);
  const AttentionLoss loss = attention_loss(x.q, k, v, {x.k_coded, x.v_coded, x.k_exact, x.v_exact, c.tiers}, layer, sampled);

  Dense exact = x;
  exact.k_coded = exact.k_exact = k, exact.v_coded = exact.v_exact = v;
  const at::Tensor o = dense_attention(exact, layer.softmax_scale), o_hat = dense_attention(x, layer.softmax_scale);
  double error = 0, norm = 0, kl = 0, mass = 0, weight = 0;
  for (std::size_t i = 0; i < sampled.rows.size(); ++i) {
    const std::int64_t t = sampled.rows[i];
    error += sampled.weight[i] * (o[t] - o_hat[t]).square().sum().item<double>(), norm += sampled.weight[i] * o[t].square().sum().item<double>();
    for (std::int64_t h = 0; h < c.heads; ++h) {
      const std::int64_t kv = h / (c.heads / c.kv);
      std::vector<double> s, s_hat;
      for (std::int64_t j = 0; j <= t; ++j) {
        if (!x.seen[t][j].item<bool>()) continue;
        const auto score = [&](const at::Tensor& keys) { return layer.softmax_scale * at::dot(x.q[t][h], keys[j][kv]).item<double>(); };
        s.push_back(score(k)), s_hat.push_back(x.coded[t][j].item<bool>() ? score(x.k_coded) : score(x.k_exact));
      }
      double sum = 0, sum_hat = 0, divergence = 0;
      for (std::size_t j = 0; j < s.size(); ++j) sum += std::exp(s[j]), sum_hat += std::exp(s_hat[j]);
      for (std::size_t j = 0; j < s.size(); ++j) divergence += std::exp(s[j]) / sum * (s[j] - std::log(sum) - s_hat[j] + std::log(sum_hat));
      kl += sampled.weight[i] * divergence, mass += sampled.weight[i] * std::pow(std::log(sum) - std::log(sum_hat), 2), weight += sampled.weight[i];
    }
  }
  EXPECT_EQ(loss.match.n_rows, weight);
  if (weight == 0) return;  // nothing but sinks
  EXPECT_NEAR(loss.match.e_out(), error / norm, 1e-10 * (error / norm) + 1e-15);
  EXPECT_NEAR(loss.mean_kl(), kl / weight, 1e-9 * (kl / weight) + 1e-12);
  EXPECT_NEAR(loss.match.e_mass(), mass / weight, 1e-9 * (mass / weight) + 1e-15);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Windows,
                         testing::Values(Case{23, 4, 2, 8, 0, {2, 5, 1, 0}}, Case{40, 6, 2, 8, 0, {4, 3, 8, 0}},
                                         Case{33, 3, 3, 16, 0, {0, 0, 1, 0}}, Case{33, 3, 3, 16, 0, {0, 0, 4, 0}},
                                         Case{40, 4, 1, 8, 9, {4, 3, 4, 0}}, Case{40, 2, 1, 8, 6, {1, 16, 1, 0}},
                                         Case{12, 2, 2, 8, 0, {4, 128, 32, 0}}, Case{3, 2, 1, 8, 0, {4, 2, 1, 0}}));

TEST(TiledAttention, EqualsDense) {
  at::manual_seed(9);
  const auto f64 = at::TensorOptions(at::kDouble);
  Dense x;
  x.q = at::randn({50, 4, 8}, f64);
  x.k_coded = x.k_exact = at::randn({50, 2, 8}, f64);
  x.v_coded = x.v_exact = at::randn({50, 2, 8}, f64);
  x.coded = at::ones({50, 50}, at::kBool);
  x.seen = seen_mask(50, 0);
  const auto f = [](const at::Tensor& t) { return t.to(at::kFloat); };
  EXPECT_LT(relative(tiled_attention(f(x.q), f(x.k_coded), f(x.v_coded), {0.3, 0, 16}), dense_attention(x, 0.3)), kTolerance);
}

}  // namespace
}  // namespace calib::sens

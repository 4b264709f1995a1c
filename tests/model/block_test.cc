#include <cmath>
#include <tuple>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "libcalib/base/rng.h"
#include "libcalib/model/torch_block.h"

namespace calib::model {
namespace {

at::Tensor random(std::vector<std::int64_t> shape, std::uint64_t stream, double scale = 1.0) {
  at::Tensor x = at::empty(shape, at::kFloat);
  Rng rng = Rng::for_item(11, stream);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data_ptr<float>()[i] = static_cast<float>(scale * rng.normal());
  return x;
}

LayerGeometry geometry(int q, int kv, int d, std::int64_t window = 0, int rotary = -1) {
  LayerGeometry g;
  g.n_q_heads = q, g.n_kv_heads = kv, g.head_dim = d, g.rotary_dim = rotary < 0 ? d : rotary;
  g.softmax_scale = 1 / std::sqrt(d);
  g.sliding_window = window;
  for (int i = 0; i < g.rotary_dim / 2; ++i) g.inv_freq.push_back(std::pow(10000.0, -2.0 * i / g.rotary_dim));
  return g;
}

constexpr std::int64_t kHidden = 48, kWide = 64;

BlockWeights weights(const LayerGeometry& g) {
  const std::int64_t q = g.n_q_heads * g.head_dim, kv = g.n_kv_heads * g.head_dim;
  const double s = 1 / std::sqrt(kHidden);
  BlockWeights w;
  w.attention_norm = at::ones({kHidden}), w.mlp_norm = at::ones({kHidden});
  w.q = random({q, kHidden}, 1, s), w.k = random({kv, kHidden}, 2, s), w.v = random({kv, kHidden}, 3, s);
  w.o = random({kHidden, q}, 4, 1 / std::sqrt(q));
  w.gate = random({kWide, kHidden}, 5, s), w.up = random({kWide, kHidden}, 6, s), w.down = random({kHidden, kWide}, 7, 0.125);
  return w;
}
std::unique_ptr<Block> block(const LayerGeometry& g, BlockWeights w) {
  return make_block(g, std::move(w), std::make_shared<RopeCache>(g.inv_freq), 1e-6);
}
at::Tensor attention(const Block& b, const at::Tensor& x) {
  const Projected p = b.project(x);
  return b.attend(b.rotate(p.q_pre), b.rotate(p.k_pre), p.v);
}

TEST(Block, OneKvHeadReachesItsGroupOnly) {  // AR-14
  const c10::InferenceMode inference;
  for (const auto& [q, kv] : {std::pair{8, 4}, std::pair{4, 4}, std::pair{28, 4}, std::pair{6, 1}}) {
    const LayerGeometry g = geometry(q, kv, 8);
    const at::Tensor x = random({40, kHidden}, 8);
    BlockWeights w = weights(g);
    const at::Tensor whole = attention(*block(g, w), x).view({40, q, 8});
    const int changed = kv > 2 ? 2 : 0;
    w.k = w.k.clone(), w.v = w.v.clone();
    w.k.slice(0, changed * 8, changed * 8 + 8).zero_();
    w.v.slice(0, changed * 8, changed * 8 + 8).zero_();
    const at::Tensor part = attention(*block(g, w), x).view({40, q, 8});
    for (int h = 0; h < q; ++h)
      EXPECT_EQ(at::equal(whole.select(1, h), part.select(1, h)), h / (q / kv) != changed) << q << "/" << kv << " head " << h;
  }
}

/// Softmax attention written out in double, one row at a time.
at::Tensor plain_attention(const LayerGeometry& g, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const std::int64_t n = q.size(0), group = g.n_q_heads / g.n_kv_heads;
  at::Tensor o = at::zeros({n, g.n_q_heads, g.head_dim}, at::kDouble);
  for (std::int64_t h = 0; h < g.n_q_heads; ++h)
    for (std::int64_t t = 0; t < n; ++t) {
      const std::int64_t first = g.sliding_window ? std::max<std::int64_t>(0, t - g.sliding_window + 1) : 0;
      const at::Tensor keys = k.select(1, h / group).slice(0, first, t + 1).to(at::kDouble);
      const at::Tensor p = at::softmax(at::mv(keys, q.select(0, t).select(0, h).to(at::kDouble)) * g.softmax_scale, 0);
      o.select(0, t).select(0, h).copy_(at::mv(v.select(1, h / group).slice(0, first, t + 1).to(at::kDouble).t(), p));
    }
  return o.view({n, -1});
}

TEST(Block, AttentionIsCausalWithinTheWindow) {  // the own key counts: window w sees t - w + 1 ... t
  const c10::InferenceMode inference;
  for (const std::int64_t window : {0, 1, 8, 600}) {
    const LayerGeometry g = geometry(4, 2, 8, window);
    const auto b = block(g, weights(g));
    const std::int64_t n = window == 600 ? 1100 : 70;  // longer than the tile of rows
    const at::Tensor q = random({n, 4, 8}, 21), k = random({n, 2, 8}, 22), v = random({n, 2, 8}, 23);
    const double error = at::max(at::abs(b->attend(q, k, v).to(at::kDouble) - plain_attention(g, q, k, v))).item<double>();
    EXPECT_LT(error, 2e-6 * 4) << "window " << window;
    if (window != 8) continue;
    const at::Tensor before = b->attend(q, k, v).select(0, 60);
    at::Tensor far = k.clone(), near = k.clone();
    far.select(0, 52).add_(10), near.select(0, 53).add_(10);
    EXPECT_TRUE(at::equal(b->attend(q, far, v).select(0, 60), before));
    EXPECT_FALSE(at::equal(b->attend(q, near, v).select(0, 60), before));
  }
}

TEST(Block, RotationIsAnIsometryAndUnrotateItsInverse) {
  const c10::InferenceMode inference;
  for (const int rotary : {16, 4}) {
    const LayerGeometry g = geometry(4, 2, 16, 0, rotary);
    const auto b = block(g, weights(g));
    const at::Tensor x = random({2400, 2, 16}, 31);
    const at::Tensor turned = b->rotate(x);
    EXPECT_LT(at::max(at::abs(b->unrotate(turned) - x)).item<double>(), 2e-6);
    EXPECT_TRUE(at::equal(turned.select(0, 0), x.select(0, 0)));
    EXPECT_TRUE(at::equal(turned.slice(2, rotary), x.slice(2, rotary)));
    EXPECT_TRUE(at::equal(b->rotate_from(2355, x.slice(0, 2355)), turned.slice(0, 2355)));
    const double angle = 2355.0 * g.inv_freq[1];
    const float* a = x.select(0, 2355).data_ptr<float>();
    const double expected = a[1] * std::cos(angle) - a[1 + rotary / 2] * std::sin(angle);
    EXPECT_NEAR(turned.select(0, 2355).data_ptr<float>()[1], expected, 1e-6);
  }
}

TEST(Block, PathsWithAndWithoutGradientsAgree) {
  const LayerGeometry g = geometry(4, 2, 8);
  const auto b = block(g, weights(g));
  const at::Tensor x = random({20, kHidden}, 41), o = random({20, 32}, 42);
  at::Tensor in_place;
  {
    const c10::InferenceMode inference;
    in_place = b->finish(x, o).clone();
  }
  const at::Tensor kept = b->finish(x, o);
  EXPECT_LT(at::max(at::abs(kept - in_place)).item<double>(), 1e-6);
}

BlockWeights gemma_weights(const LayerGeometry& g) {
  BlockWeights w = weights(g);
  w.q_norm = random({g.head_dim}, 71, 0.3) + 1, w.k_norm = random({g.head_dim}, 72, 0.3) + 1;
  w.post_attention_norm = random({kHidden}, 73, 0.3) + 1, w.post_mlp_norm = random({kHidden}, 74, 0.3) + 1;
  w.activation = Activation::kGeluTanh;
  return w;
}

TEST(Block, NormsBehindAttentionAndMlp) {
  const LayerGeometry g = geometry(4, 2, 8);
  const BlockWeights w = gemma_weights(g);
  const at::Tensor x = random({20, kHidden}, 41), o = random({20, 32}, 42);
  const auto norm = [](const at::Tensor& y, const at::Tensor& weight) { return y * at::rsqrt((y * y).mean(-1, true) + 1e-6) * weight; };
  const at::Tensor h = x + norm(at::matmul(o, w.o.t()), w.post_attention_norm), n = norm(h, w.mlp_norm);
  const at::Tensor gate = at::matmul(n, w.gate.t());
  const at::Tensor gelu = 0.5 * gate * (1 + at::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
  const at::Tensor expected = h + norm(at::matmul(gelu * at::matmul(n, w.up.t()), w.down.t()), w.post_mlp_norm);
  const auto b = block(g, w);
  EXPECT_LT(at::max(at::abs(b->finish(x, o) - expected)).item<double>(), 2e-5);
  const c10::InferenceMode inference;
  EXPECT_LT(at::max(at::abs(b->finish(x, o) - expected)).item<double>(), 2e-5) << "in place";
  // Errors of the output are weighed as the norm behind it does.
  EXPECT_TRUE(at::equal(b->output_projection(), w.o * w.post_attention_norm.unsqueeze(1)));
}

TEST(Block, RingOfAWindowSeesWhatTheWholeDoes) {  // AR-17: 27 tokens, 3 wraps
  const c10::InferenceMode inference;
  const LayerGeometry g = geometry(4, 2, 8, 8);
  const at::Tensor q = random({27, 4, 8}, 81), k = random({27, 2, 8}, 82), v = random({27, 2, 8}, 83);
  const at::Tensor whole = block(g, weights(g))->attend(q, k, v).view({27, 4, 8});
  at::Tensor ring_k = at::zeros({8, 2, 8}), ring_v = at::zeros({8, 2, 8});
  for (std::int64_t t = 0; t < 27; ++t) {
    ring_k.select(0, t % 8).copy_(k.select(0, t)), ring_v.select(0, t % 8).copy_(v.select(0, t));
    const std::int64_t held = std::min<std::int64_t>(t + 1, 8);
    for (std::int64_t h = 0; h < 4; ++h) {
      const at::Tensor p = at::softmax(at::mv(ring_k.slice(0, 0, held).select(1, h / 2), q.select(0, t).select(0, h)) * g.softmax_scale, 0);
      const at::Tensor o = at::mv(ring_v.slice(0, 0, held).select(1, h / 2).t(), p);
      EXPECT_LT(at::max(at::abs(whole.select(0, t).select(0, h) - o)).item<double>(), 1e-6) << t;
    }
  }
}

TEST(Linear, EqualsTheProductAndItsGradient) {
  for (const auto& [n, in, out] : {std::tuple{1, 8, 3}, std::tuple{40, 48, 64}, std::tuple{257, 64, 260}}) {
    const at::Tensor w = random({out, in}, 61), bias = random({out}, 62), g = random({n, out}, 63);
    at::Tensor x = random({n + 1, in}, 64).slice(0, 1);  // a view that starts inside its storage
    const at::Tensor expected = at::matmul(x.to(at::kDouble), w.t().to(at::kDouble)) + bias.to(at::kDouble);
    // fp32 dot product of `in` terms near 1: in * 2^-24 * a few standard deviations.
    const double tolerance = 8.0 * in * 0x1p-24;
    EXPECT_LT(at::max(at::abs(linear_map(x, w, bias).to(at::kDouble) - expected)).item<double>(), tolerance * 4);
    x.set_requires_grad(true);
    const at::Tensor y = linear_map(x, w, bias);
    ASSERT_TRUE(y.requires_grad());
    const at::Tensor dx = torch::autograd::grad({(y * g).sum()}, {x})[0];
    EXPECT_LT(at::max(at::abs(dx.to(at::kDouble) - at::matmul(g.to(at::kDouble), w.to(at::kDouble)))).item<double>(), 8.0 * out * 0x1p-24 * 4);
  }
}

void expect_gradients_match(const LayerGeometry& g, const BlockWeights& w) {
  const auto b = block(g, w);
  const at::Tensor direction = random({20, kHidden}, 52);
  const auto loss = [&](const at::Tensor& x) {
    return (b->finish(x, attention(*b, x)) * direction).sum();
  };
  at::Tensor x = random({20, kHidden}, 51);
  x.set_requires_grad(true);
  const at::Tensor gradient = torch::autograd::grad({loss(x)}, {x})[0];
  const at::Tensor step = random({20, kHidden}, 53);
  const double h = 1e-2;
  const at::NoGradGuard no_grad;
  const double difference = (loss(x + h * step).item<double>() - loss(x - h * step).item<double>()) / (2 * h);
  const double derivative = (gradient * step).sum().item<double>();
  // fp32 sums of ~1000 terms: 1e-4 each side over 2h, plus the third-order term.
  EXPECT_NEAR(derivative, difference, 2e-2 * std::max(1.0, std::fabs(difference)));
}

TEST(Block, GradientsMatchFiniteDifferences) {
  const LayerGeometry g = geometry(4, 2, 8, 6);
  expect_gradients_match(g, weights(g));
  expect_gradients_match(g, gemma_weights(g));
}

}  // namespace
}  // namespace calib::model

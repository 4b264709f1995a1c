#include "libcalib/sens/fisher_walk.h"

#include <algorithm>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "libcalib/base/rng.h"
#include "libcalib/model/streaming_runner.h"

namespace calib::sens {
namespace {


// First index whose cumulative probability exceeds u.
std::int64_t sample_index(const float* p, std::int64_t n, double u) {
  double total = 0;
  for (std::int64_t i = 0; i < n; ++i) total += static_cast<double>(p[i]);
  double cumulative = 0;
  std::int64_t last_possible = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (p[i] <= 0) continue;
    cumulative += static_cast<double>(p[i]);
    last_possible = i;
    if (cumulative > u * total) return i;
  }
  return last_possible;
}

at::Tensor leaf(const at::Tensor& x) { return x.detach().requires_grad_(true); }

}  // namespace

LabelGradients sampled_label_gradients(const model::Head& head, const at::Tensor& hidden, std::int64_t n_sinks, int n_draws,
                                       std::uint64_t seed, std::uint64_t document, ThreadPool& pool) {
  const std::int64_t n_tokens = hidden.size(0), vocab = head.vocab_size(), tile = model::logit_tile_rows(vocab);
  LabelGradients out;
  std::vector<std::vector<double>> uniforms(static_cast<std::size_t>(n_draws));
  for (int r = 0; r < n_draws; ++r) {
    out.d_hidden.push_back(at::zeros_like(hidden));
    out.labels.emplace_back(static_cast<std::size_t>(n_tokens), -1);
    Rng rng = Rng::for_item(seed, document, static_cast<std::uint64_t>(r));
    for (std::int64_t t = 0; t < n_tokens; ++t) uniforms[static_cast<std::size_t>(r)].push_back(rng.uniform());
  }
  for (std::int64_t t0 = std::min(n_sinks, n_tokens); t0 < n_tokens; t0 += tile) {
    const std::int64_t t1 = std::min(n_tokens, t0 + tile);
    const at::Tensor rows = leaf(hidden.slice(0, t0, t1));
    at::Tensor logits, p;
    {
      const c10::AutoGradMode grad(true);
      logits = head.logits(rows);
    }
    p = at::softmax(logits.detach(), -1);
    const at::Tensor p_cpu = p.to(at::kCPU).contiguous();
    const float* p_data = p_cpu.data_ptr<float>();
    for (int r = 0; r < n_draws; ++r) {
      std::vector<std::int64_t> labels(static_cast<std::size_t>(t1 - t0));
      pool.parallel_for(t1 - t0, [&](std::int64_t i) {
        labels[static_cast<std::size_t>(i)] = sample_index(p_data + i * vocab, vocab, uniforms[static_cast<std::size_t>(r)][static_cast<std::size_t>(t0 + i)]);
      });
      // d NLL / d logits = softmax - onehot(label).
      at::Tensor d_logits = r + 1 < n_draws ? p.clone() : p;
      const at::Tensor index = at::tensor(labels, at::kLong).to(p.device()).unsqueeze(1);
      d_logits.scatter_add_(1, index, at::full_like(index, -1, p.options()));
      const auto d_rows = torch::autograd::grad({logits}, {rows}, {d_logits}, r + 1 < n_draws);
      out.d_hidden[static_cast<std::size_t>(r)].slice(0, t0, t1).copy_(d_rows[0]);
      std::copy(labels.begin(), labels.end(), out.labels[static_cast<std::size_t>(r)].begin() + t0);
    }
  }
  return out;
}

BlockGraph::BlockGraph(const model::Block& block, const at::Tensor& x) : block_(block), x_(leaf(x)), x_residual_(leaf(x)) {
  const c10::AutoGradMode grad(true);
  const model::Projected p = block.project(x_);
  q_ = block.rotate(p.q_pre);
  k_ = block.rotate(p.k_pre);
  v_ = p.v;
  attention_ = {q_.detach().to(at::kFloat), p.k_pre.detach().to(at::kFloat), k_.detach().to(at::kFloat), v_.detach().to(at::kFloat)};
  {
    const c10::NoGradGuard no_grad;
    o_ = block.attend(q_.detach(), k_.detach(), v_.detach());
  }
  o_ = leaf(o_);
  y_ = block.finish(x_residual_, o_);
}

AttentionGradients BlockGraph::backward(std::vector<at::Tensor>& d_y, const std::vector<kvrt::Tiers>& k_classes,
                                        const std::vector<kvrt::Tiers>& v_classes) {
  const std::size_t draws = d_y.size();
  std::vector<at::Tensor> d_o(draws);
  for (std::size_t r = 0; r < draws; ++r) {
    const auto d = torch::autograd::grad({y_}, {x_residual_, o_}, {d_y[r].to(y_.scalar_type())}, r + 1 < draws);
    d_y[r] = d[0];
    d_o[r] = d[1].to(at::kFloat);
  }
  const AttentionShape shape{block_.geometry().softmax_scale, block_.geometry().sliding_window};
  AttentionGradients g = attention_backward(attention_.q_post, attention_.k_post, attention_.v, at::stack(d_o, 1), shape, k_classes, v_classes);
  for (std::size_t r = 0; r < draws; ++r) {
    const auto index = static_cast<std::int64_t>(r);
    const auto like = [&](const at::Tensor& d, const at::Tensor& x) { return d.select(1, index).contiguous().to(x.scalar_type()); };
    const auto d = torch::autograd::grad({q_, k_, v_}, {x_}, {like(g.d_q, q_), like(g.d_k, k_), like(g.d_v, v_)}, r + 1 < draws);
    d_y[r] = d_y[r] + d[0];
  }
  return g;
}

}  // namespace calib::sens

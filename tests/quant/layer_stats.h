#pragma once
// Layer statistics of seeded tensors for the tests of quant.

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "libcalib/base/rng.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::quant_test {

inline LayerGeometry geometry(int kv_heads = 2, int head_dim = 64) {
  LayerGeometry g;
  g.index = 3;
  g.n_q_heads = 2 * kv_heads;
  g.n_kv_heads = kv_heads;
  g.head_dim = g.rotary_dim = head_dim;
  g.softmax_scale = 1.0 / 8.0;
  for (int p = 0; p < head_dim / 2; ++p) g.inv_freq.push_back(std::pow(10000.0, -2.0 * p / head_dim));
  return g;
}

/// Value of (token, head, channel).
using Fill = std::function<float(std::int64_t, int, int)>;

inline std::vector<float> fill(std::int64_t n_tokens, int heads, int head_dim, const Fill& value) {
  std::vector<float> x;
  for (std::int64_t t = 0; t < n_tokens; ++t)
    for (int h = 0; h < heads; ++h)
      for (int c = 0; c < head_dim; ++c) x.push_back(value(t, h, c));
  return x;
}

/// Statistics of one document; queries are standard normal.
inline stats::LayerStats layer_stats(const LayerGeometry& g, std::int64_t n_sinks, std::int64_t n_tokens, const Fill& k_pre, const Fill& k_post, const Fill& v) {
  Rng rng(1);
  ThreadPool pool(1);
  const std::vector<float> a = fill(n_tokens, g.n_kv_heads, g.head_dim, k_pre), b = fill(n_tokens, g.n_kv_heads, g.head_dim, k_post),
                           c = fill(n_tokens, g.n_kv_heads, g.head_dim, v),
                           q = fill(n_tokens, g.n_q_heads, g.head_dim, [&](std::int64_t, int, int) { return static_cast<float>(rng.normal()); });
  stats::LayerStats layer(g, n_sinks);
  stats::DocumentTensors document;
  document.n_tokens = n_tokens;
  document.k_pre = a.data();
  document.k_post = b.data();
  document.v = c.data();
  document.q_pre = document.q_post = q.data();
  layer.add_document(document, pool);
  return layer;
}

}  // namespace calib::quant_test

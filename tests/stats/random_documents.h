#pragma once
// A small layer and documents of normal keys, values and queries for it.

#include <cstdint>
#include <vector>

#include "libcalib/base/thread_pool.h"
#include "libcalib/stats/kv_stats.h"
#include "tests/stats/random_floats.h"

namespace calib::test {

inline constexpr int kKv = 2, kQ = 4, kDim = 16;  ///< KV heads, query heads, head_dim

inline LayerGeometry geometry() {
  LayerGeometry g;
  g.index = 3, g.n_q_heads = kQ, g.n_kv_heads = kKv, g.head_dim = kDim, g.rotary_dim = kDim;
  return g;
}

struct Document {
  std::int64_t n = 0;
  std::vector<float> k_pre, k_post, v, q_pre, q_post;
  stats::DocumentTensors view() const { return {n, k_pre.data(), k_post.data(), v.data(), q_pre.data(), q_post.data()}; }
};
inline Document make_document(std::int64_t n, std::uint64_t seed) {
  const auto make = [&](int heads, std::uint64_t s) { return normal_floats(static_cast<std::size_t>(n * heads * kDim), 10 * seed + s); };
  return {n, make(kKv, 1), make(kKv, 2), make(kKv, 3), make(kQ, 4), make(kQ, 5)};
}

inline stats::LayerStats stats_of(const std::vector<Document>& documents, std::int64_t n_sinks = 4, int n_threads = 1) {
  ThreadPool pool(n_threads);
  stats::LayerStats out(geometry(), n_sinks);
  for (const Document& d : documents) out.add_document(d.view(), pool);
  return out;
}

}  // namespace calib::test

#pragma once
// One layer of a plan and the cache of one sequence, for the benchmarks: random keys and values go in through kvrt_append.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kvrt.hpp"

namespace kvrt::bench {

struct LayerShape {
  std::string k, v;
  int n_heads = 8, group = 4, head_dim = 128, n_threads = 1;  ///< KV heads, query heads of each
  std::int64_t window = 0, max_length = 0;
};

/// n values between -3 and 3, sums of three uniform ones.
inline std::vector<float> random_rows(std::size_t n, std::uint32_t seed) {
  std::vector<float> x(n);
  for (float& v : x) {
    for (int i = 0; i < 3; ++i) v += static_cast<float>(static_cast<std::int32_t>(seed = seed * 1664525u + 1013904223u)) * 0x1p-31f;
  }
  return x;
}

class LayerCache {
 public:
  explicit LayerCache(const LayerShape& shape) : shape_(shape) {
    std::vector<double> inv_freq;
    for (int i = 0; i < shape.head_dim / 2; ++i) inv_freq.push_back(std::pow(10000.0, -2.0 * i / shape.head_dim));
    kvrt_layer_view layer = {};
    layer.n_kv_heads = shape.n_heads, layer.n_q_heads = shape.n_heads * shape.group, layer.head_dim = layer.rotary_dim = shape.head_dim;
    layer.rope_style = KVRT_ROPE_HALF_SPLIT, layer.attention_factor = 1, layer.inv_freq = inv_freq.data();
    layer.softmax_scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
    layer.window_tokens = shape.window;
    layer.k.scheme = shape.k.c_str(), layer.v.scheme = shape.v.c_str();
    kvrt_plan_view view = {};
    view.n_layers = 1, view.layers = &layer, view.page_tokens = 64;
    require(PlanHandle::adopt(view, &plan_));
    kvrt_limits limits = {};
    limits.max_batch = 1, limits.max_length = shape.max_length, limits.n_workers = shape.n_threads;
    limits.parallel_for = [](void* user, std::int64_t n, void (*body)(void*, std::int64_t, std::int32_t), void* arg) {
      const int n_threads = static_cast<LayerCache*>(user)->shape_.n_threads;
#pragma omp parallel num_threads(n_threads)
      {
        const std::int32_t worker = omp_get_thread_num();
#pragma omp for schedule(dynamic)
        for (std::int64_t i = 0; i < n; ++i) body(arg, i, worker);
      }
    };
    limits.parallel_user = this;
    require(ContextHandle::create(plan_, limits, &context_));
    std::int64_t n[KVRT_SEGMENTS];
    require(checked([&](kvrt_error* e) { return kvrt_pages_needed(context_.get(), 0, shape.max_length, n, e); }));
    require(PoolMemory::allocate(context_, 0, n[KVRT_SINK] + n[KVRT_WINDOW] + 1, n[KVRT_BASE] + 1, &memory_));
    pages_.resize(static_cast<std::size_t>(std::max(n[KVRT_SINK] + n[KVRT_WINDOW], n[KVRT_BASE]) + 1));
    std::iota(pages_.begin(), pages_.end(), 0);
    for (int i = 0; i < KVRT_SALIENT; ++i) offsets_[i][0] = i == KVRT_WINDOW ? n[KVRT_SINK] : 0, offsets_[i][1] = offsets_[i][0] + n[i];
    workspace_.resize(static_cast<std::size_t>(kvrt_workspace_bytes(context_.get())));
  }
  LayerCache(const LayerCache&) = delete;

  std::int64_t row() const { return std::int64_t{shape_.n_heads} * shape_.head_dim; }
  std::string description() const { return kvrt_describe(context_.get(), 0); }

  /// k, v: [n, H, D] before RoPE.
  void append(std::int64_t n, const float* k, const float* v) {
    kvrt_qkv qkv = {};
    qkv.k.data = k, qkv.v.data = v, qkv.k_frame = KVRT_PRE_ROPE;
    const kvrt_workspace w = workspace();
    require(checked([&](kvrt_error* e) { return kvrt_append(context_.get(), 0, &batch(n), &qkv, &memory_.pools(), &w, nullptr, e); }));
    length_ += n;
  }
  void restart() { length_ = 0; }
  /// Tokens of random data.
  void fill(std::int64_t n) {
    constexpr std::int64_t kPiece = 2048;
    for (std::int64_t t = 0; t < n; t += kPiece) {
      const std::int64_t m = std::min(kPiece, n - t);
      const auto seed = static_cast<std::uint32_t>(2 * t + 1);
      append(m, random_rows(static_cast<std::size_t>(m * row()), seed).data(), random_rows(static_cast<std::size_t>(m * row()), seed + 1).data());
    }
  }
  /// The last token's attention. q, out: [G H, D].
  void decode(const float* q, float* out) {
    kvrt_attn attn = {};
    attn.q.data = q, attn.out.data = out, attn.q_frame = KVRT_PRE_ROPE;
    const kvrt_workspace w = workspace();
    --length_;
    require(checked([&](kvrt_error* e) { return kvrt_decode(context_.get(), 0, &batch(1), &attn, &memory_.pools(), &w, nullptr, e); }));
    ++length_;
  }

 private:
  static void require(const Status& status) {
    if (!status.ok()) throw std::runtime_error(status.text());
  }

  kvrt_workspace workspace() { return {workspace_.data(), static_cast<std::int64_t>(workspace_.size())}; }
  const kvrt_batch& batch(std::int64_t n) {
    positions_.resize(static_cast<std::size_t>(n));
    std::iota(positions_.begin(), positions_.end(), length_);
    rows_[1] = n;
    batch_ = {};
    batch_.n_seqs = 1, batch_.seq_len = &length_, batch_.row_offsets = rows_, batch_.positions = positions_.data();
    for (int i = 0; i < KVRT_SALIENT; ++i) batch_.pages[i] = {pages_.data(), offsets_[i]};
    return batch_;
  }

  LayerShape shape_;
  PlanHandle plan_;
  ContextHandle context_;
  PoolMemory memory_;
  std::vector<std::int32_t> pages_;
  std::int64_t offsets_[KVRT_SALIENT][2] = {}, rows_[2] = {}, length_ = 0;
  std::vector<std::int64_t> positions_;
  std::vector<std::uint8_t> workspace_;
  kvrt_batch batch_ = {};
};

}  // namespace kvrt::bench

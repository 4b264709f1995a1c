#pragma once
// One layer of a plan from two scheme strings, with pools full of 0xFF and shuffled pages: append, decode and gather in one line each.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/context.h"
#include "kernels/core/plan_constants.h"
#include "kernels/core/scheme.h"
#include "kernels/kvrt.hpp"
#include "libcalib/base/rng.h"

namespace kvrt::testing {

/// Backend of contexts that name none: the bodies of the tests run on any.
#if defined(KVRT_TEST_BACKEND)
inline constexpr kvrt_backend kTestBackend = KVRT_TEST_BACKEND;
#else
inline constexpr kvrt_backend kTestBackend = KVRT_BACKEND_DEFAULT;
#endif
inline constexpr bool kOnCuda = kTestBackend == KVRT_BACKEND_CUDA;

/// Constants of a unit in the shape that its scheme asks for.
struct UnitConstants {
  std::string scheme, chan_perm = "natural", block_order;
  std::vector<float> mean, smooth, clip_lo, clip_hi, clip_alpha, codebook, ef_u, basis_mean, basis_in, basis;
  std::vector<std::int32_t> ef_order;

  UnitConstants(const std::string& text, int heads, int width, int rotary_dim) : scheme(text) {
    Scheme s;
    std::string error;
    EXPECT_TRUE(parse_scheme(text, &s, &error)) << error;
    calib::Rng rng(17);
    for (const PlanConstant& c : plan_constants(s, heads, width)) {
      const std::string name = c.name;
      const auto n = static_cast<std::size_t>(c.count());
      if (name == "mean") for (std::size_t i = 0; i < n; ++i) mean.push_back(static_cast<float>(0.5 * rng.normal()));
      if (name == "smooth")
        for (std::size_t i = 0; i < n; ++i) smooth.push_back(1.0f + 0.25f * static_cast<float>(pair_of(static_cast<int>(i) % width, rotary_dim) % 5));
      if (name == "clip_lo") clip_lo.assign(n, -2.5f);
      if (name == "clip_hi") clip_hi.assign(n, 3.0f);
      if (name == "clip_alpha") clip_alpha.assign(n, 0.85f);
      if (name == "codebook") for (std::size_t i = 0; i < n; ++i) codebook.push_back(static_cast<float>(static_cast<int>(i * 254 / (n - 1)) - 127) * (1.0f / 127));
      if (name == "basis_mean") basis_mean.assign(n, 0.25f);
      if (name == "basis_in") basis_in.assign(n, 0.125f);
      if (name == "basis") basis.assign(n, 0.125f);
      if (name == "ef_order") for (std::size_t i = 0; i < n; ++i) ef_order.push_back(width - 1 - static_cast<int>(i) % width);
      if (name == "ef_u") {
        for (int h = 0; h < heads; ++h) {
          for (int r = 0; r < width; ++r) for (int c2 = r; c2 < width; ++c2) ef_u.push_back(c2 == r ? 1.0f : 0.3f / static_cast<float>(c2 - r));
        }
      }
    }
  }
  kvrt_unit_view view() const {
    const auto p = [](const auto& v) { return v.empty() ? nullptr : v.data(); };
    kvrt_unit_view u = {};
    u.scheme = scheme.c_str(), u.chan_perm = chan_perm.c_str(), u.block_order = block_order.empty() ? nullptr : block_order.c_str();
    u.mean = p(mean), u.smooth = p(smooth), u.clip_lo = p(clip_lo), u.clip_hi = p(clip_hi), u.clip_alpha = p(clip_alpha), u.codebook = p(codebook),
    u.ef_u = p(ef_u), u.ef_order = p(ef_order);
    u.basis_mean = p(basis_mean), u.basis_in = p(basis_in), u.basis = p(basis);
    return u;
  }

 private:
  static int pair_of(int channel, int rotary_dim) { return channel < rotary_dim ? channel % std::max(1, rotary_dim / 2) : channel; }
};

struct CacheShape {
  std::string k = "int4.token.g", v = "int4.token.g";
  int heads = 2, group = 3, width = 64;
  std::int64_t sinks = 4, window = 32, max_length = 512;
  kvrt_rope_style rope = KVRT_ROPE_HALF_SPLIT;
  int rotary_dim = -1;          ///< -1: width
  double attention_factor = 1;
  std::string chan_perm = "natural", block_order;
  int n_seqs = 1, page_tokens = 64;
  int first_head = 0, n_heads = 0;  ///< of the context
  kvrt_backend backend = kTestBackend;
  bool storage_only = kOnCuda;      ///< formats that decode has no kernel for, too
};

class Cache {
 public:
  static constexpr int kLayer = 5;

  explicit Cache(const CacheShape& shape)
      : shape_(shape), rotary_(shape.rope == KVRT_ROPE_NONE ? 0 : shape.rotary_dim < 0 ? shape.width : shape.rotary_dim),
        k_(shape.k, shape.heads, shape.width, rotary_), v_(shape.v, shape.heads, shape.width, rotary_) {
    k_.chan_perm = shape.chan_perm, k_.block_order = shape.block_order;
    for (int i = 0; i < rotary_ / 2; ++i) inv_freq_.push_back(std::pow(10000.0, -2.0 * i / rotary_));
    const kvrt_layer_view layer = layer_view();
    kvrt_plan_view view = {};
    view.n_layers = 1, view.layers = &layer, view.page_tokens = shape.page_tokens;
    status_ = PlanHandle::adopt(view, &plan_);
    if (!status_.ok()) return;
    kvrt_limits limits = {};
    limits.max_batch = shape.n_seqs, limits.max_length = shape.max_length, limits.accept_two_pass = 1;
    limits.first_kv_head = shape.first_head, limits.n_kv_heads = shape.n_heads;
    const kvrt_device device = {shape.backend, 0};
    if (shape.storage_only) {
      storage_ = std::make_unique<kvrt_context>();
      status_ = Context::make(plan_.get()->plan, device, limits, &storage_->context, Needs::kStorage);
    } else {
      status_ = ContextHandle::create(plan_, limits, &context_, &device);
    }
    if (!status_.ok()) return;
    std::int64_t n[KVRT_SEGMENTS];
    status_ = checked([&](kvrt_error* e) { return kvrt_pages_needed(context(), kLayer, shape.max_length, n, e); });
    for (int i = 0; i < KVRT_SEGMENTS; ++i) per_seq_[i] = n[i];
    const std::int64_t exact = (n[KVRT_SINK] + n[KVRT_WINDOW]) * shape.n_seqs, base = n[KVRT_BASE] * shape.n_seqs;
    if (status_.ok()) status_ = PoolMemory::allocate(context(), kLayer, exact + 1, base + 1, &memory_);
    // Pages in no order, so that nothing works by accident of neighbourhood.
    calib::Rng rng(5);
    for (auto [ids, count] : {std::pair(&exact_ids_, exact), std::pair(&base_ids_, base)}) {
      ids->resize(static_cast<std::size_t>(count));
      std::iota(ids->begin(), ids->end(), 0);
      for (std::size_t i = ids->size(); i > 1; --i) std::swap((*ids)[i - 1], (*ids)[rng.below(i)]);
    }
    workspace_.assign(static_cast<std::size_t>(kvrt_workspace_bytes(context())), 0xFF);
    lengths_.assign(static_cast<std::size_t>(shape.n_seqs), 0);
  }

  const Status& status() const { return status_; }
  const kvrt_context* context() const { return storage_ ? storage_.get() : context_.get(); }
  const kvrt_plan* plan() const { return plan_.get(); }
  const kvrt_pools& pools() const { return memory_.pools(); }
  std::vector<std::uint8_t>& bytes(bool exact, kvrt_side side) { return memory_.bytes(exact, side); }
  kvrt_workspace workspace() { return {workspace_.data(), static_cast<std::int64_t>(workspace_.size())}; }
  std::int64_t length(int seq = 0) const { return lengths_[static_cast<std::size_t>(seq)]; }
  int heads() const { return shape_.n_heads ? shape_.n_heads : shape_.heads; }
  std::int64_t row() const { return std::int64_t{heads()} * shape_.width; }
  std::int64_t q_row() const { return row() * shape_.group; }
  const std::vector<double>& inv_freq() const { return inv_freq_; }

  /// The batch of one step; seqs not named get no row. Valid until the next call.
  const kvrt_batch& batch(const std::vector<std::int64_t>& n_new) {
    rows_.assign(1, 0), positions_.clear();
    for (std::size_t s = 0; s < n_new.size(); ++s) {
      for (std::int64_t t = 0; t < n_new[s]; ++t) positions_.push_back(lengths_[s] + t + first_position);
      rows_.push_back(static_cast<std::int64_t>(positions_.size()));
    }
    batch_ = {};
    batch_.n_seqs = static_cast<std::int32_t>(n_new.size());
    batch_.seq_len = lengths_.data(), batch_.row_offsets = rows_.data(), batch_.positions = positions_.data();
    const std::vector<std::int32_t>* lists[] = {&exact_ids_, &exact_ids_, &base_ids_};
    for (int i = 0; i < 3; ++i) {
      // Lists of all sequences lie one behind the other: sinks of all, then windows of all, in the exact ids.
      const std::int64_t from = i == KVRT_WINDOW ? per_seq_[KVRT_SINK] * shape_.n_seqs : 0;
      offsets_[i].clear();
      for (std::size_t s = 0; s <= n_new.size(); ++s) offsets_[i].push_back(from + per_seq_[i] * static_cast<std::int64_t>(s));
      batch_.pages[i] = {lists[i]->data(), offsets_[i].data()};
    }
    return batch_;
  }

  Status append(const std::vector<std::int64_t>& n_new, const float* k, const float* v, kvrt_frame frame = KVRT_PRE_ROPE) {
    kvrt_qkv qkv = {};
    qkv.k.data = k, qkv.v.data = v, qkv.k_frame = frame;
    const kvrt_workspace w = workspace();
    const Status status = checked([&](kvrt_error* e) { return kvrt_append(context(), kLayer, &batch(n_new), &qkv, &pools(), &w, nullptr, e); });
    for (std::size_t s = 0; s < n_new.size() && status.ok(); ++s) lengths_[s] += n_new[s];
    return status;
  }
  Status append(std::int64_t n, const float* k, const float* v) { return append(std::vector<std::int64_t>{n}, k, v); }

  kvrt_attn attn(const float* q, float* out) const {
    kvrt_attn a = {};
    a.q.data = q, a.out.data = out, a.q_frame = KVRT_PRE_ROPE;
    return a;
  }
  /// The last token's query, after its append: rewinds by one token for the batch of that step.
  Status decode(const kvrt_attn& a, int seq = 0) {
    std::vector<std::int64_t> n_new(lengths_.size(), 0);
    n_new[static_cast<std::size_t>(seq)] = 1;
    --lengths_[static_cast<std::size_t>(seq)];
    const kvrt_workspace w = workspace();
    const Status status = checked([&](kvrt_error* e) { return kvrt_decode(context(), kLayer, &batch(n_new), &a, &pools(), &w, nullptr, e); });
    ++lengths_[static_cast<std::size_t>(seq)];
    return status;
  }
  std::vector<float> gather(kvrt_side side, kvrt_frame frame, int seq = 0) {
    std::vector<float> out(static_cast<std::size_t>(length(seq) * row()), NAN);
    kvrt_gather_args args = {};
    args.seq = seq, args.side = side, args.frame = frame, args.n_tokens = length(seq), args.out.data = out.data();
    const kvrt_workspace w = workspace();
    const std::vector<std::int64_t> none(lengths_.size(), 0);
    const Status status = checked([&](kvrt_error* e) { return kvrt_gather(context(), kLayer, &batch(none), &args, &pools(), &w, nullptr, e); });
    EXPECT_TRUE(status.ok()) << status.text();
    return out;
  }
  Status verify(kvrt_verify_report* report, int seq = 0) {
    const kvrt_workspace w = workspace();
    const std::vector<std::int64_t> none(lengths_.size(), 0);
    return checked([&](kvrt_error* e) { return kvrt_page_verify(context(), kLayer, &batch(none), seq, &pools(), &w, report, nullptr, e); });
  }
  kvrt_health health(kvrt_side side) const {
    kvrt_health h = {};
    kvrt_monitor_read(context(), kLayer, side, &h, nullptr);
    return h;
  }
  void restart(int seq) { lengths_[static_cast<std::size_t>(seq)] = 0; }
  void set_lengths(std::vector<std::int64_t> lengths) { lengths_ = std::move(lengths); }

  kvrt_layer_view layer_view() const {
    kvrt_layer_view l = {};
    l.index = kLayer, l.n_q_heads = shape_.heads * shape_.group, l.n_kv_heads = shape_.heads, l.head_dim = shape_.width;
    l.rotary_dim = rotary_, l.rope_style = shape_.rope, l.attention_factor = shape_.attention_factor, l.inv_freq = inv_freq_.data();
    l.softmax_scale = 1.0 / std::sqrt(static_cast<double>(shape_.width));
    l.sink_tokens = shape_.sinks, l.window_tokens = shape_.window;
    l.k = k_.view(), l.v = v_.view();
    return l;
  }

  std::int64_t first_position = 0;

 private:
  CacheShape shape_;
  int rotary_;
  UnitConstants k_, v_;
  std::vector<double> inv_freq_;
  Status status_;
  PlanHandle plan_;
  ContextHandle context_;
  std::unique_ptr<kvrt_context> storage_;
  PoolMemory memory_;
  std::vector<std::int32_t> exact_ids_, base_ids_;
  std::vector<std::uint8_t> workspace_;
  std::vector<std::int64_t> lengths_, rows_, positions_, offsets_[3];
  std::int64_t per_seq_[KVRT_SEGMENTS] = {};
  kvrt_batch batch_ = {};
};

inline std::vector<float> normal_rows(std::uint64_t seed, std::int64_t n, double scale = 1, double offset = 0) {
  calib::Rng rng(seed);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = static_cast<float>(offset + scale * rng.normal());
  return x;
}

/// R_t in double, in place.
inline void rotate_row(const CacheShape& shape, const std::vector<double>& inv_freq, std::int64_t position, double* x) {
  const int pairs = static_cast<int>(inv_freq.size());
  for (int i = 0; i < pairs; ++i) {
    const double c = shape.attention_factor * std::cos(static_cast<double>(position) * inv_freq[static_cast<std::size_t>(i)]);
    const double s = shape.attention_factor * std::sin(static_cast<double>(position) * inv_freq[static_cast<std::size_t>(i)]);
    double& a = x[shape.rope == KVRT_ROPE_INTERLEAVED ? 2 * i : i];
    double& b = x[shape.rope == KVRT_ROPE_INTERLEAVED ? 2 * i + 1 : i + pairs];
    const double first = a * c - b * s, second = a * s + b * c;
    a = first, b = second;
  }
}

/// Dense softmax attention in double over gathered rows. keys, values: [T, H, D] after RoPE; q: [G H, D] after RoPE.
struct Dense {
  std::vector<double> out, lse;  ///< [G H, D], [G H]
};
inline Dense dense_attention(const std::vector<double>& q, const std::vector<double>& keys, const std::vector<float>& values, std::int64_t n_tokens, int heads,
                             int group, int width, double scale, double soft_cap = 0, const float* sink_logit = nullptr) {
  Dense r;
  r.out.assign(static_cast<std::size_t>(heads * group * width), 0.0);
  for (int h = 0; h < heads * group; ++h) {
    std::vector<double> scores;
    for (std::int64_t t = 0; t < n_tokens; ++t) {
      double dot = 0;
      for (int d = 0; d < width; ++d) dot += q[static_cast<std::size_t>(h * width + d)] * keys[static_cast<std::size_t>((t * heads + h / group) * width + d)];
      scores.push_back(soft_cap > 0 ? soft_cap * std::tanh(dot * scale / soft_cap) : dot * scale);
    }
    double top = sink_logit ? sink_logit[h] : -1e300, sum = 0;
    for (const double s : scores) top = std::max(top, s);
    if (sink_logit) sum = std::exp(sink_logit[h] - top);
    for (const double s : scores) sum += std::exp(s - top);
    for (std::int64_t t = 0; t < n_tokens; ++t) {
      const double p = std::exp(scores[static_cast<std::size_t>(t)] - top) / sum;
      for (int d = 0; d < width; ++d) {
        r.out[static_cast<std::size_t>(h * width + d)] += p * values[static_cast<std::size_t>((t * heads + h / group) * width + d)];
      }
    }
    r.lse.push_back(top + std::log(sum));
  }
  return r;
}

}  // namespace kvrt::testing

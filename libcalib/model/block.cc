#include <cmath>
#include <limits>
#include <mutex>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include "libcalib/model/torch_block.h"

namespace calib::model {
namespace {

/// x / rms(x) * weight, statistics in fp32 whatever the compute dtype; the product too where the weight is.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor inverse = at::rsqrt(at::mean(wide * wide, -1, /*keepdim=*/true) + epsilon);
  if (weight.scalar_type() == at::kFloat) return (wide * inverse * weight).to(x.scalar_type());
  return weight * (wide * inverse).to(x.scalar_type());
}

/// Rows of a sliding-window layer are computed in tiles of this many, each against the keys that it can see.
constexpr std::int64_t kWindowTileRows = 512;

class DecoderBlock final : public Block {
 public:
  DecoderBlock(const LayerGeometry& geometry, BlockWeights weights, std::shared_ptr<const RopeCache> rope, double rms_epsilon)
      : geometry_(geometry), w_(std::move(weights)), rope_(std::move(rope)), rms_epsilon_(rms_epsilon) {}

  const LayerGeometry& geometry() const override { return geometry_; }

  Projected project(const at::Tensor& x) const override {
    const std::int64_t n = x.size(0), d = geometry_.head_dim;
    const at::Tensor normed = rms_norm(x, w_.attention_norm, rms_epsilon_);
    Projected out;
    out.q_pre = linear_map(normed, w_.q, w_.q_bias).view({n, geometry_.n_q_heads, d});
    out.k_pre = linear_map(normed, w_.k, w_.k_bias).view({n, geometry_.n_kv_heads, d});
    out.v = linear_map(normed, w_.v, w_.v_bias).view({n, geometry_.n_kv_heads, d});
    if (w_.q_norm.defined()) {
      out.q_pre = rms_norm(out.q_pre, w_.q_norm, rms_epsilon_);
      out.k_pre = rms_norm(out.k_pre, w_.k_norm, rms_epsilon_);
    }
    return out;
  }

  at::Tensor rotate_from(std::int64_t first, const at::Tensor& x) const override { return turn(x, first, false); }
  at::Tensor unrotate(const at::Tensor& x) const override { return turn(x, 0, true); }

  at::Tensor attend(const at::Tensor& q_post, const at::Tensor& k_post, const at::Tensor& v) const override {
    const std::int64_t n = q_post.size(0), width = q_post.size(1) * q_post.size(2);
    const at::Tensor q = q_post.transpose(0, 1).unsqueeze(0);
    const at::Tensor k = repeat_heads(k_post), value = repeat_heads(v);
    const std::int64_t window = geometry_.sliding_window;
    at::Tensor o;
    if (window == 0 || window >= n) {
      o = at::scaled_dot_product_attention(q, k, value, {}, 0.0, /*is_causal=*/true, geometry_.softmax_scale);
    } else {
      std::vector<at::Tensor> tiles;
      for (std::int64_t row = 0; row < n; row += kWindowTileRows) tiles.push_back(window_tile(q, k, value, row));
      o = at::cat(tiles, 2);
    }
    return o.squeeze(0).transpose(0, 1).reshape({n, width});
  }

  at::Tensor finish(const at::Tensor& x, const at::Tensor& o) const override {
    const bool in_place = !c10::GradMode::is_enabled();  // the widest activations are read and written once less
    const at::Tensor h = add(x, post_norm(linear_map(o, w_.o, w_.o_bias), w_.post_attention_norm), in_place);
    const at::Tensor normed = rms_norm(h, w_.mlp_norm, rms_epsilon_);
    at::Tensor gated = linear_map(normed, w_.gate, w_.gate_bias);
    const at::Tensor up = linear_map(normed, w_.up, w_.up_bias);
    const bool gelu = w_.activation == Activation::kGeluTanh;
    if (in_place) {
      gelu ? at::gelu_(gated, "tanh") : at::silu_(gated);
      gated.mul_(up);
    } else {
      gated = (gelu ? at::gelu(gated, "tanh") : at::silu(gated)) * up;
    }
    return add(h, post_norm(linear_map(gated, w_.down, w_.down_bias), w_.post_mlp_norm), in_place);
  }

  at::Tensor output_projection() const override {
    return w_.post_attention_norm.defined() ? w_.o * w_.post_attention_norm.unsqueeze(1).to(w_.o.scalar_type()) : w_.o;
  }

 private:
  at::Tensor post_norm(const at::Tensor& change, const at::Tensor& weight) const {
    return weight.defined() ? rms_norm(change, weight, rms_epsilon_) : change;
  }

  /// residual + change; `change` is overwritten if in_place.
  static at::Tensor add(const at::Tensor& residual, const at::Tensor& change, bool in_place) {
    return in_place ? change.add_(residual) : residual + change;
  }

  /// [T, H, D] -> [1, Q, T, D], each KV head repeated for its group of query heads.
  at::Tensor repeat_heads(const at::Tensor& x) const {
    const std::int64_t group = geometry_.n_q_heads / geometry_.n_kv_heads;
    const at::Tensor heads = x.transpose(0, 1).unsqueeze(0);
    return group == 1 ? heads : at::repeat_interleave(heads, group, 1);
  }

  /// Rows [row, row + kWindowTileRows): row t sees keys t - window + 1 ... t.
  at::Tensor window_tile(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t row) const {
    const std::int64_t n = q.size(2), end = std::min(n, row + kWindowTileRows);
    const std::int64_t first_key = std::max<std::int64_t>(0, row - geometry_.sliding_window + 1);
    const auto index = at::TensorOptions().dtype(at::kLong).device(q.device());
    const at::Tensor distance = at::arange(row, end, index).unsqueeze(1) - at::arange(first_key, end, index).unsqueeze(0);
    const at::Tensor visible = at::logical_and(distance.ge(0), distance.lt(geometry_.sliding_window));
    const at::Tensor mask = at::zeros(visible.sizes(), q.options())
                                .masked_fill(at::logical_not(visible), -std::numeric_limits<double>::infinity());
    return at::scaled_dot_product_attention(q.slice(2, row, end), k.slice(2, first_key, end), v.slice(2, first_key, end), mask, 0.0,
                                            /*is_causal=*/false, geometry_.softmax_scale);
  }

  struct TorchTable {
    at::Tensor cos, sin;  // [n, 1, pairs] fp32 on the device
  };
  /// Rows [first, end).
  TorchTable table(std::int64_t first, std::int64_t end, const at::Tensor& like) const {
    const std::lock_guard lock(table_mutex_);
    if (!table_.cos.defined() || table_.cos.size(0) < end) {
      const std::shared_ptr<const RopeTable> source = rope_->table(end);
      const auto to_device = [&](const std::vector<float>& values) {
        return at::from_blob(const_cast<float*>(values.data()), {source->n_positions, 1, source->n_pairs}, at::kFloat)
            .clone()
            .to(like.device());
      };
      table_ = {to_device(source->cos), to_device(source->sin)};
    }
    return {table_.cos.slice(0, first, end), table_.sin.slice(0, first, end)};
  }

  at::Tensor turn(const at::Tensor& x, std::int64_t first, bool inverse) const {
    if (geometry_.rope_style == RopeStyle::kNone || geometry_.rotary_dim == 0) return x;
    const std::int64_t pairs = geometry_.rotary_dim / 2;
    const TorchTable t = table(first, first + x.size(0), x);
    const at::Tensor wide = x.to(at::kFloat);
    const at::Tensor sin = inverse ? at::neg(t.sin) : t.sin;
    const at::Tensor a = wide.slice(2, 0, pairs), b = wide.slice(2, pairs, 2 * pairs);
    std::vector<at::Tensor> parts = {a * t.cos - b * sin, b * t.cos + a * sin};
    if (geometry_.rotary_dim < geometry_.head_dim) parts.push_back(wide.slice(2, geometry_.rotary_dim, geometry_.head_dim));
    return at::cat(parts, 2).to(x.scalar_type());
  }

  LayerGeometry geometry_;
  BlockWeights w_;
  std::shared_ptr<const RopeCache> rope_;
  double rms_epsilon_;
  mutable std::mutex table_mutex_;
  mutable TorchTable table_;
};

class NormedHead final : public Head {
 public:
  NormedHead(at::Tensor norm, at::Tensor weight, double rms_epsilon)
      : norm_(std::move(norm)), weight_(std::move(weight)), rms_epsilon_(rms_epsilon) {}
  at::Tensor logits(const at::Tensor& h) const override {
    return linear_map(normalise(h), weight_).to(at::kFloat);
  }
  at::Tensor normalise(const at::Tensor& h) const override { return rms_norm(h, norm_, rms_epsilon_); }
  std::int64_t vocab_size() const override { return weight_.size(0); }

 private:
  at::Tensor norm_, weight_;
  double rms_epsilon_;
};

}  // namespace

std::unique_ptr<Block> make_block(const LayerGeometry& geometry, BlockWeights weights, std::shared_ptr<const RopeCache> rope,
                                  double rms_epsilon) {
  return std::make_unique<DecoderBlock>(geometry, std::move(weights), std::move(rope), rms_epsilon);
}

std::unique_ptr<Head> make_head(at::Tensor norm, at::Tensor weight, double rms_epsilon) {
  return std::make_unique<NormedHead>(std::move(norm), std::move(weight), rms_epsilon);
}

}  // namespace calib::model

#pragma once
// INTERNAL to model/ and sens/: the one header with Torch types. One decoder block, its pieces callable apart.
// Legend: T tokens, C hidden size, Q query heads, H KV heads, D head_dim. Tensors are in the compute dtype on the compute
// device; captured q, k, v are fp32.

#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "libcalib/base/model_geometry.h"

namespace calib::model {

struct Projected {
  at::Tensor q_pre;  ///< [T, Q, D] after bias and q_norm, before RoPE
  at::Tensor k_pre;  ///< [T, H, D] after bias and k_norm, before RoPE
  at::Tensor v;      ///< [T, H, D]
};

/// One loaded block. Const calls are differentiable through autograd (weights never require grad) and add no state.
class Block {
 public:
  virtual ~Block() = default;
  virtual const LayerGeometry& geometry() const = 0;
  /// Input norm + projections. x: [T, C].
  virtual Projected project(const at::Tensor& x) const = 0;
  /// R_t x for positions 0..T-1 (fp32 tables computed in double); x: [T, heads, D]. unrotate applies R_t^T.
  virtual at::Tensor rotate(const at::Tensor& x) const = 0;
  virtual at::Tensor unrotate(const at::Tensor& x) const = 0;
  /// Fused causal attention (sliding window included). q: [T, Q, D], k, v: [T, H, D] -> [T, Q*D].
  virtual at::Tensor attend(const at::Tensor& q_post, const at::Tensor& k_post, const at::Tensor& v) const = 0;
  /// Output projection, residual, MLP. x: [T, C] block input, o: [T, Q*D] -> [T, C].
  virtual at::Tensor finish(const at::Tensor& x, const at::Tensor& o) const = 0;
  virtual at::Tensor output_projection() const = 0;  ///< W_o [C, Q*D]
};

/// Final norm and vocabulary projection, applied to few rows at a time: full logits are never held.
class Head {
 public:
  virtual ~Head() = default;
  /// h: [n, C] -> fp32 logits [n, V]. Differentiable.
  virtual at::Tensor logits(const at::Tensor& h) const = 0;
  virtual std::int64_t vocab_size() const = 0;
};

}  // namespace calib::model

#pragma once
// INTERNAL to model/ and sens/: the one header with Torch types. One decoder block, its pieces callable apart.
// Legend: T tokens, C hidden size, Q query heads, H KV heads, D head_dim. Tensors are in the compute dtype on the compute
// device; captured q, k, v are fp32.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "libcalib/base/model_geometry.h"
#include "libcalib/model/architecture.h"
#include "libcalib/model/rope.h"

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
  /// R_t x for positions first..first+T-1 (fp32 tables computed in double); x: [T, heads, D]. unrotate applies R_t^T from position 0 on.
  virtual at::Tensor rotate_from(std::int64_t first, const at::Tensor& x) const = 0;
  at::Tensor rotate(const at::Tensor& x) const { return rotate_from(0, x); }
  virtual at::Tensor unrotate(const at::Tensor& x) const = 0;
  /// Fused causal attention (sliding window included). q: [T, Q, D], k, v: [T, H, D] -> [T, Q*D].
  virtual at::Tensor attend(const at::Tensor& q_post, const at::Tensor& k_post, const at::Tensor& v) const = 0;
  /// Output projection, residual, MLP, and the norms behind both where the family has them. x: [T, C] block input, o: [T, Q*D] -> [T, C].
  virtual at::Tensor finish(const at::Tensor& x, const at::Tensor& o) const = 0;
  /// W_o [C, Q*D]; rows times the weight of the norm behind it, if there is one: relative errors are then those of what is added to
  /// the residual, but for the change of that norm's divisor.
  virtual at::Tensor output_projection() const = 0;
};

/// Final norm and vocabulary projection, applied to few rows at a time: full logits are never held.
class Head {
 public:
  virtual ~Head() = default;
  /// h: [n, C] -> fp32 logits [n, V]. Differentiable.
  virtual at::Tensor logits(const at::Tensor& h) const = 0;
  /// The final norm alone: h: [n, C] -> [n, C].
  virtual at::Tensor normalise(const at::Tensor& h) const = 0;
  virtual std::int64_t vocab_size() const = 0;
};

/// Token embedding: rows are read from the checkpoint on demand, the table is never held.
class Embedding {
 public:
  virtual ~Embedding() = default;
  /// [n] ids -> [n, C] in the compute dtype on the device. Throws: kMismatch naming an id outside the vocabulary.
  virtual at::Tensor lookup(std::span<const std::int32_t> ids) const = 0;
};

/// Weights of one block in the compute dtype on the device, rows in Hugging Face channel order; undefined where absent. Norm weights
/// may be fp32 in a narrower compute dtype: then x / rms(x) * weight is formed in fp32 and rounded once (Gemma), else before the
/// product with the weight (Llama).
struct BlockWeights {
  at::Tensor attention_norm;          ///< [C]
  at::Tensor q, k, v, o;              ///< [Q*D, C], [H*D, C], [H*D, C], [C, Q*D]
  at::Tensor q_bias, k_bias, v_bias, o_bias;
  at::Tensor q_norm, k_norm;          ///< [D]
  at::Tensor mlp_norm;                ///< [C]
  at::Tensor gate, up, down;          ///< [F, C], [F, C], [C, F]
  at::Tensor gate_bias, up_bias, down_bias;
  at::Tensor post_attention_norm, post_mlp_norm;  ///< [C]
  Activation activation = Activation::kSilu;
};
/// `rope` may be shared by blocks with equal frequencies.
std::unique_ptr<Block> make_block(const LayerGeometry& geometry, BlockWeights weights, std::shared_ptr<const RopeCache> rope,
                                  double rms_epsilon);

/// weight: [V, C]; norm: [C].
std::unique_ptr<Head> make_head(at::Tensor norm, at::Tensor weight, double rms_epsilon);

/// x W^T + b on the fastest product that this machine has. x: [n, in], weight: [out, in] (may be a transposed view), bias:
/// [out] or undefined -> [n, out]. Differentiable in x alone.
at::Tensor linear_map(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// Compute device and dtype of resolved names ("cpu", "cuda:0"; "fp32", "bf16").
at::TensorOptions tensor_options(const std::string& device, const std::string& dtype);

}  // namespace calib::model

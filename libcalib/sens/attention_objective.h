#pragma once
// INTERNAL to sens/: one layer's attention over a stored cache against exact attention, for the same queries (Attention Matching,
// arXiv 2602.16284). Legend: T tokens, Q query heads, H KV heads, D head_dim.

#include "libcalib/sens/attention_backward.h"
#include "libcalib/sens/forward_metrics.h"

namespace calib::sens {

/// Sums over sampled rows and query heads, each row times the number of rows it stands for; they add up over documents.
struct AttentionLoss {
  double weight = 0;             ///< of rows and heads
  double kl = 0;                 ///< KL(p || p^) of the probabilities, nats
  double mass = 0;               ///< (ln sum e^s - ln sum e^s^)^2, nats^2
  double error = 0, norm = 0;    ///< |o - o^|^2 and |o|^2, o before the output projection
  double mean_kl() const { return weight > 0 ? kl / weight : 0.0; }
  double e_mass() const { return weight > 0 ? mass / weight : 0.0; }
  double e_out() const { return norm > 0 ? error / norm : 0.0; }
};

/// q: [T, Q, D], k, v: [T, H, D] exact and post-RoPE, `cache` what rows read instead. In double precision, on the CPU.
AttentionLoss attention_loss(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MixedCache& cache, const LayerGeometry& layer,
                             const SampledPositions& sampled);

}  // namespace calib::sens

#pragma once
// INTERNAL to sens/: one layer's attention over a stored cache against exact attention, for the same queries (Attention Matching,
// arXiv 2602.16284). Legend: T tokens, Q query heads, H KV heads, D head_dim.

#include "libcalib/sens/attention_backward.h"
#include "libcalib/sens/attention_matching.h"
#include "libcalib/sens/forward_metrics.h"

namespace calib::sens {

/// Sums over sampled rows and query heads; o is that before the output projection.
struct AttentionLoss {
  AttentionMatch match;
  double kl = 0;  ///< KL(p || p^) of the probabilities, nats
  double mean_kl() const { return match.n_rows > 0 ? kl / match.n_rows : 0.0; }
  AttentionLoss& operator+=(const AttentionLoss& other) {
    match += other.match;
    kl += other.kl;
    return *this;
  }
};

/// q: [T, Q, D], k, v: [T, H, D] exact and post-RoPE, `cache` what rows read instead. In double precision, on the CPU.
AttentionLoss attention_loss(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MixedCache& cache, const LayerGeometry& layer,
                             const SampledPositions& sampled);

}  // namespace calib::sens

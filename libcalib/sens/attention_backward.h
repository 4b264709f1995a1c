#pragma once
// INTERNAL to sens/: attention in query tiles, forward over a mixed cache and backward with the gradient split by what a row reads.
// Legend: T tokens, Q query heads, H KV heads, G = Q/H, D head_dim, R label draws. All tensors fp32 on one device.

#include <vector>

#include "kernels/core/tiers.h"
#include "libcalib/model/torch_block.h"

namespace calib::sens {

struct AttentionShape {
  double softmax_scale = 0;
  std::int64_t sliding_window = 0;  ///< keys a row sees, its own included; 0 = all
  std::int64_t query_tile = 128;    ///< rows of one tile; changes rounding only
};

/// Gradient of the loss with respect to one document's q, k and v. A key's gradient splits by rows: those that read the key from
/// the coded cache and those that read it exact (sink, window, unfinished exit block). full = coded + exact.
struct AttentionGradients {
  at::Tensor d_q;                            ///< [T, R, Q, D]
  at::Tensor d_k, d_v;                       ///< [T, R, H, D], all rows; query heads of a group summed
  std::vector<at::Tensor> exact_k, exact_v;  ///< per class, [T, R, H, D], rows that read the key exact
};

/// Backward of softmax attention for R upstream gradients that share the recomputed probabilities.
/// q: [T, Q, D], k, v: [T, H, D] post-RoPE, d_o: [T, R, Q*D]. A class is one (S, W, E): row t reads [S, coded_end(t + 1)) coded.
/// Memory: O(query_tile * T) scores at a time.  Source: METHODS.md 7, "Window and sinks in g".
AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& d_o,
                                      const AttentionShape& shape, const std::vector<kvrt::Tiers>& k_classes,
                                      const std::vector<kvrt::Tiers>& v_classes);

/// Keys that no row reads coded, and sinks, hold 0: full minus exact elsewhere. Shapes [T, R, H, D].
at::Tensor coded_gradient(const at::Tensor& full, const at::Tensor& exact, const kvrt::Tiers& tiers);

/// What a row reads: coded K and V for tokens that have left the window by its length, exact ones for the rest. Rows below n_sinks of
/// the coded tensors must hold the exact values (sinks are exact for every row).
struct MixedCache {
  at::Tensor k_coded, v_coded;  ///< [T, H, D]
  at::Tensor k_exact, v_exact;  ///< [T, H, D]; unused where every row reads even its own token coded
  kvrt::Tiers tiers;
};

/// Attention output [T, Q*D] over the mixed cache.
at::Tensor mixed_attention(const at::Tensor& q, const MixedCache& cache, const AttentionShape& shape);

/// Attention output [T, Q*D] over exact K and V, in the same tiles.
at::Tensor tiled_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionShape& shape);

}  // namespace calib::sens

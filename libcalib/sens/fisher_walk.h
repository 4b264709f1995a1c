#pragma once
// INTERNAL to sens/: gradients of the sampled-label loss, from the head down, one block at a time.
// Legend: T tokens, C hidden size, R label draws.

#include <cstdint>
#include <vector>

#include "libcalib/model/torch_block.h"
#include "libcalib/sens/attention_backward.h"
#include "libcalib/sens/layer_scorer.h"

namespace calib::sens {

/// Gradient of the summed next-token NLL of rows [n_sinks, T) with respect to the final hidden states, for each draw: labels are
/// sampled from the model, seeded by (seed, document, draw). hidden: [T, C]. Logits are held in tiles of rows.
struct LabelGradients {
  std::vector<at::Tensor> d_hidden;               ///< per draw [T, C]
  std::vector<std::vector<std::int64_t>> labels;  ///< per draw [T]; -1 where a row is not in the loss
};
LabelGradients sampled_label_gradients(const model::Head& head, const at::Tensor& hidden, std::int64_t n_sinks, int n_draws,
                                       std::uint64_t seed, std::uint64_t document, ThreadPool& pool);

/// One block's recompute with its pieces differentiable apart, shared by all draws.
class BlockGraph {
 public:
  BlockGraph(const model::Block& block, const at::Tensor& x);
  /// What attention read and the scorer needs, detached.
  const DocumentAttention& attention() const { return attention_; }
  /// d_y: R tensors [T, C]. Replaces them by the gradient entering the block and returns the attention gradients on the way.
  AttentionGradients backward(std::vector<at::Tensor>& d_y, const std::vector<kvrt::Tiers>& k_classes, const std::vector<kvrt::Tiers>& v_classes);

 private:
  const model::Block& block_;
  at::Tensor x_, x_residual_, q_, k_, v_, o_, y_;  ///< leaves x_, x_residual_, o_
  DocumentAttention attention_;
};

}  // namespace calib::sens

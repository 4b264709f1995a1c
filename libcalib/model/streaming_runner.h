#pragma once
// The block-major walk: every document through one block, then the next block. No Torch types here.
// Legend: T tokens, C hidden size, Q query heads, H KV heads, D head_dim, R sampled rows.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "libcalib/model/streaming_model.h"
#include "libcalib/stats/kv_stats.h"
#include "libcalib/text/corpus.h"

namespace calib::model {

/// One document at one layer; pointers are valid during the call.
struct LayerCapture {
  std::int64_t layer_idx = 0, document_idx = 0;
  stats::DocumentTensors tensors;
  stats::SampledRows attention;        ///< no rows where none is eligible
  const float* hidden = nullptr;       ///< [T, C] residual stream entering the layer
  const float* hidden_absmax = nullptr;  ///< [T] max over channels of |hidden|
  std::int64_t hidden_size = 0;
};

/// Sees every layer's captured tensors, documents in order.
class LayerTap {
 public:
  virtual ~LayerTap() = default;
  virtual void begin_layer(const LayerGeometry& layer) = 0;
  /// After begin_layer: [H, D, D] sum over each KV head's group of query heads of W_o^T W_o, from the block's weights.
  virtual void on_output_moment(const std::vector<double>&) {}
  /// The same before the sum: [Q, D, D], one W_o^T W_o per query head.
  virtual void on_head_output_moments(const std::vector<double>&) {}
  virtual void on_document(const LayerCapture& capture) = 0;
  virtual void end_layer(const LayerGeometry& layer) = 0;
};

struct RunnerOptions {
  std::int64_t hidden_memory_bytes = std::int64_t{4} << 30;  ///< states beyond it go to a temporary file
  std::uint64_t seed = 0;
  std::int64_t attention_rows = 128;  ///< per document and layer
  bool reference_nll = true;          ///< if the model has a head
};

/// Work done so far, in tokens times layers (the head counts as the blocks that its weights amount to).
struct RunProgress {
  std::int64_t layer_idx = 0, n_layers = 0;  ///< layer_idx == n_layers while the head runs
  std::int64_t done = 0, total = 0;
  bool layer_finished = false;
};
/// Called after every batch of documents; what it throws ends the walk.
using ProgressFn = std::function<void(const RunProgress&)>;

struct ReferenceNll {
  std::vector<double> sum;            ///< nats, by position bucket of the predicting row
  std::vector<std::int64_t> count;
  bool computed() const { return !sum.empty(); }
};

/// tap may be null: a bare forward pass. Throws kNumeric naming layer, document and token of the first non-finite state,
/// kMismatch naming a token id outside the vocabulary.
ReferenceNll run_streaming(const StreamingModel& model, std::span<const text::Document> documents, const RunnerOptions& options,
                           LayerTap* tap, const ProgressFn& progress = {});

/// What a walk will take, from sizes and one measured matrix product.
struct RunEstimate {
  std::int64_t weights_bytes = 0;      ///< one block, or the head if larger
  std::int64_t activation_bytes = 0;   ///< of one batch, sampled attention included
  std::int64_t hidden_memory_bytes = 0, hidden_spill_bytes = 0;
  std::int64_t logits_bytes = 0;
  double forward_seconds = 0;
};
RunEstimate estimate_run(const StreamingModel& model, std::span<const text::Document> documents, const RunnerOptions& options,
                         bool with_tap);

/// Rows of logits that are held at a time.
std::int64_t logit_tile_rows(std::int64_t vocab_size);

}  // namespace calib::model

#pragma once
// Everything kvcalib records of one layer, as a monoid: neutral, add, merge, finish (METHODS.md 3).
// Legend: T tokens, H KV heads, Q query heads, D head_dim, R sampled rows.

#include <cstdint>
#include <vector>

#include "libcalib/base/model_geometry.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/stats/attention_stats.h"
#include "libcalib/stats/covariance.h"
#include "libcalib/stats/tensor_stats.h"

namespace calib::stats {

/// One document at one layer. All arrays fp32, row-major, dense.
struct DocumentTensors {
  std::int64_t n_tokens = 0;
  const float* k_pre = nullptr;   ///< [T, H, D] after k_norm and bias, before RoPE
  const float* k_post = nullptr;  ///< [T, H, D]
  const float* v = nullptr;       ///< [T, H, D]
  const float* q_pre = nullptr;   ///< [T, Q, D]
  const float* q_post = nullptr;  ///< [T, Q, D]
};

/// Attention probabilities of the sampled rows of one document (METHODS.md 3, "Attention").
struct SampledRows {
  std::vector<std::int64_t> rows;   ///< [R] row positions, ascending
  std::vector<double> row_weight;   ///< [R] rows of the bucket / sampled rows of the bucket, for totals
  const float* p = nullptr;         ///< [Q, R, T]; columns a row does not see hold 0
};

/// Parts: k_pre, k_post, v, q_pre, q_post each split into sink and body tokens; query_moment (post), q_pre mean and covariance,
/// key_cov (pre, centred), value_cov, pair envelope, attention. Sink rows are in none of the Gram matrices.
class LayerStats {
 public:
  LayerStats() = default;  ///< neutral element only after init by geometry
  LayerStats(const LayerGeometry& geometry, std::int64_t n_sinks);

  /// Throws: kNumeric naming tensor, head, channel and position of the first non-finite value (caller adds layer and document).
  /// Independent of `pool`'s size. Cost: one pass, tiles of 256 tokens.
  void add_document(const DocumentTensors& document, ThreadPool& pool);
  void add_attention(const SampledRows& rows, std::int64_t n_tokens, ThreadPool& pool);
  /// Exact for counts, extrema and sketches; moments to 1e-12 relative. Associative and independent of order within that bound.
  void merge(const LayerStats& other);

  const LayerGeometry& geometry() const { return geometry_; }
  std::int64_t n_sinks() const { return n_sinks_; }

  // Public parts: the file format mirrors them.
  struct Split {
    TensorStats body, sink;
    /// Statistics over all tokens: what a plan without sinks fits its scales on.
    TensorStats all() const {
      TensorStats both = body;
      both.merge(sink);
      return both;
    }
  };
  Split k_pre, k_post, v, q_pre, q_post;
  GramAccumulator query_moment;   ///< sum over the GQA group of q q^T, post, [H, D, D]; divided by the number of tokens
  GramAccumulator query_cov;      ///< pre, centred, [Q, D, D]
  GramAccumulator key_cov;        ///< pre, centred, [H, D, D]
  GramAccumulator value_cov;      ///< centred, [H, D, D]
  std::vector<float> pair_absmax; ///< [H, D/2] RoPE-pair envelope of k_pre (body tokens)
  AttentionStats attention;
  /// Of the weights, not of text: [H, D, D] sum over the GQA group of W_o^T W_o; empty if nobody stated it.
  std::vector<double> output_moment;

 private:
  LayerGeometry geometry_;
  std::int64_t n_sinks_ = 0;
};

}  // namespace calib::stats

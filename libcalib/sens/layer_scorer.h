#pragma once
// INTERNAL to sens/: scores every candidate of one layer's two units, document by document, in one pass over its tensors.
// Legend: T tokens, Q query heads, H KV heads, D head_dim, R label draws.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "libcalib/model/torch_block.h"
#include "libcalib/sens/attention_backward.h"
#include "libcalib/sens/candidates.h"
#include "libcalib/sens/fisher.h"
#include "libcalib/sens/forward_metrics.h"
#include "libcalib/sens/metrics.h"

namespace calib::sens {

struct ScoreSettings {
  std::int64_t n_sinks = 4;
  std::vector<std::int64_t> windows = {128};      ///< of every tier class
  std::vector<double> salient_fractions = {0.0};  ///< likewise
  std::int64_t rows_per_document = 128;  ///< sampled rows of attn_kl, attn_out and fisher_softmax
  std::uint64_t seed = 0;
  bool fisher = true;     ///< fisher_vec, fisher and fisher_dir
  bool fisher_softmax = true;  ///< requires fisher
  bool attn_kl = true, attn_out = true;
};

/// Post-RoPE queries and keys, pre-RoPE keys and values of one document, fp32 on the compute device.
struct DocumentAttention {
  at::Tensor q_post, k_pre, k_post, v;
};

class LayerScorer {
 public:
  /// `salient`: the layer's tier, for classes that have one; else null.
  LayerScorer(const model::Block& block, std::vector<UnitCandidate> keys, std::vector<UnitCandidate> values, const ScoreSettings& settings,
              ThreadPool& pool, std::shared_ptr<const quant::SalientTier> salient = nullptr);

  /// Classes for which attention_backward() must split the gradient.
  const std::vector<kvrt::Tiers>& key_classes() const { return keys_.classes; }
  const std::vector<kvrt::Tiers>& value_classes() const { return values_.classes; }

  /// `gradients` may be null if no fisher metric is asked for. Documents in ascending order.
  void add_document(std::int32_t document, const DocumentAttention& x, const AttentionGradients* gradients);

  /// Writes the two units' spreads and constants into `result` (tables sized beforehand). Of two candidates of one scheme the one that
  /// loses less is kept: less attn_kl on keys, less attn_out on values.
  void finish(std::size_t key_unit, std::size_t value_unit, SensResult* result);
  /// Alternatives scored and kept so far.
  std::size_t n_alternatives() const { return n_alternatives_; }
  std::size_t n_alternatives_kept() const { return n_alternatives_kept_; }

 private:
  /// Rows of one (candidate, tier class), in the order of the row index.
  struct Rows {
    std::vector<float> vec, diagonal, kl, out;
    std::vector<float> direction;  ///< a row a document
    std::int64_t n_squares = 0;    ///< in all of them
    std::vector<ProbabilityChange> change;  ///< keys only
  };
  struct UnitState {
    Side side = Side::kK;
    std::vector<UnitCandidate> candidates;
    std::vector<kvrt::Tiers> classes;
    std::vector<std::size_t> class_of;  ///< [candidate, tier class] -> classes
    std::vector<Rows> rows;             ///< [candidate, tier class]
  };
  /// Gradients of one frame, split by class, and the exact segments' share of the Fisher rows.
  struct FrameGradients {
    std::vector<at::Tensor> coded;  ///< per class [T, R, H, D] on the CPU
    std::vector<FisherRows> exact;  ///< per class
  };

  UnitState make_unit(Side side, std::vector<UnitCandidate> candidates) const;
  FrameGradients split_gradients(const UnitState& unit, const at::Tensor& full, const std::vector<at::Tensor>& exact,
                                 const at::Tensor& rounding, bool pre) const;
  void add_fisher(const at::Tensor& error, const FrameGradients& g, std::size_t class_idx, Rows* rows) const;
  void score_keys(const DocumentAttention& x, const AttentionGradients* gradients, const AttentionProbe* probe);
  void score_values(const DocumentAttention& x, const AttentionGradients* gradients, const AttentionProbe* probe);
  /// fisher_softmax over fisher_vec: sum w exact / sum w linear over sampled rows; 1 for values and where nothing moves.
  double softmax_gain(const Rows& rows) const;
  at::Tensor error_of(const UnitCandidate& candidate, Side side, const at::Tensor& x, bool bf16_input) const;
  /// Error of one candidate that tier classes share, or with a salient tier that of one class alone.
  struct SharedError {
    at::Tensor error;
    bool tiered = false;
  };
  /// Brings `shared` to what the class needs; true if it is another than before.
  bool renew(SharedError& shared, const UnitCandidate& candidate, Side side, const kvrt::Tiers& tiers, const at::Tensor& x, const at::Tensor& x_post);
  /// The same with a salient tier, by where the document's tokens stand. x_post: x after RoPE (x itself but for `pre`).
  at::Tensor tier_error(const UnitCandidate& candidate, Side side, const kvrt::Tiers& tiers, const at::Tensor& x, const at::Tensor& x_post);
  const quant::TierMap& placement(const kvrt::Tiers& tiers);
  /// Drops the worse of two candidates of one scheme, with its rows.
  void settle_alternatives(UnitState& unit);
  struct Resampling {
    Bootstrap tokens, documents, sampled;
  };
  void finish_unit(const UnitState& unit, std::size_t unit_idx, const Resampling& resampling, SensResult* result) const;

  const model::Block& block_;
  ScoreSettings settings_;
  ThreadPool& pool_;
  at::Tensor w_o_;
  std::shared_ptr<const quant::SalientTier> salient_;
  std::vector<std::pair<kvrt::Tiers, quant::TierMap>> placements_;  ///< of the present document
  at::Tensor k_post_, v_;                                           ///< likewise, where there is a tier
  UnitState keys_, values_;
  RowIndex token_rows_, document_rows_, sampled_rows_;
  std::int64_t longest_ = 0;
  std::size_t n_alternatives_ = 0, n_alternatives_kept_ = 0;
};

/// Names of the score tables that the settings ask for, and their empty tables.
void prepare_tables(const ScoreSettings& settings, std::int64_t seq_len, SensResult* result);

/// Adds a table of NaNs.
void add_empty_table(const std::string& metric, SensResult* result);
/// Copies one spread into a table.
void store_spread(const Spread& spread, std::size_t unit, std::size_t scheme, std::size_t window, const std::string& metric, SensResult* result);

}  // namespace calib::sens

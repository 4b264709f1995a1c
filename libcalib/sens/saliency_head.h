#pragma once
// INTERNAL to sens/: one document, layer and KV head of `kvsens saliency`. Torch in the .cc alone.
// Legend: T tokens, Q query heads, H KV heads, D head_dim, G query heads of the KV head.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "libcalib/sens/saliency.h"
#include "libcalib/sens/saliency_tally.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::sens {

/// Keys (post-RoPE) and values of a document as base and salient tier hold them. [T, H, D] each.
struct TierTensors {
  std::vector<float> base_k, base_v, salient_k, salient_v;
};

/// What the rows of a bucket wanted of tokens S ... P - 1, P the bucket's first row.
struct BucketEvidence {
  JudgedRows rows;
  std::vector<float> mass, gain;
};

/// Scores of one KV head as they stood when tokens were placed.
struct PlacementScores {
  /// [fraction][score]: of tokens S ... in whole exit blocks, each block scored at the length where it left the window.
  std::vector<std::array<std::vector<double>, kPlanScores>> by_block;
  /// [bucket evidence][score]: of tokens S ... P - 1, scored at P.
  std::vector<std::array<std::vector<double>, kPlanScores>> by_prompt;
};

/// Mean over KV heads of the attention scores: the ranking that the last layer lends. Requires: heads of one layer and document.
PlacementScores mean_over_heads(std::span<const PlacementScores> heads);

struct HeadInputs {
  const LayerGeometry* layer = nullptr;
  int head = 0;
  std::int64_t n_sinks = 0;
  std::uint64_t seed = 0, document = 0;
  std::int64_t match_rows = 0;
  const stats::DocumentTensors* tensors = nullptr;
  const TierTensors* tiers = nullptr;
  std::span<const double> output_moments;      ///< [Q, D, D]
  std::span<const FutureQuery> future;         ///< per query head of the layer, for distances
  const quant::SaliencyFactors* factors = nullptr;  ///< of `future`: what a plan ranks exit blocks by
  std::span<const kvrt::Tiers> fractions;
  std::span<const JudgedRows> buckets;
};

/// Computes in its constructor.
class HeadSaliency {
 public:
  explicit HeadSaliency(const HeadInputs& in);

  const std::vector<BucketEvidence>& evidence() const { return evidence_; }
  const PlacementScores& scores() const { return scores_; }
  double entropy_sum() const { return entropy_sum_; }      ///< of H / ln n_vis over rows and query heads
  std::int64_t n_entropy_rows() const { return n_entropy_rows_; }
  /// [fraction][choice]: E_out and E_mass over the sampled rows of all buckets.
  const std::vector<std::array<AttentionMatch, SaliencyTally::kChoices>>& matches() const { return matches_; }

 private:
  struct Torch;
  void measure_attention(const HeadInputs& in, const Torch& t);
  void score_tokens(const HeadInputs& in);
  void compare_tiers(const HeadInputs& in, const Torch& t);
  std::vector<double> expected_scores(const HeadInputs& in, bool by_block, std::int64_t length, std::int64_t first, std::int64_t end) const;
  std::array<std::vector<double>, kPlanScores> scores_at(const HeadInputs& in, bool by_block, std::int64_t length, std::int64_t first, std::int64_t end) const;

  AttentionMap map_;
  std::vector<double> value_norm_;  ///< [T] mean over the group of |W_o v|
  std::vector<BucketEvidence> evidence_;
  PlacementScores scores_;
  double entropy_sum_ = 0;
  std::int64_t n_entropy_rows_ = 0;
  std::vector<std::array<AttentionMatch, SaliencyTally::kChoices>> matches_;
};

/// The choices of one score in a bucket: by block and by prompt.
struct Choice {
  std::vector<std::int32_t> by_block, by_prompt;
};
Choice choose(const PlacementScores& scores, std::size_t fraction, std::size_t bucket_idx, std::size_t score, const kvrt::Tiers& tiers, std::int64_t first_row);
/// The oracle's: by what the future rows of the bucket gain.
Choice choose_oracle(const BucketEvidence& evidence, const kvrt::Tiers& tiers);
/// Coded tokens [S, end) at the bucket's first row, as a length.
std::int64_t n_coded(const kvrt::Tiers& tiers, std::int64_t first_row);
/// judge_choice on the evidence's first tokens.
SaliencyCell judge(const BucketEvidence& evidence, const Choice& choice, const kvrt::Tiers& tiers);

}  // namespace calib::sens

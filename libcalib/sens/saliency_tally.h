#pragma once
// INTERNAL to sens/: sums of what choices caught, by score, layer, head, bucket and document, and the rates and verdicts made of them. No Torch.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/core/tiers.h"
#include "libcalib/sens/attention_matching.h"
#include "libcalib/sens/saliency_result.h"

namespace calib::sens {

struct SaliencyCell {
  double caught = 0, prompt_caught = 0, catchable = 0, gain = 0, best_gain = 0, common = 0, chosen = 0, rows = 0;
  SaliencyCell& operator+=(const SaliencyCell& other);
};

/// One choice against the best. mass: attention that each coded token gets from the rows judged, gain: what 8 bits would save there.
/// block_choice and prompt_choice: ascending, of equal size.
SaliencyCell judge_choice(std::span<const double> mass, std::span<const double> gain, std::span<const std::int32_t> block_choice,
                          std::span<const std::int32_t> prompt_choice, std::int64_t n_rows);

/// Bucket b (from 1) of METHODS.md 3 as rows [first, end) of a document; judged if it has kLeastRows rows and its first row finds an exit
/// block coded.
inline constexpr std::int64_t kLeastJudgedRows = 64;
struct JudgedRows {
  int bucket = 0;
  std::int64_t first = 0, end = 0;
};
/// Buckets of a document that are judged under all of `tiers`.
std::vector<JudgedRows> judged_buckets(std::int64_t n_tokens, std::span<const kvrt::Tiers> tiers);

class SaliencyTally {
 public:
  static constexpr std::size_t kChoices = kOwnScores + 2;  ///< of the tiers compared: own scores, no tier, everything in it

  SaliencyTally(std::size_t n_fractions, std::vector<int> kv_heads_by_layer, int n_buckets, std::size_t n_documents);
  /// Distinct cells may be written from several threads. bucket: from 0.
  SaliencyCell& cell(std::size_t fraction, std::size_t score, std::size_t layer, int head, int bucket, std::size_t document);
  AttentionMatch& match(std::size_t fraction, std::size_t choice, std::size_t layer, int head, std::size_t document);

  /// Fills what result->fractions holds beside the sizes of its tiers. Requires: result->layers and the fractions' sizes.
  void finish(SaliencyResult* result) const;

 private:
  std::size_t index(std::size_t fraction, std::size_t score, std::size_t layer, int head, int bucket, std::size_t document) const;
  const SaliencyCell& at(std::size_t fraction, std::size_t score, std::size_t layer, int head, int bucket, std::size_t document) const {
    return cells_[index(fraction, score, layer, head, bucket, document)];
  }
  /// Sums by document over layers [l0, l1), heads [h0, h1) (h1 < 0: all) and buckets [b0, b1).
  std::vector<SaliencyCell> by_document(std::size_t fraction, std::size_t score, std::size_t l0, std::size_t l1, int h0, int h1, int b0, int b1) const;
  AttentionMatch layer_match(std::size_t fraction, std::size_t choice, std::size_t layer) const;
  void finish_score(std::size_t fraction, std::size_t score, const SaliencyResult& facts, SaliencyFraction* out) const;

  std::vector<int> heads_;
  std::vector<std::size_t> first_head_;  ///< running sum of heads_
  std::size_t n_fractions_, n_documents_;
  int n_buckets_;
  std::vector<SaliencyCell> cells_;
  std::vector<AttentionMatch> matches_;
};

}  // namespace calib::sens

#pragma once
// Which cached tokens later queries will need: scores known when a token is coded, the oracle that knows the future, and how much of
// the attention a score catches (METHODS.md 6). No Torch. Legend: T tokens, D head_dim, G query heads of one KV head.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "libcalib/base/model_geometry.h"
#include "libcalib/base/rng.h"
#include "libcalib/quant/expected_attention.h"
#include "libcalib/sens/saliency_result.h"

namespace calib::sens {

/// R_t x for position t, in place: RoPE with the attention factor on the rotated channels. x: [D].
void rotate_row(const LayerGeometry& layer, std::int64_t position, double* x);

using quant::FutureQuery, quant::future_distances, quant::future_query;

/// Logits z of post-RoPE keys k[j], `stride` floats apart, for queries `length` positions past those that `query` was made for: the keys
/// are turned back by as much, so that one FutureQuery of distances serves every length. Shape: [n_keys].
std::vector<double> expected_logits(const FutureQuery& query, const LayerGeometry& layer, std::int64_t length, const float* k, std::int64_t stride,
                                    std::int64_t n_keys);

/// Expected Attention of a KV head: softmax of z over the keys, mean over the group's query heads, times what the value weighs.
/// logits: one row per query head; value_norm: mean over the group of |W_o v_j| (or |v_j|). Shape: [n_keys].
std::vector<double> expected_attention(std::span<const std::vector<double>> logits, std::span<const double> value_norm);

/// Attention probabilities of one KV head, mean over its group: row t holds keys 0 ... t.
class AttentionMap {
 public:
  /// sliding_window: keys a row sees, 0 = all. Values start at 0.
  explicit AttentionMap(std::int64_t n_tokens, std::int64_t sliding_window = 0)
      : n_(n_tokens), window_(sliding_window), p_(static_cast<std::size_t>(n_tokens * (n_tokens + 1) / 2), 0.0f) {}
  std::int64_t n_tokens() const { return n_; }
  std::int64_t first_key(std::int64_t t) const { return window_ > 0 && t + 1 > window_ ? t + 1 - window_ : 0; }
  float* row(std::int64_t t) { return p_.data() + t * (t + 1) / 2; }
  const float* row(std::int64_t t) const { return p_.data() + t * (t + 1) / 2; }

 private:
  std::int64_t n_, window_;
  std::vector<float> p_;
};

/// Probe rows among the first n_rows: the last 5 % and as many drawn from those before, at least 32 of each; ascending.
std::vector<std::int64_t> probe_rows(std::int64_t n_rows, Rng rng);

/// Mean attention that key j gets from the probes that see it (ZipCache, arXiv 2405.14256; its code divides by all later rows, which
/// hides a recency bias: G37). A key that no probe sees gets -1: it ranks last. Keys [first, end).
std::vector<double> probe_scores(const AttentionMap& map, std::span<const std::int64_t> probes, std::int64_t first, std::int64_t end);

/// Attention that keys [first, end) got from rows below n_rows (H2O, arXiv 2306.14048): favours early keys.
std::vector<double> accumulated_scores(const AttentionMap& map, std::int64_t n_rows, std::int64_t first, std::int64_t end);

/// Indices of the `count` highest scores, ascending; ties go to the lower index. Requires: count <= size.
std::vector<std::int32_t> top_set(std::span<const double> scores, std::int64_t count);
/// The same inside every block of block_size scores, as tokens are placed when their exit block leaves the window (METHODS.md 4.9).
/// Requires: a whole number of blocks.
std::vector<std::int32_t> top_set_by_block(std::span<const double> scores, std::int64_t block_size, std::int64_t count_per_block);

/// Sum of mass[i] over a set.
double caught(std::span<const double> mass, std::span<const std::int32_t> set);
/// Members that two ascending sets share.
std::int64_t n_common(std::span<const std::int32_t> a, std::span<const std::int32_t> b);

/// What 8 bits instead of the base scheme would save at each key, of one row (identity 4 of METHODS.md 2). Adds |q|^2 p^2 |v - o|^2 to
/// key_part and p^2 to value_part. v_dot_o: v_j . o; v_norm2: |v_j|^2.
void add_gain_row(const float* p, const float* v_dot_o, const double* v_norm2, double o_norm2, double q_norm2, std::int64_t n_keys, double* key_part,
                  double* value_part);
/// Per-coordinate error variances of the base scheme less those of the salient one.
struct SavedVariance {
  double key = 0, value = 0;
};
/// tau^2 key_part saved.key + d value_part saved.value.
std::vector<double> oracle_gain(std::span<const double> key_part, std::span<const double> value_part, double tau, int head_dim, SavedVariance saved);

/// What decides whether a layer keeps a salient tier.
struct SaliencyEvidence {
  double hit_rate = 0;            ///< on held-out rows
  double catchable = 0;           ///< attention that the best set of this size could get; 0: nothing to catch
  double normalised_entropy = 0;  ///< H / ln n_vis, mean over held-out rows and heads
  bool fitted = false;            ///< the score rests on query statistics: the two below count
  std::int64_t n_statistics_rows = 0;
  double query_shift = 0;         ///< stats::mean_shift of the held-out queries, at the worst head
};
inline constexpr double kMostEntropy = 0.9, kMostQueryShift = 0.5;
inline constexpr std::int64_t kLeastStatisticsRows = 64;
/// Empty, or why the layer does without, each with its number and limit. Source: METHODS.md 6, "Abstain"; limits are defaults.
std::vector<std::string> abstain_reasons(const SaliencyEvidence& evidence);

}  // namespace calib::sens

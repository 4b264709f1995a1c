#pragma once
// How concentrated attention is, by query head and position bucket, from sampled rows; a monoid.
// Legend: Q query heads, B position buckets, R sampled rows, T tokens.

#include <array>
#include <cstdint>
#include <vector>

namespace calib::stats {

struct SampledRows;  // kv_stats.h

/// Shares of the visible keys whose mass is recorded: the top ceil(x n_vis) keys.
inline constexpr std::array<double, 5> kTopShares = {0.01, 0.05, 0.10, 0.20, 0.50};
/// Rows that see fewer keys are skipped: their entropy says nothing about long contexts.
inline constexpr std::int64_t kMinVisibleKeys = 64;

/// Of one softmax row, over the keys it sees.
struct RowConcentration {
  double entropy = 0;             ///< H = -sum p ln p, nats
  double normalised_entropy = 0;  ///< H / ln n_vis
  double n_eff = 0;               ///< 1 / sum p^2
  double sink_mass = 0;           ///< mass on positions below n_sinks
  std::array<double, kTopShares.size()> top_mass{};
};

/// p: the row's probabilities at positions [first, first + n_vis). Units: nats. Requires: n_vis >= 2.
/// Exact: top_mass takes exactly the largest ceil(x n_vis) values; logarithms are fp32 (1e-6 relative of H).
RowConcentration row_concentration(const float* p, std::int64_t first, std::int64_t n_vis, std::int64_t n_sinks);

/// Weighted sums over rows; a mean is sum / weight.
class AttentionStats {
 public:
  static constexpr int kMeasures = 4 + static_cast<int>(kTopShares.size());
  enum Measure { kEntropy = 0, kNormalisedEntropy = 1, kNEff = 2, kSinkMass = 3, kTopMass = 4 };  ///< kTopMass + i for kTopShares[i]

  AttentionStats() = default;
  explicit AttentionStats(int n_q_heads);

  int n_q_heads() const { return n_q_heads_; }
  int n_buckets() const { return n_buckets_; }

  /// Makes room for buckets below `n_buckets`; call before add_head from several threads.
  void reserve_buckets(int n_buckets);
  /// Adds the rows of one query head; p: [R, T] of that head. window: keys a row sees, 0 = all.
  void add_head(int head, const SampledRows& rows, const float* p, std::int64_t n_tokens, std::int64_t window, std::int64_t n_sinks);
  void merge(const AttentionStats& other);

  std::int64_t n_rows(int head, int bucket) const { return n_rows_[cell(head, bucket)]; }
  double weight(int head, int bucket) const { return weight_[cell(head, bucket)]; }
  /// Weighted mean over rows; 0 where no row was sampled.
  double mean(int head, int bucket, int measure) const;

  /// State, for files: n_rows [Q, B], weight [Q, B], sums [Q, B, kMeasures].
  const std::vector<std::int64_t>& rows_state() const { return n_rows_; }
  const std::vector<double>& weight_state() const { return weight_; }
  const std::vector<double>& sum_state() const { return sums_; }
  void set_state(int n_buckets, std::vector<std::int64_t> n_rows, std::vector<double> weight, std::vector<double> sums);

 private:
  std::size_t cell(int head, int bucket) const {
    return static_cast<std::size_t>(head) * static_cast<std::size_t>(n_buckets_) + static_cast<std::size_t>(bucket);
  }
  int n_q_heads_ = 0, n_buckets_ = 0;
  std::vector<std::int64_t> n_rows_;
  std::vector<double> weight_, sums_;
};

/// Mean attention mass that column `column` gets from the sampled rows after it, per query head; p as in SampledRows.
/// Shape: [Q]; 0 where no later row was sampled. Source: METHODS.md 3, functional check of massive activations.
std::vector<double> column_mass(const SampledRows& rows, int n_q_heads, std::int64_t n_tokens, std::int64_t column);
/// True if column_mass > 0.3 in at least 10 % of the query heads.
bool is_functional_sink(const std::vector<double>& mass_per_head);

}  // namespace calib::stats

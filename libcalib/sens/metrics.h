#pragma once
// Exact attention KL of a perturbed score row, and the spread of a score over rows and documents (METHODS.md 2.1, 7). No Torch.

#include <cstdint>
#include <span>
#include <vector>

namespace calib::sens {

/// KL(p || p^) = ln sum p e^delta - sum p delta in double, for a row of probabilities and the change of its scores.
/// Stable for tiny and huge delta; rounding residue below 0 becomes 0. Source: METHODS.md 2, identity 1 (G1, G3).
double attention_kl(std::span<const double> p, std::span<const double> delta);

/// Half the variance of delta under p: the second-order value of attention_kl (a pre-filter only, METHODS.md 2.2).
double half_variance(std::span<const double> p, std::span<const double> delta);

/// The same KL for one fp32 row of the fast path; `delta` is replaced by p^ - p, the change of the probabilities.
/// Exact: within 1e-6 relative of attention_kl for the same inputs.
double attention_kl_row(const float* p, float* delta, std::int64_t n);

/// Squared length of the change of a row's probabilities. fisher_vec knows `linear`; the ratio is what the exponential and the
/// normaliser add: 1 for small delta, (e^(s^2) - 1) / s^2 for Gaussian delta over many equal p, below 1 once the row saturates.
struct ProbabilityChange {
  double exact = 0;   ///< sum (p^ - p)^2
  double linear = 0;  ///< sum (p (delta - mean))^2, mean = sum p delta
};

/// sum (p (delta - sum p delta))^2 of one fp32 row.
double linear_change_norm2(const float* p, const float* delta, std::int64_t n);

/// sum x^2 of one fp32 row.
double row_norm2(const float* x, std::int64_t n);

/// What errors that move together cost, over what they would cost one by one: together / by_token where that lies three standard errors
/// above 1, else 1. by_token: mean of fisher_vec; together: mean of fisher_dir over n_squares squares, each with the variance of chi^2_1.
double coherence(double by_token, double together, std::int64_t n_squares);

/// First-order prediction of E||delta o||^2 for one row with independent errors of per-coordinate variance var_k, var_v
/// (METHODS.md 2.4): tau^2 |q|^2 var_k * sum p^2 |v - o|^2 + d var_v sum p^2. v: [n, d] dense.
double first_order_output_error(std::span<const double> p, std::span<const double> v, std::span<const double> o, double q_norm2,
                                double tau, double var_k, double var_v);

/// Where scored rows stand: shared by all schemes of a unit.
struct RowIndex {
  std::vector<std::int32_t> document;   ///< ascending
  std::vector<std::int64_t> position;   ///< in the document
  std::vector<double> weight;           ///< rows that this row stands for
  std::vector<double> denominator;      ///< ratio of sums: sum(weight * value) / sum(weight * denominator)
  std::size_t size() const { return document.size(); }
};

/// Summary of one score. mean and se in the unit of value / denominator.
struct Spread {
  double mean = 0, se = 0;
  double p99 = 0;           ///< weighted, over rows divided by the mean denominator
  double max = 0;
  double worst_decile = 0;  ///< mean over the worst ceil(0.1 * documents) documents
  std::vector<double> by_bucket;  ///< ratio of sums inside each position bucket; NaN for a bucket without rows
};

/// Resampling plan shared by every score over the same rows, so that thousands of scores cost one index table.
/// Fewer than 8 documents: blocks of 256 consecutive positions are resampled instead (few_docs()).
class Bootstrap {
 public:
  static constexpr int kResamples = 1000;
  static constexpr int kMinDocuments = 8;
  static constexpr std::int64_t kBlockRows = 256;

  Bootstrap(const RowIndex& rows, std::uint64_t seed);
  bool few_docs() const { return few_docs_; }
  std::size_t n_items() const { return n_items_; }
  /// Standard error of sum(numerator) / sum(denominator) per resample; both per item.
  double ratio_se(const std::vector<double>& numerator, const std::vector<double>& denominator) const;
  std::size_t item(std::size_t row) const { return item_of_row_[row]; }

 private:
  bool few_docs_ = false;
  std::size_t n_items_ = 0;
  std::vector<std::uint32_t> item_of_row_;
  std::vector<std::uint16_t> counts_;  ///< [kResamples, n_items]
};

/// Number of position buckets of documents up to seq_len tokens.
int n_position_buckets(std::int64_t seq_len);

/// Requires: value.size() == rows.size(). A score without rows or with denominator 0 is NaN throughout.
Spread summarise(const RowIndex& rows, std::span<const float> value, const Bootstrap& bootstrap, int n_buckets);

/// Linear interpolation at fraction * (n - 1) of ascending values (METHODS.md 9). Requires: not empty.
double percentile(std::span<const double> sorted, double fraction);

/// Mean and its standard error over clusters (documents): m = sum s_d / sum w_d, SE by linearisation, equal to sd / sqrt(n) for
/// equal weights. SE is NaN for fewer than two clusters.
struct ClusterMean {
  double mean = 0, se = 0;
};
ClusterMean cluster_mean(std::span<const double> sum, std::span<const double> weight);

}  // namespace calib::sens

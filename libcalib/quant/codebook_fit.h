#pragma once
// Fits the codebook of a unit: optimal weighted k-means of normalised values in one dimension (METHODS.md 4.5).

#include <cstddef>
#include <vector>

namespace calib::quant {

/// Sums over 4096 bins of [-1, 1].
class NormalisedHistogram {
 public:
  NormalisedHistogram() : weight_(kBins, 0.0), sum_(kBins, 0.0) {}
  /// Values beyond [-1, 1] count as the nearer end. Requires: finite x, weight >= 0.
  void add(double x, double weight);
  const std::vector<double>& weight() const { return weight_; }
  const std::vector<double>& weighted_sum() const { return sum_; }

 private:
  static constexpr std::size_t kBins = 4096;
  std::vector<double> weight_, sum_;
};

/// The k means that minimise sum of w (x - nearest mean)^2 over points that are given in ascending order by their weights and weighted
/// sums w x. Exact: dynamic programming over the points, no seeds, no restarts. Points below 1e-12 of the whole weight do not count (they
/// would drown in the rounding of prefix sums); fewer than k others are all taken, the last one repeated. Ascending. Requires: k >= 1. Throws kNumeric if all
/// weights are 0. Source: Wang & Song 2011 (Ckmeans.1d.dp), with the monotone division of the search by Aggarwal et al.
std::vector<double> optimal_means(const std::vector<double>& weight, const std::vector<double>& weighted_sum, std::size_t k);

/// Q-Norm: the means moved and stretched, (c - m_Q) std(x) / std(Q) + m_x, so that what they code (the nearest mean of each point) has the
/// points' mean and deviation; it costs error and keeps variance. Means that code everything alike come back as they are.
/// Points as above, in ascending order. Source: KVQuant (arXiv 2401.18079) 3.5; METHODS.md 4.5 (G26).
std::vector<double> match_spread(const std::vector<double>& means, const std::vector<double>& weight, const std::vector<double>& weighted_sum);

/// Rounded to the stored grid: int8 levels of one fp32 step, the largest magnitude over 127.
std::vector<float> stored_codebook(const std::vector<double>& means);

}  // namespace calib::quant

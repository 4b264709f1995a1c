#include "libcalib/quant/codebook_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "libcalib/base/error.h"

namespace calib::quant {
namespace {

/// Share of the whole weight that a point must have: far above the rounding of prefix sums, far below what moves a mean.
constexpr double kLeastShare = 1e-12;

/// Prefix sums of the points that have weight.
struct Points {
  std::vector<double> weight{0.0}, sum{0.0};
  std::size_t size() const { return weight.size() - 1; }
  double mean(std::size_t begin, std::size_t end) const { return (sum[end] - sum[begin]) / (weight[end] - weight[begin]); }
  /// What one cluster of [begin, end) saves of sum w x^2.
  double gain(std::size_t begin, std::size_t end) const {
    const double s = sum[end] - sum[begin];
    return s * s / (weight[end] - weight[begin]);
  }
};

/// best[j] = max over i < j of before[i] + gain(i, j) for j in [begin, end), whose maximising i rises with j and lies in [low, high].
void search(const Points& points, const std::vector<double>& before, std::size_t begin, std::size_t end, std::size_t low, std::size_t high,
            std::vector<double>& best, std::vector<std::size_t>& from) {
  if (begin >= end) return;
  const std::size_t j = begin + (end - begin) / 2;
  best[j] = -std::numeric_limits<double>::infinity();
  for (std::size_t i = low; i <= std::min(high, j - 1); ++i) {
    const double value = before[i] + points.gain(i, j);
    if (value > best[j]) best[j] = value, from[j] = i;
  }
  search(points, before, begin, j, low, from[j], best, from);
  search(points, before, j + 1, end, from[j], high, best, from);
}

}  // namespace

void NormalisedHistogram::add(double x, double weight) {
  const double inside = std::clamp(x, -1.0, 1.0);
  const auto bin = std::min(kBins - 1, static_cast<std::size_t>((inside + 1) / 2 * static_cast<double>(kBins)));
  weight_[bin] += weight;
  sum_[bin] += weight * inside;
}

std::vector<double> optimal_means(const std::vector<double>& weight, const std::vector<double>& weighted_sum, std::size_t k) {
  CALIB_CHECK(weight.size() == weighted_sum.size() && k >= 1);
  Points points;
  const double least = kLeastShare * std::accumulate(weight.begin(), weight.end(), 0.0);
  for (std::size_t i = 0; i < weight.size(); ++i) {
    if (!(weight[i] > least)) continue;
    points.weight.push_back(points.weight.back() + weight[i]);
    points.sum.push_back(points.sum.back() + weighted_sum[i]);
  }
  const std::size_t n = points.size();
  if (n == 0) fail(ErrorKind::kNumeric, "codebook", "all values have weight 0");
  std::vector<double> means;
  if (n <= k) {
    for (std::size_t i = 0; i < n; ++i) means.push_back(points.mean(i, i + 1));
    means.resize(k, means.back());
    return means;
  }
  std::vector<double> before(n + 1, 0.0), best(n + 1, 0.0);
  for (std::size_t j = 1; j <= n; ++j) before[j] = points.gain(0, j);
  std::vector<std::vector<std::size_t>> from(k, std::vector<std::size_t>(n + 1, 0));
  for (std::size_t c = 1; c < k; ++c) {  // clusters 0..c hold at least one point each
    search(points, before, c + 1, n + 1, c, n, best, from[c]);
    std::swap(before, best);
  }
  std::size_t end = n;
  for (std::size_t c = k; c-- > 0;) {
    const std::size_t begin = c == 0 ? 0 : from[c][end];
    means.push_back(points.mean(begin, end));
    end = begin;
  }
  std::reverse(means.begin(), means.end());
  return means;
}

std::vector<double> match_spread(const std::vector<double>& means, const std::vector<double>& weight, const std::vector<double>& weighted_sum) {
  CALIB_CHECK(weight.size() == weighted_sum.size() && !means.empty());
  double total = 0, sum_x = 0, sum_q = 0, sum_xx = 0, sum_qq = 0;
  std::size_t nearest = 0;
  for (std::size_t i = 0; i < weight.size(); ++i) {
    if (!(weight[i] > 0)) continue;
    const double w = weight[i], x = weighted_sum[i] / w;
    while (nearest + 1 < means.size() && 2 * x > means[nearest] + means[nearest + 1]) ++nearest;
    const double q = means[nearest];
    total += w, sum_x += w * x, sum_q += w * q, sum_xx += w * x * x, sum_qq += w * q * q;
  }
  if (!(total > 0)) fail(ErrorKind::kNumeric, "codebook", "all values have weight 0");
  const double mean_x = sum_x / total, mean_q = sum_q / total;
  const double variance_x = std::max(0.0, sum_xx / total - mean_x * mean_x), variance_q = sum_qq / total - mean_q * mean_q;
  if (!(variance_q > 1e-12 * variance_x)) return means;
  const double factor = std::sqrt(variance_x / variance_q);
  std::vector<double> moved;
  for (const double c : means) moved.push_back((c - mean_q) * factor + mean_x);
  return moved;
}

std::vector<float> stored_codebook(const std::vector<double>& means) {
  double largest = 0;
  for (const double m : means) largest = std::max(largest, std::fabs(m));
  CALIB_CHECK(std::isfinite(largest));
  const float step = largest > 0 ? static_cast<float>(largest / 127) : 1.0f / 127;
  std::vector<float> entries;
  for (const double m : means) entries.push_back(static_cast<float>(std::nearbyint(m / static_cast<double>(step))) * step);
  // All entries 0 would have no step of their own: constant values of a unit sit at one end of their range, never here.
  if (largest == 0) entries.back() = 127 * step;
  return entries;
}

}  // namespace calib::quant

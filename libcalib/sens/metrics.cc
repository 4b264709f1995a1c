#include "libcalib/sens/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "libcalib/base/error.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/base/rng.h"
#include "libcalib/sens/wide_clones.h"

namespace calib::sens {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// e^x - 1 - x without cancellation: series of x^2 (1/2 + x/6 + ...) near 0.
double exp_remainder(double x) {
  if (std::fabs(x) < 1e-3) return x * x * (0.5 + x * (1.0 / 6.0 + x / 24.0));
  return std::expm1(x) - x;
}

// x^2 * phi(x) by the first ten terms of the series; truncation below 1e-11 relative for |x| <= 0.5.
inline float short_exp_remainder(float x) {
  float s = 1.0f / 3628800.0f;
  s = s * x + 1.0f / 362880.0f;
  s = s * x + 1.0f / 40320.0f;
  s = s * x + 1.0f / 5040.0f;
  s = s * x + 1.0f / 720.0f;
  s = s * x + 1.0f / 120.0f;
  s = s * x + 1.0f / 24.0f;
  s = s * x + 1.0f / 6.0f;
  s = s * x + 0.5f;
  return s * x * x;
}

// All terms p (e^x - 1 - x) are >= 0, so fp32 terms with a double sum per lane lose nothing that matters.
CALIB_WIDE_CLONES double short_row(const float* __restrict p, float* __restrict delta, std::int64_t n, float mean) {
  constexpr int kLanes = 16;
  double total = 0;
  float lane[kLanes] = {};
  std::int64_t i = 0, since_flush = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float x = delta[i + l] - mean;
      const float r = short_exp_remainder(x);
      lane[l] += p[i + l] * r;
      delta[i + l] = x + r;  // expm1(x)
    }
    if (++since_flush == 16) {
      for (int l = 0; l < kLanes; ++l) total += lane[l], lane[l] = 0;
      since_flush = 0;
    }
  }
  for (int l = 0; l < kLanes; ++l) total += lane[l];
  for (; i < n; ++i) {
    const float x = delta[i] - mean;
    const float r = short_exp_remainder(x);
    total += static_cast<double>(p[i]) * r;
    delta[i] = x + r;
  }
  return total;
}

CALIB_WIDE_CLONES void row_moments(const float* __restrict p, const float* __restrict delta, std::int64_t n, double* mean, float* low,
                                   float* high) {
  constexpr int kLanes = 8;
  double sum[kLanes] = {};
  float lo[kLanes], hi[kLanes];
  for (int l = 0; l < kLanes; ++l) lo[l] = delta[0], hi[l] = delta[0];
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float d = delta[i + l];
      sum[l] += static_cast<double>(p[i + l]) * static_cast<double>(d);
      lo[l] = d < lo[l] ? d : lo[l];
      hi[l] = d > hi[l] ? d : hi[l];
    }
  double total = 0;
  *low = lo[0];
  *high = hi[0];
  for (int l = 0; l < kLanes; ++l) {
    total += sum[l];
    *low = std::min(*low, lo[l]);
    *high = std::max(*high, hi[l]);
  }
  for (; i < n; ++i) {
    total += static_cast<double>(p[i]) * static_cast<double>(delta[i]);
    *low = std::min(*low, delta[i]);
    *high = std::max(*high, delta[i]);
  }
  *mean = total;
}

CALIB_WIDE_CLONES void scale_change(const float* __restrict p, float* __restrict delta, std::int64_t n, float epsilon, float inverse) {
  for (std::int64_t i = 0; i < n; ++i) delta[i] = p[i] * (delta[i] - epsilon) * inverse;
}

// sum (p (x - mean))^2.
CALIB_WIDE_CLONES double weighted_norm2(const float* __restrict p, const float* __restrict x, std::int64_t n, float mean) {
  constexpr int kLanes = 8;
  double sum[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const double y = static_cast<double>(p[i + l]) * static_cast<double>(x[i + l] - mean);
      sum[l] += y * y;
    }
  double total = 0;
  for (int l = 0; l < kLanes; ++l) total += sum[l];
  for (; i < n; ++i) {
    const double y = static_cast<double>(p[i]) * static_cast<double>(x[i] - mean);
    total += y * y;
  }
  return total;
}

CALIB_WIDE_CLONES double plain_norm2(const float* x, std::int64_t n) {
  constexpr int kLanes = 8;
  double sum[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) sum[l] += static_cast<double>(x[i + l]) * static_cast<double>(x[i + l]);
  double total = 0;
  for (int l = 0; l < kLanes; ++l) total += sum[l];
  for (; i < n; ++i) total += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return total;
}

// ln sum p e^x for rows whose largest x would overflow expm1, shifted by the largest x.
double shifted_log_sum(std::span<const double> p, std::span<const double> delta, double mean) {
  double top = -std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < p.size(); ++i)
    if (p[i] > 0) top = std::max(top, delta[i] - mean);
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i)
    if (p[i] > 0) sum += p[i] * std::exp(delta[i] - mean - top);
  return top + std::log(sum);
}

}  // namespace

double attention_kl(std::span<const double> p, std::span<const double> delta) {
  CALIB_CHECK(p.size() == delta.size());
  double mean = 0, mass = 0;
  for (std::size_t i = 0; i < p.size(); ++i) mean += p[i] * delta[i], mass += p[i];
  if (mass > 0) mean /= mass;
  double high = 0;
  for (std::size_t i = 0; i < p.size(); ++i)
    if (p[i] > 0) high = std::max(high, delta[i] - mean);
  if (high > 30) return std::max(0.0, shifted_log_sum(p, delta, mean));
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) sum += p[i] * exp_remainder(delta[i] - mean);
  return std::max(0.0, std::log1p(sum));
}

double half_variance(std::span<const double> p, std::span<const double> delta) {
  CALIB_CHECK(p.size() == delta.size());
  double mean = 0, sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) mean += p[i] * delta[i];
  for (std::size_t i = 0; i < p.size(); ++i) sum += p[i] * (delta[i] - mean) * (delta[i] - mean);
  return 0.5 * sum;
}

double attention_kl_row(const float* p, float* delta, std::int64_t n) {
  if (n <= 0) return 0;
  double mean = 0;
  float low = 0, high = 0;
  row_moments(p, delta, n, &mean, &low, &high);
  const double low_x = low - mean, high_x = high - mean;
  double sum = 0;
  if (low_x >= -0.5 && high_x <= 0.5) {
    sum = short_row(p, delta, n, static_cast<float>(mean));
  } else if (high_x <= 30) {
    for (std::int64_t i = 0; i < n; ++i) {
      const double x = delta[i] - mean, r = exp_remainder(x);
      sum += static_cast<double>(p[i]) * r;
      delta[i] = static_cast<float>(x + r);
    }
  } else {
    double log_sum = 0;
    {
      std::vector<double> wide_p(p, p + n), wide_delta(delta, delta + n);
      log_sum = shifted_log_sum(wide_p, wide_delta, mean);
    }
    for (std::int64_t i = 0; i < n; ++i)
      delta[i] = p[i] > 0 ? static_cast<float>(p[i] * std::expm1(delta[i] - mean - log_sum)) : 0.0f;
    return std::max(0.0, log_sum);
  }
  // p^ = p e^x / (1 + sum), so p^ - p = p (expm1(x) - sum) / (1 + sum).
  scale_change(p, delta, n, static_cast<float>(sum), static_cast<float>(1.0 / (1.0 + sum)));
  return std::max(0.0, std::log1p(sum));
}

double linear_change_norm2(const float* p, const float* delta, std::int64_t n) {
  if (n <= 0) return 0;
  double mean = 0;
  float low = 0, high = 0;
  row_moments(p, delta, n, &mean, &low, &high);
  return weighted_norm2(p, delta, n, static_cast<float>(mean));
}

double row_norm2(const float* x, std::int64_t n) { return plain_norm2(x, n); }

double coherence(double by_token, double together, std::int64_t n_squares) {
  if (!(by_token > 0)) return 1.0;
  const double ratio = together / by_token;
  return ratio > 1 + 3 * std::sqrt(2.0 / static_cast<double>(n_squares)) ? ratio : 1.0;
}

double first_order_output_error(std::span<const double> p, std::span<const double> v, std::span<const double> o, double q_norm2,
                                double tau, double var_k, double var_v) {
  const std::size_t d = o.size();
  CALIB_CHECK(v.size() == p.size() * d);
  double a = 0, b = 0;
  for (std::size_t j = 0; j < p.size(); ++j) {
    double distance = 0;
    for (std::size_t c = 0; c < d; ++c) distance += (v[j * d + c] - o[c]) * (v[j * d + c] - o[c]);
    a += p[j] * p[j] * distance;
    b += p[j] * p[j];
  }
  return tau * tau * q_norm2 * var_k * a + static_cast<double>(d) * var_v * b;
}

Bootstrap::Bootstrap(const RowIndex& rows, std::uint64_t seed) {
  std::size_t n_documents = 0;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (i == 0 || rows.document[i] != rows.document[i - 1]) ++n_documents;
  few_docs_ = n_documents < kMinDocuments;
  item_of_row_.resize(rows.size());
  std::int64_t last_block = -1;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t block = few_docs_ ? rows.position[i] / kBlockRows : 0;
    if (i == 0 || rows.document[i] != rows.document[i - 1] || block != last_block) ++n_items_;
    last_block = block;
    item_of_row_[i] = static_cast<std::uint32_t>(n_items_ - 1);
  }
  counts_.assign(n_items_ * kResamples, 0);
  for (int r = 0; r < kResamples && n_items_ > 0; ++r) {
    Rng rng = Rng::for_item(seed, 0x626F6F74, static_cast<std::uint64_t>(r));
    for (std::size_t i = 0; i < n_items_; ++i) ++counts_[static_cast<std::size_t>(r) * n_items_ + rng.below(n_items_)];
  }
}

double Bootstrap::ratio_se(const std::vector<double>& numerator, const std::vector<double>& denominator) const {
  CALIB_CHECK(numerator.size() == n_items_ && denominator.size() == n_items_);
  if (n_items_ < 2) return kNaN;
  double sum = 0, sum_squares = 0, first = 0;
  int n = 0;
  for (int r = 0; r < kResamples; ++r) {
    double a = 0, b = 0;
    const std::uint16_t* count = counts_.data() + static_cast<std::size_t>(r) * n_items_;
    for (std::size_t i = 0; i < n_items_; ++i) a += count[i] * numerator[i], b += count[i] * denominator[i];
    if (b <= 0) continue;
    if (n == 0) first = a / b;
    const double x = a / b - first;  // shifted: the spread may be tiny beside the mean
    sum += x;
    sum_squares += x * x;
    ++n;
  }
  if (n < 2) return kNaN;
  return std::sqrt(std::max(0.0, (sum_squares - sum * sum / n) / (n - 1)));
}

int n_position_buckets(std::int64_t seq_len) { return seq_len > 0 ? position_bucket(seq_len - 1) + 1 : 0; }

Spread summarise(const RowIndex& rows, std::span<const float> value, const Bootstrap& bootstrap, int n_buckets) {
  CALIB_CHECK(value.size() == rows.size());
  const std::size_t n = rows.size(), n_bins = static_cast<std::size_t>(n_buckets);
  Spread out;
  std::vector<double> item_sum(bootstrap.n_items(), 0.0), item_den(bootstrap.n_items(), 0.0);
  std::vector<double> bin_sum(n_bins, 0.0), bin_den(n_bins, 0.0);
  std::vector<std::pair<double, double>> documents;  // sum, denominator
  double total = 0, total_den = 0, total_weight = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double a = rows.weight[i] * static_cast<double>(value[i]), b = rows.weight[i] * rows.denominator[i];
    if (i == 0 || rows.document[i] != rows.document[i - 1]) documents.emplace_back(0.0, 0.0);
    documents.back().first += a;
    documents.back().second += b;
    item_sum[bootstrap.item(i)] += a;
    item_den[bootstrap.item(i)] += b;
    const auto bin = static_cast<std::size_t>(position_bucket(rows.position[i]));
    CALIB_CHECK(bin < n_bins);
    bin_sum[bin] += a;
    bin_den[bin] += b;
    total += a;
    total_den += b;
    total_weight += rows.weight[i];
  }
  out.by_bucket.assign(n_bins, kNaN);
  if (n == 0 || total_den <= 0) {
    out.mean = out.se = out.p99 = out.max = out.worst_decile = kNaN;
    return out;
  }
  out.mean = total / total_den;
  out.se = bootstrap.ratio_se(item_sum, item_den);
  for (std::size_t b = 0; b < n_bins; ++b)
    if (bin_den[b] > 0) out.by_bucket[b] = bin_sum[b] / bin_den[b];

  const double mean_den = total_den / total_weight;
  // A heap gives the largest values in order without sorting the rest.
  std::vector<std::uint32_t> heap(n);
  std::iota(heap.begin(), heap.end(), 0u);
  const auto below = [&](std::uint32_t a, std::uint32_t b) { return value[a] != value[b] ? value[a] < value[b] : a > b; };
  std::make_heap(heap.begin(), heap.end(), below);
  out.max = value[heap[0]] / mean_den;
  double above = 0;
  for (auto end = heap.end(); end != heap.begin() && above <= 0.01 * total_weight; --end) {
    out.p99 = value[heap[0]] / mean_den;
    above += rows.weight[heap[0]];
    std::pop_heap(heap.begin(), end, below);
  }

  std::vector<std::pair<double, std::size_t>> ranked;
  for (std::size_t d = 0; d < documents.size(); ++d)
    if (documents[d].second > 0) ranked.emplace_back(documents[d].first / documents[d].second, d);
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  const std::size_t worst = (ranked.size() + 9) / 10;
  double worst_sum = 0, worst_den = 0;
  for (std::size_t k = 0; k < worst; ++k) {
    worst_sum += documents[ranked[k].second].first;
    worst_den += documents[ranked[k].second].second;
  }
  out.worst_decile = worst_den > 0 ? worst_sum / worst_den : kNaN;
  return out;
}

double percentile(std::span<const double> sorted, double fraction) {
  CALIB_CHECK(!sorted.empty());
  const double at = fraction * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(std::floor(at));
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

ClusterMean cluster_mean(std::span<const double> sum, std::span<const double> weight) {
  CALIB_CHECK(sum.size() == weight.size());
  ClusterMean out;
  double total = 0, total_weight = 0;
  std::size_t n = 0;
  for (std::size_t d = 0; d < sum.size(); ++d) {
    total += sum[d];
    total_weight += weight[d];
    n += weight[d] > 0 ? 1 : 0;
  }
  out.mean = total_weight > 0 ? total / total_weight : kNaN;
  if (n < 2) {
    out.se = kNaN;
    return out;
  }
  double squares = 0;
  for (std::size_t d = 0; d < sum.size(); ++d) {
    const double e = sum[d] - out.mean * weight[d];
    squares += e * e;
  }
  out.se = std::sqrt(squares * static_cast<double>(n) / static_cast<double>(n - 1)) / total_weight;
  return out;
}

}  // namespace calib::sens

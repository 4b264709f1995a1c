#include "libcalib/sens/saliency.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "libcalib/base/error.h"
#include "libcalib/sens/wide_clones.h"

namespace calib::sens {
namespace {

constexpr std::int64_t kLeastProbes = 32;

/// k' M k for symmetric M, both in double: keys of one head in a dense row each.
CALIB_WIDE_CLONES double quadratic_form(const double* m, const double* k, int d) {
  double sum = 0;
  for (int r = 0; r < d; ++r) {
    const double* const row = m + static_cast<std::ptrdiff_t>(r) * d;
    double part[8] = {};
    int c = 0;
    for (; c + 8 <= d; c += 8)
      for (int u = 0; u < 8; ++u) part[u] += row[c + u] * k[c + u];
    double rest = 0;
    for (; c < d; ++c) rest += row[c] * k[c];
    for (const double p : part) rest += p;
    sum += k[r] * rest;
  }
  return sum;
}

void softmax(std::vector<double>& z) {
  const double largest = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (double& x : z) sum += x = std::exp(x - largest);
  for (double& x : z) x /= sum;
}

/// Moves the `count` best of [begin, end) to the front; ties go to the lower index.
void select_best(std::span<const double> scores, std::vector<std::int32_t>::iterator begin, std::vector<std::int32_t>::iterator end, std::int64_t count) {
  std::nth_element(begin, begin + count, end, [&](std::int32_t a, std::int32_t b) {
    const double x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  });
}

}  // namespace

void rotate_row(const LayerGeometry& layer, std::int64_t position, double* x) {
  quant::RopeTurn(layer, position, layer.attention_factor).apply(x);
}

std::vector<double> expected_logits(const FutureQuery& query, const LayerGeometry& layer, std::int64_t length, const float* k, std::int64_t stride,
                                    std::int64_t n_keys) {
  const std::size_t d = query.linear.size();
  const quant::RopeTurn back(layer, -length, 1.0);
  std::vector<double> out, key(d);
  for (std::int64_t j = 0; j < n_keys; ++j) {
    for (std::size_t c = 0; c < d; ++c) key[c] = static_cast<double>(k[j * stride + static_cast<std::int64_t>(c)]);
    back.apply(key.data());
    double sum = 0;
    for (std::size_t c = 0; c < d; ++c) sum += query.linear[c] * key[c];
    out.push_back(sum + quadratic_form(query.quadratic.data(), key.data(), static_cast<int>(d)));
  }
  return out;
}

std::vector<double> expected_attention(std::span<const std::vector<double>> logits, std::span<const double> value_norm) {
  CALIB_CHECK(!logits.empty());
  std::vector<double> out(value_norm.size(), 0.0);
  if (out.empty()) return out;
  for (std::vector<double> z : logits) {
    CALIB_CHECK(z.size() == out.size());
    softmax(z);
    for (std::size_t j = 0; j < out.size(); ++j) out[j] += z[j] / static_cast<double>(logits.size());
  }
  for (std::size_t j = 0; j < out.size(); ++j) out[j] *= value_norm[j];
  return out;
}

std::vector<std::int64_t> probe_rows(std::int64_t n_rows, Rng rng) {
  const std::int64_t half = std::max((n_rows + 19) / 20, kLeastProbes);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(n_rows));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  if (n_rows <= 2 * half) return rows;
  const std::int64_t n_before = n_rows - half;
  for (std::int64_t i = 0; i < half; ++i)
    std::swap(rows[static_cast<std::size_t>(i)], rows[static_cast<std::size_t>(i) + rng.below(static_cast<std::uint64_t>(n_before - i))]);
  rows.erase(rows.begin() + half, rows.begin() + n_before);
  std::sort(rows.begin(), rows.end());
  return rows;
}

std::vector<double> probe_scores(const AttentionMap& map, std::span<const std::int64_t> probes, std::int64_t first, std::int64_t end) {
  const auto n = static_cast<std::size_t>(std::max<std::int64_t>(0, end - first));
  std::vector<double> sum(n, 0.0);
  std::vector<std::int64_t> seen_by(n, 0);
  for (const std::int64_t t : probes) {
    const float* const p = map.row(t);
    for (std::int64_t j = std::max(first, map.first_key(t)); j < std::min(end, t + 1); ++j) {
      sum[static_cast<std::size_t>(j - first)] += static_cast<double>(p[j]);
      ++seen_by[static_cast<std::size_t>(j - first)];
    }
  }
  for (std::size_t i = 0; i < n; ++i) sum[i] = seen_by[i] > 0 ? sum[i] / static_cast<double>(seen_by[i]) : -1.0;
  return sum;
}

std::vector<double> accumulated_scores(const AttentionMap& map, std::int64_t n_rows, std::int64_t first, std::int64_t end) {
  std::vector<double> sum(static_cast<std::size_t>(std::max<std::int64_t>(0, end - first)), 0.0);
  for (std::int64_t t = first; t < n_rows; ++t) {
    const float* const p = map.row(t);
    for (std::int64_t j = first; j < std::min(end, t + 1); ++j) sum[static_cast<std::size_t>(j - first)] += static_cast<double>(p[j]);
  }
  return sum;
}

std::vector<std::int32_t> top_set(std::span<const double> scores, std::int64_t count) {
  return top_set_by_block(scores, static_cast<std::int64_t>(scores.size()), count);
}

std::vector<std::int32_t> top_set_by_block(std::span<const double> scores, std::int64_t block_size, std::int64_t count_per_block) {
  std::vector<std::int32_t> out;
  if (scores.empty()) return out;
  CALIB_CHECK(block_size > 0 && count_per_block >= 0 && count_per_block <= block_size && static_cast<std::int64_t>(scores.size()) % block_size == 0);
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  for (auto at = order.begin(); at != order.end(); at += block_size) {
    select_best(scores, at, at + block_size, count_per_block);
    out.insert(out.end(), at, at + count_per_block);
  }
  std::sort(out.begin(), out.end());
  return out;
}

double caught(std::span<const double> mass, std::span<const std::int32_t> set) {
  double sum = 0;
  for (const std::int32_t i : set) sum += mass[static_cast<std::size_t>(i)];
  return sum;
}

std::int64_t n_common(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  std::int64_t n = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    n += a[i] == b[j];
    a[i] < b[j] ? ++i : b[j] < a[i] ? ++j : (++i, ++j);
  }
  return n;
}

CALIB_WIDE_CLONES void add_gain_row(const float* p, const float* v_dot_o, const double* v_norm2, double o_norm2, double q_norm2, std::int64_t n_keys,
                                    double* key_part, double* value_part) {
  for (std::int64_t j = 0; j < n_keys; ++j) {
    const double weight = static_cast<double>(p[j]) * static_cast<double>(p[j]);
    const double distance2 = v_norm2[j] - 2 * static_cast<double>(v_dot_o[j]) + o_norm2;
    key_part[j] += q_norm2 * weight * (distance2 > 0 ? distance2 : 0.0);
    value_part[j] += weight;
  }
}

std::vector<double> oracle_gain(std::span<const double> key_part, std::span<const double> value_part, double tau, int head_dim, SavedVariance saved) {
  CALIB_CHECK(key_part.size() == value_part.size());
  std::vector<double> out(key_part.size());
  for (std::size_t j = 0; j < out.size(); ++j) out[j] = tau * tau * key_part[j] * saved.key + head_dim * value_part[j] * saved.value;
  return out;
}

std::vector<std::string> abstain_reasons(const SaliencyEvidence& e) {
  std::vector<std::string> out;
  if (!(e.catchable > 0)) out.push_back("no later row attends to coded tokens: nothing to catch");
  if (e.hit_rate < kLeastHitRate) out.push_back(fmt::format("hit rate {:.3f} < {:.2f}", e.hit_rate, kLeastHitRate));
  if (e.normalised_entropy > kMostEntropy)
    out.push_back(fmt::format("attention entropy {:.3f} of ln n > {:.1f}: all tokens weigh alike", e.normalised_entropy, kMostEntropy));
  if (e.fitted && e.n_statistics_rows < kLeastStatisticsRows)
    out.push_back(fmt::format("{} query rows in the statistics < {}", e.n_statistics_rows, kLeastStatisticsRows));
  if (e.fitted && e.query_shift > kMostQueryShift)
    out.push_back(fmt::format("query shift {:.3f} > {:.1f}: queries have moved away from the statistics", e.query_shift, kMostQueryShift));
  return out;
}

}  // namespace calib::sens

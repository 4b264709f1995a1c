#include "libcalib/sens/kld_block.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "libcalib/base/error.h"
#include "libcalib/sens/metrics.h"
#include "libcalib/sens/wide_clones.h"

namespace calib::sens {
namespace {

constexpr std::int64_t kBlockRows = 256;
constexpr double kOf95Percent = 1.96;

// sum p (a - b) in double; lanes are added in a fixed order.
CALIB_WIDE_CLONES double weighted_difference(const float* __restrict p, const float* __restrict a, const float* __restrict b, std::int64_t n) {
  constexpr int kLanes = 8;
  double lane[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l)
      lane[l] += static_cast<double>(p[i + l]) * (static_cast<double>(a[i + l]) - static_cast<double>(b[i + l]));
  for (; i < n; ++i) lane[0] += static_cast<double>(p[i]) * (static_cast<double>(a[i]) - static_cast<double>(b[i]));
  double sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += lane[l];
  return sum;
}

CALIB_WIDE_CLONES double weighted_sum(const float* __restrict p, const float* __restrict a, std::int64_t n) {
  constexpr int kLanes = 8;
  double lane[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lane[l] += static_cast<double>(p[i + l]) * static_cast<double>(a[i + l]);
  for (; i < n; ++i) lane[0] += static_cast<double>(p[i]) * static_cast<double>(a[i]);
  double sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += lane[l];
  return sum;
}

CALIB_WIDE_CLONES float largest(const float* x, std::int64_t n) {
  constexpr int kLanes = 8;
  if (n < kLanes) return *std::max_element(x, x + n);
  float lane[kLanes];
  for (int l = 0; l < kLanes; ++l) lane[l] = x[l];
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  float top = lane[0];
  for (int l = 0; l < kLanes; ++l) top = std::max(top, lane[l]);
  for (; i < n; ++i) top = std::max(top, x[i]);
  return top;
}

std::int64_t argmax(const float* x, std::int64_t n) { return std::find(x, x + n, largest(x, n)) - x; }

// Mean of f(row) with its error over clusters of rows.
template <typename F>
MeanSe clustered(std::span<const KldRow> rows, const std::vector<std::size_t>& cluster_begin, F f) {
  const std::size_t n = cluster_begin.size() - 1;
  std::vector<double> sum(n, 0.0), weight(n, 0.0);
  for (std::size_t c = 0; c < n; ++c) {
    for (std::size_t i = cluster_begin[c]; i < cluster_begin[c + 1]; ++i) sum[c] += f(rows[i]);
    weight[c] = static_cast<double>(cluster_begin[c + 1] - cluster_begin[c]);
  }
  const ClusterMean m = cluster_mean(sum, weight);
  return {m.mean, n < 2 ? 0.0 : m.se};
}

struct Clusters {
  std::vector<std::size_t> begin;  // n + 1 entries
  std::int64_t n_documents = 0;
};

Clusters clusters_of(std::span<const KldRow> rows) {
  Clusters c;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (i == 0 || rows[i].document != rows[i - 1].document) c.begin.push_back(i);
  c.n_documents = static_cast<std::int64_t>(c.begin.size());
  if (c.n_documents == 1) {
    c.begin.clear();
    for (std::size_t i = 0; i < rows.size(); ++i)
      if (i == 0 || rows[i].position / kBlockRows != rows[i - 1].position / kBlockRows) c.begin.push_back(i);
  }
  c.begin.push_back(rows.size());
  return c;
}

/// Rows, their KLD and their ln(t + 1) summed in one position bucket.
struct BucketSums {
  double rows = 0, kld = 0, log_position = 0;
};
using BucketTable = std::vector<BucketSums>;

// Slope of ln(mean KLD) over the buckets of `all` less those of `left_out`.
std::optional<double> slope_without(const BucketTable& all, const BucketTable& left_out) {
  double weight = 0, x_mean = 0, y_mean = 0;
  std::vector<std::array<double, 3>> points;  // rows, ln position, ln KLD
  for (std::size_t b = 0; b < all.size(); ++b) {
    BucketSums s = all[b];
    if (b < left_out.size()) s.rows -= left_out[b].rows, s.kld -= left_out[b].kld, s.log_position -= left_out[b].log_position;
    if (s.rows < 0.5 || !(s.kld > 0)) continue;
    points.push_back({s.rows, s.log_position / s.rows, std::log(s.kld / s.rows)});
    weight += s.rows, x_mean += s.log_position, y_mean += s.rows * points.back()[2];
  }
  if (points.size() < 2) return std::nullopt;
  x_mean /= weight, y_mean /= weight;
  double xx = 0, xy = 0;
  for (const auto& [w, x, y] : points) xx += w * (x - x_mean) * (x - x_mean), xy += w * (x - x_mean) * (y - y_mean);
  return xy / xx;
}

}  // namespace

MeanSe over_documents(const std::vector<double>& values) {
  const ClusterMean m = cluster_mean(values, std::vector<double>(values.size(), 1.0));
  return {m.mean, values.size() < 2 ? 0.0 : m.se};
}

namespace {

MeanSe exponential(const MeanSe& m) { return {std::exp(m.mean), std::exp(m.mean) * m.se}; }

std::int64_t bucket_begin(std::size_t b) { return b == 0 ? 0 : std::int64_t{128} << b; }

std::string flag_text(const EvalContender& c, const std::string& flag) {
  if (flag == "kld_slope")
    return fmt::format("{}: its loss grows with position, slope of ln KLD against ln position {:.2f} ± {:.2f}, above {:g}", c.name, c.kld_slope->mean,
                       c.kld_slope->se, kSteepSlope);
  const auto further = [](const EvalBucket& a, const EvalBucket& b) { return std::abs(a.entropy_shift.mean) < std::abs(b.entropy_shift.mean); };
  const EvalBucket& worst = *std::max_element(c.buckets.begin(), c.buckets.end(), further);
  const std::string shift = fmt::format("{:+.3g} ± {:.2g} nats at positions {} to {}", worst.entropy_shift.mean, worst.entropy_shift.se, worst.first_position,
                                        worst.end_position - 1);
  if (flag == "entropy_shift")
    return fmt::format("{}: the entropy of its next-token distributions is shifted by {}, beyond {:g}", c.name, shift, kEntropyShiftMax);
  return fmt::format("{}: the entropy of its next-token distributions drifts further from one position bucket to the next, {}", c.name, shift);
}

}  // namespace

ReferenceRow make_reference_row(const float* log_p, const float* p, std::int64_t vocab_size, std::int64_t label) {
  CALIB_CHECK(label >= 0 && label < vocab_size);
  return {log_p, p, vocab_size, label, argmax(log_p, vocab_size), -weighted_sum(p, log_p, vocab_size)};
}

KldRow compare_row(const ReferenceRow& reference, const float* log_q, const float* q) {
  KldRow row;
  const auto label = static_cast<std::size_t>(reference.label);
  row.kld = std::max(0.0, weighted_difference(reference.p, reference.log_p, log_q, reference.vocab_size));
  row.nll_ref = -static_cast<double>(reference.log_p[label]);
  row.nll = -static_cast<double>(log_q[label]);
  row.delta_p = 100.0 * (std::exp(-row.nll) - std::exp(-row.nll_ref));
  row.entropy_shift = -weighted_sum(q, log_q, reference.vocab_size) - reference.entropy;
  row.same_top = argmax(log_q, reference.vocab_size) == reference.top;
  return row;
}

KldBlock summarise_kld(std::span<const KldRow> rows) {
  CALIB_CHECK(!rows.empty());
  const Clusters clusters = clusters_of(rows);
  KldBlock out;
  out.n_rows = static_cast<std::int64_t>(rows.size());
  out.n_documents = clusters.n_documents;
  out.ppl_q = exponential(clustered(rows, clusters.begin, [](const KldRow& r) { return r.nll; }));
  out.ppl_base = exponential(clustered(rows, clusters.begin, [](const KldRow& r) { return r.nll_ref; }));
  out.ppl_ratio = exponential(clustered(rows, clusters.begin, [](const KldRow& r) { return r.nll - r.nll_ref; }));
  out.kld = clustered(rows, clusters.begin, [](const KldRow& r) { return r.kld; });
  out.delta_p = clustered(rows, clusters.begin, [](const KldRow& r) { return r.delta_p; });
  const MeanSe square = clustered(rows, clusters.begin, [](const KldRow& r) { return r.delta_p * r.delta_p; });
  out.rms_delta_p.mean = std::sqrt(square.mean);
  out.rms_delta_p.se = square.mean > 0 ? square.se / (2 * out.rms_delta_p.mean) : 0.0;  // d sqrt(x) = dx / (2 sqrt(x))
  out.same_top_p = clustered(rows, clusters.begin, [](const KldRow& r) { return r.same_top ? 100.0 : 0.0; });

  std::vector<double> sorted;
  sorted.reserve(rows.size());
  for (const KldRow& r : rows) sorted.push_back(r.kld);
  std::sort(sorted.begin(), sorted.end());
  out.kld_min = sorted.front();
  out.kld_max = sorted.back();
  for (std::size_t i = 0; i < kKldPercentiles.size(); ++i) out.kld_percentiles[i] = percentile(sorted, kKldPercentiles[i]);
  return out;
}

std::vector<double> document_klds(std::span<const KldRow> rows) {
  std::vector<double> out;
  for (std::size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    double sum = 0;
    for (end = begin; end < rows.size() && rows[end].document == rows[begin].document; ++end) sum += rows[end].kld;
    out.push_back(sum / static_cast<double>(end - begin));
  }
  return out;
}

std::vector<EvalBucket> summarise_buckets(std::span<const KldRow> rows) {
  std::vector<std::vector<KldRow>> parts;
  for (const KldRow& r : rows) {
    const auto b = static_cast<std::size_t>(position_bucket(r.position));
    if (parts.size() <= b) parts.resize(b + 1);
    parts[b].push_back(r);
  }
  std::vector<EvalBucket> out;
  for (std::size_t b = 0; b < parts.size(); ++b) {
    if (parts[b].empty()) continue;
    EvalBucket bucket;
    bucket.first_position = bucket_begin(b);
    bucket.end_position = std::int64_t{256} << b;
    bucket.block = summarise_kld(parts[b]);
    bucket.entropy_shift = clustered(parts[b], clusters_of(parts[b]).begin, [](const KldRow& r) { return r.entropy_shift; });
    out.push_back(std::move(bucket));
  }
  return out;
}

std::int64_t trend_start(std::int64_t n_sinks, std::int64_t window) { return 2 * (n_sinks + window); }

std::optional<MeanSe> kld_slope(std::span<const KldRow> rows, std::int64_t first_position) {
  std::vector<BucketTable> documents;
  BucketTable all;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i == 0 || rows[i].document != rows[i - 1].document) documents.emplace_back();
    const auto b = static_cast<std::size_t>(position_bucket(rows[i].position));
    if (bucket_begin(b) < first_position) continue;
    for (BucketTable* table : {&documents.back(), &all}) {
      if (table->size() <= b) table->resize(b + 1);
      (*table)[b].rows += 1;
      (*table)[b].kld += rows[i].kld;
      (*table)[b].log_position += std::log(static_cast<double>(rows[i].position + 1));
    }
  }
  const std::optional<double> slope = slope_without(all, {});
  if (!slope) return std::nullopt;
  std::vector<double> left_out;
  if (documents.size() > 1)
    for (const BucketTable& document : documents)
      if (const std::optional<double> s = slope_without(all, document)) left_out.push_back(*s);
  double mean = 0, square = 0;
  const auto n = static_cast<double>(left_out.size());
  for (const double s : left_out) mean += s / n;
  for (const double s : left_out) square += (s - mean) * (s - mean);
  return MeanSe{*slope, left_out.empty() ? 0.0 : std::sqrt((n - 1) / n * square)};
}

std::vector<std::string> length_flags(const std::optional<MeanSe>& slope, std::span<const EvalBucket> buckets, std::int64_t first_position) {
  std::vector<std::string> flags;
  if (slope && slope->mean > kSteepSlope) flags.push_back("kld_slope");
  if (std::any_of(buckets.begin(), buckets.end(), [](const EvalBucket& b) { return std::abs(b.entropy_shift.mean) > kEntropyShiftMax; }))
    flags.push_back("entropy_shift");
  while (!buckets.empty() && buckets.front().first_position < first_position) buckets = buckets.subspan(1);
  if (buckets.size() >= 3) {
    const MeanSe &first = buckets.front().entropy_shift, &last = buckets.back().entropy_shift;
    const double sign = last.mean < 0 ? -1 : 1;
    bool grows = sign * (last.mean - first.mean) > kOf95Percent * std::hypot(first.se, last.se);
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      const double before = i == 0 ? 0.0 : sign * buckets[i - 1].entropy_shift.mean;
      grows = grows && sign * buckets[i].entropy_shift.mean > before;
    }
    if (grows) flags.push_back("entropy_growth");
  }
  return flags;
}

std::vector<std::string> length_warnings(const EvalContender& contender) {
  std::vector<std::string> out;
  for (const std::string& flag : contender.flags) out.push_back(flag_text(contender, flag));
  return out;
}

std::optional<std::int64_t> length_limit(std::span<const EvalBucket> buckets, double ratio_max) {
  const auto exceeds = [&](const EvalBucket& b) { return b.block.ppl_ratio.mean > ratio_max && b.block.ppl_ratio.mean - kOf95Percent * b.block.ppl_ratio.se > 1; };
  for (std::size_t i = 0; i < buckets.size(); ++i)
    if (exceeds(buckets[i]) && (i + 1 == buckets.size() || exceeds(buckets[i + 1]))) return buckets[i].first_position;
  return std::nullopt;
}

}  // namespace calib::sens

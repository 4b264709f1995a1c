#include "libcalib/sens/kld_block.h"

#include <algorithm>
#include <cmath>

#include "libcalib/base/error.h"
#include "libcalib/sens/metrics.h"
#include "libcalib/sens/wide_clones.h"

namespace calib::sens {
namespace {

constexpr std::int64_t kBlockRows = 256;

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

MeanSe exponential(const MeanSe& m) { return {std::exp(m.mean), std::exp(m.mean) * m.se}; }

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
    bucket.first_position = b == 0 ? 0 : std::int64_t{128} << b;
    bucket.end_position = std::int64_t{256} << b;
    bucket.block = summarise_kld(parts[b]);
    bucket.entropy_shift = clustered(parts[b], clusters_of(parts[b]).begin, [](const KldRow& r) { return r.entropy_shift; });
    out.push_back(std::move(bucket));
  }
  return out;
}

std::optional<std::int64_t> length_limit(std::span<const EvalBucket> buckets, double ratio_max) {
  constexpr double kOf95Percent = 1.96;
  const auto exceeds = [&](const EvalBucket& b) { return b.block.ppl_ratio.mean > ratio_max && b.block.ppl_ratio.mean - kOf95Percent * b.block.ppl_ratio.se > 1; };
  for (std::size_t i = 0; i < buckets.size(); ++i)
    if (exceeds(buckets[i]) && (i + 1 == buckets.size() || exceeds(buckets[i + 1]))) return buckets[i].first_position;
  return std::nullopt;
}

}  // namespace calib::sens

#include "libcalib/stats/drift.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <Eigen/Cholesky>

#include "libcalib/base/error.h"
#include "libcalib/base/plural.h"

namespace calib::stats {
namespace {

constexpr double kLeastShare = 1e-4;  ///< floor of a bin, so that an empty one does not cost infinity

/// Sums over documents of a statistic's counts, and the statistic recomputed without each document in turn.
template <class Value>
double jackknife_se(std::int64_t n_documents, Value&& without) {
  if (n_documents < 2) return 0;
  std::vector<double> values;
  for (std::int64_t d = 0; d < n_documents; ++d) values.push_back(without(d));
  double mean = 0, sum = 0;
  for (const double v : values) mean += v / static_cast<double>(n_documents);
  for (const double v : values) sum += (v - mean) * (v - mean);
  return std::sqrt(sum * static_cast<double>(n_documents - 1) / static_cast<double>(n_documents));
}

double share(std::int64_t part, std::int64_t whole) { return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0; }

}  // namespace

const char* drift_level_name(DriftLevel level) {
  return level == DriftLevel::kOut ? "out" : level == DriftLevel::kWarn ? "warn" : "ok";
}

const char* drift_decision_name(DriftDecision decision) {
  switch (decision) {
    case DriftDecision::kOk: return "ok";
    case DriftDecision::kWatch: return "watch";
    case DriftDecision::kStepUp: return "step_up";
    case DriftDecision::kRecalibrate: return "recalibrate";
  }
  return "?";
}

DriftLevel UnitDrift::level() const {
  DriftLevel worst = DriftLevel::kOk;
  for (const DriftSignal& s : signals) {
    const bool is_shift = std::string_view(s.name) == "query_shift";
    worst = std::max(worst, is_shift ? std::min(s.level(), DriftLevel::kWarn) : s.level());
  }
  return worst;
}

double population_stability(std::span<const double> actual, std::span<const double> expected) {
  CALIB_CHECK(actual.size() == expected.size());
  double sum = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double a = std::max(actual[i], kLeastShare);
    sum += (a - expected[i]) * std::log(a / expected[i]);
  }
  return sum;
}

double mean_shift(std::span<const double> mean, std::span<const double> fresh_mean, const std::vector<double>& covariance) {
  const auto d = static_cast<Eigen::Index>(mean.size());
  CALIB_CHECK(fresh_mean.size() == mean.size() && covariance.size() == mean.size() * mean.size());
  Eigen::VectorXd difference(d);
  for (Eigen::Index i = 0; i < d; ++i) difference[i] = fresh_mean[static_cast<std::size_t>(i)] - mean[static_cast<std::size_t>(i)];
  if (difference.isZero(0.0)) return 0;
  Eigen::MatrixXd matrix = Eigen::Map<const Eigen::MatrixXd>(covariance.data(), d, d);  // symmetric: either order
  const double trace = matrix.trace();
  if (trace <= 0) return std::numeric_limits<double>::infinity();
  matrix.diagonal().array() += 1e-3 * trace / static_cast<double>(d);
  return difference.dot(matrix.llt().solve(difference)) / static_cast<double>(d);
}

LayerDrift::LayerDrift(const LayerStats& reference)
    : geometry_(reference.geometry()), n_sinks_(reference.n_sinks()),
      moment_(geometry_.n_kv_heads, geometry_.head_dim, false, geometry_.n_q_heads / geometry_.n_kv_heads),
      query_sum_(static_cast<std::size_t>(geometry_.n_q_heads) * static_cast<std::size_t>(geometry_.head_dim), 0.0) {
  const TensorStats* const sides[2] = {&reference.k_pre.body, &reference.v.body};
  for (int side = 0; side < 2; ++side) {
    const TensorStats& t = *sides[side];
    Bounds& b = bounds_[side];
    b.n_tokens = static_cast<double>(t.n_tokens());
    for (int h = 0; h < geometry_.n_kv_heads; ++h) {
      for (int c = 0; c < geometry_.head_dim; ++c) {
        for (const double q : t.abs_quantiles(h, c, kAbsQuantiles)) b.edges.push_back(static_cast<float>(q));
        b.absmax.push_back(t.absmax(h, c));
      }
    }
    counts_[side].ratio.assign(static_cast<std::size_t>(geometry_.n_kv_heads), 0.0f);
  }
  for (int h = 0; h < geometry_.n_q_heads; ++h) {
    for (int c = 0; c < geometry_.head_dim; ++c) query_mean_.push_back(reference.q_pre.body.mean(h, c));
    query_cov_.push_back(reference.query_cov.matrix(h));
  }
  for (int h = 0; h < geometry_.n_kv_heads; ++h) query_moment_.push_back(reference.query_moment.matrix(h));
}

void LayerDrift::add_side(int side, const float* x, std::int64_t n_sink, std::int64_t n_tokens, ThreadPool& pool) {
  const int heads = geometry_.n_kv_heads, width = geometry_.head_dim;
  constexpr auto kEdges = static_cast<int>(kAbsQuantiles.size());
  const Bounds& bounds = bounds_[side];
  Counts& counts = counts_[side];
  const std::size_t first = counts.beyond.size();
  counts.beyond.resize(first + static_cast<std::size_t>(heads), 0);
  counts.bins.resize((first + static_cast<std::size_t>(heads)) * kBins, 0);
  counts.saturated.push_back(0), counts.values.push_back(0);
  pool.parallel_for(heads, [&](std::int64_t h) {
    const float* const edges = bounds.edges.data() + h * width * kEdges;
    const float* const absmax = bounds.absmax.data() + h * width;
    // Values at or above each edge; differences of neighbours are the bins.
    std::array<std::int64_t, kEdges> above{};
    std::int64_t beyond = 0;
    float ratio = counts.ratio[static_cast<std::size_t>(h)];
    for (std::int64_t t = n_sink; t < n_tokens; ++t) {
      const float* const row = x + (t * heads + h) * width;
      for (int c = 0; c < width; ++c) {
        const float a = std::fabs(row[c]);
        for (int e = 0; e < kEdges; ++e) above[static_cast<std::size_t>(e)] += a > edges[c * kEdges + e] ? 1 : 0;
        if (a > absmax[c]) {
          ++beyond;
          ratio = std::max(ratio, absmax[c] > 0 ? a / absmax[c] : std::numeric_limits<float>::infinity());
        }
      }
    }
    const std::size_t at = first + static_cast<std::size_t>(h);
    counts.beyond[at] = beyond, counts.ratio[static_cast<std::size_t>(h)] = ratio;
    std::int64_t* const bins = &counts.bins[at * kBins];
    bins[0] = (n_tokens - n_sink) * width - above[0];
    for (int e = 0; e < kEdges; ++e) bins[e + 1] = above[static_cast<std::size_t>(e)] - (e + 1 < kEdges ? above[static_cast<std::size_t>(e) + 1] : 0);
  });
}

void LayerDrift::add_document(const DocumentTensors& document, ThreadPool& pool) {
  const std::int64_t n = document.n_tokens, n_sink = std::min(n_sinks_, n);
  const int width = geometry_.head_dim, n_q = geometry_.n_q_heads, group = n_q / geometry_.n_kv_heads;
  add_side(0, document.k_pre, n_sink, n, pool);
  add_side(1, document.v, n_sink, n, pool);
  ++n_documents_, n_tokens_ += n - n_sink;
  const std::int64_t stride = static_cast<std::int64_t>(n_q) * width;
  pool.parallel_for(geometry_.n_kv_heads, [&](std::int64_t h) {
    for (std::int64_t q = h * group; q < (h + 1) * group; ++q) {
      double* const sum = query_sum_.data() + q * width;
      for (std::int64_t t = n_sink; t < n; ++t)
        for (int c = 0; c < width; ++c) sum[c] += static_cast<double>(document.q_pre[t * stride + q * width + c]);
      moment_.add_rows(static_cast<int>(h), document.q_post + n_sink * stride + q * width, n - n_sink, stride);
    }
  });
}

void LayerDrift::add_saturation(Side side, std::int64_t n_saturated, std::int64_t n_values) {
  Counts& counts = counts_[side == Side::kK ? 0 : 1];
  CALIB_CHECK(!counts.saturated.empty());
  counts.saturated.back() += n_saturated, counts.values.back() += n_values;
}

std::vector<DriftSignal> LayerDrift::range_signals(int side) const {
  const Counts& counts = counts_[side];
  const int heads = geometry_.n_kv_heads;
  // A value of the same distribution exceeds the largest of n calibrated ones with probability 1 / (n + 1).
  const double e0 = 1.0 / (bounds_[side].n_tokens + 1);
  DriftSignal exceedance{"range_exceedance", 0, -1, 0, std::max(10 * e0, 1e-4), std::max(100 * e0, 1e-3)};
  DriftSignal psi{"psi", 0, -1, 0, 0.10, 0.25}, ratio{"range_ratio", 0, -1, 0, 2.0, 2.0};
  for (int h = 0; h < heads; ++h) {
    const auto at = [&](std::int64_t d) { return static_cast<std::size_t>(d * heads + h); };
    std::int64_t beyond = 0;
    std::array<std::int64_t, kBins> bins{};
    for (std::int64_t d = 0; d < n_documents_; ++d) {
      beyond += counts.beyond[at(d)];
      for (std::size_t b = 0; b < kBins; ++b) bins[b] += counts.bins[at(d) * kBins + b];
    }
    std::int64_t n = 0;
    for (const std::int64_t b : bins) n += b;
    const auto psi_without = [&](std::int64_t d) {  // d = -1: with all
      std::array<double, kBins> shares{};
      std::int64_t rest = n;
      for (std::size_t b = 0; b < kBins && d >= 0; ++b) rest -= counts.bins[at(d) * kBins + b];
      for (std::size_t b = 0; b < kBins; ++b) shares[b] = share(bins[b] - (d >= 0 ? counts.bins[at(d) * kBins + b] : 0), rest);
      return population_stability(shares, kPsiExpected);
    };
    if (const double value = psi_without(-1); value > psi.value) {
      psi.head = h, psi.value = value;
      psi.se = jackknife_se(n_documents_, psi_without);
    }
    if (const double value = share(beyond, n); value > exceedance.value) {
      exceedance.head = h, exceedance.value = value;
      exceedance.se = jackknife_se(n_documents_, [&](std::int64_t d) {
        std::int64_t rest = n;
        for (std::size_t b = 0; b < kBins; ++b) rest -= counts.bins[at(d) * kBins + b];
        return share(beyond - counts.beyond[at(d)], rest);
      });
    }
    if (const double value = counts.ratio[static_cast<std::size_t>(h)]; value > ratio.value) ratio.head = h, ratio.value = value;
  }
  std::vector<DriftSignal> out = {exceedance, ratio, psi};
  std::int64_t saturated = 0, values = 0;
  for (std::size_t d = 0; d < counts.values.size(); ++d) saturated += counts.saturated[d], values += counts.values[d];
  if (values > 0) {
    out.push_back({"saturation", -1, share(saturated, values), jackknife_se(n_documents_, [&](std::int64_t d) {
                     return share(saturated - counts.saturated[static_cast<std::size_t>(d)], values - counts.values[static_cast<std::size_t>(d)]);
                   }), 1e-3, 1e-2});
  }
  return out;
}

std::vector<UnitDrift> LayerDrift::finish() const {
  CALIB_CHECK(n_tokens_ > 0);
  UnitDrift k{geometry_.index, Side::kK, range_signals(0)}, v{geometry_.index, Side::kV, range_signals(1)};
  const auto width = static_cast<std::size_t>(geometry_.head_dim);
  DriftSignal shift{"query_shift", 0, -1, 0, 0.1, 0.5};
  for (int h = 0; h < geometry_.n_q_heads; ++h) {
    std::vector<double> fresh(query_sum_.begin() + h * geometry_.head_dim, query_sum_.begin() + (h + 1) * geometry_.head_dim);
    for (double& x : fresh) x /= static_cast<double>(n_tokens_);
    const double value = mean_shift(std::span(query_mean_).subspan(static_cast<std::size_t>(h) * width, width), fresh, query_cov_[static_cast<std::size_t>(h)]);
    if (value > shift.value) shift.head = h, shift.value = value;
  }
  DriftSignal moment{"query_moment", 0, -1, 0, 0.3, 0.6};
  for (int h = 0; h < geometry_.n_kv_heads; ++h) {
    const std::vector<double> fresh = moment_.matrix(h);
    const std::vector<double>& stored = query_moment_[static_cast<std::size_t>(h)];
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < stored.size(); ++i) difference += (fresh[i] - stored[i]) * (fresh[i] - stored[i]), norm += stored[i] * stored[i];
    const double value = norm > 0 ? std::sqrt(difference / norm) : difference > 0 ? std::numeric_limits<double>::infinity() : 0.0;
    if (value > moment.value) moment.head = h, moment.value = value;
  }
  k.signals.push_back(shift), k.signals.push_back(moment);
  return {std::move(k), std::move(v)};
}

void decide_drift(DriftReport& report) {
  std::size_t n_out = 0, n_warn = 0, n_shift = 0;
  for (const UnitDrift& unit : report.units) {
    n_out += unit.level() == DriftLevel::kOut, n_warn += unit.level() != DriftLevel::kOk;
    for (const DriftSignal& s : unit.signals) n_shift += std::string_view(s.name) == "query_shift" && s.level() == DriftLevel::kOut;
  }
  const MonitorSignal* hit = nullptr;
  const MonitorSignal* near = nullptr;
  const MonitorSignal* twice = nullptr;
  for (const MonitorSignal& m : report.monitor) {
    if (m.level() == DriftLevel::kOut && !hit) hit = &m;
    if (m.level() == DriftLevel::kWarn && !near) near = &m;
    for (std::size_t b = 1; b < m.buckets.size(); ++b)
      if (m.buckets[b - 1] > m.limit && m.buckets[b] > m.limit) twice = &m;
  }
  const auto raise = [&](DriftDecision decision, std::string reason) {
    report.decision = std::max(report.decision, decision);
    report.reasons.push_back(std::move(reason));
  };
  report.decision = DriftDecision::kOk;
  report.reasons.clear();
  if (n_out > 0 && 10 * n_out >= report.units.size())
    raise(DriftDecision::kRecalibrate, fmt::format("beyond the limits of the calibration: {} of {}", n_out, counted(report.units.size(), "unit")));
  if (report.unseen_share > kUnseenLimit)
    raise(DriftDecision::kRecalibrate, fmt::format("{:.0f} % of the tokens stand at positions that the calibration never reached", 100 * report.unseen_share));
  if (twice) raise(DriftDecision::kRecalibrate, fmt::format("{} exceeds {} in two neighbouring position buckets", twice->name, twice->limit));
  if (hit) raise(DriftDecision::kStepUp, fmt::format("{} is {:.4g}, the plan's limit is {}", hit->name, hit->value, hit->limit));
  if (near) raise(DriftDecision::kWatch, fmt::format("{} is {:.4g}, near the plan's limit of {}", near->name, near->value, near->limit));
  if (n_warn > 0 && report.decision != DriftDecision::kRecalibrate)
    raise(DriftDecision::kWatch, fmt::format("warnings in {} of {}, {} of them beyond a limit", n_warn, counted(report.units.size(), "unit"), n_out));
  if (report.unseen_share > kUnseenWarn && report.unseen_share <= kUnseenLimit)
    raise(DriftDecision::kWatch, fmt::format("{:.1f} % of the tokens stand at positions that the calibration never reached", 100 * report.unseen_share));
  if (n_shift > 0)
    raise(DriftDecision::kWatch, fmt::format("moved queries in {}: token scores fitted on the calibration are void", counted(n_shift, "layer")));
}

}  // namespace calib::stats

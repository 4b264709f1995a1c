#include "libcalib/stats/attention_stats.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "libcalib/base/error.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/stats/kv_stats.h"
#include "libcalib/stats/tile_kernels.h"

namespace calib::stats {
namespace {

// Mass of the largest k values for several k: a coarse histogram finds the bins that the cuts fall into, and only their
// values are sorted.
class TopMass {
 public:
  TopMass() : count_(kBins, 0), sum_(kBins, 0.0), slot_(kBins, -1) {}

  std::array<double, kTopShares.size()> operator()(const float* p, std::int64_t n) {
    std::uint32_t lowest = kBins - 1, highest = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t bin = bin_of(p[i]);
      ++count_[bin];
      sum_[bin] += static_cast<double>(p[i]);
      lowest = std::min(lowest, bin);
      highest = std::max(highest, bin);
    }
    std::array<Cut, kTopShares.size()> cuts;
    std::int64_t above = 0;
    double mass_above = 0;
    std::uint32_t bin = highest;
    for (std::size_t i = 0; i < kTopShares.size(); ++i) {
      const std::int64_t k = static_cast<std::int64_t>(std::ceil(kTopShares[i] * static_cast<double>(n) - 1e-9));
      while (above + count_[bin] < k) {
        above += count_[bin];
        mass_above += sum_[bin--];
      }
      cuts[i] = {bin, k - above, mass_above};
      if (slot_[bin] < 0) {
        slot_[bin] = n_slots_;
        in_slot_[static_cast<std::size_t>(n_slots_++)].clear();
      }
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const int slot = slot_[bin_of(p[i])];
      if (slot >= 0) in_slot_[static_cast<std::size_t>(slot)].push_back(p[i]);
    }
    for (int s = 0; s < n_slots_; ++s) std::sort(in_slot_[static_cast<std::size_t>(s)].rbegin(), in_slot_[static_cast<std::size_t>(s)].rend());
    std::array<double, kTopShares.size()> out;
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      const std::vector<float>& values = in_slot_[static_cast<std::size_t>(slot_[cuts[i].bin])];
      out[i] = cuts[i].mass_above;
      for (std::int64_t j = 0; j < cuts[i].n_of_bin; ++j) out[i] += static_cast<double>(values[static_cast<std::size_t>(j)]);
    }
    for (std::uint32_t b = lowest; b <= highest; ++b) {
      count_[b] = 0;
      sum_[b] = 0;
      slot_[b] = -1;
    }
    n_slots_ = 0;
    return out;
  }

 private:
  static constexpr std::uint32_t kBins = 2048;  // exponent and 3 mantissa bits of a value >= 0
  struct Cut {
    std::uint32_t bin = 0;
    std::int64_t n_of_bin = 0;
    double mass_above = 0;
  };
  static std::uint32_t bin_of(float p) { return std::bit_cast<std::uint32_t>(p) >> 20 & (kBins - 1); }

  std::vector<std::uint32_t> count_;
  std::vector<double> sum_;
  std::vector<std::int8_t> slot_;
  std::array<std::vector<float>, kTopShares.size()> in_slot_;
  std::int8_t n_slots_ = 0;
};

RowConcentration concentration(const float* p, std::int64_t first, std::int64_t n_vis, std::int64_t n_sinks, TopMass& top_mass) {
  RowConcentration out;
  const float* visible = p + first;
  double sum_squares = 0;
  row_entropy(visible, static_cast<std::size_t>(n_vis), &out.entropy, &sum_squares);
  out.normalised_entropy = out.entropy / std::log(static_cast<double>(n_vis));
  out.n_eff = 1.0 / sum_squares;
  for (std::int64_t j = first; j < std::min(n_sinks, first + n_vis); ++j) out.sink_mass += static_cast<double>(p[j]);
  out.top_mass = top_mass(visible, n_vis);
  return out;
}

}  // namespace

RowConcentration row_concentration(const float* p, std::int64_t first, std::int64_t n_vis, std::int64_t n_sinks) {
  CALIB_CHECK(n_vis >= 2);
  TopMass top_mass;
  return concentration(p, first, n_vis, n_sinks, top_mass);
}

AttentionStats::AttentionStats(int n_q_heads) : n_q_heads_(n_q_heads) { CALIB_CHECK(n_q_heads > 0); }

void AttentionStats::reserve_buckets(int n_buckets) {
  if (n_buckets <= n_buckets_) return;
  AttentionStats wider(n_q_heads_);
  const std::size_t cells = static_cast<std::size_t>(n_q_heads_) * static_cast<std::size_t>(n_buckets);
  wider.n_buckets_ = n_buckets;
  wider.n_rows_.assign(cells, 0);
  wider.weight_.assign(cells, 0.0);
  wider.sums_.assign(cells * kMeasures, 0.0);
  for (int h = 0; h < n_q_heads_; ++h)
    for (int b = 0; b < n_buckets_; ++b) {
      const std::size_t from = cell(h, b), to = wider.cell(h, b);
      wider.n_rows_[to] = n_rows_[from];
      wider.weight_[to] = weight_[from];
      std::copy_n(sums_.begin() + static_cast<std::ptrdiff_t>(from * kMeasures), kMeasures,
                  wider.sums_.begin() + static_cast<std::ptrdiff_t>(to * kMeasures));
    }
  *this = std::move(wider);
}

void AttentionStats::add_head(int head, const SampledRows& rows, const float* p, std::int64_t n_tokens, std::int64_t window,
                              std::int64_t n_sinks) {
  TopMass top_mass;
  for (std::size_t r = 0; r < rows.rows.size(); ++r) {
    const std::int64_t row = rows.rows[r];
    const std::int64_t n_vis = window > 0 ? std::min(row + 1, window) : row + 1;
    if (n_vis < kMinVisibleKeys) continue;
    const RowConcentration c =
        concentration(p + static_cast<std::int64_t>(r) * n_tokens, row + 1 - n_vis, n_vis, n_sinks, top_mass);
    if (!std::isfinite(c.entropy) || !std::isfinite(c.n_eff))
      fail(ErrorKind::kNumeric, fmt::format("attention, query head {}, position {}", head, row),
           "the row's probabilities are not finite or all zero");
    const std::size_t at = cell(head, position_bucket(row));
    const double w = rows.row_weight[r];
    double* sums = sums_.data() + at * kMeasures;
    n_rows_[at] += 1;
    weight_[at] += w;
    sums[kEntropy] += w * c.entropy;
    sums[kNormalisedEntropy] += w * c.normalised_entropy;
    sums[kNEff] += w * c.n_eff;
    sums[kSinkMass] += w * c.sink_mass;
    for (std::size_t i = 0; i < c.top_mass.size(); ++i) sums[kTopMass + i] += w * c.top_mass[i];
  }
}

void AttentionStats::merge(const AttentionStats& other) {
  CALIB_CHECK(n_q_heads_ == other.n_q_heads_);
  reserve_buckets(other.n_buckets_);
  for (int h = 0; h < n_q_heads_; ++h)
    for (int b = 0; b < other.n_buckets_; ++b) {
      const std::size_t from = other.cell(h, b), to = cell(h, b);
      n_rows_[to] += other.n_rows_[from];
      weight_[to] += other.weight_[from];
      for (int m = 0; m < kMeasures; ++m)
        sums_[to * kMeasures + static_cast<std::size_t>(m)] += other.sums_[from * kMeasures + static_cast<std::size_t>(m)];
    }
}

double AttentionStats::mean(int head, int bucket, int measure) const {
  const std::size_t at = cell(head, bucket);
  return weight_[at] > 0 ? sums_[at * kMeasures + static_cast<std::size_t>(measure)] / weight_[at] : 0.0;
}

void AttentionStats::set_state(int n_buckets, std::vector<std::int64_t> n_rows, std::vector<double> weight, std::vector<double> sums) {
  const std::size_t cells = static_cast<std::size_t>(n_q_heads_) * static_cast<std::size_t>(n_buckets);
  CALIB_CHECK(n_rows.size() == cells && weight.size() == cells && sums.size() == cells * kMeasures);
  n_buckets_ = n_buckets;
  n_rows_ = std::move(n_rows);
  weight_ = std::move(weight);
  sums_ = std::move(sums);
}

std::vector<double> column_mass(const SampledRows& rows, int n_q_heads, std::int64_t n_tokens, std::int64_t column) {
  std::vector<double> out(static_cast<std::size_t>(n_q_heads), 0.0);
  const std::size_t n_rows = rows.rows.size();
  for (int h = 0; h < n_q_heads; ++h) {
    double mass = 0, weight = 0;
    for (std::size_t r = 0; r < n_rows; ++r) {
      if (rows.rows[r] <= column) continue;
      const std::size_t row = static_cast<std::size_t>(h) * n_rows + r;
      mass += rows.row_weight[r] * static_cast<double>(rows.p[row * static_cast<std::size_t>(n_tokens) + static_cast<std::size_t>(column)]);
      weight += rows.row_weight[r];
    }
    if (weight > 0) out[static_cast<std::size_t>(h)] = mass / weight;
  }
  return out;
}

bool is_functional_sink(const std::vector<double>& mass_per_head) {
  const auto above = std::count_if(mass_per_head.begin(), mass_per_head.end(), [](double mass) { return mass > 0.3; });
  return !mass_per_head.empty() && 10 * static_cast<std::size_t>(above) >= mass_per_head.size() && above > 0;
}

}  // namespace calib::stats

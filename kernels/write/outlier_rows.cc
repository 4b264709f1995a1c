#include "kernels/write/outlier_rows.h"

#include <algorithm>

namespace kvrt {
namespace {

FoundOutliers find_in_group(const FakeQuantJob& job, const float* rows, std::int64_t first, int n, float* kept, std::uint16_t* picks) {
  const int d = job.head_dim, per_mille = job.scheme.outlier_per_mille, r = static_cast<int>(first / n % (job.page_tokens / n));
  const int quota = group_outliers_before(per_mille, n, d, r + 1) - group_outliers_before(per_mille, n, d, r);
  float medians[kMaxOutlierDim];
  FoundOutliers found;
  found.n = pick_group_outliers([&](int t, int c) { return rows[t * d + c]; }, n, d, quota, picks, medians);
  for (int c = 0; c < d; ++c) {
    float column[kMaxGroupTokens];
    for (int t = 0; t < n; ++t) column[t] = rows[t * d + c];
    fill_channel_outliers(column, n, d, c, picks, found.n, medians[c]);
    for (int t = 0; t < n; ++t) kept[t * d + c] = column[t];
  }
  return found;
}

FoundOutliers find_in_row(const FakeQuantJob& job, const StaticGrids& grids, const float* row, float* kept, std::uint16_t* picks) {
  const int d = job.head_dim, k = token_outliers(job.scheme.outlier_per_mille, d);
  const bool by_channel = job.scheme.granularity == Granularity::kChannelStatic;
  const auto range = [&](int i) {
    const int at = by_channel ? i : 0;
    return StaticRange{grids.lo[at], grids.scale[at], grids.min[at], grids.max[at]};
  };
  float middle = 0.0f;
  FoundOutliers found;
  found.n = by_channel ? pick_static_outliers(row, d, k, range, picks) : pick_vector_outliers(row, d, k, picks, &middle);
  std::copy(row, row + d, kept);
  if (!grids.lo) fill_vector_outliers(kept, d, job.group, picks, found.n, middle);
  for (int i = 0; grids.lo && i < found.n; ++i) {
    const StaticRange r = range(picks[i]);
    found.n_beyond += row[picks[i]] < r.min || row[picks[i]] > r.max;
  }
  return found;
}

}  // namespace

FoundOutliers find_outliers(const FakeQuantJob& job, const StaticGrids& grids, const float* rows, std::int64_t first, int n, float* kept,
                            std::uint16_t* picks) {
  if (job.scheme.granularity == Granularity::kChannel) return find_in_group(job, rows, first, n, kept, picks);
  FoundOutliers all;
  for (int t = 0; t < n; ++t) {
    const std::int64_t at = static_cast<std::int64_t>(t) * job.head_dim;
    const FoundOutliers found = find_in_row(job, grids, rows + at, kept + at, picks + all.n);
    for (int i = 0; i < found.n; ++i) picks[all.n + i] = static_cast<std::uint16_t>(picks[all.n + i] + at);
    all.n += found.n, all.n_beyond += found.n_beyond;
  }
  return all;
}

void store_outlier_entries(const PageCodec& c, int slot, int n, const std::uint16_t* picks, float* rests, int n_picks, std::uint8_t* block,
                           EncodeCounters* counters) {
  const bool by_channel = c.granularity == Granularity::kChannel;
  const int k = token_outliers(c.out_per_mille, c.head_dim);
  const int before = by_channel ? group_outliers_before(c.out_per_mille, c.group, c.head_dim, slot / c.group) : 0;
  std::uint8_t* const starts = block + c.outliers;
  for (int t = 0, at = 0; t < n; ++t) {
    if (by_channel && t % 16 == 0) store_le16(starts + 2 * ((slot + t) / 16), static_cast<std::uint16_t>(before + at));
    std::uint16_t channels[kMaxOutlierDim];
    int found = 0;
    for (; at + found < n_picks && picks[at + found] / c.head_dim == t; ++found) channels[found] = static_cast<std::uint16_t>(picks[at + found] % c.head_dim);
    std::uint8_t* const entries = by_channel ? starts + kOutlierStarts + 4 * (before + at) : starts + 4 * (std::int64_t{slot} + t) * k;
    detail::store_outliers(c, slot + t, {channels, rests + at, found}, block, entries, counters);
    for (int i = found; !by_channel && i < k; ++i) store_outlier(entries + 4 * i, (slot + t) * c.head_dim, 0);
    at += found;
  }
}

}  // namespace kvrt

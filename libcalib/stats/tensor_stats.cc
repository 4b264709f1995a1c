#include "libcalib/stats/tensor_stats.h"

#include <algorithm>
#include <cmath>

#include "libcalib/base/error.h"
#include "libcalib/stats/tile_kernels.h"

namespace calib::stats {

TensorStats::TensorStats(int n_heads_in, int head_dim_in, int mantissa_bits) : n_heads(n_heads_in), head_dim(head_dim_in) {
  CALIB_CHECK(n_heads > 0 && head_dim > 0);
  const std::size_t n = static_cast<std::size_t>(n_heads) * static_cast<std::size_t>(head_dim);
  moments.resize(n);
  extrema.resize(n);
  sketches.assign(n, QuantileSketch(mantissa_bits));
}

float TensorStats::head_absmax(int head) const {
  float out = 0;
  for (int c = 0; c < head_dim; ++c) out = std::max(out, absmax(head, c));
  return out;
}

float TensorStats::absmax() const {
  float out = 0;
  for (const Extrema& e : extrema) out = std::max(out, e.absmax());
  return out;
}

std::vector<double> TensorStats::quantiles(int head, int channel, std::span<const double> p) const {
  const std::size_t i = index(head, channel);
  std::vector<double> out = sketches[i].quantiles(p);
  if (!extrema[i].empty())
    for (double& x : out) x = std::clamp(x, static_cast<double>(extrema[i].min), static_cast<double>(extrema[i].max));
  return out;
}

std::vector<double> TensorStats::abs_quantiles(int head, int channel, std::span<const double> p) const {
  const std::size_t i = index(head, channel);
  std::vector<double> out = sketches[i].abs_quantiles(p);
  for (double& x : out) x = std::min(x, static_cast<double>(extrema[i].absmax()));
  return out;
}

std::optional<TensorStats::NonFinite> TensorStats::add_head(int head, const float* x, std::int64_t n_tokens, std::int64_t token_stride) {
  Tile tile(head_dim);
  const std::size_t padded = static_cast<std::size_t>(tile.padded_dim());
  std::vector<double> scratch(6 * padded);
  double *sum = scratch.data(), *mean = sum + padded, *s1 = mean + padded, *s2 = s1 + padded, *s3 = s2 + padded, *s4 = s3 + padded;
  std::vector<float> low(padded), high(padded);

  for (std::int64_t first = 0; first < n_tokens; first += kTileRows) {
    const int n = static_cast<int>(std::min<std::int64_t>(kTileRows, n_tokens - first));
    tile.load(x + first * token_stride, n, token_stride);
    tile_sum_extrema(tile, sum, low.data(), high.data());
    if (!std::all_of(sum, sum + head_dim, [](double s) { return std::isfinite(s); })) {
      for (int r = 0; r < n; ++r)
        for (int c = 0; c < head_dim; ++c)
          if (!std::isfinite(x[(first + r) * token_stride + c])) return NonFinite{first + r, c};
    }
    for (std::size_t c = 0; c < padded; ++c) mean[c] = sum[c] / n;
    tile_power_sums(tile, mean, s1, s2, s3, s4);
    for (int c = 0; c < head_dim; ++c) {
      const std::size_t i = index(head, c);
      // The rounded mean is off by e = s1 / n; moving the sums to the true mean keeps the two-pass result exact.
      const double e = s1[c] / n;
      Moments of_tile;
      of_tile.n = n;
      of_tile.mean = mean[c] + e;
      of_tile.m2 = std::max(0.0, s2[c] - n * e * e);
      of_tile.m3 = s3[c] - 3 * e * s2[c] + 2 * n * e * e * e;
      of_tile.m4 = std::max(0.0, s4[c] - 4 * e * s3[c] + 6 * e * e * s2[c] - 3 * n * e * e * e * e);
      moments[i].merge(of_tile);
      extrema[i].merge({low[static_cast<std::size_t>(c)], high[static_cast<std::size_t>(c)]});
    }
    QuantileSketch::add_rows(std::span(sketches).subspan(index(head, 0), static_cast<std::size_t>(head_dim)), tile.data(), static_cast<std::size_t>(n),
                             tile.row_stride());
  }
  return std::nullopt;
}

void TensorStats::merge(const TensorStats& other) {
  CALIB_CHECK(n_heads == other.n_heads && head_dim == other.head_dim);
  for (std::size_t i = 0; i < moments.size(); ++i) {
    moments[i].merge(other.moments[i]);
    extrema[i].merge(other.extrema[i]);
    sketches[i].merge(other.sketches[i]);
  }
}

std::vector<double> channel_outlier_ratios(const TensorStats& stats) {
  std::vector<double> out(stats.n_channels());
  std::vector<float> sorted(static_cast<std::size_t>(stats.head_dim));
  for (int h = 0; h < stats.n_heads; ++h) {
    for (int c = 0; c < stats.head_dim; ++c) sorted[static_cast<std::size_t>(c)] = stats.absmax(h, c);
    std::sort(sorted.begin(), sorted.end());
    const std::size_t middle = sorted.size() / 2;
    const double median = sorted.size() % 2 ? sorted[middle] : 0.5 * (static_cast<double>(sorted[middle - 1]) + sorted[middle]);
    for (int c = 0; c < stats.head_dim; ++c) out[stats.index(h, c)] = median > 0 ? stats.absmax(h, c) / median : 0.0;
  }
  return out;
}

}  // namespace calib::stats

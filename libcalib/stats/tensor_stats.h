#pragma once
// Moments, extrema and quantile sketch of every channel of one captured tensor.
// Legend: T tokens, H heads of the tensor, D head_dim.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "libcalib/stats/extrema.h"
#include "libcalib/stats/moments.h"
#include "libcalib/stats/quantile_sketch.h"

namespace calib::stats {

/// Probabilities of the quantiles that stats.h5 lists.
inline constexpr std::array<double, 5> kAbsQuantiles = {0.5, 0.9, 0.99, 0.995, 0.999};
inline constexpr std::array<double, 6> kSignedQuantiles = {0.0025, 0.005, 0.01, 0.99, 0.995, 0.9975};
/// P99.9 needs this many values; files mark those read from fewer with `low_n`.
inline constexpr std::int64_t kLowCount = 10000;

/// Per-channel statistics. Layout of the parts: [H, D], index head * head_dim + channel.
struct TensorStats {
  TensorStats() = default;  ///< no channels; only good for assigning to
  /// mantissa_bits: 6 for k and v, 4 for q (METHODS.md 3).
  TensorStats(int n_heads, int head_dim, int mantissa_bits);

  int n_heads = 0, head_dim = 0;
  std::vector<Moments> moments;
  std::vector<Extrema> extrema;
  std::vector<QuantileSketch> sketches;

  std::size_t index(int head, int channel) const {
    return static_cast<std::size_t>(head) * static_cast<std::size_t>(head_dim) + static_cast<std::size_t>(channel);
  }
  std::size_t n_channels() const { return moments.size(); }
  /// Tokens seen; the same for every channel.
  std::int64_t n_tokens() const { return moments.empty() ? 0 : moments.front().n; }

  double mean(int head, int channel) const { return moments[index(head, channel)].mean; }
  float min(int head, int channel) const { return extrema[index(head, channel)].min; }
  float max(int head, int channel) const { return extrema[index(head, channel)].max; }
  float absmax(int head, int channel) const { return extrema[index(head, channel)].absmax(); }
  /// Largest |x| over the channels of one head, and over all channels.
  float head_absmax(int head) const;
  float absmax() const;
  /// Quantiles of x (or |x|) for ascending p, clamped to what was seen; 0 if nothing was.
  std::vector<double> quantiles(int head, int channel, std::span<const double> p) const;
  std::vector<double> abs_quantiles(int head, int channel, std::span<const double> p) const;
  double quantile(int head, int channel, double p) const { return quantiles(head, channel, {&p, 1})[0]; }
  double abs_quantile(int head, int channel, double p) const { return abs_quantiles(head, channel, {&p, 1})[0]; }

  /// A value that is not finite.
  struct NonFinite {
    std::int64_t token = 0;
    int channel = 0;
  };
  /// Adds the rows of one head. x points at [head, channel 0] of token 0; consecutive tokens lie `token_stride` floats apart.
  /// Stops at the first tile that holds a non-finite value and names the earliest one; *this is then incomplete.
  /// Different heads may be added at the same time from different threads. Tiles of 256 tokens, two passes each.
  [[nodiscard]] std::optional<NonFinite> add_head(int head, const float* x, std::int64_t n_tokens, std::int64_t token_stride);
  /// Requires: equal shapes. Exact for counts, extrema, sketches; moments to 1e-12 relative.
  void merge(const TensorStats& other);
};

/// Median over a head's channels of absmax; the outlier ratio of a channel is its absmax over this (0 if the median is 0).
std::vector<double> channel_outlier_ratios(const TensorStats& stats);

}  // namespace calib::stats

#include "libcalib/quant/channel_summary.h"

#include <algorithm>
#include <cmath>

#include "kernels/codec/hadamard.h"
#include "libcalib/base/error.h"
#include "libcalib/quant/static_thresholds.h"
#include "libcalib/quant/unit_moments.h"

namespace calib::quant {
namespace {

/// Whether `scheme` stores ranges of post-RoPE keys that a later position may leave. Rotated ones are bounded by norms, which RoPE keeps.
bool needs_every_position(const kvrt::Scheme& s, Side side) {
  const bool by_channel = s.granularity == kvrt::Granularity::kChannelStatic;
  const bool whole = s.granularity == kvrt::Granularity::kTensor || s.granularity == kvrt::Granularity::kHead || s.format == kvrt::Format::kNvfp4;
  return side == Side::kK && !s.pre && (by_channel || (whole && !s.had));
}

bool is_static(const kvrt::Scheme& s) {
  return s.granularity == kvrt::Granularity::kTensor || s.granularity == kvrt::Granularity::kHead || s.granularity == kvrt::Granularity::kChannelStatic;
}

std::size_t index_of(const ChannelSummary& s, int h, int c) {
  return static_cast<std::size_t>(h) * static_cast<std::size_t>(s.head_dim) + static_cast<std::size_t>(c);
}

ChannelSummary of_tensor(const stats::TensorStats& tensor, double tail) {
  ChannelSummary s;
  s.n_heads = tensor.n_heads;
  s.head_dim = tensor.head_dim;
  s.n_tokens = tensor.n_tokens();
  for (int h = 0; h < s.n_heads; ++h)
    for (int c = 0; c < s.head_dim; ++c) {
      const stats::Extrema& extrema = tensor.extrema[tensor.index(h, c)];
      s.mean.push_back(tensor.mean(h, c));
      s.lo.push_back(extrema.empty() ? 0.0 : tail > 0 ? tensor.quantile(h, c, tail) : extrema.min);
      s.hi.push_back(extrema.empty() ? 0.0 : tail > 0 ? tensor.quantile(h, c, 1 - tail) : extrema.max);
    }
  return s;
}

/// Keys after RoPE under static ranges: a pair that has not finished a turn within the text reaches values that no statistic of this text
/// holds. The norm of its two channels before RoPE bounds both at every position (METHODS.md 4.10). `turned_too`: also of pairs that have.
void widen_to_every_position(const stats::LayerStats& layer, bool with_sinks, bool turned_too, std::int64_t max_distance, ChannelSummary& s) {
  const LayerGeometry& g = layer.geometry();
  for (int h = 0; h < s.n_heads; ++h)
    for (int c = 0; c < s.head_dim; ++c) {
      const int partner = rope_partner(g, c);
      if (partner == c) continue;
      const int pair = g.rope_style == RopeStyle::kInterleaved ? c / 2 : std::min(c, partner);
      if (!turned_too && finishes_a_turn(g, pair, max_distance)) continue;
      double norm = layer.pair_absmax[static_cast<std::size_t>(h) * static_cast<std::size_t>(s.head_dim / 2) + static_cast<std::size_t>(pair)];
      if (with_sinks) norm = std::max<double>(norm, std::hypot(layer.k_pre.sink.absmax(h, c), layer.k_pre.sink.absmax(h, partner)));
      s.lo[index_of(s, h, c)] = std::min(s.lo[index_of(s, h, c)], -g.attention_factor * norm);
      s.hi[index_of(s, h, c)] = std::max(s.hi[index_of(s, h, c)], g.attention_factor * norm);
    }
}

/// Subtracts the means from the summary, which then describes centred values.
void fit_center(const std::string& where, ChannelSummary& s, SchemeParams& params) {
  for (std::size_t c = 0; c < s.mean.size(); ++c) {
    const float mean = static_cast<float>(s.mean[c]);
    if (!std::isfinite(mean)) fail(ErrorKind::kNumeric, where, "the mean of channel {} is not finite", c);
    params.mean.push_back(mean);
    s.mean[c] -= mean;
    s.lo[c] -= mean;
    s.hi[c] -= mean;
  }
}

/// lambda = sqrt(largest |k| of the RoPE pair), within [1e-4, 1e4], 1 for a pair of zeros (METHODS.md 5.2, alpha 0.5, beta 0).
void fit_smooth(const LayerGeometry& g, const std::string& where, ChannelSummary& s, SchemeParams& params) {
  const auto absmax = [&](int h, int c) { return std::max(std::fabs(s.lo[index_of(s, h, c)]), std::fabs(s.hi[index_of(s, h, c)])); };
  for (int h = 0; h < s.n_heads; ++h)
    for (int c = 0; c < s.head_dim; ++c) {
      const double largest = std::max(absmax(h, c), absmax(h, rope_partner(g, c)));
      if (!std::isfinite(largest)) fail(ErrorKind::kNumeric, where, "the range of KV head {} channel {} is not finite", h, c);
      params.smooth.push_back(static_cast<float>(largest > 0 ? std::clamp(std::sqrt(largest), 1e-4, 1e4) : 1.0));
    }
  for (std::size_t c = 0; c < s.lo.size(); ++c) s.mean[c] /= params.smooth[c], s.lo[c] /= params.smooth[c], s.hi[c] /= params.smooth[c];
}

/// No statistic holds the rotated values. A rotation keeps the norm, so the norm of the channels' extremes bounds them all: looser than
/// what occurs, which a float format does not notice (METHODS.md 4.3). Integers need what does occur, and a rotated channel is a sum of
/// many: its covariance says how far n normal values go.
void rotate(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, std::int64_t max_distance, const SchemeParams& params, ChannelSummary& s) {
  const int d = s.head_dim;
  const bool is_float = scheme.format == kvrt::Format::kFp8E4m3 || scheme.format == kvrt::Format::kFp8E5m2 || scheme.format == kvrt::Format::kNvfp4;
  const double reach = std::sqrt(2 * std::log(std::max(2.0, static_cast<double>(s.n_tokens))));
  for (int h = 0; h < s.n_heads; ++h) {
    double squares = 0;
    std::vector<float> mean;
    for (int c = 0; c < d; ++c) {
      const double absmax = std::max(std::fabs(s.lo[index_of(s, h, c)]), std::fabs(s.hi[index_of(s, h, c)]));
      squares += absmax * absmax;
      mean.push_back(static_cast<float>(s.mean[index_of(s, h, c)]));
    }
    const double norm = std::sqrt(squares);
    kvrt::hadamard_rotate(kvrt::is_llamacpp_block(scheme.format) ? kvrt::llamacpp_hadamard_order(d, side == Side::kK) : kvrt::hadamard_order(d), mean.data(), d,
                          false);
    const float* smooth = params.smooth.empty() ? nullptr : &params.smooth[index_of(s, h, 0)];
    const std::vector<double> covariance = is_float ? std::vector<double>() : stored_covariance(layer, side, h, scheme, smooth, max_distance);
    for (int c = 0; c < d; ++c) {
      const std::size_t at = index_of(s, h, c);
      const double deviation = is_float ? norm : std::sqrt(std::max(0.0, covariance[static_cast<std::size_t>(c) * static_cast<std::size_t>(d + 1)]));
      s.mean[at] = mean[static_cast<std::size_t>(c)];
      s.lo[at] = is_float ? -norm : std::max(-norm, s.mean[at] - reach * deviation);
      s.hi[at] = is_float ? norm : std::min(norm, s.mean[at] + reach * deviation);
    }
  }
}

}  // namespace

stats::TensorStats coded_tensor(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, bool with_sinks) {
  const stats::LayerStats::Split& split = side == Side::kV ? layer.v : scheme.pre ? layer.k_pre : layer.k_post;
  return with_sinks ? split.all() : split.body;
}

ChannelSummary summarise(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, const stats::TensorStats& tensor, bool with_sinks,
                         std::int64_t max_distance, const std::string& where, SchemeParams& params) {
  const bool percentiles = is_static(scheme) && scheme.outlier_per_mille > 0 && !scheme.had;
  ChannelSummary s = of_tensor(tensor, percentiles ? scheme.outlier_per_mille / 2000.0 : 0.0);
  if (needs_every_position(scheme, side))
    widen_to_every_position(layer, with_sinks, scheme.granularity == kvrt::Granularity::kChannelStatic && !percentiles, max_distance, s);
  if (scheme.center) fit_center(where, s, params);
  if (scheme.smooth) fit_smooth(layer.geometry(), where, s, params);
  if (scheme.had && is_static(scheme)) {
    if (with_sinks && layer.n_sinks() > 0 && kvrt::code_bits(scheme.format) < 16 && scheme.format >= kvrt::Format::kInt8 && scheme.format <= kvrt::Format::kSint4)
      fail(ErrorKind::kUnsupported, where, "the covariance that static integer ranges of rotated values are fitted on holds no sinks; "
           "run kvcalib with --sinks 0, or keep {} sinks", layer.n_sinks());
    rotate(scheme, side, layer, max_distance, params, s);
  }
  return s;
}

}  // namespace calib::quant

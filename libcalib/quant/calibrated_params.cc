#include "libcalib/quant/calibrated_params.h"

#include <algorithm>
#include <cmath>

#include "libcalib/base/error.h"
#include "libcalib/quant/channel_summary.h"
#include "libcalib/quant/error_feedback.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/quant/static_thresholds.h"

namespace calib::quant {
namespace {

ChannelSummary summarise(const stats::LayerStats::Split& split, bool with_sinks) {
  const stats::TensorStats& body = split.body;
  ChannelSummary s;
  s.n_heads = body.n_heads;
  s.head_dim = body.head_dim;
  for (std::size_t c = 0; c < body.n_channels(); ++c) {
    stats::Moments moments = body.moments[c];
    stats::Extrema extrema = body.extrema[c];
    if (with_sinks && c < split.sink.n_channels()) {
      moments.merge(split.sink.moments[c]);
      extrema.merge(split.sink.extrema[c]);
    }
    s.n_tokens = moments.n;
    s.mean.push_back(moments.mean);
    s.lo.push_back(extrema.empty() ? 0.0 : extrema.min);
    s.hi.push_back(extrema.empty() ? 0.0 : extrema.max);
  }
  return s;
}

/// Channels that RoPE turns together with channel c; c itself where it turns none.
int rope_partner(const LayerGeometry& g, int c) {
  if (g.rope_style == RopeStyle::kNone || c >= g.rotary_dim) return c;
  if (g.rope_style == RopeStyle::kInterleaved) return c ^ 1;
  const int half = g.rotary_dim / 2;
  return c < half ? c + half : c - half;
}

/// Keys after RoPE under per-channel thresholds: a pair that has not finished a turn within the text reaches values that no statistic
/// of this text holds. The norm of its two channels before RoPE bounds both at every position (METHODS.md 4.10).
void widen_to_every_position(const stats::LayerStats& layer, bool with_sinks, ChannelSummary& s) {
  const LayerGeometry& g = layer.geometry();
  for (int h = 0; h < s.n_heads; ++h)
    for (int c = 0; c < s.head_dim; ++c) {
      const int partner = rope_partner(g, c);
      if (partner == c) continue;
      const int pair = g.rope_style == RopeStyle::kInterleaved ? c / 2 : std::min(c, partner);
      double norm = layer.pair_absmax[static_cast<std::size_t>(h) * static_cast<std::size_t>(s.head_dim / 2) + static_cast<std::size_t>(pair)];
      if (with_sinks) norm = std::max<double>(norm, std::hypot(layer.k_pre.sink.absmax(h, c), layer.k_pre.sink.absmax(h, partner)));
      const std::size_t at = static_cast<std::size_t>(h) * static_cast<std::size_t>(s.head_dim) + static_cast<std::size_t>(c);
      s.lo[at] = std::min(s.lo[at], -g.attention_factor * norm);
      s.hi[at] = std::max(s.hi[at], g.attention_factor * norm);
    }
}

/// Subtracts the means from the summary, which then describes centred values.
void fit_center(const std::string& where, ChannelSummary& s, SchemeParams& params) {
  for (std::size_t c = 0; c < s.mean.size(); ++c) {
    const float mean = static_cast<float>(s.mean[c]);
    if (!std::isfinite(mean)) fail(ErrorKind::kNumeric, where, "the mean of channel {} is not finite", c);
    params.mean.push_back(mean);
    s.lo[c] -= mean;
    s.hi[c] -= mean;
  }
}

/// lambda = sqrt(largest |k| of the RoPE pair), within [1e-4, 1e4], 1 for a pair of zeros (METHODS.md 5.2, alpha 0.5, beta 0).
void fit_smooth(const LayerGeometry& g, const std::string& where, ChannelSummary& s, SchemeParams& params) {
  const auto absmax = [&](int h, int c) {
    const std::size_t at = static_cast<std::size_t>(h) * static_cast<std::size_t>(s.head_dim) + static_cast<std::size_t>(c);
    return std::max(std::fabs(s.lo[at]), std::fabs(s.hi[at]));
  };
  for (int h = 0; h < s.n_heads; ++h)
    for (int c = 0; c < s.head_dim; ++c) {
      const double largest = std::max(absmax(h, c), absmax(h, rope_partner(g, c)));
      if (!std::isfinite(largest)) fail(ErrorKind::kNumeric, where, "the range of KV head {} channel {} is not finite", h, c);
      params.smooth.push_back(static_cast<float>(largest > 0 ? std::clamp(std::sqrt(largest), 1e-4, 1e4) : 1.0));
    }
  for (std::size_t c = 0; c < s.lo.size(); ++c) s.lo[c] /= params.smooth[c], s.hi[c] /= params.smooth[c];
}

void fit_feedback(const kvrt::Scheme& scheme, const stats::LayerStats& layer, std::int64_t max_distance, SchemeParams& params) {
  const LayerGeometry& g = layer.geometry();
  const std::int64_t reach = g.sliding_window > 0 ? std::min(max_distance, g.sliding_window) : max_distance;
  for (int h = 0; h < g.n_kv_heads; ++h) {
    const float* smooth = params.smooth.empty() ? nullptr : &params.smooth[static_cast<std::size_t>(h) * static_cast<std::size_t>(g.head_dim)];
    const FeedbackTriangle t = feedback_triangle(key_error_moment(layer, h, scheme, smooth, std::max<std::int64_t>(reach, 1)), g.head_dim);
    params.ef_u.insert(params.ef_u.end(), t.u.begin(), t.u.end());
    params.ef_order.insert(params.ef_order.end(), t.order.begin(), t.order.end());
  }
}

}  // namespace

SchemeParams fit_params(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, std::int64_t plan_sinks,
                        std::vector<std::string>* why, std::int64_t max_distance) {
  SchemeParams params;
  if (!kvrt::needs_calibration(scheme)) return params;
  const std::string where = fmt::format("layer {} {} {}", layer.geometry().index, side_name(side), kvrt::to_string(scheme));
  if (const std::string missing = missing_part(scheme, side); !missing.empty()) fail(ErrorKind::kUnsupported, where, "{}", missing);
  if (plan_sinks != 0 && plan_sinks != layer.n_sinks())
    fail(ErrorKind::kUsage, where,
         "{} sink tokens asked, but the statistics keep {} apart; ask for that many or none, or run kvcalib with --sinks {}", plan_sinks,
         layer.n_sinks(), plan_sinks);

  const stats::LayerStats::Split& split = side == Side::kV ? layer.v : scheme.pre ? layer.k_pre : layer.k_post;
  ChannelSummary s = summarise(split, plan_sinks == 0);
  if (s.n_tokens == 0) fail(ErrorKind::kNumeric, where, "the statistics of this layer hold no token to be quantised");

  if (side == Side::kK && !scheme.pre && scheme.granularity == kvrt::Granularity::kChannelStatic) widen_to_every_position(layer, plan_sinks == 0, s);
  if (scheme.center) fit_center(where, s, params);
  if (scheme.smooth) fit_smooth(layer.geometry(), where, s, params);
  fit_static_thresholds(scheme, s, where, params, why);
  if (scheme.ef) fit_feedback(scheme, layer, max_distance, params);
  return params;
}

}  // namespace calib::quant

#include "libcalib/quant/calibrated_params.h"

#include <algorithm>
#include <cmath>

#include "libcalib/base/error.h"

namespace calib::quant {
namespace {

/// Mean and range of every channel over the tokens that the plan quantises.
struct ChannelSummary {
  std::int64_t n_tokens = 0;
  int n_heads = 0, head_dim = 0;
  std::vector<double> mean, lo, hi;  ///< [H, D]
};

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

/// Smallest and largest value to be coded in the channels [begin, end) of one head or of all.
struct Range {
  double lo = 0, hi = 0;
};
Range coded_range(const ChannelSummary& s, std::size_t begin, std::size_t end, bool rotated) {
  Range range;
  if (rotated) {
    // No statistic holds the rotated values; a rotation keeps the norm, so the norm of the channels' extremes bounds them all,
    // per head. Looser than what occurs, which a float format does not notice (METHODS.md 4.3).
    const std::size_t d = static_cast<std::size_t>(s.head_dim);
    for (std::size_t head = begin; head < end; head += d) {
      double squares = 0;
      for (std::size_t c = head; c < head + d; ++c) {
        const double absmax = std::max(std::fabs(s.lo[c]), std::fabs(s.hi[c]));
        squares += absmax * absmax;
      }
      range.hi = std::max(range.hi, std::sqrt(squares));
    }
    range.lo = -range.hi;
    return range;
  }
  range.lo = *std::min_element(s.lo.begin() + static_cast<std::ptrdiff_t>(begin), s.lo.begin() + static_cast<std::ptrdiff_t>(end));
  range.hi = *std::max_element(s.hi.begin() + static_cast<std::ptrdiff_t>(begin), s.hi.begin() + static_cast<std::ptrdiff_t>(end));
  return range;
}

double fp8_max(kvrt::Format format) { return format == kvrt::Format::kFp8E4m3 ? 448.0 : 57344.0; }

/// The smallest float that is not below `value`: a threshold must cover what was seen.
float next_up_if_below(double value) {
  const float rounded = static_cast<float>(value);
  return static_cast<double>(rounded) < value ? std::nextafter(rounded, INFINITY) : rounded;
}

/// Float formats: clip_hi is the absmax to cover, per unit or per KV head.
void fit_static_thresholds(const kvrt::Scheme& scheme, const ChannelSummary& s, const std::string& where, SchemeParams& params,
                           std::vector<std::string>* why) {
  const bool per_head = scheme.granularity == kvrt::Granularity::kHead;
  const std::size_t d = static_cast<std::size_t>(s.head_dim), n = per_head ? static_cast<std::size_t>(s.n_heads) : 1;
  const std::size_t width = per_head ? d : s.lo.size();
  for (std::size_t i = 0; i < n; ++i) {
    Range range = coded_range(s, i * width, (i + 1) * width, scheme.had);
    const std::string which = per_head ? fmt::format("KV head {}", i) : std::string("the unit");
    if (!std::isfinite(range.lo) || !std::isfinite(range.hi))
      fail(ErrorKind::kNumeric, where, "the range of {} is not finite", which);
    double absmax = std::max(std::fabs(range.lo), std::fabs(range.hi));
    if (absmax == 0) {
      absmax = fp8_max(scheme.format);  // scale = absmax / max = 1
      if (why) why->push_back(fmt::format("zero range in {}: scale 1", which));
    }
    params.clip_hi.push_back(next_up_if_below(absmax));
  }
}

}  // namespace

SchemeParams fit_params(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, std::int64_t plan_sinks,
                        std::vector<std::string>* why) {
  SchemeParams params;
  if (!kvrt::needs_calibration(scheme)) return params;
  const std::string where = fmt::format("layer {} {} {}", layer.geometry().index, side_name(side), kvrt::to_string(scheme));
  if (const std::string missing = kvrt::check_implemented(scheme); !missing.empty()) fail(ErrorKind::kUnsupported, where, "{}", missing);
  if (plan_sinks != 0 && plan_sinks != layer.n_sinks())
    fail(ErrorKind::kUsage, where,
         "{} sink tokens asked, but the statistics keep {} apart; ask for that many or none, or run kvcalib with --sinks {}", plan_sinks,
         layer.n_sinks(), plan_sinks);

  const stats::LayerStats::Split& split = side == Side::kV ? layer.v : scheme.pre ? layer.k_pre : layer.k_post;
  ChannelSummary s = summarise(split, plan_sinks == 0);
  if (s.n_tokens == 0) fail(ErrorKind::kNumeric, where, "the statistics of this layer hold no token to be quantised");

  if (scheme.center) {
    for (std::size_t c = 0; c < s.mean.size(); ++c) {
      const float mean = static_cast<float>(s.mean[c]);
      if (!std::isfinite(mean)) fail(ErrorKind::kNumeric, where, "the mean of channel {} is not finite", c);
      params.mean.push_back(mean);
      s.lo[c] -= mean;
      s.hi[c] -= mean;
    }
  }
  if (scheme.granularity == kvrt::Granularity::kTensor || scheme.granularity == kvrt::Granularity::kHead)
    fit_static_thresholds(scheme, s, where, params, why);
  return params;
}

}  // namespace calib::quant

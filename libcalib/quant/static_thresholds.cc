#include "libcalib/quant/static_thresholds.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/codec/group_range.h"
#include "kernels/core/plan_constants.h"
#include "libcalib/base/error.h"

namespace calib::quant {
namespace {

/// Smallest and largest value to be coded in the channels [begin, end), and their mean.
struct Range {
  double lo = 0, hi = 0, mean = 0;
};
Range coded_range(const ChannelSummary& s, std::size_t begin, std::size_t end) {
  Range range;
  range.lo = *std::min_element(s.lo.begin() + static_cast<std::ptrdiff_t>(begin), s.lo.begin() + static_cast<std::ptrdiff_t>(end));
  range.hi = *std::max_element(s.hi.begin() + static_cast<std::ptrdiff_t>(begin), s.hi.begin() + static_cast<std::ptrdiff_t>(end));
  for (std::size_t c = begin; c < end; ++c) range.mean += s.mean[c] / static_cast<double>(end - begin);
  return range;
}
Range joined(const Range& a, const Range& b) { return {std::min(a.lo, b.lo), std::max(a.hi, b.hi), (a.mean + b.mean) / 2}; }
/// Never wider than before: the mean of what was seen may lie beside percentiles.
Range clipped(const Range& r, double alpha) {
  if (alpha == 1.0) return r;
  const double mean = std::clamp(r.mean, r.lo, r.hi);
  return {mean - alpha * (mean - r.lo), mean + alpha * (r.hi - mean), r.mean};
}

/// Largest value that a float format holds without a scale: one that covers it has scale 1.
double format_max(kvrt::Format format) {
  if (format == kvrt::Format::kFp8E4m3) return 448.0;
  return format == kvrt::Format::kFp8E5m2 ? 57344.0 : 6.0 * 448.0;
}

/// The nearest floats that do not cut the range: thresholds must cover what was seen.
float round_up(double value) {
  const float rounded = static_cast<float>(value);
  return static_cast<double>(rounded) < value ? std::nextafter(rounded, INFINITY) : rounded;
}
float round_down(double value) { return -round_up(-value); }

}  // namespace

int rope_partner(const LayerGeometry& layer, int c) {
  return kvrt::rope_partner(layer.rope_style == RopeStyle::kNone ? 0 : layer.rotary_dim, layer.rope_style == RopeStyle::kInterleaved, c);
}

bool finishes_a_turn(const LayerGeometry& layer, int pair, std::int64_t n_tokens) {
  return static_cast<double>(n_tokens) * layer.inv_freq.at(static_cast<std::size_t>(pair)) >= 2 * std::numbers::pi;
}

void fit_static_thresholds(const kvrt::Scheme& scheme, const LayerGeometry& layer, const ChannelSummary& s, double alpha,
                           const std::string& where, SchemeParams& params, std::vector<std::string>* why) {
  std::int64_t n = 0;
  bool absmax_only = true;
  for (const kvrt::PlanConstant& c : kvrt::plan_constants(scheme, s.n_heads, s.head_dim)) {
    if (std::string_view(c.name) == "clip_hi") n = c.count();
    if (std::string_view(c.name) == "clip_lo") absmax_only = false;
  }
  if (n == 0) return;
  params.clip_lo.clear();
  params.clip_hi.clear();
  const std::size_t width = s.lo.size() / static_cast<std::size_t>(n), d = static_cast<std::size_t>(s.head_dim);
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    Range range = coded_range(s, i * width, (i + 1) * width);
    if (scheme.pair && width == 1) {
      const std::size_t partner = i / d * d + static_cast<std::size_t>(rope_partner(layer, static_cast<int>(i % d)));
      if (partner != i) range = joined(range, coded_range(s, partner, partner + 1));
    }
    range = clipped(range, alpha);
    const std::string which = n == 1        ? std::string("the unit")
                              : width == d ? fmt::format("KV head {}", i)
                                           : fmt::format("KV head {} channel {}", i / d, i % d);
    if (!std::isfinite(range.lo) || !std::isfinite(range.hi)) fail(ErrorKind::kNumeric, where, "the range of {} is not finite", which);
    if (!absmax_only) {
      params.clip_lo.push_back(round_down(range.lo));
      params.clip_hi.push_back(round_up(range.hi));
      continue;
    }
    double absmax = std::max(std::fabs(range.lo), std::fabs(range.hi));
    if (absmax == 0) {
      absmax = format_max(scheme.format);
      if (why) why->push_back(fmt::format("zero range in {}: scale 1", which));
    }
    params.clip_hi.push_back(round_up(absmax));
  }
}

}  // namespace calib::quant

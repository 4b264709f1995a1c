#include "libcalib/quant/static_thresholds.h"

#include <algorithm>
#include <cmath>

#include "kernels/core/plan_constants.h"
#include "libcalib/base/error.h"

namespace calib::quant {
namespace {

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

void fit_static_thresholds(const kvrt::Scheme& scheme, const ChannelSummary& s, const std::string& where, SchemeParams& params,
                           std::vector<std::string>* why) {
  std::int64_t n = 0;
  bool absmax_only = true;
  for (const kvrt::PlanConstant& c : kvrt::plan_constants(scheme, s.n_heads, s.head_dim)) {
    if (std::string_view(c.name) == "clip_hi") n = c.count();
    if (std::string_view(c.name) == "clip_lo") absmax_only = false;
  }
  if (n == 0) return;
  if (scheme.had && !absmax_only)
    fail(ErrorKind::kUnsupported, where, "static integer ranges of rotated values are not in the statistics; use token.g<N> with had, or leave had out");
  const std::size_t width = s.lo.size() / static_cast<std::size_t>(n), d = static_cast<std::size_t>(s.head_dim);
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    const Range range = coded_range(s, i * width, (i + 1) * width, scheme.had);
    const std::string which = n == 1        ? std::string("the unit")
                              : width == d ? fmt::format("KV head {}", i)
                                           : fmt::format("KV head {} channel {}", i / d, i % d);
    if (!std::isfinite(range.lo) || !std::isfinite(range.hi))
      fail(ErrorKind::kNumeric, where, "the range of {} is not finite", which);
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

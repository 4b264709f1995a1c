#pragma once
// Fits static ranges: of a unit, of a KV head, of a channel.

#include <string>
#include <vector>

#include "kernels/core/scheme.h"
#include "libcalib/quant/channel_summary.h"
#include "libcalib/quant/scheme_params.h"

namespace calib::quant {

/// Sets clip_lo and clip_hi of schemes with static ranges; others are left alone. Thresholds cover every value of the summary.
/// Float formats: clip_hi alone, the absmax to cover; a range of zero gives scale 1 and a note in `why`.
/// Throws: kNumeric (a range that is not finite), kUnsupported (integers over a rotation, whose range no statistic holds).
void fit_static_thresholds(const kvrt::Scheme& scheme, const ChannelSummary& summary, const std::string& where, SchemeParams& params,
                           std::vector<std::string>* why);

}  // namespace calib::quant

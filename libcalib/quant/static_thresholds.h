#pragma once
// Fits static ranges: of a unit, of a KV head, of a channel.

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/core/scheme.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/quant/channel_summary.h"
#include "libcalib/quant/scheme_params.h"

namespace calib::quant {

/// Sets clip_lo and clip_hi of schemes with static ranges; others are left alone. Thresholds cover every value of the summary, then
/// shrink about the mean to the share `alpha` (METHODS.md 4.8). With `pair`, both channels of a RoPE pair have one range.
/// Float formats: clip_hi alone, the absmax to cover; a range of zero gives scale 1 and a note in `why`.
/// Throws: kNumeric (a range that is not finite).
void fit_static_thresholds(const kvrt::Scheme& scheme, const LayerGeometry& layer, const ChannelSummary& summary, double alpha,
                           const std::string& where, SchemeParams& params, std::vector<std::string>* why);

/// Channels that RoPE turns together with channel c; c itself where it turns none.
int rope_partner(const LayerGeometry& layer, int c);

/// Whether RoPE pair `pair` turns at least once within n_tokens positions: a text of that length has shown all its values.
bool finishes_a_turn(const LayerGeometry& layer, int pair, std::int64_t n_tokens);

}  // namespace calib::quant

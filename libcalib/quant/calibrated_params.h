#pragma once
// Fits the constants of every candidate scheme from the statistics of a layer (means, factors, static ranges, bases, error feedback).

#include "libcalib/quant/fake_quant.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::quant {

/// Scales are fitted on exactly the tokens that the plan quantises: with `plan_sinks` == 0 the sink part of the statistics is
/// merged back (moments, extrema); other counts than 0 and the statistics' own are kUsage.
/// max_distance: tokens between a query and a key that keys with `pre` and `ef` or `lowrank` are fitted for, from 1 on: the length of the documents.
/// The one place that derives a scale: never <= 0, NaN or infinite; a range of zero gives 1 and a note in `why`.
SchemeParams fit_params(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, std::int64_t plan_sinks,
                        std::vector<std::string>* why = nullptr, std::int64_t max_distance = 2048);

}  // namespace calib::quant

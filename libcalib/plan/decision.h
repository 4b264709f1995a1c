#pragma once
// Why a unit is stored as it is: the numbers behind each choice, for people and machines.

#include <vector>

#include "libcalib/plan/candidate.h"
#include "libcalib/plan/plan.h"
#include "libcalib/plan/search.h"
#include "libcalib/quant/unit_evidence.h"

namespace calib::plan {

inline constexpr double kOutlierRatio = 6.0;  ///< a channel this far above the median widens every per-token range by that factor

/// Reasons of one unit of a searched plan. Rules: `score`, `cheaper`, `dearer` (best neighbours in bytes, the other side fixed),
/// `price` (the score that a byte was worth), `tier` (what the layer's salient tier costs and saves, or why it has none), `restricted` (what the
/// target took away, or why the unit is tied), `lowrank` (whether a basis beat the best plain scheme of the unit), and those of
/// evidence_reasons. `evidence` may be null.
std::vector<Reason> decision_reasons(const Candidates& candidates, std::size_t layer, Side side, const Found& found,
                                     const quant::UnitEvidence* evidence);

/// What the statistics say about the choice: `outlier_ratio`, `mean_ratio`.
std::vector<Reason> evidence_reasons(const kvrt::Scheme& scheme, Side side, const quant::UnitEvidence& evidence);

}  // namespace calib::plan

#pragma once
// The flow of a whole plan: is 16 bit affordable, are there outliers, which frame, ranges, width, group, rotation and window; what each
// alternative would have cost at the same bytes; what was chosen.

#include <map>
#include <optional>
#include <vector>

#include "libcalib/plan/plan.h"
#include "libcalib/plan/search.h"
#include "libcalib/quant/unit_evidence.h"

namespace calib::plan {

/// METHODS.md 8: a calibrated plan that does not beat the data-free one by more than 2 SE gives way to it.
struct MarginVerdict {
  double calibrated = 0, data_free = 0;  ///< predicted scores at the same limit
  double se = 0;                         ///< of their difference: units that differ, sides independent, summed over units
  bool data_free_taken = false;
};
/// Empty if the found plan holds no calibrated scheme, or no data-free plan fits `limit_bytes`. Replaces `found` where the rule says so.
std::optional<MarginVerdict> apply_margin(const Candidates& candidates, std::int64_t limit_bytes, bool window_per_layer, Found& found);

/// Bytes of the whole cache in bf16 without tiers: what 16 bit costs at this context and batch.
std::int64_t plain_16_bit_bytes(const std::vector<LayerGeometry>& layers, Accounting accounting);

/// First steps, the same for every plan: what was asked, and whether 16 bit is affordable. `limit_bytes` 0 = no byte limit.
std::vector<Reason> affordability(const std::vector<LayerGeometry>& layers, const Accounting& accounting, const std::string& asked, std::int64_t limit_bytes);

/// The steps behind a searched plan. `found` is the choice that stands; `evidence` by layer number, may be empty.
std::vector<Reason> decision_flow(const Candidates& candidates, const Found& found, bool window_per_layer, const std::optional<MarginVerdict>& margin,
                                  const std::map<int, quant::UnitEvidence>& evidence);

}  // namespace calib::plan

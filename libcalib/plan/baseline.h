#pragma once
// Simpler ways to spend the same bytes: a plan that does not beat them is not worth its complexity (METHODS.md 8).

#include <cstdint>
#include <optional>
#include <vector>

#include "libcalib/plan/candidate.h"
#include "libcalib/plan/plan.h"
#include "libcalib/plan/search.h"

namespace calib::plan {

/// Best uniform pair, best data-free uniform pair, K 8 bits with V 4, first and last two layers at 8 bits, mean of 20 random
/// plans (seeded), best plan of data-free schemes. One that does not fit `limit_bytes` is listed with its own bytes and
/// feasible = false; one that the candidates cannot form is left out. Predictions of the same metric as the plan's.
/// None has a salient tier. Under restrictions all of them keep these too.
std::vector<Baseline> baselines(const Candidates& candidates, std::int64_t limit_bytes, std::uint64_t seed);

/// Optimum of the schemes without calibrated constants within the limit; the smallest of them if none fits; empty if a unit has none.
std::optional<Found> best_data_free(const Candidates& candidates, std::int64_t limit_bytes, bool window_per_layer);

}  // namespace calib::plan

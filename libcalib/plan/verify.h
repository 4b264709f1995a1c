#pragma once
// Independent check of a plan: recounts everything it claims, from its layers alone.

#include <string>
#include <vector>

#include "libcalib/plan/plan.h"

namespace calib::plan {

/// Problems found, empty if none: every unit of the model once, schemes that fit its shape, constants of the right size, salient tiers that the plan describes,
/// bytes and effective bits as counted again, byte limit and restrictions held, rungs nested: rising bytes, units only raised, each once a rung, a tenth of
/// them at most unless ties ask for more, by schemes that need no constants.
std::vector<std::string> verify_plan(const Plan& plan);

/// Throws kMismatch naming both artifacts and the first field that differs.
void check_same_model(const ModelIdentity& a, const std::string& a_name, const ModelIdentity& b, const std::string& b_name);

}  // namespace calib::plan

#pragma once
// Static ranges that a runtime raises as it goes (KERNELS.md, `refresh`), simulated over one document.

#include <cstdint>

#include "libcalib/quant/fake_quant.h"

namespace calib::quant {

/// Whether a refresh changes anything: one static range a unit or a KV head, on values as they come. Ranges of transformed values
/// (`center`, `smooth`, `had`) and thresholds per channel stay what calibration made them.
bool can_refresh(const kvrt::Scheme& scheme);

/// fake_quant_document() with ranges that only grow: tokens [i * interval, (i + 1) * interval) are coded with ranges that hold the
/// calibrated ones and every coded value of the intervals before; what is coded stays. Sinks are copied and raise nothing.
/// n_raised, if not null: (interval, range) pairs coded with a wider range than the calibrated one.
/// Requires: can_refresh(scheme), interval >= 1, params fitted for the scheme.
void fake_quant_refreshed(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer, const SchemeParams& params, std::int64_t interval,
                          std::int64_t n_sinks, bool bf16_input, std::int64_t n_tokens, const float* x, float* out, ThreadPool& pool,
                          std::int64_t* n_raised = nullptr);

}  // namespace calib::quant

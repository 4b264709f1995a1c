#pragma once
// Error diffusion along the tokens of one unit, before its codec (`kvsens evaluate --carry-value-error`). No bytes, and the decoder is the same.

#include <cstdint>

#include "libcalib/quant/fake_quant.h"

namespace calib::quant {

/// Ranges per token, each row coded on its own: `token.g<N>` without `ef`, which chooses codes against a moment, and without `lowrank`,
/// whose missing directions no later row can make up for.
bool can_carry_error(const kvrt::Scheme& scheme);

/// fake_quant_document() of rows x_t + share e_(t-1), where e_t is what coding left of such a row; e of the last token before the coded ones
/// is 0. Sinks are copied. x, out: [T, H, D]. Requires: can_carry_error(scheme), share in [0, 1].
void fake_quant_carried(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer, const SchemeParams& params, float share,
                        std::int64_t n_sinks, bool bf16_input, std::int64_t n_tokens, const float* x, float* out);

}  // namespace calib::quant

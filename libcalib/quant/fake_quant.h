#pragma once
// Fake quantisation of one unit's tensor through kvrt, sinks and tail exact, and the constants a scheme needs.

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/core/scheme.h"
#include "kernels/core/tiers.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/quant/scheme_params.h"

namespace calib::quant {

/// Quantises the coded range of one document. x: [T, H, D] dense fp32 in the scheme's frame; out likewise.
/// Tokens [n_sinks, n_sinks + k*N) with the largest whole number of channel groups (k*1 otherwise) are replaced by decode(encode(x));
/// all others (sinks, a partial last group) are copied unchanged. `bf16_input` as tiers.h encodes_bf16().
/// n_saturated, if not null: values that a static threshold or the end of a format cut off. Throws kNumeric, kInternal with kvrt's text.
void fake_quant_document(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer, const SchemeParams& params,
                         std::int64_t n_sinks, bool bf16_input, std::int64_t n_tokens, const float* x, float* out, ThreadPool& pool,
                         std::int64_t* n_saturated = nullptr);

/// Rounds to BF16 and back (nearest even): what exact segments hold.
void round_bf16(const float* x, float* out, std::int64_t n);

/// llama.cpp's order of a key row: stored position -> channel (adjacent pairs for NORM rope families), empty = natural.
std::vector<std::int32_t> llamacpp_block_order(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer);

}  // namespace calib::quant

#pragma once
// The grid of one run: which schemes each unit is scored with, and what applying one needs. No Torch.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/core/tiers.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/quant/token_tiers.h"
#include "libcalib/sens/sens_result.h"

namespace calib::sens {

/// Constants of a scheme for the unit (position of the layer in ModelIdentity::layers, side) when n_sinks tokens stay exact. Called
/// only for schemes that need some.
using ParamsProvider = std::function<quant::SchemeParams(std::size_t layer_idx, Side side, const kvrt::Scheme& scheme, std::int64_t n_sinks)>;

/// By what a layer (position in ModelIdentity::layers) ranks tokens for a salient tier.
using SaliencyProvider = std::function<quant::SaliencyFactors(std::size_t layer_idx)>;

/// One scheme of one unit, ready to be applied.
struct UnitCandidate {
  std::size_t scheme_idx = 0;  ///< in SensResult::schemes
  kvrt::Scheme scheme;
  quant::SchemeParams params;
  bool is_alternative = false;  ///< stands beside another of its scheme with other constants; one of the two is kept
};

/// Tiers of a unit that stands alone: the exit block is its own (METHODS.md 7).
kvrt::Tiers isolated_tiers(const kvrt::Scheme& scheme, std::int64_t n_sinks, std::int64_t window, double salient_fraction = 0);

/// The tier of a layer (its number) in classes that have one; null if the grid has none. Throws kInternal if the layer's factors are missing.
std::shared_ptr<const quant::SalientTier> salient_tier_of(const SensResult& grid, int layer);

/// Fills schemes, units, valid and base_bytes_per_token of `result` from its model. A scheme that no unit of its side can hold is left
/// out with a note; one that some layers cannot hold is marked not valid there, with a note. `layers` (layer numbers) restricts the
/// units; empty = all. Throws: kUsage if nothing is left, or a layer number is unknown.
void lay_out_grid(const quant::CandidateList& candidates, const std::vector<int>& layers, SensResult* result, const LogSink& log);

/// Key of SensResult::params.
std::string params_key(const SensResult& grid, std::size_t unit, std::size_t scheme_idx);

/// Keeps the constants of a candidate for the plan that will be made from the scores; nothing where it has none.
void store_params(const UnitCandidate& candidate, std::size_t unit, SensResult* grid);

/// Valid candidates of a unit, with constants for grid.n_sinks: those that the grid already keeps, else those of `params`.
std::vector<UnitCandidate> unit_candidates(const SensResult& grid, std::size_t unit, const ParamsProvider& params);

/// Position of a layer number in ModelIdentity::layers. Throws kInternal if absent.
std::size_t layer_position(const ModelIdentity& model, int layer);

/// Adds beside each candidate with a codebook by Q-Norm a second one that uses it.
void add_qnorm_alternatives(std::vector<UnitCandidate>& candidates);

/// decode(encode(x)) - x for the tokens that a document of this length may read coded; 0 for sinks and the rest.
/// x: [T, H, D] in the scheme's frame.
void quantisation_error(const UnitCandidate& candidate, Side side, const LayerGeometry& layer, std::int64_t n_sinks, bool bf16_input,
                        std::int64_t n_tokens, const float* x, float* out, ThreadPool& pool);

}  // namespace calib::sens

#pragma once
// Builds whole plans: by search over sens.h5, or one pair for every layer.

#include <functional>
#include <map>
#include <string>

#include "libcalib/plan/decision_flow.h"
#include "libcalib/plan/plan.h"
#include "libcalib/plan/search.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/quant/unit_evidence.h"
#include "libcalib/sens/sens_result.h"

namespace calib::plan {

using EvidenceByLayer = std::map<int, quant::UnitEvidence>;  ///< by layer number; may be empty

struct SearchRequest {
  Limits limits;
  std::string limit_text;   ///< as the user wrote it, for the plan's request
  std::string metric;       ///< empty = first present
  Accounting accounting;    ///< sinks come from sens.h5
  Restrictions restrictions;
  TierRules tiers;          ///< where a salient tier may stand
  std::uint64_t seed = 0;   ///< of the random baseline
};

/// The plan without provenance. Where 16 bit fits a byte limit and nothing forbids it, the plan is bf16 without tiers. Constants come from sens.params. Throws
/// as Candidates and search; kMismatch naming a unit whose scheme needs constants that sens.h5 lacks.
Plan search_plan(const sens::SensResult& sens, const EvidenceByLayer& evidence, const SearchRequest& request, const LogSink& log = {});

/// The steps of search_plan: what may be chosen, and a choice written out as a plan.
Candidates candidates_of(const sens::SensResult& sens, const SearchRequest& request, const LogSink& log = {});
Plan plan_of(const Candidates& candidates, const Found& found, const EvidenceByLayer& evidence, const SearchRequest& request,
             const std::optional<MarginVerdict>& margin = {});
/// Fitted arrays of one unit. Throws: kMismatch if sens.h5 has none for it.
quant::SchemeParams params_from_sens(const sens::SensResult& sens, const LayerGeometry& layer, Side side, const std::string& scheme);

/// Fits the constants of one unit: (layer geometry, side, scheme, list that receives notes).
using FitUnit = std::function<quant::SchemeParams(const LayerGeometry&, Side, const kvrt::Scheme&, std::vector<std::string>*)>;

/// By what a layer ranks tokens for a salient tier.
using FitSaliency = std::function<quant::SaliencyFactors(const LayerGeometry&)>;

/// One pair for every layer, with the preset's sinks, window and salient tier (`saliency` is asked for presets that have one). Checks
/// each scheme against each layer.
Plan uniform_plan(const ModelIdentity& model, const quant::Preset& preset, Accounting accounting, const EvidenceByLayer& evidence, const FitUnit& fit,
                  const FitSaliency& saliency = {});

/// What another tool chose for one layer: schemes without calibrated constants, and where that stands.
struct ImportedLayer {
  kvrt::Scheme k, v;
  std::string why;  ///< one sentence
};

/// Those choices as a plan, layers as model.layers. `origin` names the tool and its setting, as Request::imported. Checks each scheme
/// against each layer.
Plan imported_plan(const ModelIdentity& model, const std::string& origin, const std::vector<ImportedLayer>& layers, std::int64_t n_sinks, std::int64_t window,
                   Accounting accounting, const EvidenceByLayer& evidence);

/// Stored key order and llama.cpp block order of a unit (KERNELS.md 3.3, FORMATS.md 2).
std::string default_chan_perm(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer);
std::string block_order(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer);

}  // namespace calib::plan

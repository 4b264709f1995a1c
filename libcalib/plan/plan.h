#pragma once
// A plan: one scheme per unit, its constants and tiers, for one exact model, with the request, prediction and reasons.

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/core/scheme.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/plan/cost_model.h"
#include "libcalib/plan/restrictions.h"
#include "libcalib/quant/saliency_factors.h"
#include "libcalib/quant/scheme_params.h"

namespace calib::plan {

/// One machine-readable reason: a rule, a sentence, and the numbers in it.
struct Reason {
  std::string rule;
  std::string text;
  std::vector<std::pair<std::string, double>> numbers;
  bool operator==(const Reason&) const = default;
};

struct UnitPlan {
  kvrt::Scheme scheme;
  quant::SchemeParams params;
  std::string chan_perm = "natural";  ///< stored channel order of K: `natural` or `spread<N>` (KERNELS.md 3.3)
  std::string block_order;            ///< llama.cpp blocks on keys: `adjacent` or `half_split`; else empty
  std::vector<Reason> why;
};

struct LayerPlan {
  int index = 0;        ///< layer number of the model
  std::string module;   ///< e.g. model.layers.7.self_attn
  std::optional<std::int64_t> window_tokens;  ///< only where it differs from the plan's
  double salient_fraction = 0;                ///< share of the coded tokens in the salient tier, both sides; 0 = no tier
  quant::SaliencyFactors saliency;            ///< by which they are chosen, where there is one
  UnitPlan k, v;
  const UnitPlan& unit(Side side) const { return side == Side::kK ? k : v; }
  UnitPlan& unit(Side side) { return side == Side::kK ? k : v; }
};

/// What was asked. Exactly one limit is set: bytes (from any budget spelling), or kl, or a uniform pair; an imported plan has none.
struct Request {
  std::string budget;                ///< as given ("4.5", "12GiB", "300B/token", "max-kl 0.05"), empty for uniform plans
  std::string uniform;               ///< preset or pair of a uniform plan
  std::string imported;              ///< tool and setting that made an imported plan ("kvtuner kivi"); else empty
  std::string profile;               ///< accuracy, compact or empty
  std::int64_t context_tokens = 8192, batch = 1;
  std::int64_t budget_bytes = 0;     ///< 0 = no byte limit
  double max_kl = 0;                 ///< nats; 0 = none
  std::string metric;                ///< score that was spent; empty for uniform plans
  std::string candidates;            ///< list name of sens.h5
  bool window_per_layer = false;
  Restrictions restrictions;
};

/// The slope of the runs of one window.
struct WindowSlope {
  std::int64_t window = 0;
  std::size_t n_runs = 0;
  double slope = 1;
};

/// What joint runs say about predictions (joint.h): measured KL = slope x predicted sum, ln PPL ratio = kappa x KL. Runs span decades,
/// so slope and r2 are those of the logarithms: slope = exp(weighted mean of ln(measured / predicted)), r2 the share of the variance of
/// ln measured that slope x predicted explains. Scores of short windows may be off by another factor than those of long ones, so
/// each window with runs enough has a slope of its own. Large errors amplify each other: over all runs measured = s (s / pivot)^(exponent - 1)
/// with s = slope x predicted, and r2, spearman and worst_factor are those of this curve.
struct JointFit {
  std::size_t n_runs = 0;
  double slope = 1, kappa = 1;  ///< slope: of all runs; in a plan, of its own sum: fitted over unfitted
  double r2 = 0, spearman = 0;
  double worst_factor = 1;  ///< largest ratio of measured to slope x predicted, or of its inverse
  // Not kept in plan files, whose slope is the curve's at their own loss.
  double exponent = 1, pivot = 1;
  std::vector<WindowSlope> windows = {};  ///< ascending
  /// Measured over `score`, a sum already times its slopes.
  double level(double score) const { return score > 0 ? std::pow(score / pivot, exponent - 1) : 1.0; }
  double slope_of(std::int64_t window) const {
    for (const WindowSlope& w : windows)
      if (w.window == window) return w.slope;
    return slope;
  }
  /// METHODS.md 7: outside these limits sums of scores say too little, and only measured plans count.
  bool reliable() const { return spearman >= 0.8 && slope >= 0.7 && slope <= 1.5; }
};

/// A plan's loss on verification text, measured with all its units at once.
struct Measured {
  double kld = 0, kld_se = 0;              ///< nats
  double ppl_ratio = 1, ppl_ratio_se = 0;
  std::int64_t n_documents = 0, n_tokens = 0, seq_len = 0;
  std::string documents_sha256;            ///< of the text, as DataIdentity
  std::optional<std::int64_t> length_limit = {};  ///< for Monitor
  /// Standard errors are over documents: a single one has none that a decision may rest on.
  bool has_error() const { return n_documents >= 2; }
};

/// Units whose scores are measured losses of single units (`kvsens isolate`), over the slope that those have to the metric.
struct IsolatedUse {
  std::size_t n_units = 0;
  double above = 0;                ///< nats of the metric
  double slope_k = 1, slope_v = 1;
  bool operator==(const IsolatedUse&) const = default;
};

/// Sum over units of the score that was spent. METHODS.md 7: a metric in nats predicts KL = slope x score.
struct Prediction {
  std::string metric;
  double score = 0, se = 0;  ///< se: sum of the units' standard errors (they share documents, so no quadrature)
  bool in_nats = false;      ///< logit_kl, fisher_softmax, fisher_vec, fisher
  bool unfitted = true;      ///< slope = kappa = 1, no joint runs behind it
  std::optional<JointFit> joint = {};
  std::optional<IsolatedUse> isolated = {};
  double kl() const { return joint ? joint->slope * score : score; }                       ///< if in_nats
  double ln_ppl_ratio() const { return joint ? joint->kappa * kl() : kl(); }
};

struct Summary {
  std::int64_t bytes = 0;            ///< all K and V bytes at context x batch
  std::int64_t elements = 0;
  double effective_bits = 0;         ///< bytes * 8 / elements
  double bytes_per_token = 0;        ///< bytes / (context x batch)
  double compression = 0;            ///< 16 / effective_bits
  std::int64_t constants_bytes = 0;  ///< shared by all sequences, not in effective_bits
  std::optional<Prediction> predicted;
  std::optional<Measured> measured;
  double gap = 0;                    ///< (predicted sum - lower bound) / sum; 0 = proven optimal
  bool proven = false;
  std::optional<std::int64_t> valid_to_position;
};

struct FrontierPoint {
  std::int64_t bytes = 0;
  double effective_bits = 0, score = 0;
};

/// A simpler way to spend the same bytes.
struct Baseline {
  std::string name, description;
  bool feasible = false;  ///< fits the byte limit
  std::int64_t bytes = 0;
  double effective_bits = 0, score = 0;
  std::string pair;                 ///< KSCHEME:VSCHEME of a uniform one; else empty
  std::int64_t window_tokens = 0;   ///< of `pair`
  std::optional<double> measured_kld = {}, measured_se = {};  ///< on the text of Summary::measured
};

struct RungChange {
  int layer = 0;
  Side side = Side::kK;
  kvrt::Scheme scheme;  ///< needs no constants
};
/// Fallback: the changes on top of all rungs below it.
struct Rung {
  std::vector<RungChange> changes;
  std::int64_t bytes = 0;
  double effective_bits = 0;
  double score = 0;
};

/// Limits for watching the plan in use. Ratios are against the 16-bit cache under the same load: perplexity, time to first token, time
/// between tokens. Compression buys speed where HBM bandwidth is the bottleneck: HBM less busy than its limit, or SMs busier than
/// theirs, say that it is not.
struct Monitor {
  double kl_max = 0.05, ppl_ratio_max = 1.10, ttft_ratio_max = 1.15, itl_ratio_max = 1.15;
  double hit_rate_min = 0.70, hbm_utilisation_min = 0.50, sm_utilisation_max = 0.90;
  std::optional<std::int64_t> length_limit;  ///< position from which the measured perplexity ratio was above its limit
};

/// The 8-bit tier of layers whose salient_fraction is above 0.
struct SalientTier {
  kvrt::Scheme scheme;  ///< of keys and values alike
  std::string score;    ///< by which tokens are chosen: expected_attention
  bool operator==(const SalientTier&) const = default;
};

struct Plan {
  ModelIdentity model;
  Provenance provenance;
  Request request;
  Summary summary;
  std::vector<FrontierPoint> frontier;
  std::vector<Baseline> baselines;
  std::vector<Reason> decision;  ///< the whole plan's flow: what was considered, what it would have cost, what was chosen
  std::int64_t sink_tokens = 4, window_tokens = 128;
  std::optional<SalientTier> salient;  ///< set if any layer has a tier
  std::vector<LayerPlan> layers;  ///< ascending index, one per layer of `model`
  int page_tokens = 64, scale_refresh_tokens = 0;
  Monitor monitor;
  std::vector<Rung> fallback;
  /// Fields this version does not know: (JSON pointer, JSON text); kept on rewrite.
  std::vector<std::pair<std::string, std::string>> unknown_fields;

  std::int64_t window_of(const LayerPlan& layer) const { return layer.window_tokens.value_or(window_tokens); }
  TierClass tiers_of(const LayerPlan& layer) const { return {window_of(layer), layer.salient_fraction, salient ? salient->scheme : kvrt::Scheme{}}; }
};

}  // namespace calib::plan

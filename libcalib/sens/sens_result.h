#pragma once
// What kvsens hands to kvplan: plain structs, no Torch, no HDF5.

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "libcalib/base/model_geometry.h"
#include "libcalib/quant/saliency_factors.h"

namespace calib::sens {

struct UnitId {
  int layer = 0;  ///< layer number of the model
  Side side = Side::kK;
};

/// Scores of one metric. Index: (unit * n_schemes + scheme) * n_classes + class; NaN where the scheme is not valid for the unit.
struct ScoreTable {
  std::vector<double> mean, se, p99, max, worst_decile;
  std::vector<double> by_bucket;  ///< index as above, times n_buckets, plus bucket
};

/// A fitted array that a scheme of a unit needs (means, clips …); kvplan copies it into plan.safetensors.
struct FittedArray {
  std::string what;                  ///< clip_lo clip_hi scale mean smooth codebook …
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

/// Combinations of units measured as a whole (`kvsens joint`), on text that neither the statistics nor the scores have seen.
struct JointRuns {
  DataIdentity data;
  Provenance provenance;
  std::size_t n_layers = 0;
  std::vector<std::int64_t> k, v, tier_class;      ///< [runs, n_layers]: positions in SensResult's schemes and tier classes
  std::vector<double> kld, kld_se, ln_ppl_ratio;   ///< [runs]: mean KL and its standard error in nats, ln of the perplexity ratio
  std::size_t size() const { return kld.size(); }
};

/// Single units run on to the logits where a metric's estimate is past what it can be trusted with (`kvsens isolate`).
struct IsolatedRuns {
  /// logit_kl over the metric, where the metric holds.
  struct Slope {
    double value = 1, se_ln = 0;  ///< se_ln: standard error of its logarithm
    std::int64_t n_pairs = 0;
  };
  DataIdentity data;
  Provenance provenance;
  std::string metric;   ///< whose scores they replace
  double above = 0;     ///< nats of that metric: a unit with a surviving option above it is taken up
  Slope k, v;           ///< the same where both sides were fitted together
  std::vector<std::uint8_t> taken_up;  ///< [units]
  std::vector<double> mean, se;        ///< logit_kl, index as ScoreTable; NaN where not measured
  const Slope& slope(Side side) const { return side == Side::kK ? k : v; }
  bool measured(std::size_t cell) const { return mean[cell] == mean[cell]; }
};

struct SensResult {
  ModelIdentity model;
  DataIdentity data, calibration_data;
  Provenance provenance;
  std::int64_t n_sinks = 4, seq_len = 0;
  std::string candidate_list;             ///< "default-2", a preset's name, or "custom"
  std::vector<std::string> schemes;       ///< canonical strings
  std::vector<double> base_bytes_per_token;  ///< [units, schemes] base page bytes per token, NaN where not valid
  std::vector<std::uint8_t> valid;        ///< [units, schemes]
  /// Tier classes: newest tokens kept exact (--window), and the share of the coded ones in the salient tier (--salient; empty = all 0).
  std::vector<std::int64_t> windows;
  std::vector<double> salient_fractions;
  std::string salient_scheme, salient_score;  ///< of classes with a tier; else empty
  std::map<int, quant::SaliencyFactors> saliency;  ///< by layer number, where classes have a tier
  std::vector<UnitId> units;              ///< layer-major, K before V
  int n_buckets = 0;
  std::map<std::string, ScoreTable> scores;  ///< by metric name
  std::map<std::string, std::vector<FittedArray>> params;  ///< key "<ll>/<k|v>/<scheme>"
  std::optional<JointRuns> joint;
  std::optional<IsolatedRuns> isolated;

  std::size_t index(std::size_t unit, std::size_t scheme, std::size_t tier_class) const {
    return (unit * schemes.size() + scheme) * windows.size() + tier_class;
  }
  double salient_fraction(std::size_t tier_class) const { return salient_fractions.empty() ? 0.0 : salient_fractions[tier_class]; }
};

}  // namespace calib::sens

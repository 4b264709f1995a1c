#pragma once
// What `kvsens saliency` measured: how well each score finds the tokens that later queries attend to, and where a layer should do without.

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "libcalib/base/model_geometry.h"
#include "libcalib/sens/eval_result.h"

namespace calib::sens {

/// Below this share of what the best set catches a score is not worth a tier (METHODS.md 6; a default).
inline constexpr double kLeastHitRate = 0.70;

/// Scores in the order of tables. Those of the last layer are the mean over its KV heads, reused by every head of every layer.
enum class TokenScore { kExpectedAttention, kProbe, kAccumulated, kRecency, kRandom, kOracle, kLastExpectedAttention, kLastProbe, kLastAccumulated };
inline constexpr std::array<const char*, 9> kTokenScoreNames = {"expected_attention", "probe", "accumulated", "recency", "random", "oracle",
                                                                "last_expected_attention", "last_probe", "last_accumulated"};
inline constexpr std::size_t kTokenScores = kTokenScoreNames.size();
inline constexpr std::size_t kPlanScores = 5;      ///< the first ones: what a plan may name
inline constexpr std::size_t kOwnScores = 6;       ///< with the oracle: taken from the layer itself
inline constexpr std::size_t kAttentionScores = 3; ///< the first ones: those that the last layer can lend

/// Ratios of sums over documents, layers, heads and rows, with the standard error over documents (0 for a single one).
struct SaliencyRates {
  MeanSe hit;         ///< attention caught / attention that the best set of equal size catches; tokens placed exit block by exit block
  MeanSe prompt_hit;  ///< the same for one ranking of all coded tokens at the first row judged
  MeanSe overlap;     ///< tokens that the choice and the best set share / tokens chosen
  MeanSe gain;        ///< output error saved / that of the oracle's choice (one ranking)
  double catchable = 0;  ///< attention of a row that the best set gets, mean
};

/// Rows of one position bucket, ranked at its first row.
struct SaliencyBucket {
  std::int64_t first_position = 0, end_position = 0, n_documents = 0;
  SaliencyRates rates;
};

struct SaliencyLayer {
  SaliencyRates rates;
  int worst_head = 0;
  double worst_head_hit = 0;
  std::optional<double> e_out, e_mass;  ///< of the layer's attention under base and salient tier; not for scores of the last layer
  std::vector<std::string> abstain;     ///< reasons; empty: the tier is worth having here with this score
};

struct SaliencyScore {
  SaliencyRates total;
  std::vector<SaliencyBucket> buckets;
  std::vector<SaliencyLayer> layers;  ///< as SaliencyResult::layers
};

struct SaliencyFraction {
  double requested = 0, achieved = 0;
  std::int64_t block_base = 0, block_salient = 0;  ///< of an exit block
  std::array<SaliencyScore, kTokenScores> scores;
  std::vector<double> e_out_base, e_out_salient, e_mass_base, e_mass_salient;  ///< by layer: no tier, and all coded tokens in it
  std::size_t best = 0, runner_up = 0;  ///< of the plan's scores, by total hit rate
  MeanSe lead;                          ///< difference of their hit rates, paired over documents
};

/// What speaks for or against a tier in a layer whatever the score.
struct SaliencyLayerFacts {
  int index = 0;
  double normalised_entropy = 0, query_shift = 0;
  std::int64_t n_statistics_rows = 0;
};

struct SaliencySettings {
  std::int64_t seq_len = 0, n_documents = 0, n_sinks = 0, window = 0, match_rows = 0;
  std::string base_k, base_v, salient;
};

struct SaliencyResult {
  Provenance provenance;
  ModelIdentity model;
  DataIdentity data, calibration_data;
  bool same_text_as_calibration = false;
  SaliencySettings settings;
  std::vector<SaliencyLayerFacts> layers;
  std::vector<SaliencyFraction> fractions;
  std::vector<std::string> warnings;
};

/// What a planner needs of it.
struct SaliencyVerdicts {
  struct Layer {
    int index = 0;
    double hit_rate = 0;
    std::vector<std::string> abstain;
  };
  struct Fraction {
    double requested = 0;
    std::map<std::string, std::vector<Layer>> layers;  ///< by name of the score
  };
  ModelIdentity model;
  SaliencySettings settings;
  bool same_text_as_calibration = false;
  std::vector<Fraction> fractions;
};

/// Whether the last layer's ranking may be reused: its hit rate passes kLeastHitRate in every layer.
struct LastLayerVerdict {
  bool allowed = false;
  std::size_t worst_layer = 0;  ///< position
  double worst_hit = 0;
};
/// score: one of the last three. Requires: layers.
inline LastLayerVerdict last_layer_verdict(const SaliencyFraction& fraction, std::size_t score) {
  const std::vector<SaliencyLayer>& layers = fraction.scores[score].layers;
  LastLayerVerdict out;
  for (std::size_t l = 0; l < layers.size(); ++l)
    if (layers[l].rates.hit.mean < layers[out.worst_layer].rates.hit.mean) out.worst_layer = l;
  out.worst_hit = layers[out.worst_layer].rates.hit.mean;
  out.allowed = out.worst_hit >= kLeastHitRate;
  return out;
}

}  // namespace calib::sens

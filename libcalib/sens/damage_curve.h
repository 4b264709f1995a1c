#pragma once
// The damage-curve gate (METHODS.md 7): what noise on every key does to attention scores and to perplexity tells which plans are ruined
// before they are measured. Blind to small losses: a gate, never a ranking. No Torch types here.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "libcalib/base/thread_pool.h"
#include "libcalib/sens/contender.h"
#include "libcalib/sens/evaluate.h"

namespace calib::sens {

inline constexpr std::array<double, 9> kDamageSigmas = {.005, .01, .02, .04, .05, .1, .2, .4, .8};
inline constexpr double kRuinedPplRatio = 5;
/// Documents that the gate runs on; rows of them that see at least so many keys are compared.
inline constexpr std::size_t kDamageDocuments = 2;
inline constexpr std::int64_t kLeastScores = 64;

/// Pearson correlation. 0 where y alone is constant, empty where x is: there is no order to keep then. Requires: equal sizes.
std::optional<double> pearson(std::span<const float> x, std::span<const float> y);

/// Perplexity ratio at x: from (0, 1) through the points by ascending x, each raised to the highest before it, ln ratio linear in x.
/// Never falls; past the last point its ratio, which is then a lower bound.
double predicted_ppl_ratio(std::span<const DamagePoint> points, double x);
/// Least x at which that is `ratio`; empty if it never is. Requires: ratio > 1.
std::optional<double> damage_at_ratio(std::span<const DamagePoint> points, double ratio);

/// The documents of the gate: the first kDamageDocuments with kLeastScores tokens and a scored row; may be empty.
std::vector<text::Document> damage_documents(const std::vector<text::Document>& documents, std::int64_t n_sinks);

struct DamageOptions {
  std::int64_t n_sinks = 4;  ///< rows below are not scored, as in the measurement that the gate stands before
  bool second_half = false;  ///< likewise
  std::int64_t rows = 128;   ///< sampled rows per document and layer
  std::uint64_t seed = 0;
  std::int64_t hidden_memory_bytes = std::int64_t{4} << 30;
};

/// Walks over its documents that measuring the curve takes.
inline constexpr std::int64_t kDamageRuns = static_cast<std::int64_t>(kDamageSigmas.size()) + 3;

class DamageGate {
 public:
  /// Measures the curve on `documents`, those of damage_documents(). References must outlive it. Requires: at least one. Throws as evaluate().
  DamageGate(const model::StreamingModel& model, std::vector<text::Document> documents, const DamageOptions& options, ThreadPool& pool,
             const EvaluateProgressFn& progress = {});

  const DamageCurve& curve() const { return curve_; }
  /// One pass of the reference: the scores of its own queries and keys against those over each contender's cache, every row reading keys
  /// coded or exact as that contender's tiers say. x = 1 - min over layers of the mean over rows (weighted by bucket) and query heads.
  std::vector<EvalDamage> judge(const std::vector<Contender>& contenders, const EvaluateProgressFn& progress = {}) const;

 private:
  std::vector<EvalDamage> correlate(const std::vector<Contender>& contenders, const EvaluateProgressFn& progress) const;

  const model::StreamingModel& model_;
  std::vector<text::Document> documents_;
  DamageOptions options_;
  ThreadPool& pool_;
  DamageCurve curve_;
};

}  // namespace calib::sens

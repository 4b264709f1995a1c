#pragma once
// Compares next-token distributions row by row and summarises them under the names of FORMATS.md 4. No Torch.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "libcalib/sens/eval_result.h"

namespace calib::sens {

/// Mean of one value a document, each counting the same, with its standard error (0 for a single one).
MeanSe over_documents(const std::vector<double>& values);

/// One scored row: reference against contender.
struct KldRow {
  std::int32_t document = 0;
  std::int64_t position = 0;
  double kld = 0;                 ///< nats, KL(ref || cand)
  double nll_ref = 0, nll = 0;    ///< nats, of the text's next token
  double delta_p = 0;             ///< 100 * (p_cand(y) - p_ref(y))
  double entropy_shift = 0;       ///< H_cand - H_ref, nats
  bool same_top = false;
};

/// Log-probabilities of one row and what depends on the reference alone.
struct ReferenceRow {
  const float* log_p = nullptr;  ///< [V]
  const float* p = nullptr;      ///< [V] exp(log_p)
  std::int64_t vocab_size = 0;
  std::int64_t label = 0;        ///< the text's next token
  std::int64_t top = 0;          ///< argmax, lowest index on ties
  double entropy = 0;
};

/// Fills `top` and `entropy`. Requires: label in [0, vocab_size).
ReferenceRow make_reference_row(const float* log_p, const float* p, std::int64_t vocab_size, std::int64_t label);

/// log_q, q: the contender's row. Sums are double; rounding residue of the KL below 0 becomes 0. `document`, `position` stay 0.
KldRow compare_row(const ReferenceRow& reference, const float* log_q, const float* q);

/// Means over rows with standard errors over documents (METHODS.md 9); with a single document, over blocks of 256 positions; SE 0 with
/// a single block. The PPL ratio's error comes from paired differences. Requires: rows grouped by document, at least one row.
KldBlock summarise_kld(std::span<const KldRow> rows);

/// Mean KLD of each document, in order. Requires: rows grouped by document.
std::vector<double> document_klds(std::span<const KldRow> rows);

/// summarise_kld() of each position bucket that has rows.
std::vector<EvalBucket> summarise_buckets(std::span<const KldRow> rows);

inline constexpr double kPplRatioMax = 1.10;

/// First position of the first bucket whose perplexity ratio is above `ratio_max`, and above 1 with 95 % confidence, if the next bucket
/// says so too or there is none; empty otherwise. Nothing is said about positions past the last bucket. Source: METHODS.md 9 (G45).
std::optional<std::int64_t> length_limit(std::span<const EvalBucket> buckets, double ratio_max = kPplRatioMax);

inline constexpr double kSteepSlope = 0.5, kEntropyShiftMax = 0.05;

/// Where a trend over positions may start: below 2 (sinks + window) most of what a row reads is exact, so that any loss rises there.
std::int64_t trend_start(std::int64_t n_sinks, std::int64_t window);

/// Slope of ln(mean KLD) against ln(position) over the position buckets that begin at `first_position` or later, each weighted by its rows
/// and standing at the geometric mean of t + 1 over them. SE: jackknife over documents; 0 with a single one. Empty with fewer than two
/// buckets that lose anything.  Source: METHODS.md 9. Requires: rows grouped by document.
std::optional<MeanSe> kld_slope(std::span<const KldRow> rows, std::int64_t first_position = 0);

/// What METHODS.md 9 flags: "kld_slope" (above 0.5), "entropy_shift" (some bucket's is beyond 0.05 nats), "entropy_growth" (at least three
/// buckets from first_position on, each shifted further in the same direction than the one before, the last from the first by more than
/// 1.96 standard errors).
std::vector<std::string> length_flags(const std::optional<MeanSe>& slope, std::span<const EvalBucket> buckets, std::int64_t first_position = 0);

/// A sentence for each of a contender's flags.
std::vector<std::string> length_warnings(const EvalContender& contender);

}  // namespace calib::sens

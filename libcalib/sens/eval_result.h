#pragma once
// What `kvsens evaluate` measured: each contender's next-token distributions against the reference's, on the same rows.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libcalib/base/error.h"
#include "libcalib/base/model_geometry.h"

namespace calib::sens {

/// A mean over documents with its standard error.
struct MeanSe {
  double mean = 0, se = 0;
};

/// The numbers known from `llama-perplexity --kl-divergence`, under those names in eval.json (FORMATS.md 4).
/// Units: nats for KLD, percent for delta_p and same_top_p. Percentiles: linear interpolation at fraction (N - 1).
struct KldBlock {
  std::int64_t n_rows = 0, n_documents = 0;
  MeanSe ppl_q;       ///< "Mean PPL(Q)"
  MeanSe ppl_base;    ///< "Mean PPL(base)"
  MeanSe ppl_ratio;   ///< "Mean PPL(Q)/PPL(base)": exp of the token-weighted mean NLL difference; paired SE
  MeanSe kld;         ///< "Mean KLD"
  double kld_max = 0, kld_min = 0;             ///< "Maximum KLD", "Minimum KLD"
  /// kKldPercentiles' values: "99.9% KLD", "99.0% KLD", "95.0% KLD", "90.0% KLD", "Median KLD", "10.0% KLD" … "0.1% KLD".
  std::array<double, 9> kld_percentiles{};
  MeanSe delta_p;     ///< "Mean Δp"
  MeanSe rms_delta_p; ///< "RMS Δp"
  MeanSe same_top_p;  ///< "Same top p"
};
inline constexpr std::array<double, 9> kKldPercentiles = {0.999, 0.99, 0.95, 0.90, 0.50, 0.10, 0.05, 0.01, 0.001};

/// Greedy continuations of the documents' first tokens by one run. Means are over documents.
struct EvalReplies {
  MeanSe rep_4;            ///< 1 - unique / total 4-grams of a reply
  MeanSe repeated_suffix;  ///< tokens of a reply's longest suffix that occurs in it before
  double hit_cap = 0;      ///< share of replies that had not ended by themselves at the cap
  std::vector<double> document_rep_4;
};

/// A contender's replies against the reference's to the same prompts.
struct EvalGeneration {
  EvalReplies replies;
  MeanSe agreeing_prefix;  ///< tokens up to the first difference over the length of the reference's reply
  MeanSe row_kld;          ///< nats, mean over the rows of the contender's own reply, which the reference reads too
  std::vector<double> document_row_kld;
  std::int64_t n_catastrophic = 0;                       ///< replies with rep-4 > reference + 0.2 or row-mean KLD > 1
  double catastrophic_low = 0, catastrophic_high = 0;    ///< Wilson 95 % interval of their share
};

/// Numbers told in running text and asked for at its end: `hits` of `n` answers are what a greedy reply would say.
struct RetrievalCell {
  std::int64_t length = 0;      ///< tokens of the texts
  std::optional<double> depth;  ///< of a text's only number; empty: texts with four numbers
  std::int64_t n = 0, hits = 0;
};
struct EvalRetrieval {
  std::vector<RetrievalCell> cells;  ///< by length, then depth, the four numbers last
  std::optional<bool> pass;          ///< of retrieval_passes(); empty for the reference, and where it says nothing
};

/// Attention over a contender's cache against exact attention, on the reference's own inputs of every layer. Means over layers, then documents.
struct EvalAttention {
  MeanSe kl;      ///< of the probabilities, nats, mean over query heads
  MeanSe e_out;   ///< sum |o - o^|^2 / sum |o|^2
  MeanSe e_mass;  ///< mean squared difference of ln sum e^s, nats^2
  std::vector<double> layer_kl, layer_e_out, layer_e_mass;  ///< as ModelIdentity::layers, all documents together
};

/// Keys of all layers with noise of sigma times their norm: what that does to attention scores, and to the text (damage_curve.h).
struct DamagePoint {
  double sigma = 0;
  double x = 0;          ///< 1 - lowest layer's mean correlation of scores with the exact ones
  double ppl_ratio = 1;  ///< perplexity over that of exact keys
};
struct DamageCurve {
  std::int64_t n_documents = 0, n_tokens = 0;
  std::vector<DamagePoint> points;     ///< ascending sigma
  std::optional<double> rejects_from;  ///< x from which a ratio of kRuinedPplRatio is predicted; empty if the curve never reaches it
};
/// Where a contender stands on the curve.
struct EvalDamage {
  double x = 0;
  int worst_layer = 0;              ///< layer number of the lowest correlation
  double predicted_ppl_ratio = 1;   ///< past the curve's end: at least this
  bool rejected = false;            ///< x at or above rejects_from
};

/// The same over the rows of one position bucket.
struct EvalBucket {
  std::int64_t first_position = 0, end_position = 0;  ///< [first, end)
  KldBlock block;
  MeanSe entropy_shift;  ///< mean(H_cand - H_ref), nats
};

/// One plan, preset or scheme pair.
struct EvalContender {
  std::string name;         ///< preset, "KSCHEME:VSCHEME", or the plan's path as given
  std::string kind;         ///< "uniform", "plan", "noise_floor", "negative_control"
  std::string k, v;         ///< canonical schemes; empty for a mixed plan
  std::string description;  ///< one line
  std::string plan_sha256;  ///< empty unless kind is "plan"
  std::int64_t n_sinks = 0, window = 0;
  /// Bytes the runtime allocates, times 8, over the number of K and V elements, at 2,048 and 8,192 tokens of context.
  std::optional<double> effective_bits_2048, effective_bits_8192;
  KldBlock total;
  std::vector<double> document_kld;  ///< mean KLD of each document, in order: paired comparisons; empty in older files
  std::vector<EvalBucket> buckets;
  bool indistinguishable = false;  ///< mean KLD below 3 x the noise floor
  std::optional<std::int64_t> length_limit;  ///< position from which the perplexity ratio is above 1.10, by bucket; see kld_block.h
  std::optional<MeanSe> kld_slope;           ///< of ln KLD against ln position; see kld_block.h
  std::vector<std::string> flags;            ///< of length_flags(); empty where indistinguishable
  std::optional<EvalGeneration> generation;
  std::optional<EvalRetrieval> retrieval;
  std::optional<EvalAttention> attention;
  std::optional<EvalDamage> damage;
};

struct EvalSettings {
  std::int64_t seq_len = 0, n_documents = 0, n_rows = 0;
  bool second_half = false;           ///< only rows of the second half of each document are scored
  std::string prefill = "quantised";  ///< rows read quantised K and V of earlier tokens, or "exact"
  std::string backend = "fake";       ///< "fake" (decode(encode(x)) in place) or "kvrt"
};

/// Greedy replies, where they were asked for.
struct GenerationSettings {
  std::int64_t n_documents = 0, depth = 0, n_tokens = 0;  ///< prompts, their length, and the cap on a reply, in tokens
  std::optional<std::int32_t> end_token;                  ///< ends a reply and is its last token; none: every reply hits the cap
};

struct EvalResult {
  Provenance provenance;
  ModelIdentity model;
  DataIdentity data;
  std::optional<DataIdentity> calibration_data;  ///< of the statistics or plan, if one was given
  bool same_text_as_calibration = false;
  EvalSettings settings;
  KldBlock noise_floor;               ///< reference against itself with another query-tile size
  std::optional<EvalContender> negative_control;  ///< int2.token.g on all K, sinks 0, window 2
  std::vector<EvalContender> contenders;
  std::optional<GenerationSettings> generation;
  std::optional<EvalReplies> reference_replies;
  std::optional<EvalRetrieval> reference_retrieval;
  std::optional<DamageCurve> damage_curve;
  std::vector<std::string> warnings;
};

/// Says it, and keeps it in the result.
inline void warn(EvalResult* result, const LogSink& log, std::string text) {
  log.warning(text);
  result->warnings.push_back(std::move(text));
}

}  // namespace calib::sens

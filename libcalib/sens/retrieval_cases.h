#pragma once
// Texts of the retrieval smoke test (METHODS.md 9): 5-digit numbers told somewhere in running text and asked for at its end. No Torch.

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "libcalib/base/model_geometry.h"
#include "libcalib/sens/contender.h"
#include "libcalib/sens/eval_result.h"
#include "libcalib/text/corpus.h"
#include "libcalib/text/tokenizer.h"

namespace calib::sens {

/// Shares of the filler in front of the number, where a text has one, and in front of the numbers, where it has four.
inline constexpr std::array<double, 3> kPasskeyDepths = {.1, .5, .9};
inline constexpr std::array<double, 4> kKeyDepths = {.2, .4, .6, .8};
inline constexpr std::int64_t kPasskeysPerDepth = 2;  ///< texts with one number, by length and depth; one text of a length has four
inline constexpr std::int64_t kLostHits = 1;          ///< hits fewer than the reference's that still pass

struct RetrievalAnswer {
  std::int64_t first = 0, end = 0;  ///< tokens [first, end) with the digits; row t - 1 has to choose token t
  std::int64_t told_at = 0;         ///< first token of the sentence that tells the number
};

struct RetrievalCase {
  text::Document document;              ///< of exactly the length asked for, BOS included where the tokenizer adds one
  std::optional<double> depth;          ///< of the only number; empty: four numbers
  std::vector<RetrievalAnswer> answers; ///< in the order of the questions, each behind the right answers to those before it
};

/// By length, then depth, the four numbers last. Filler: the tokens of `documents` joined, each case from another place on, round the end if
/// need be. A number is told at the line or sentence end next to its depth, within a twentieth of the length, else right there. Numbers
/// depend on (seed, length, case). Throws: kUsage (a length past the model's positions, or less than half of it filler), kInfeasible
/// (`documents` hold fewer tokens than the longest), kUnsupported (a vocabulary without the sentences).
std::vector<RetrievalCase> retrieval_cases(const text::Tokenizer& tokenizer, const std::vector<text::Document>& documents, const std::vector<std::int64_t>& lengths,
                                           std::int64_t max_positions, std::uint64_t seed);

std::vector<text::Document> documents_of(const std::vector<RetrievalCase>& cases);

/// Throws kInfeasible where a contender keeps all of the shortest text exact.
void check_retrieval(const std::vector<RetrievalCase>& cases, const std::vector<Contender>& contenders);

/// Hits and answers of all cells, or of those of one length.
struct RetrievalSum {
  std::int64_t hits = 0, n = 0;
};
RetrievalSum sum_hits(const EvalRetrieval& retrieval, std::optional<std::int64_t> length = {});

/// Over the lengths at which the reference has at least half of the hits: not more than kLostHits fewer than it. Empty if there is no such
/// length: the test says nothing then.
std::optional<bool> retrieval_passes(const EvalRetrieval& reference, const EvalRetrieval& contender);

/// What the numbers alone do not say: lengths at which the reference has too few hits, sentences that stay in an exact window, contenders
/// that fail. Requires: retrieval set for reference and contenders.
std::vector<std::string> retrieval_warnings(const EvalResult& result, const std::vector<RetrievalCase>& cases);

}  // namespace calib::sens

#pragma once
// Joint effect of whole plans on held-out text: next-token distributions against the uncompressed reference, contender by contender,
// all sharing one block-major walk, the reference and the rows (METHODS.md 9). No Torch types here.

#include <cstdint>
#include <functional>
#include <vector>

#include "libcalib/base/thread_pool.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/sens/contender.h"
#include "libcalib/sens/eval_result.h"
#include "libcalib/text/corpus.h"

namespace calib::sens {

struct EvaluateOptions {
  bool packed = false;       ///< contenders run through the runtime's packed pages, token by token, instead of being fake-quantised
  bool second_half = false;  ///< rows n/2 ... n - 2 of each document, as llama-perplexity scores
  bool attention = false;    ///< also fill EvalContender::attention; not with `packed`
  bool contender_warnings = true;  ///< warn of single contenders: by position, of their entropy, beyond the negative control
  std::int64_t attention_rows = 128;  ///< sampled rows per document and layer
  std::uint64_t seed = 0;             ///< of that sample
  std::int64_t hidden_memory_bytes = std::int64_t{4} << 30;
  std::int64_t query_tile = 128, floor_query_tile = 80;  ///< the noise floor is the reference in tiles of another size
};

struct EvaluateProgress {
  std::int64_t done = 0, total = 0;  ///< tokens times (layers + head), all runs together
};
using EvaluateProgressFn = std::function<void(const EvaluateProgress&)>;

/// Fills settings, noise_floor, negative_control, contenders and warnings of `result` (model, data and provenance are the caller's).
/// Rows: t >= the largest number of sinks among the contenders, the same for all, up to the last with a next token.
/// Throws: kMismatch (no head), kInfeasible (no rows left), kNumeric (non-finite values), kInternal if the negative control is not above
/// 10 x the noise floor: quantisation is then not being applied.
void evaluate(const model::StreamingModel& model, const std::vector<text::Document>& documents, const std::vector<Contender>& contenders,
              const EvaluateOptions& options, ThreadPool& pool, EvalResult* result, const LogSink& log = {}, const EvaluateProgressFn& progress = {});

/// Bytes of hidden states: in memory and spilled.
struct EvaluateEstimate {
  std::int64_t hidden_memory_bytes = 0, hidden_spill_bytes = 0, working_bytes = 0;
};
/// Of a walk of n_runs runs, the reference among them, over the documents.
EvaluateEstimate estimate_walk(const model::StreamingModel& model, const std::vector<text::Document>& documents, std::size_t n_runs,
                               const EvaluateOptions& options);
/// Of evaluate().
EvaluateEstimate estimate_evaluate(const model::StreamingModel& model, const std::vector<text::Document>& documents, std::size_t n_contenders,
                                   const EvaluateOptions& options);

}  // namespace calib::sens

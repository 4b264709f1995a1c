#pragma once
// Whether greedy replies still find numbers told far back in the text, by the reference and every contender (METHODS.md 9). No Torch types here.

#include <cstdint>
#include <vector>

#include "libcalib/base/thread_pool.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/sens/contender.h"
#include "libcalib/sens/eval_result.h"
#include "libcalib/sens/evaluate.h"
#include "libcalib/sens/retrieval_cases.h"

namespace calib::sens {

/// Fills reference_retrieval and the contenders' `retrieval` of a result of evaluate() over the same contenders, and warns. A greedy reply is
/// the answer exactly where every row in front of an answer's token chooses it with the answer so far before it, so one block-major pass over
/// text, question and answer stands for the reply. `options`: packed, hidden_memory_bytes and query_tile are read.
/// Throws: kMismatch (no head), kInfeasible (as check_retrieval()), kNumeric, kUnsupported (packed).
void retrieve(const model::StreamingModel& model, const std::vector<RetrievalCase>& cases, const std::vector<Contender>& contenders,
              const EvaluateOptions& options, ThreadPool& pool, EvalResult* result, const LogSink& log = {}, const EvaluateProgressFn& progress = {});

/// As estimate_evaluate().
EvaluateEstimate estimate_retrieval(const model::StreamingModel& model, const std::vector<RetrievalCase>& cases, std::size_t n_contenders,
                                    const EvaluateOptions& options);

}  // namespace calib::sens

#pragma once
// Documents through the model, layer by layer: what each token score would have put into the salient tier, judged by later rows.
// No Torch types here.

#include <cstdint>
#include <vector>

#include "kernels/core/scheme.h"
#include "kernels/core/tiers.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/model/streaming_runner.h"
#include "libcalib/sens/candidates.h"
#include "libcalib/sens/drift_walk.h"
#include "libcalib/sens/saliency_result.h"

namespace calib::sens {

struct SaliencyOptions {
  std::int64_t n_sinks = 4, window = 128;
  std::vector<double> fractions = {0.1, 0.2};
  kvrt::Scheme base_k, base_v, salient;
  std::uint64_t seed = 0;
  std::int64_t match_rows = 32;  ///< rows per bucket and document on which E_out and E_mass are taken
  std::int64_t hidden_memory_bytes = std::int64_t{4} << 30;
};

/// Exit blocks of every fraction. Throws kUsage naming a fraction that rounds to no token of an exit block.
std::vector<kvrt::Tiers> saliency_tiers(const SaliencyOptions& options);

/// Throws kUsage, kUnsupported (a scheme that a layer cannot hold), kInfeasible (no document is long enough to be judged).
void check_saliency(const SaliencyOptions& options, const ModelIdentity& model, const std::vector<text::Document>& documents);

/// Bytes held beside the walk: attention of the longest document, and what each row bucket wanted of every token.
std::int64_t saliency_bytes(const ModelIdentity& model, const std::vector<text::Document>& documents, int n_threads);

/// Fills settings, layers and fractions of `result`. A bucket of a document is ranked at its first row P: exit blocks coded by then are
/// judged by the attention of the bucket's rows on them. Placed by block: each block's tokens by scores at the length where it left
/// the window; by prompt: all of them by scores at P. Rows of `reference` and `params` as in LayerStats and candidates.h.
/// Requires: check_saliency(). Throws: as run_streaming.
void measure_saliency(const model::StreamingModel& model, const std::vector<text::Document>& documents, const ReferenceLayer& reference,
                      const ParamsProvider& params, const SaliencyOptions& options, ThreadPool& pool, SaliencyResult* result,
                      const model::ProgressFn& progress = {});

}  // namespace calib::sens

#pragma once
// Scores a whole grid of candidates in two walks over the model: forward, keeping the state that enters each block, and backward,
// one block in memory, with label gradients for all units and schemes at once (METHODS.md 7). No Torch types here.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libcalib/base/thread_pool.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/sens/candidates.h"
#include "libcalib/sens/sens_result.h"
#include "libcalib/text/corpus.h"

namespace calib::sens {

struct SweepOptions {
  std::vector<std::string> metrics = {"fisher_softmax", "fisher_vec", "fisher", "attn_kl", "attn_out"};
  std::vector<std::int64_t> windows = {128};
  std::vector<double> salient_fractions = {0.0};  ///< every window is scored with each of them: tier classes, window-major
  std::int64_t n_sinks = 4;
  int n_draws = 2;                       ///< label draws of the Fisher walk
  std::int64_t lookahead_blocks = 4;     ///< blocks that `lookahead` runs after the changed one
  std::int64_t rows_per_document = 128;  ///< sampled rows of attn_kl, attn_out and fisher_softmax
  std::uint64_t seed = 0;
  /// At 2 bits a second codebook (Q-Norm, METHODS.md 4.5) is scored beside each fitted one, and the one that loses less attn_kl (keys) or
  /// attn_out (values) is kept. For text that the codebooks were not fitted on, and only with one of these metrics.
  bool judge_codebooks = true;
  std::int64_t hidden_memory_bytes = std::int64_t{4} << 30;
};

/// Metric names that --metric knows.
const std::vector<std::string>& known_metrics();
bool wants(const SweepOptions& options, const char* metric);

struct SweepProgress {
  std::string phase;  ///< "forward", "labels", "backward", "logit_kl", "lookahead"
  std::int64_t done = 0, total = 0;
};
using SweepProgressFn = std::function<void(const SweepProgress&)>;

/// Requires: result->model, data and the grid laid out (lay_out_grid); for a salient tier also its scheme and every layer's factors.
/// Fills the tier classes, buckets, score tables and the constants of all candidates.
/// Throws: kUsage (unknown metric, draws < 1), kMismatch (a Fisher metric, lookahead or logit_kl without a head), kInfeasible (documents no longer
/// than the sinks), kNumeric naming layer and document.
void run_sweep(const model::StreamingModel& model, const std::vector<text::Document>& documents, const SweepOptions& options,
               const ParamsProvider& params, ThreadPool& pool, SensResult* result, const LogSink& log = {}, const SweepProgressFn& progress = {});

/// logit_kl of single cells of a grid that has been scored, with the sinks, tier classes and constants of the grid. `cells`: index as
/// ScoreTable, 1 = measure. Returns means and errors, NaN elsewhere. Equal to what run_sweep() gives those cells on the same text.
/// Throws: as run_sweep; kMismatch naming a unit whose scheme needs constants that the grid does not keep.
ScoreTable measure_isolated(const model::StreamingModel& model, const std::vector<text::Document>& documents, const SensResult& grid,
                            const std::vector<std::uint8_t>& cells, std::int64_t hidden_memory_bytes, ThreadPool& pool, const LogSink& log = {},
                            const SweepProgressFn& progress = {});

/// Bare forward passes that measure_isolated() takes.
double isolated_forward_passes(const SensResult& grid, const std::vector<std::uint8_t>& cells);

/// Bytes a sweep holds beside the model: hidden states in memory and on disk, and one layer's working set; its time in bare forward
/// passes over the same tokens.
struct SweepEstimate {
  std::int64_t hidden_memory_bytes = 0, hidden_spill_bytes = 0, working_bytes = 0;
  double forward_passes = 0;
};
SweepEstimate estimate_sweep(const model::StreamingModel& model, const std::vector<text::Document>& documents, const SweepOptions& options,
                             const SensResult& grid);

}  // namespace calib::sens

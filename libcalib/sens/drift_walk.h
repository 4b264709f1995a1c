#pragma once
// Fresh documents through the model, layer by layer against the calibration's statistics. No Torch types here.

#include <functional>
#include <vector>

#include "libcalib/base/thread_pool.h"
#include "libcalib/model/streaming_runner.h"
#include "libcalib/sens/contender.h"
#include "libcalib/stats/drift.h"
#include "libcalib/text/corpus.h"

namespace calib::sens {

/// Statistics of the layer at this position of ModelIdentity::layers.
using ReferenceLayer = std::function<stats::LayerStats(std::size_t layer_idx)>;

/// Two units a layer, in order of layers. plan, if not null: its units with static thresholds also report how much they clamp.
/// Requires: a document with tokens past the calibration's sinks. Throws: as run_streaming.
std::vector<stats::UnitDrift> measure_drift(const model::StreamingModel& model, const std::vector<text::Document>& documents, const ReferenceLayer& reference,
                                            const Contender* plan, const model::RunnerOptions& options, ThreadPool& pool,
                                            const model::ProgressFn& progress = {});

/// Share of the documents' tokens in position buckets for which the calibration has no row. calibrated_rows: by position bucket.
double unseen_share(const std::vector<text::Document>& documents, const std::vector<std::int64_t>& calibrated_rows);

}  // namespace calib::sens

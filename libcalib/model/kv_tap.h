#pragma once
// The tap of kvcalib: statistics of every layer, massive activations, and what is worth a warning.

#include <cstdint>
#include <functional>
#include <vector>

#include "libcalib/base/error.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/model/streaming_runner.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::model {

/// A token of the residual stream entering `layer` with some |h_c| > 1000 median |h| and > 100 (arXiv 2402.17762).
struct MassiveToken {
  std::int64_t layer = 0, document = 0, token = 0, channel = 0;
  double value = 0, ratio = 0;
  bool functional_sink = false;  ///< stats::is_functional_sink on the layer's sampled rows
};

class KvTap final : public LayerTap {
 public:
  /// `on_layer` receives each finished layer, which is dropped afterwards.
  KvTap(std::int64_t n_sinks, ThreadPool& pool, std::function<void(const stats::LayerStats&)> on_layer, const LogSink& log);

  void begin_layer(const LayerGeometry& layer) override;
  void on_output_moment(const std::vector<double>& moment) override { layer_.output_moment = moment; }
  void on_document(const LayerCapture& capture) override;
  void end_layer(const LayerGeometry& layer) override;

  /// Ordered by layer, document, token.
  const std::vector<MassiveToken>& massive() const { return massive_; }
  /// Seconds spent here.
  double seconds() const { return seconds_; }

 private:
  void find_massive(const LayerCapture& capture);

  std::int64_t n_sinks_;
  ThreadPool& pool_;
  std::function<void(const stats::LayerStats&)> on_layer_;
  const LogSink& log_;
  stats::LayerStats layer_;
  std::vector<MassiveToken> massive_;
  double seconds_ = 0;
};

}  // namespace calib::model

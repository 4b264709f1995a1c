#pragma once
// stats.h5: what kvcalib measured of every layer, with who made it from what (schemas/stats.md is the layout's contract).

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libcalib/base/model_geometry.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::artifacts {

/// A token whose residual stream holds one channel far above the rest (METHODS.md 3, "Massive activations").
struct MassiveActivation {
  std::int64_t layer = 0, document = 0, token = 0, channel = 0;
  double value = 0;   ///< h of that channel
  double ratio = 0;   ///< |h_c| / median |h|
  bool functional_sink = false;  ///< its column mass exceeds 0.3 in at least 10 % of the query heads
};

/// The reference model on the calibration text.
struct ReferenceSummary {
  std::vector<double> nll_sum;             ///< nats, by position bucket of the row; empty if NLL was not computed
  std::vector<std::int64_t> nll_count;     ///< rows, by position bucket
  std::vector<MassiveActivation> massive;  ///< ordered by layer, document, token
  std::vector<std::string> warnings;       ///< as printed
  std::int64_t n_distinct_tokens = 0;      ///< of the text that was fed
  double commonest_token_share = 0;
};

/// Everything but the layers.
struct StatsHeader {
  Provenance provenance;
  ModelIdentity model;
  DataIdentity data;
  std::int64_t n_sinks = 4;
  std::int64_t rows_per_document = 0;  ///< sampled attention rows per document and layer
};

struct StatsFile {
  StatsHeader header;
  ReferenceSummary reference;
  std::vector<stats::LayerStats> layers;  ///< in the order of header.model.layers
};

/// Writes a stats.h5 layer by layer, so that a layer can be dropped once written. The file appears under `path` at finish()
/// and not before; destruction without finish() leaves nothing behind.
class StatsWriter {
 public:
  /// `pool` outlives this object. Throws: kIo, kNotFound (the folder).
  StatsWriter(const std::string& path, const StatsHeader& header, ThreadPool& pool);
  ~StatsWriter();
  StatsWriter(StatsWriter&&) noexcept;

  /// Requires: layers come in the order of header.model.layers. Throws kNumeric for a layer that saw no token, naming it.
  void add_layer(const stats::LayerStats& layer);
  /// Writes the rest, then the completeness marker, flushes and renames. `seconds` goes into the provenance.
  void finish(const ReferenceSummary& reference, double seconds);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Opens a stats.h5; layers are read one at a time.
class StatsReader {
 public:
  /// Throws: kNotFound, kIo, kFormat (not a stats file, truncated, damaged, incomplete), kVersion.
  explicit StatsReader(const std::string& path);
  ~StatsReader();
  StatsReader(StatsReader&&) noexcept;

  const StatsHeader& header() const;
  const ReferenceSummary& reference() const;
  std::size_t n_layers() const;
  /// i-th of header().model.layers. The result merges and fits like one that was just measured.
  stats::LayerStats layer(std::size_t i) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

void write_stats_file(const std::string& path, const StatsFile& file);
StatsFile read_stats_file(const std::string& path);


}  // namespace calib::artifacts

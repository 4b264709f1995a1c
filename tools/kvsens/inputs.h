#pragma once
// What both commands of kvsens open: the model, its text, the statistics, and the checks that they belong together.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "libcalib/artifacts/stats_file.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/plan/plan.h"
#include "libcalib/sens/candidates.h"
#include "libcalib/sens/contender.h"
#include "libcalib/text/corpus.h"
#include "tools/common/option_values.h"
#include "tools/common/progress.h"
#include "tools/common/run_options.h"

namespace calib::tools {

struct Inputs {
  std::optional<model::StreamingModel> model;
  ModelIdentity identity;  ///< of the model, with its tokenizer
  std::optional<text::TokenId> end_token;
  text::Corpus corpus;
  Provenance provenance;
};

/// Opens model, tokenizer and text. Throws as they do.
Inputs open_inputs(const RunOptions& options, const Invocation& call, const LogSink& log);

/// Statistics of the same model. One layer is in memory at a time; what was fitted from it is kept.
class Statistics {
 public:
  /// `path` empty: no statistics, every need is kUsage naming the scheme. Throws kMismatch if they are another model's.
  Statistics(const std::string& path, const ModelIdentity& model, const std::string& model_name);
  bool given() const { return reader_ != nullptr; }
  const artifacts::StatsHeader& header() const { return reader_->header(); }
  /// Valid as long as this object.
  sens::ParamsProvider provider() const;
  /// By what layers rank tokens for a salient tier; empty without statistics. Valid as long as this object.
  sens::SaliencyProvider saliency() const;
  /// The matrices of --rotate, each made once. Valid as long as this object; kUsage where there are no statistics.
  sens::RotationProvider rotations(quant::RotationKind kind) const;
  const artifacts::StatsReader& reader() const { return *reader_; }

 private:
  const stats::LayerStats& layer(std::size_t i) const;
  std::unique_ptr<artifacts::StatsReader> reader_;
  mutable std::unique_ptr<stats::LayerStats> layer_;
  mutable std::size_t layer_idx_ = 0;
  mutable std::map<std::tuple<std::size_t, Side, std::string, std::int64_t>, quant::SchemeParams> fitted_;
};

/// A plan as what its runtime would keep. Throws kMismatch if it is another model's, naming `path`.
sens::Contender plan_contender(const std::string& path, const plan::Plan& plan, const ModelIdentity& model, const std::string& model_name);

/// A plan that no token of any document ever reaches would measure as free. Throws kInfeasible naming the contender; `longest`: tokens of the
/// longest document.
void check_something_is_coded(const sens::Contender& contender, std::int64_t longest);

/// Seconds of one bare forward pass over documents, or over the text, from sizes and one measured matrix product.
double forward_seconds(const model::StreamingModel& model, const std::vector<text::Document>& documents);
double forward_seconds(const Inputs& in);

/// The same of the damage-curve gate, in passes over the whole text.
double damage_passes(const Inputs& in, std::int64_t n_sinks);

/// True if both were cut from at least one common file, or hold the same documents.
bool same_text(const DataIdentity& a, const DataIdentity& b);

/// Warns where no row of the text lies past a border that layers have, so that what happens there stays unmeasured.
void warn_untested_positions(const ModelIdentity& model, const DataIdentity& data, const LogSink& log);

/// Feeds a Progress from (phase, done, total), with milestones every tenth of a phase, and lets the user interrupt.
class PhaseProgress {
 public:
  PhaseProgress(Progress& progress, const Invocation& call, std::int64_t n_tokens)
      : progress_(progress), call_(call), n_tokens_(n_tokens), started_(call.seconds()), last_(started_) {}
  void update(const std::string& phase, std::int64_t done, std::int64_t total);

 private:
  Progress& progress_;
  const Invocation& call_;
  std::int64_t n_tokens_;
  std::string phase_;
  double started_, last_;  ///< of this phase; of the last update, where the next phase starts
  std::int64_t last_tenth_ = -1;
};

}  // namespace calib::tools

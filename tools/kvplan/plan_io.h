#pragma once
// What plans are made from and how they are written, for the sub-commands that make one.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "libcalib/artifacts/stats_file.h"
#include "libcalib/plan/planner.h"
#include "tools/common/cli_main.h"
#include "tools/common/progress.h"
#include "tools/kvplan/options.h"

namespace calib::tools {

/// Statistics layer by layer, read once each.
class LayerSource {
 public:
  explicit LayerSource(const std::string& path) : reader_(path), layers_(reader_.n_layers()) {}
  const artifacts::StatsHeader& header() const { return reader_.header(); }
  /// Throws kMismatch if the statistics do not hold that layer number.
  const stats::LayerStats& of(int layer_index);
  plan::EvidenceByLayer evidence();

 private:
  artifacts::StatsReader reader_;
  std::vector<std::unique_ptr<stats::LayerStats>> layers_;
};

/// Of a model's files, its tokenizer included. `fast`: weights by sizes and header instead of content.
ModelIdentity identity_of(const std::string& path, bool fast, const Invocation& call, Progress& progress);

/// What bytes are counted at. Throws kUsage for pages that the runtime does not have.
plan::Accounting accounting_of(const KvplanOptions& options);

/// As check_output(), and that the name is not that of a tensor file.
void check_plan_output(const KvplanOptions& options, const std::vector<std::string>& inputs);

/// (role, sha256) of what a plan was made from.
using Parents = std::vector<std::pair<std::string, std::string>>;
/// Counts the plan again, warns of what the runtime cannot run, and writes it with its provenance unless --dry-run.
void finish_plan(plan::Plan& plan, const KvplanOptions& options, const Invocation& call, Parents parents, Progress& progress);

}  // namespace calib::tools

#pragma once
// The options shared by all commands that run a model over text.

#include <cstdint>
#include <string>
#include <vector>

#include "libcalib/model/streaming_model.h"
#include "libcalib/text/corpus.h"
#include "tools/common/cli_main.h"

namespace calib::tools {

struct RunOptions {
  std::string model;
  std::vector<std::string> data;
  std::int64_t num_samples = 0;          ///< 0 = unset
  std::int64_t default_samples = 128;    ///< windows taken where --num-samples is unset
  std::int64_t seq_len = 2048;
  std::int64_t seed = 0;
  std::string device = "cpu", dtype = "auto", chat_template;
  std::int64_t hidden_mem = std::int64_t{4} << 30;
  bool first = false, fast_identity = false, dry_run = false;
};

/// Adds --model --data --num-samples --seq-len --first --chat-template (Input), --seed, --device --dtype --hidden-mem
/// (Device), --fast-identity and --dry-run.
void add_run_options(CLI::App& app, RunOptions& options);

/// Throws kUsage if --model or --data is missing.
void require_model_and_data(const RunOptions& options);
/// The model and the files of --data, without their options: what --output must not replace.
std::vector<std::string> inputs_of(const RunOptions& options);
model::ModelOptions model_options(const RunOptions& options, const Invocation& call);
/// seq_len is bounded by the model's positions; max_positions comes from its identity.
text::CorpusRequest corpus_request(const RunOptions& options, std::int64_t max_positions);

}  // namespace calib::tools

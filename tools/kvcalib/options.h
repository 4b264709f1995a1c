#pragma once
// Command line of kvcalib.

#include <cstdint>
#include <string>
#include <vector>

#include "tools/common/run_options.h"

namespace calib::tools {

struct KvcalibOptions {
  RunOptions run;
  std::string output = "stats.h5";
  std::int64_t n_sinks = 4;
  std::int64_t attention_rows = 128;
  std::string statistics = "all";   ///< all, none (a bare forward pass, to measure what the statistics cost)
  bool fisher = false, resume = false;  ///< named so that they can be refused by name
};

void declare_kvcalib(CLI::App& app, KvcalibOptions& options);
/// Throws kUnsupported for what this version does not offer, kUsage for contradictions.
void check_kvcalib(const KvcalibOptions& options);

}  // namespace calib::tools

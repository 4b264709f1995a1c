#include "tools/kvcalib/options.h"

#include <CLI/CLI.hpp>

#include "tools/common/option_values.h"

namespace calib::tools {

void declare_kvcalib(CLI::App& app, KvcalibOptions& o) {
  add_run_options(app, o.run);
  add_text(app, "-o,--output", o.output, "Statistics file to write", "Output", "FILE");
  add_integer(app, "--sinks", o.n_sinks, 0, 1 << 20, "First tokens of every document, kept apart in all statistics", "Calibration");
  add_integer(app, "--attention-rows", o.attention_rows, 0, 1 << 20, "Sampled attention rows per document and layer", "Calibration");
  add_text(app, "--statistics", o.statistics, "all, or none: a bare forward pass that writes no file", "Diagnostics", "WHAT");
  add_flag(app, "--fisher", o.fisher, "Gradient statistics (not offered by this version)", "Calibration");
  add_flag(app, "--resume", o.resume, "Continue an interrupted run (not offered by this version)", "Calibration");
  CLI::App* merge = app.add_subcommand("merge", "Merge statistics files (not offered by this version)");
  merge->allow_extras();
  // Thrown while parsing: its own options are unknown, but the command is what there is to say.
  merge->callback([] { fail(ErrorKind::kUnsupported, "kvcalib merge", "is not offered by this version; run kvcalib once over all texts instead"); });
}

void check_kvcalib(const KvcalibOptions& o) {
  if (o.fisher) fail(ErrorKind::kUnsupported, "--fisher", "is not offered by this version; kvsens measures gradients itself");
  if (o.resume) fail(ErrorKind::kUnsupported, "--resume", "is not offered by this version; start the run again without it");
  require_model_and_data(o.run);
  if (o.statistics != "all" && o.statistics != "none")
    fail(ErrorKind::kUsage, "--statistics", "is \"{}\", expected all or none", o.statistics);
  if (o.output.empty()) fail(ErrorKind::kUsage, "--output", "is empty, expected a file name");
}

}  // namespace calib::tools

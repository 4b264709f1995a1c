#include "tools/kvcalib/run.h"

int main(int argc, char** argv) {
  calib::tools::KvcalibOptions options;
  calib::tools::Program program;
  program.name = "kvcalib";
  program.summary = "Records the KV-cache statistics of a model on calibration text.";
  program.declare = [&](CLI::App& app) { calib::tools::declare_kvcalib(app, options); };
  program.run = [&](const calib::tools::Invocation& call) { return calib::tools::run_kvcalib(options, call); };
  program.computes = true;
  return calib::tools::cli_main(argc, argv, program);
}

#include "tools/kvsens/run.h"

int main(int argc, char** argv) {
  calib::tools::KvsensOptions options;
  calib::tools::Program program;
  program.name = "kvsens";
  program.summary = "Measures what each layer's K and V lose under each way of storing them, and what a whole plan loses.";
  program.declare = [&](CLI::App& app) { calib::tools::declare_kvsens(app, options); };
  program.run = [&](const calib::tools::Invocation& call) { return calib::tools::run_kvsens(options, call); };
  program.computes = true;
  return calib::tools::cli_main(argc, argv, program);
}

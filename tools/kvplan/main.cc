#include "tools/kvplan/commands.h"

int main(int argc, char** argv) {
  calib::tools::KvplanOptions options;
  calib::tools::Program program;
  program.name = "kvplan";
  program.main_command = "plan";
  program.summary = "Chooses how every layer's K and V are stored within a byte budget, and explains and checks such plans.";
  program.declare = [&](CLI::App& app) { calib::tools::declare_kvplan(app, options); };
  program.run = [&](const calib::tools::Invocation& call) { return calib::tools::run_kvplan(options, call); };
  return calib::tools::cli_main(argc, argv, program);
}

#pragma once
// The frame of every program: parse, run, and turn each outcome into one exit code and at most one `error:` line.

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace calib::tools {

/// Options that every program has, and what an artifact records of the call.
struct Invocation {
  std::vector<std::string> argv;  ///< valid UTF-8
  std::string started_utc;        ///< "2025-01-31T12:00:00Z"
  double seconds() const;         ///< since the program started
  int threads = 0;                ///< --threads, 0 = all cores
  int n_threads() const;          ///< resolved, >= 1
  bool json = false;              ///< --json: results on stdout as JSON
  int verbosity = 0;              ///< -q: -1, -v: 1
  double started_monotonic = 0;
};

struct Program {
  std::string name, summary;
  std::string main_command = {};               ///< the sub-command that takes the program's own options; others refuse them
  std::function<void(CLI::App&)> declare;      ///< adds options and sub-commands
  std::function<int(const Invocation&)> run;   ///< after a successful parse; returns 0 or 1 (gate failed)
  bool computes = false;                       ///< by libtorch's worker threads
};

/// Exit codes: that of run(), those of exit_code(ErrorKind), 2 for every command-line error, 130 after SIGINT (143 SIGTERM)
/// with everything cleaned up. `--help`, `--version` and `--print-config` write to stdout and return 0.
int cli_main(int argc, char** argv, const Program& program);

/// Throws what cli_main turns into exit 130 or 143 if the user asked to stop; call it between pieces of work.
void throw_if_interrupted();

/// Version of the programs, written into every artifact.
const char* version();

}  // namespace calib::tools

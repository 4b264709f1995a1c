#pragma once
// Runs one of the built programs and keeps what came out.

#include <string>
#include <vector>

namespace calib::test {

struct ProgramResult {
  int exit_code = -1;  ///< 128 + signal if it was killed by one
  std::string out, err;
  double seconds = 0;
  long peak_kib = 0;   ///< highest resident memory
};

/// `name` stands in build/bin. `input` goes to its standard input. `interrupt_after`: SIGINT that many seconds after the first
/// line on stderr (< 0: never).
ProgramResult run_program(const std::string& name, const std::vector<std::string>& args, const std::string& input = "",
                          double interrupt_after = -1);

struct CommandResult {
  int exit_code = -1;
  std::string text;  ///< stdout and stderr as they came
};

/// "PROGRAM argument …" of build/bin through the shell.
CommandResult run_command(const std::string& command);

/// What every refusal must look like: this exit code, first line "error: ", the parts named, no text of a library.
void expect_refusal(const ProgramResult& result, int exit_code, const std::vector<std::string>& parts);

}  // namespace calib::test

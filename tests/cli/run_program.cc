#include "tests/cli/run_program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <stdexcept>

#include <gtest/gtest.h>

namespace calib::test {
namespace {

using Clock = std::chrono::steady_clock;

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    read = ends[0], write = ends[1];
  }
  ~Pipe() { close_read(), close_write(); }
  void close_read() { if (read >= 0) ::close(read), read = -1; }
  void close_write() { if (write >= 0) ::close(write), write = -1; }
};

}  // namespace

ProgramResult run_program(const std::string& name, const std::vector<std::string>& args, const std::string& input,
                          double interrupt_after) {
  const std::string path = std::string(CALIB_BIN_DIR) + "/" + name;
  std::vector<char*> argv{const_cast<char*>(path.c_str())};
  for (const std::string& a : args) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  Pipe in, out, err;
  const auto start = Clock::now();
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("fork");
  if (pid == 0) {
    ::dup2(in.read, 0), ::dup2(out.write, 1), ::dup2(err.write, 2);
    ::execv(path.c_str(), argv.data());
    ::_exit(127);
  }
  in.close_read(), out.close_write(), err.close_write();
  ::signal(SIGPIPE, SIG_IGN);
  if (!input.empty() && ::write(in.write, input.data(), input.size()) < 0) { /* the program may not read it */ }
  in.close_write();

  ProgramResult result;
  bool interrupted = false;
  Clock::time_point first_line{};
  pollfd fds[2] = {{out.read, POLLIN, 0}, {err.read, POLLIN, 0}};
  while (fds[0].fd >= 0 || fds[1].fd >= 0) {
    if (::poll(fds, 2, 20) < 0 && errno != EINTR) break;
    for (int i = 0; i < 2; ++i) {
      if (fds[i].fd < 0 || !(fds[i].revents & (POLLIN | POLLHUP))) continue;
      char buffer[4096];
      const ssize_t n = ::read(fds[i].fd, buffer, sizeof buffer);
      if (n <= 0) fds[i].fd = -1;
      else (i == 0 ? result.out : result.err).append(buffer, static_cast<std::size_t>(n));
    }
    if (first_line == Clock::time_point{} && result.err.find('\n') != std::string::npos) first_line = Clock::now();
    if (interrupt_after >= 0 && !interrupted && first_line != Clock::time_point{} &&
        std::chrono::duration<double>(Clock::now() - first_line).count() >= interrupt_after) {
      ::kill(pid, SIGINT);
      interrupted = true;
    }
  }
  int status = 0;
  rusage usage{};
  ::wait4(pid, &status, 0, &usage);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  result.peak_kib = usage.ru_maxrss;
  return result;
}

CommandResult run_command(const std::string& command) {
  CommandResult out;
  FILE* pipe = ::popen((std::string(CALIB_BIN_DIR) + "/" + command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return out;
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) out.text.append(buffer.data(), n);
  const int status = ::pclose(pipe);
  out.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return out;
}

void expect_refusal(const ProgramResult& result, int exit_code, const std::vector<std::string>& parts) {
  EXPECT_EQ(result.exit_code, exit_code) << result.err;
  std::size_t n_errors = 0;
  for (std::size_t at = 0; (at = result.err.find("error: ", at)) != std::string::npos; ++at)
    if (at == 0 || result.err[at - 1] == '\n') ++n_errors;
  EXPECT_EQ(n_errors, 1u) << result.err;
  for (const std::string& part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << "'" << part << "' is not in: " << result.err;
  for (const char* foreign : {"json.exception", "c10::", "std::", "HDF5-DIAG", "terminate called", "what():"})
    EXPECT_EQ(result.err.find(foreign), std::string::npos) << result.err;
}

}  // namespace calib::test

#include "tools/common/cli_main.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <new>
#include <thread>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/atomic_file.h"
#include "tools/common/option_values.h"

#ifndef KVCALIB_VERSION
#error "KVCALIB_VERSION comes from tools/common/CMakeLists.txt"
#endif

namespace calib::tools {
namespace {

struct Interrupted {
  int signal;
};

volatile sig_atomic_t g_signal = 0;

/// The first signal asks; a second one ends the process at once, so that a hung run can be left.
extern "C" void on_signal(int signal) {
  if (g_signal != 0) {
    io::remove_partial_files();
    ::_exit(128 + signal);
  }
  g_signal = signal;
}

/// Signals that end the process whatever it is doing: a closed pipe, Ctrl-Backslash. The default action follows.
extern "C" void on_fatal_signal(int signal) {
  io::remove_partial_files();
  ::raise(signal);
}

/// Unless it is ignored, as nohup ignores SIGHUP.
void handle_unless_ignored(int signal, const struct sigaction& action) {
  struct sigaction inherited{};
  if (::sigaction(signal, nullptr, &inherited) == 0 && inherited.sa_handler != SIG_IGN) ::sigaction(signal, &action, nullptr);
}

void install_signal_handlers() {
  struct sigaction action{};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  handle_unless_ignored(SIGHUP, action);  // a closed terminal
  struct sigaction fatal{};
  fatal.sa_handler = on_fatal_signal;
  fatal.sa_flags = SA_RESETHAND | SA_NODEFER;
  sigemptyset(&fatal.sa_mask);
  handle_unless_ignored(SIGPIPE, fatal);
  handle_unless_ignored(SIGQUIT, fatal);
}

/// FILE of `--config FILE` or `--config=FILE` as the user gave it.
std::string config_path(int argc, char** argv) {
  const std::string name = "--config";
  std::string path;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == name && i + 1 < argc) path = argv[i + 1];
    if (word.rfind(name + "=", 0) == 0) path = word.substr(name.size() + 1);
  }
  return to_valid_utf8(path);
}

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min,
                     utc.tm_sec);
}

std::string one_line(const std::string& text) {
  std::string out;
  for (const char c : to_valid_utf8(text))
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    else out += c;
  return out;
}

void print_error(const std::string& line, const std::vector<std::string>& details = {}) {
  const bool colour = ::isatty(STDERR_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  std::string text = (colour ? "\x1b[31merror:\x1b[0m " : "error: ") + one_line(line) + "\n";
  constexpr std::size_t kShown = 10;
  for (std::size_t i = 0; i < details.size() && i < kShown; ++i) text += "  " + one_line(details[i]) + "\n";
  if (details.size() > kShown) text += fmt::format("  and {} more\n", details.size() - kShown);
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

/// The command line's own failures, in our words: which option, what is wrong with it.
std::string describe_parse_error(const CLI::App& app, const CLI::ParseError& e) {
  std::string option;
  for (const CLI::App* a : [&] {
         std::vector<const CLI::App*> apps{&app};
         for (const CLI::App* s : app.get_subcommands(nullptr)) apps.push_back(s);
         return apps;
       }())
    for (const CLI::Option* o : a->get_options(nullptr)) {
      const std::string name = o->get_name();
      if (name.size() > option.size() && std::string(e.what()).find(name) != std::string::npos) option = name;
    }
  const std::string subject = option.empty() ? "the command line" : "option " + option;
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&e)) return subject + ": its value is missing, or it is given more than once";
  if (dynamic_cast<const CLI::RequiredError*>(&e)) return subject + " is required";
  if (dynamic_cast<const CLI::ExcludesError*>(&e)) return subject + " cannot be combined with another option given";
  if (dynamic_cast<const CLI::RequiresError*>(&e)) return subject + " needs another option that is missing";
  return subject + ": its value is not valid";
}

/// OpenMP's threads spin between libtorch's parallel regions; where other programs want the same cores, the threads that still have work
/// then wait for those that only spin, a time slice at every region. The runtime reads its policy while it is loaded, so the program starts
/// itself once more with another one, before it has read anything. A policy of the user's stands; where the start fails all goes on as it was.
void wait_without_spinning(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  ::setenv("OMP_WAIT_POLICY", "passive", 1);
  char path[4096];  // not /proc/self/exe itself, which would become the name of the process
  const ssize_t n = ::readlink("/proc/self/exe", path, sizeof path - 1);
  if (n <= 0) return;
  path[n] = '\0';
  ::execv(path, argv);
}

/// Throws kIo if anything written to standard output is lost.
void flush_stdout() {
  std::cout.flush();
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) fail(ErrorKind::kIo, "standard output", "cannot be written");
}

/// Options of the program itself that a sub-command would ignore.
class UnusedOptions {
 public:
  UnusedOptions(const CLI::App& app, std::string program, std::string main_command)
      : app_(app), program_(std::move(program)), main_command_(std::move(main_command)) {
    for (const CLI::Option* option : app.get_options(nullptr))
      if (option != app.get_help_ptr() && option != app.get_version_ptr()) own_.push_back(option);
  }

  /// Throws kUsage naming the first that was given.
  void check() const {
    const std::vector<CLI::App*> used = app_.get_subcommands();
    if (used.empty() || used[0]->get_name() == main_command_) return;
    const std::string command = program_ + " " + used[0]->get_name();
    for (const CLI::Option* option : own_) {
      if (option->count() == 0) continue;
      const std::string name = option->get_name();
      if (used[0]->get_option_no_throw(name))
        fail(ErrorKind::kUsage, name, "stands before {}; write it behind, where it applies to {}", used[0]->get_name(), command);
      fail(ErrorKind::kUsage, name, "is not an option of {}; see {} --help", command, command);
    }
  }

 private:
  const CLI::App& app_;
  std::string program_, main_command_;
  std::vector<const CLI::Option*> own_;
};

/// Looks at the command line before the values of a file join it: a file may hold options of commands that are not run.
class CheckedConfig : public CLI::ConfigTOML {
 public:
  explicit CheckedConfig(const UnusedOptions& unused) : unused_(unused) {}
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    unused_.check();
    return CLI::ConfigTOML::from_config(input);
  }

 private:
  const UnusedOptions& unused_;
};

int run_program(int argc, char** argv, const Program& program) {
  Invocation call;
  call.started_monotonic = monotonic_seconds();
  call.started_utc = utc_now();
  for (int i = 0; i < argc; ++i) call.argv.push_back(to_valid_utf8(argv[i]));

  CLI::App app(program.summary, program.name);
  app.set_help_flag("-h,--help", "Print this help and exit")->group("Diagnostics");
  app.set_version_flag("--version", fmt::format("{} {}", program.name, version()))->group("Diagnostics");
  app.option_defaults()->always_capture_default(false);
  app.fallthrough();
  app.allow_extras();  // reported below in our own words
  app.get_formatter()->column_width(34);

  std::int64_t threads = 0;
  bool quiet = false, verbose = false, print_config = false;
  program.declare(app);
  const UnusedOptions unused(app, program.name, program.main_command);
  app.config_formatter(std::make_shared<CheckedConfig>(unused));
  add_integer(app, "--threads", threads, 0, 4096, "Worker threads, 0 = all cores", "Device");
  add_flag(app, "--json", call.json, "Print results as JSON on standard output", "Diagnostics");
  add_flag(app, "-v,--verbose", verbose, "Print notes as well", "Diagnostics");
  add_flag(app, "-q,--quiet", quiet, "Print warnings and errors only", "Diagnostics");
  app.set_config("--config", "", "Read options from a TOML file with the same names")->group("Diagnostics")->type_name("FILE");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.add_flag("--print-config", print_config, "Print the resolved options as TOML and exit")->group("Diagnostics")->configurable(false);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    const int status = app.exit(e);
    flush_stdout();
    return status;
  } catch (const CLI::FileError&) {
    fail(ErrorKind::kNotFound, "--config " + config_path(argc, argv), "the file cannot be read");
  } catch (const CLI::ConfigError&) {
    fail(ErrorKind::kUsage, "--config " + config_path(argc, argv), "names an option that {0} does not have, or is not TOML; {0} --print-config shows the names",
         program.name);
  } catch (const CLI::ParseError& e) {
    fail(ErrorKind::kUsage, program.name, "{}; see {} --help", describe_parse_error(app, e), program.name);
  }
  const std::vector<std::string> extras = app.remaining(/*recurse=*/true);
  if (!extras.empty())
    fail(ErrorKind::kUsage, program.name, "unknown {} \"{}\"; see {} --help", extras[0].rfind('-', 0) == 0 ? "option" : "argument",
         to_valid_utf8(extras[0]), program.name);
  if (app.get_config_ptr()->count() == 0) unused.check();
  if (quiet && verbose) fail(ErrorKind::kUsage, program.name, "-q and -v contradict each other");
  if (print_config) {
    const std::string text = app.config_to_str(/*default_also=*/true, /*write_description=*/false);
    std::fwrite(text.data(), 1, text.size(), stdout);
    flush_stdout();
    return 0;
  }
  call.threads = static_cast<int>(threads);
  call.verbosity = quiet ? -1 : verbose ? 1 : 0;
  const int status = program.run(call);
  flush_stdout();
  return status;
}

}  // namespace

double Invocation::seconds() const { return monotonic_seconds() - started_monotonic; }

int Invocation::n_threads() const {
  return threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

const char* version() { return KVCALIB_VERSION; }

void throw_if_interrupted() {
  if (g_signal != 0) throw Interrupted{static_cast<int>(g_signal)};
}

int cli_main(int argc, char** argv, const Program& program) {
  if (program.computes) wait_without_spinning(argv);
  install_signal_handlers();
  try {
    return run_program(argc, argv, program);
  } catch (const Interrupted& i) {
    print_error("interrupted; nothing was written");
    return 128 + i.signal;
  } catch (const Error& e) {
    print_error(e.where().empty() ? e.message() : e.where() + ": " + e.message(), e.details());
    return exit_code(e.kind());
  } catch (const std::bad_alloc&) {
    print_error("out of memory; lower --seq-len, --num-samples or --hidden-mem");
    return exit_code(ErrorKind::kIo);
  } catch (const std::exception&) {
    if (std::ferror(stdout)) {  // fmt says so with an exception of its own
      print_error("standard output: cannot be written");
      return exit_code(ErrorKind::kIo);
    }
    print_error("an unexpected failure inside the program; please report it with the command line");
    return exit_code(ErrorKind::kInternal);
  } catch (...) {
    print_error("an unexpected failure inside the program; please report it with the command line");
    return exit_code(ErrorKind::kInternal);
  }
}

}  // namespace calib::tools

#include "tools/common/progress.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "tools/common/option_values.h"

namespace calib::tools {
namespace {

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void write_stderr(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

/// Control characters in names taken from files must not move the cursor or start a second line.
std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    else out += c;
  return out;
}

}  // namespace

Progress::Progress(int verbosity) : verbosity_(verbosity) {
  const char* term = std::getenv("TERM");
  terminal_ = ::isatty(STDERR_FILENO) == 1 && !(term && std::strcmp(term, "dumb") == 0);
}
Progress::~Progress() { clear(); }

void Progress::clear() {
  if (!line_open_) return;
  write_stderr("\r\x1b[K");
  line_open_ = false;
}

void Progress::update(const std::string& label, std::int64_t done, std::int64_t total, double units_per_second, double seconds_left,
                      bool milestone) {
  if (verbosity_ < 0 || (!terminal_ && !milestone)) return;
  const double now = monotonic_seconds();
  if (terminal_ && done < total && now - last_update_ < 0.1) return;
  last_update_ = now;
  const std::string speed = units_per_second > 0 ? fmt::format("  {:.0f} tokens/s  {} left", units_per_second, format_duration(seconds_left)) : "";
  const std::string text = fmt::format("{}  {:3.0f} %{}  peak {}", label,
                                       total > 0 ? 100.0 * static_cast<double>(done) / static_cast<double>(total) : 100.0, speed,
                                       format_bytes(static_cast<double>(peak_memory_bytes())));
  write_stderr(terminal_ ? "\r\x1b[K" + text : text + "\n");
  line_open_ = terminal_;
}

void Progress::note(const std::string& text) {
  if (verbosity_ < 1) return;
  clear();
  write_stderr("note: " + printable(text) + "\n");
}

void Progress::warning(const std::string& text) {
  ++n_warnings_;
  clear();
  write_stderr("warning: " + printable(text) + "\n");
}

void Progress::say(const std::string& text) {
  if (verbosity_ < 0) return;
  clear();
  write_stderr(printable(text) + "\n");
}

LogSink Progress::sink() {
  LogSink sink;
  sink.warning = [this](const std::string& text) { warning(text); };
  sink.note = [this](const std::string& text) { note(text); };
  return sink;
}

}  // namespace calib::tools

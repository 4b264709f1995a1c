#pragma once
// Progress and diagnostics on stderr: one line rewritten in place on a terminal, plain lines otherwise.

#include <cstdint>
#include <string>

#include "libcalib/base/error.h"
#include "tools/common/process_memory.h"

namespace calib::tools {

/// Not thread-safe: one instance, one thread.
class Progress {
 public:
  /// verbosity: -1 errors and warnings only, 0 progress, 1 also notes.
  explicit Progress(int verbosity);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` units of work (tokens through blocks). On a terminal at most ten times a second; otherwise only
  /// where `milestone` is set (a layer finished). Shows units/s, the time left and peak memory.
  void update(const std::string& label, std::int64_t done, std::int64_t total, double units_per_second, double seconds_left,
              bool milestone);
  void note(const std::string& text);
  void warning(const std::string& text);
  /// A line that belongs to the result of a quiet-able run ("wrote stats.h5").
  void say(const std::string& text);
  void clear();
  /// Warnings and notes of the library. The sink refers to this object.
  LogSink sink();
  std::int64_t n_warnings() const { return n_warnings_; }

 private:
  int verbosity_;
  bool terminal_, line_open_ = false;
  double last_update_ = -1;
  std::int64_t n_warnings_ = 0;
};

}  // namespace calib::tools

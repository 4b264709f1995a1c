#pragma once
// The one error type of libcalib and the sink for everything that is not an error.

#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace calib {

/// Kind of failure; each maps to one exit code (exit_code()).
enum class ErrorKind {
  kUsage,        ///< 2: unknown or contradictory option, value outside its documented range
  kNotFound,     ///< 3: a file that is not there
  kIo,           ///< 3: unreadable, locked, disk full
  kFormat,       ///< 4: one file that is malformed in itself
  kVersion,      ///< 4: a schema or format version outside the supported range
  kMismatch,     ///< 5: two well-formed things that contradict each other
  kInfeasible,   ///< 6: a request that the given input cannot meet
  kUnsupported,  ///< 7: valid input, feature not offered
  kNumeric,      ///< 8: NaN, infinity, a layer that saw no token
  kInternal,     ///< 70: a bug of ours
};

/// Exit code of a program that ends with this kind of error (0 and 1 are not error kinds).
int exit_code(ErrorKind kind) noexcept;

/// Thrown by every libcalib function that fails. `message` is one line that says what, got, expected and what to do;
/// `where` names the file (as the user gave it), tensor, layer, key or line; `details` is an optional list of further
/// items of the same class (print at most 10, then a count). All of them are kept as printable single lines: control
/// characters escaped, damaged UTF-8 replaced, more than 4096 bytes cut.
class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string where, std::string message, std::vector<std::string> details = {});

  ErrorKind kind() const noexcept { return kind_; }
  const std::string& where() const noexcept { return where_; }
  const std::string& message() const noexcept { return message_; }
  const std::vector<std::string>& details() const noexcept { return details_; }
  /// "where: message", followed by the details as an indented list.
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  ErrorKind kind_;
  std::string where_, message_;
  std::vector<std::string> details_;
  std::string text_;
};

/// Throws Error with a message built by fmt, e.g. fail(ErrorKind::kFormat, path, "header length {} exceeds {}", a, b).
template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, std::string where, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, std::move(where), fmt::format(format, std::forward<Args>(args)...));
}

/// Where a library sends what is not an error. Libraries never print; tools set one sink. Default: drop.
struct LogSink {
  std::function<void(const std::string&)> warning = [](const std::string&) {};
  std::function<void(const std::string&)> note = [](const std::string&) {};
};

}  // namespace calib

/// Internal invariant: throws kInternal with file and line. Never use it to validate input.
#define CALIB_CHECK(condition)                                                                              \
  do {                                                                                                      \
    if (!(condition))                                                                                       \
      ::calib::fail(::calib::ErrorKind::kInternal, fmt::format("{}:{}", __FILE__, __LINE__), "check failed: {}", \
                    #condition);                                                                            \
  } while (0)

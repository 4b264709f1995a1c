#include "libcalib/base/error.h"

#include "libcalib/base/utf8.h"

namespace calib {
namespace {

// Names come from files: a line break or an escape sequence in one must not break the one-line message or the terminal.
std::string one_line(const std::string& text) {
  constexpr std::size_t kLongest = 4096;
  const std::string valid = to_valid_utf8(std::string_view(text).substr(0, kLongest));
  std::string out;
  out.reserve(valid.size());
  for (const char c : valid) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') out += "\\n";
    else if (c == '\t') out += "\\t";
    else if (byte < 0x20 || byte == 0x7F) out += fmt::format("\\x{:02x}", byte);
    else out += c;
  }
  if (text.size() > kLongest) out += fmt::format("… ({} bytes)", text.size());
  return out;
}

}  // namespace

int exit_code(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kUsage: return 2;
    case ErrorKind::kNotFound:
    case ErrorKind::kIo: return 3;
    case ErrorKind::kFormat:
    case ErrorKind::kVersion: return 4;
    case ErrorKind::kMismatch: return 5;
    case ErrorKind::kInfeasible: return 6;
    case ErrorKind::kUnsupported: return 7;
    case ErrorKind::kNumeric: return 8;
    case ErrorKind::kInternal: return 70;
  }
  return 70;
}

Error::Error(ErrorKind kind, std::string where, std::string message, std::vector<std::string> details)
    : kind_(kind), where_(one_line(where)), message_(one_line(message)), details_(std::move(details)) {
  for (std::string& d : details_) d = one_line(d);
  constexpr std::size_t kShown = 10;
  text_ = where_.empty() ? message_ : where_ + ": " + message_;
  for (std::size_t i = 0; i < details_.size() && i < kShown; ++i) text_ += "\n  " + details_[i];
  if (details_.size() > kShown) text_ += fmt::format("\n  … and {} more ({} in all)", details_.size() - kShown, details_.size());
}

}  // namespace calib

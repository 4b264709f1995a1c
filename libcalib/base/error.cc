#include "libcalib/base/error.h"

namespace calib {

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
    : kind_(kind), where_(std::move(where)), message_(std::move(message)), details_(std::move(details)) {
  constexpr std::size_t kShown = 10;
  text_ = where_.empty() ? message_ : where_ + ": " + message_;
  for (std::size_t i = 0; i < details_.size() && i < kShown; ++i) text_ += "\n  " + details_[i];
  if (details_.size() > kShown) text_ += fmt::format("\n  … and {} more ({} in all)", details_.size() - kShown, details_.size());
}

}  // namespace calib

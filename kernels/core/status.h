#pragma once
// Result of every kvrt call: a code plus text naming what, got and expected. The library never prints, aborts or throws.

#include <string>
#include <utility>

namespace kvrt {

enum class Code { kOk, kArgument, kIo, kFormat, kMismatch, kUnsupported, kCapacity, kCuda, kNumeric, kInternal };

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string text) : code_(code), text_(std::move(text)) {}
  bool ok() const noexcept { return code_ == Code::kOk; }
  Code code() const noexcept { return code_; }
  const std::string& text() const noexcept { return text_; }

 private:
  Code code_ = Code::kOk;
  std::string text_;
};

}  // namespace kvrt

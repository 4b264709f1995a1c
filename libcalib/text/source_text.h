#pragma once
// The bytes of one calibration file as valid UTF-8 (CASES.md TX-01 … TX-03).

#include <optional>
#include <string>
#include <string_view>

#include "libcalib/base/error.h"
#include "libcalib/base/mapped_file.h"

namespace calib::text {

/// Reads a file (mapped) or standard input ("-"). A UTF-8 mark is taken off, line ends stay, every damaged sequence becomes
/// U+FFFD with one warning per file (count and offset of the first).
class SourceText {
 public:
  /// Throws: kNotFound, kIo, kFormat naming what the content is instead of text (UTF-16, LFS pointer, gzip, …).
  SourceText(const std::string& path, const LogSink& log);

  /// Valid UTF-8; lives as long as this object, which may not be moved from meanwhile.
  std::string_view text() const noexcept { return text_; }
  const std::string& name() const noexcept { return name_; }      ///< path, or "standard input"
  const std::string& sha256() const noexcept { return sha256_; }  ///< of the original bytes

 private:
  std::string name_, sha256_;
  std::optional<MappedFile> file_;
  std::string owned_;
  std::string_view text_;
};

/// True if some character is neither white space nor a control character.
bool has_usable_text(std::string_view text);

}  // namespace calib::text

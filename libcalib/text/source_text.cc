#include "libcalib/text/source_text.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "libcalib/base/json.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/utf8.h"

namespace calib::text {
namespace {

std::string read_standard_input() {
  std::string all;
  char block[1 << 16];
  while (const std::size_t n = std::fread(block, 1, sizeof block, stdin)) all.append(block, n);
  if (std::ferror(stdin)) fail(ErrorKind::kIo, "standard input", "cannot be read: {}", std::strerror(errno));
  return all;
}

void refuse_other_encodings(std::string_view bytes, const std::string& name) {
  const auto starts = [&](std::string_view mark) { return bytes.starts_with(mark); };
  const char* encoding = starts(std::string_view("\xFF\xFE\0\0", 4)) ? "UTF-32 LE"
                         : starts(std::string_view("\0\0\xFE\xFF", 4)) ? "UTF-32 BE"
                         : starts("\xFF\xFE")                          ? "UTF-16 LE"
                         : starts("\xFE\xFF")                          ? "UTF-16 BE"
                                                                       : nullptr;
  if (encoding) fail(ErrorKind::kFormat, name, "is {}, expected UTF-8; convert it first (iconv -f {} -t UTF-8)", encoding, std::string_view(encoding).substr(0, 6));
  // Text may begin with the letters GGUF; a binary file also has control bytes near its start.
  const std::string_view start = bytes.substr(0, 512);
  const bool binary = std::any_of(start.begin(), start.end(), [](char c) { return static_cast<unsigned char>(c) < '\t'; });
  const std::string foreign = describe_foreign_content(start);
  if (!foreign.empty() && (binary || foreign.starts_with("Git LFS") || foreign == "HTML page"))
    fail(ErrorKind::kFormat, name, "expected text, found: {}", foreign);
  // Single NULs are characters like others; one in ten bytes is no text in UTF-8.
  const std::string_view head = bytes.substr(0, 4096);
  const auto n_nul = std::count(head.begin(), head.end(), '\0');
  if (n_nul * 10 > static_cast<std::ptrdiff_t>(head.size()))
    fail(ErrorKind::kFormat, name, "{} of the first {} bytes are NUL: looks like UTF-16 or binary data, expected UTF-8", n_nul, head.size());
}

}  // namespace

SourceText::SourceText(const std::string& path, const LogSink& log) : name_(path == "-" ? "standard input" : path) {
  std::string_view bytes;
  if (path == "-") {
    owned_ = read_standard_input();
    bytes = owned_;
  } else {
    file_.emplace(path);
    bytes = file_->bytes();
  }
  sha256_ = sha256_hex(bytes);
  refuse_other_encodings(bytes, name_);
  const std::size_t mark = bytes.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  text_ = bytes.substr(mark);
  Utf8Repair repair = repair_utf8(text_);
  if (repair.n_replaced > 0) {
    log.warning(fmt::format("{}: {} damaged UTF-8 sequence{} replaced by U+FFFD, the first at byte {}", name_, repair.n_replaced, repair.n_replaced == 1 ? "" : "s",
                            repair.first_bad_offset + mark));
    owned_ = std::move(repair.text);
    text_ = owned_;
  }
}

bool has_usable_text(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Step s = decode_utf8(text, at);
    const char32_t c = s.scalar;
    const bool blank = c <= 0x20 || (c >= 0x7F && c <= 0xA0) || c == 0x1680 || (c >= 0x2000 && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
                       c == 0x205F || c == 0x3000 || c == 0xFEFF;
    if (!blank) return true;
    at += s.size;
  }
  return false;
}

}  // namespace calib::text

#include "libcalib/base/utf8.h"

namespace calib {

Utf8Step decode_utf8(std::string_view text, std::size_t at) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char b0 = byte(at);
  if (b0 < 0x80) return {b0, 1, true};
  // Allowed range of the second byte depends on the first (no overlong forms, no surrogates, nothing above U+10FFFF).
  unsigned lo = 0x80, hi = 0xBF;
  std::size_t need = 0;
  char32_t value = 0;
  if (b0 >= 0xC2 && b0 <= 0xDF) { need = 1; value = b0 & 0x1F; }
  else if (b0 >= 0xE0 && b0 <= 0xEF) { need = 2; value = b0 & 0x0F; if (b0 == 0xE0) lo = 0xA0; if (b0 == 0xED) hi = 0x9F; }
  else if (b0 >= 0xF0 && b0 <= 0xF4) { need = 3; value = b0 & 0x07; if (b0 == 0xF0) lo = 0x90; if (b0 == 0xF4) hi = 0x8F; }
  else return {0xFFFD, 1, false};
  std::size_t i = 1;
  for (; i <= need; ++i) {
    if (at + i >= text.size() || byte(at + i) < lo || byte(at + i) > hi) return {0xFFFD, i, false};
    value = (value << 6) | (byte(at + i) & 0x3F);
    lo = 0x80, hi = 0xBF;
  }
  return {value, i, true};
}

void append_utf8(char32_t c, std::string& out) {
  if ((c >= 0xD800 && c <= 0xDFFF) || c > 0x10FFFF) c = 0xFFFD;
  const auto put = [&](char32_t v) { out += static_cast<char>(v); };
  if (c < 0x80) put(c);
  else if (c < 0x800) put(0xC0 | (c >> 6)), put(0x80 | (c & 0x3F));
  else if (c < 0x10000) put(0xE0 | (c >> 12)), put(0x80 | ((c >> 6) & 0x3F)), put(0x80 | (c & 0x3F));
  else put(0xF0 | (c >> 18)), put(0x80 | ((c >> 12) & 0x3F)), put(0x80 | ((c >> 6) & 0x3F)), put(0x80 | (c & 0x3F));
}

Utf8Repair repair_utf8(std::string_view text) {
  Utf8Repair r;
  r.text.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Step s = decode_utf8(text, at);
    if (s.valid) {
      r.text.append(text, at, s.size);
    } else {
      if (r.n_replaced++ == 0) r.first_bad_offset = at;
      r.text += "\xEF\xBF\xBD";
    }
    at += s.size;
  }
  return r;
}

std::string to_valid_utf8(std::string_view text) { return repair_utf8(text).text; }

}  // namespace calib

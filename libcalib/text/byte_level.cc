#include "libcalib/text/byte_level.h"

#include <array>

#include "libcalib/base/utf8.h"

namespace calib::text {
namespace {

constexpr bool stands_for_itself(int b) { return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE; }

constexpr int kAlphabetEnd = 0x144;  // 0x100 + 68 characters for the bytes that do not print

struct Alphabet {
  std::array<char32_t, 256> chars{};
  std::array<int, kAlphabetEnd> bytes{};
  constexpr Alphabet() {
    for (auto& b : bytes) b = -1;
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      chars[b] = stands_for_itself(b) ? static_cast<char32_t>(b) : next++;
      bytes[chars[b]] = b;
    }
  }
};
constexpr Alphabet kAlphabet;

}  // namespace

char32_t byte_to_char(unsigned char byte) noexcept { return kAlphabet.chars[byte]; }

int char_to_byte(char32_t c) noexcept { return c < kAlphabetEnd ? kAlphabet.bytes[c] : -1; }

void append_byte_chars(std::string_view bytes, std::string& out) {
  for (const char c : bytes) {
    const char32_t mapped = byte_to_char(static_cast<unsigned char>(c));
    if (mapped < 0x80) {
      out += static_cast<char>(mapped);
    } else {
      out += static_cast<char>(0xC0 | (mapped >> 6));
      out += static_cast<char>(0x80 | (mapped & 0x3F));
    }
  }
}

std::string bytes_of_chars(std::string_view chars) {
  std::string out;
  for (std::size_t at = 0; at < chars.size();) {
    const Utf8Step step = decode_utf8(chars, at);
    if (const int byte = step.valid ? char_to_byte(step.scalar) : -1; byte >= 0) out += static_cast<char>(byte);
    else out.append(chars, at, step.size);
    at += step.size;
  }
  return out;
}

}  // namespace calib::text

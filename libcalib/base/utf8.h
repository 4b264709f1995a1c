#pragma once
// UTF-8 with the Unicode rule for damaged input: one U+FFFD per maximal subpart (Unicode 15, section 3.9, table 3-8).

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace calib {

/// Result of decoding one scalar value.
struct Utf8Step {
  char32_t scalar = 0xFFFD;  ///< U+FFFD where the bytes are damaged
  std::size_t size = 0;      ///< bytes consumed (>= 1)
  bool valid = false;
};

/// Decodes the scalar that starts at text[at]. Requires: at < text.size().
Utf8Step decode_utf8(std::string_view text, std::size_t at) noexcept;

/// Appends the UTF-8 form of a scalar value (surrogates and values above U+10FFFF become U+FFFD).
void append_utf8(char32_t scalar, std::string& out);

struct Utf8Repair {
  std::string text;
  std::uint64_t n_replaced = 0;
  std::uint64_t first_bad_offset = 0;  ///< byte offset in the input; meaningful if n_replaced > 0
};
/// Replaces each damaged maximal subpart by U+FFFD and counts.
Utf8Repair repair_utf8(std::string_view text);

/// repair_utf8(text).text; for names and paths that go into JSON, HDF5 or a message.
std::string to_valid_utf8(std::string_view text);

}  // namespace calib

#pragma once
// The byte alphabet of byte-level BPE: every byte stands for one printable character, so that vocabularies are text.

#include <string>
#include <string_view>

namespace calib::text {

/// Character of a byte. Source: GPT-2 `encoder.py`: the printable bytes 21-7E, A1-AC, AE-FF stand for themselves as
/// Latin-1, the 68 others for U+0100, U+0101, … in byte order (space: U+0120 "Ġ", line feed: U+010A "Ċ").
char32_t byte_to_char(unsigned char byte) noexcept;
/// Inverse; -1 if the character stands for no byte.
int char_to_byte(char32_t c) noexcept;

/// Appends the characters of all bytes, in UTF-8.
void append_byte_chars(std::string_view bytes, std::string& out);
/// Bytes of a vocabulary entry; characters outside the alphabet stay as they are (added tokens).
std::string bytes_of_chars(std::string_view chars);

}  // namespace calib::text

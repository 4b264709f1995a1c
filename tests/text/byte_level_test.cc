#include "libcalib/text/byte_level.h"

#include <set>

#include "libcalib/base/utf8.h"
#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

TEST(ByteLevel, EveryByteHasItsOwnPrintableCharacterAndComesBack) {
  std::set<char32_t> seen;
  for (int b = 0; b < 256; ++b) {
    const char32_t c = byte_to_char(static_cast<unsigned char>(b));
    EXPECT_GT(c, 0x20u);
    EXPECT_TRUE(seen.insert(c).second) << b;
    EXPECT_EQ(char_to_byte(c), b);
  }
}

TEST(ByteLevel, KnownCharacters) {
  EXPECT_EQ(byte_to_char(' '), 0x120u);
  EXPECT_EQ(byte_to_char('\n'), 0x10Au);
  EXPECT_EQ(byte_to_char(0), 0x100u);
  EXPECT_EQ(byte_to_char(0xAD), 0x143u);
  EXPECT_EQ(byte_to_char('a'), U'a');
  EXPECT_EQ(char_to_byte(0x144), -1);
  EXPECT_EQ(char_to_byte(0x4E00), -1);
}

TEST(ByteLevel, TextRoundTripKeepsForeignCharacters) {
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  std::string chars;
  append_byte_chars(all, chars);
  EXPECT_EQ(to_valid_utf8(chars), chars);
  EXPECT_EQ(bytes_of_chars(chars), all);
  EXPECT_EQ(bytes_of_chars("Ġ一"), " 一");
}

}  // namespace
}  // namespace calib::text

#include "libcalib/base/utf8.h"

#include <gtest/gtest.h>

namespace calib {
namespace {

TEST(Utf8, Tx01OneReplacementPerMaximalSubpart) {
  const std::string replacement = "\xEF\xBF\xBD";
  const struct {
    std::string bytes;
    int n;
  } cases[] = {{"\xE6\xAD", 1}, {"\x80", 1}, {"\xC0\x80", 2}, {"\xED\xA0\x80", 3}, {"\xF8\x88\x80\x80\x80", 5}, {"\xF4\x90\x80\x80", 4}};
  for (const auto& c : cases) {
    const Utf8Repair r = repair_utf8("ab" + c.bytes + "cd");
    EXPECT_EQ(r.n_replaced, static_cast<std::uint64_t>(c.n));
    EXPECT_EQ(r.first_bad_offset, 2u);
    std::string expected = "ab";
    for (int i = 0; i < c.n; ++i) expected += replacement;
    EXPECT_EQ(r.text, expected + "cd");
  }
  const Utf8Repair cut = repair_utf8("ab\xF0\x9F\x98");
  EXPECT_EQ(cut.n_replaced, 1u);
  EXPECT_EQ(cut.text, "ab" + replacement);
}

TEST(Utf8, EveryScalarSurvivesARoundTrip) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string bytes;
    append_utf8(c, bytes);
    const Utf8Step s = decode_utf8(bytes, 0);
    ASSERT_TRUE(s.valid) << static_cast<std::uint32_t>(c);
    ASSERT_EQ(s.scalar, c);
    ASSERT_EQ(s.size, bytes.size());
  }
}

TEST(Utf8, SurrogatesAndBeyondBecomeReplacements) {
  for (char32_t c : {char32_t{0xD800}, char32_t{0xDFFF}, char32_t{0x110000}}) {
    std::string bytes;
    append_utf8(c, bytes);
    EXPECT_EQ(bytes, "\xEF\xBF\xBD");
  }
}

TEST(Utf8, ValidTextIsUntouched) {
  const std::string text = "plain, \xC3\xA9, \xE4\xB8\x80, \xF0\x9F\x98\x80, " + std::string(1, '\0');
  const Utf8Repair r = repair_utf8(text);
  EXPECT_EQ(r.text, text);
  EXPECT_EQ(r.n_replaced, 0u);
}

TEST(Utf8, EveryTwoByteSequenceIsConsumedWhole) {
  for (int a = 0; a < 256; ++a)
    for (int b = 0; b < 256; ++b) {
      const std::string text = {static_cast<char>(a), static_cast<char>(b)};
      std::size_t at = 0;
      while (at < text.size()) {
        const Utf8Step s = decode_utf8(text, at);
        ASSERT_GE(s.size, 1u);
        ASSERT_LE(at + s.size, text.size());
        at += s.size;
      }
    }
}

}  // namespace
}  // namespace calib

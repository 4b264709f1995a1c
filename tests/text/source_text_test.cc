#include "libcalib/text/source_text.h"

#include "libcalib/base/sha256.h"
#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::HasSubstr;

struct Read {
  std::string text, sha256;
  std::vector<std::string> warnings;
};

Read read(const std::string& bytes) {
  const TempFolder folder;
  write_file(folder.file("t.txt"), bytes);
  Log log;
  const SourceText source(folder.file("t.txt"), log.sink());
  return {std::string(source.text()), source.sha256(), log.warnings};
}

std::size_t count_replacements(const std::string& text) {
  std::size_t n = 0;
  for (auto at = text.find("\uFFFD"); at != std::string::npos; at = text.find("\uFFFD", at + 3)) ++n;
  return n;
}

TEST(SourceText, DamagedBytes) {  // TX-01
  const std::pair<std::string, std::size_t> cases[] = {{"\xE6\xAD", 1},        {"\x80", 1}, {"\xC0\x80", 2}, {"\xED\xA0\x80", 3}, {"\xF8\x88\x80\x80\x80", 5},
                                                       {"\xF4\x90\x80\x80", 4}};
  for (const auto& [bytes, n] : cases) {
    const std::string original = "ab" + bytes + "cd";
    const Read r = read(original);
    EXPECT_EQ(count_replacements(r.text), n);
    EXPECT_TRUE(r.text.starts_with("ab") && r.text.ends_with("cd"));
    EXPECT_EQ(r.text.size(), 4 + 3 * n);
    ASSERT_EQ(r.warnings.size(), 1u);
    EXPECT_THAT(r.warnings[0], testing::AllOf(HasSubstr(fmt::format(": {} damaged", n)), HasSubstr("at byte 2")));
    EXPECT_EQ(r.sha256, sha256_hex(original));
  }
  const Read cut = read("ab\xF0\x9F\x98");
  EXPECT_EQ(count_replacements(cut.text), 1u);
  const Read marked = read("\xEF\xBB\xBFx\x80");
  EXPECT_THAT(marked.warnings[0], HasSubstr("at byte 4"));
}

TEST(SourceText, LineEndsAndSingleNulsStay) {  // TX-02
  EXPECT_EQ(read("a\r\nb\r\n").text, "a\r\nb\r\n");
  const std::string nul("some words, a NUL \0 and more words", 34);
  EXPECT_EQ(read(nul).text, nul);
  EXPECT_TRUE(read(nul).warnings.empty());
}

std::string utf16(const std::string& ascii, bool little, bool mark) {
  std::string out = mark ? (little ? "\xFF\xFE" : "\xFE\xFF") : "";
  for (const char c : ascii) {
    if (!little) out += '\0';
    out += c;
    if (little) out += '\0';
  }
  return out;
}

TEST(SourceText, OtherEncodings) {  // TX-03
  const std::string words = random_words(4096);
  EXPECT_EQ(read("\xEF\xBB\xBF" + words).text, words);
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { read(utf16(words, true, true)); }), HasSubstr("UTF-16 LE"));
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { read(utf16(words, false, true)); }), HasSubstr("UTF-16 BE"));
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { read(utf16(words, true, false)); }), testing::AllOf(HasSubstr("NUL"), HasSubstr("looks like UTF-16")));
  const Read latin = read("caf\xE9 au lait");
  EXPECT_EQ(latin.text, "caf\uFFFD au lait");
  EXPECT_EQ(latin.warnings.size(), 1u);
}

TEST(SourceText, FilesThatAreNoText) {
  EXPECT_THAT(error_text(ErrorKind::kFormat, [] { read("version https://git-lfs.github.com/spec/v1\nsize 12\n"); }), HasSubstr("Git LFS pointer"));
  EXPECT_THAT(error_text(ErrorKind::kFormat, [] { read(std::string("\x1f\x8b\x08\x00", 4)); }), HasSubstr("gzip"));
  EXPECT_THAT(error_text(ErrorKind::kFormat, [] { read(std::string("GGUF\3\0\0\0", 8)); }), HasSubstr("GGUF"));
  EXPECT_EQ(read("GGUF is a container.").text, "GGUF is a container.");
  const TempFolder folder;
  EXPECT_THAT(error_text(ErrorKind::kNotFound, [&] { SourceText(folder.file("absent.txt"), {}); }), HasSubstr("absent.txt"));
  EXPECT_THAT(error_text(ErrorKind::kIo, [&] { SourceText(folder.path(), {}); }), HasSubstr("folder"));
}

TEST(SourceText, UsableText) {
  for (const std::string blank : {"", " \n\t\r\n", "\u00a0\u3000", "\uFEFF"}) EXPECT_FALSE(has_usable_text(blank));
  for (const std::string usable : {".", " \n x", "一", "\uFFFD"}) EXPECT_TRUE(has_usable_text(usable));
}

}  // namespace
}  // namespace calib::text

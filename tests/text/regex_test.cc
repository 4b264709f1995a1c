#include "libcalib/text/regex.h"

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

std::vector<std::string> all_matches(const Regex& regex, std::string_view text) {
  std::vector<std::string> out;
  std::size_t from = 0;
  while (const auto m = regex.find(text, from)) {
    out.emplace_back(text.substr(m->begin, m->end - m->begin));
    from = m->end;
  }
  return out;
}

TEST(Regex, WhiteSpaceFollowsTheUnicodeProperty) {
  const Regex space(R"(\s)", "test");
  for (const char* c : {"\t", "\n", "\v", "\r", " ", "\u0085", "\u00a0", "\u1680", "\u2003", "\u2028", "\u3000"}) EXPECT_TRUE(space.find(c, 0)) << c;
  for (const char* c : {"\u180e", "\u200b", "\x1f", "a"}) EXPECT_FALSE(space.find(c, 0)) << c;
  EXPECT_TRUE(Regex(R"([^\s])", "test").find("\u180e", 0));
}

TEST(Regex, WordsHaveMarksAndConnectors) {
  EXPECT_THAT(all_matches(Regex(R"(\w+)", "test"), "e\u0301_a\u203fb-1 \u00bd"), testing::ElementsAre("e\u0301_a\u203fb", "1"));
}

TEST(Regex, InlineCaseFlagAndLookAhead) {
  EXPECT_THAT(all_matches(Regex(R"((?i:'s|'ll)|\s+(?!\S))", "test"), "I'LL it'S  x"), testing::ElementsAre("'LL", "'S", " "));
}

TEST(Regex, ScriptsAreScriptsAndNotExtensions) {
  // U+30FC has script Common, script extensions Hiragana and Katakana.
  EXPECT_FALSE(Regex(R"(\p{Katakana})", "test").find("\u30fc", 0));
  EXPECT_TRUE(Regex(R"(\p{Katakana})", "test").find("\u30ab", 0));
}

TEST(Regex, FourDigitEscapes) { EXPECT_THAT(all_matches(Regex(R"([\u4e00-\u4e02])", "test"), "a一丁丂七"), testing::ElementsAre("一", "丁", "丂")); }

TEST(Regex, EmptyMatchesArePassedOver) { EXPECT_THAT(all_matches(Regex("x*", "test"), "aéxxb"), testing::ElementsAre("xx")); }

TEST(Regex, LiteralTextIsNotAPattern) {
  EXPECT_THAT(all_matches(Regex::literal("a.*[", "test"), "a.*[ aXX[ a.*["), testing::ElementsAre("a.*[", "a.*["));
  EXPECT_TRUE(Regex::literal("\xE2\x96\x81", "test").find("x\xE2\x96\x81", 0));
}

TEST(Regex, PartsWithoutAnEqualAreRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {{R"(\h)", "\\h"},          {R"(\bx)", "\\b"},         {R"([a[bc]])", "class inside"},
                                                       {R"([a-z&&[^b]])", "(&&)"}, {"(", "not understood"}, {R"(\p{Nonsense})", "not understood"}};
  for (const auto& [pattern, named] : cases) {
    const std::string text = error_text(ErrorKind::kUnsupported, [&, p = pattern] { Regex(p, "file.json"); });
    EXPECT_THAT(text, testing::HasSubstr(named));
    EXPECT_THAT(text, testing::HasSubstr("file.json"));
  }
}

TEST(Regex, OneMatchOfTwoMillionCharacters) {
  const std::string letters(2'000'000, 'a'), spaces(2'000'000, ' ');
  EXPECT_EQ(Regex(R"( ?\p{L}+)", "test").find(letters, 0)->end, letters.size());
  EXPECT_EQ(Regex(R"(\s*[\r\n]+|\s+(?!\S)|\s+)", "test").find(spaces, 0)->end, spaces.size());
}

}  // namespace
}  // namespace calib::text

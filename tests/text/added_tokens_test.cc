#include "libcalib/text/added_tokens.h"

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

// "[token]" and plain stretches, joined by "|".
std::string shown(const AddedTokens& tokens, const std::string& text, bool parse_special = false) {
  std::string out;
  for (const Segment& s : tokens.split(text, parse_special)) {
    if (!out.empty()) out += "|";
    out += s.id ? "[" + std::string(s.text) + "]" : std::string(s.text);
  }
  return out;
}

TEST(AddedTokens, LeftmostThenLongest) {
  AddedTokens t;
  t.add({.id = 1, .content = "ab"});
  t.add({.id = 2, .content = "abc"});
  t.add({.id = 3, .content = "bcd"});
  EXPECT_EQ(shown(t, "xabcdab"), "x|[abc]|d|[ab]");
  EXPECT_EQ(shown(t, ""), "");
  EXPECT_EQ(t.find("abc")->id, 2);
  EXPECT_EQ(t.find("x"), nullptr);
}

TEST(AddedTokens, SpecialOnesAreLiteralUnlessAskedFor) {
  AddedTokens t;
  t.add({.id = 1, .content = "<s>", .special = true});
  t.add({.id = 2, .content = "s>", .special = false});
  EXPECT_EQ(shown(t, "a<s>b"), "a<s>b");
  EXPECT_EQ(shown(t, "a<s>b", true), "a|[<s>]|b");
  EXPECT_EQ(shown(t, "as>b"), "a|[s>]|b");
}

TEST(AddedTokens, StripFlagsTakeWhiteSpaceWithThem) {
  AddedTokens t;
  t.add({.id = 1, .content = "<l>", .lstrip = true});
  t.add({.id = 2, .content = "<r>", .rstrip = true});
  EXPECT_EQ(shown(t, "a \u00a0<l> b"), "a|[ \u00a0<l>]| b");
  EXPECT_EQ(shown(t, "a <r> \n b"), "a |[<r> \n ]|b");
  EXPECT_EQ(shown(t, "<r>  <l>"), "[<r>  ]|[<l>]");
}

TEST(AddedTokens, SingleWordDoesNotMatchInsideWords) {
  AddedTokens t;
  t.add({.id = 1, .content = "the", .single_word = true});
  EXPECT_EQ(shown(t, "the other the, thé éthe"), "[the]| other |[the]|, thé éthe");
}

}  // namespace
}  // namespace calib::text

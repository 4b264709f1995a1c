#include "libcalib/text/normalizer.h"

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

TEST(Normalizer, StepsRunInOrderAndPrependLeavesEmptyTextAlone) {
  Normalizer n;
  EXPECT_TRUE(n.empty());
  n.add(PrependText{"_"});
  n.add(ReplaceMatches{Regex::literal(" ", "test"), "_"});
  EXPECT_EQ(n.apply("a  b"), "_a__b");
  EXPECT_EQ(n.apply(""), "");
}

TEST(Normalizer, ReplaceTakesEveryMatchAndKeepsNul) {
  Normalizer n;
  n.add(ReplaceMatches{Regex(R"(\d+)", "test"), "#"});
  EXPECT_EQ(n.apply(std::string("1\0 22x", 6)), std::string("#\0 #x", 5));
}

TEST(Normalizer, NfcComposesReordersAndKeepsWhatIsComposed) {
  EXPECT_EQ(compose_nfc("plain é"), "plain é");
  EXPECT_EQ(compose_nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(compose_nfc("\u212b"), "\u00c5");                    // Angstrom sign: a singleton
  EXPECT_EQ(compose_nfc("\u1100\u1161\u11a8"), "\uac01");        // Hangul
  EXPECT_EQ(compose_nfc("q\u0307\u0323"), "q\u0323\u0307");      // canonical order
  EXPECT_EQ(compose_nfc("\u0958"), "\u0915\u093c");              // composition exclusion
  EXPECT_EQ(compose_nfc("\uff21"), "\uff21");                    // compatibility forms stay
  EXPECT_EQ(compose_nfc(std::string("a\0e\u0301", 5)), std::string("a\0\u00e9", 4));
}

}  // namespace
}  // namespace calib::text

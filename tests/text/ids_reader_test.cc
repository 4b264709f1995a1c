#include "libcalib/text/ids_reader.h"

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::HasSubstr;

TEST(IdsReader, OneDocumentALine) {
  const IdLines r = read_id_lines("1 2\t3\r\n\n  \n4\n5", 6, "x.ids");
  EXPECT_EQ(r.ids, (Ids{1, 2, 3, 4, 5}));
  EXPECT_THAT(r.lines, testing::ElementsAre(std::pair(0u, 3u), std::pair(3u, 4u), std::pair(4u, 5u)));
}

TEST(IdsReader, WordsThatAreNoIds) {
  for (const char* word : {"a", "1.5", "0x10", "+1", "1,2", "--1"}) {
    const std::string text = error_text(ErrorKind::kFormat, [&] { read_id_lines(std::string("1\n2 ") + word + "\n", 6, "x.ids"); });
    EXPECT_THAT(text, testing::AllOf(HasSubstr("x.ids"), HasSubstr("line 2"), HasSubstr(word)));
  }
}

TEST(IdsReader, IdsOutsideTheVocabulary) {
  for (const char* word : {"6", "-1", "99999999999999999999"}) {
    const std::string text = error_text(ErrorKind::kMismatch, [&] { read_id_lines(word, 6, "x.ids"); });
    EXPECT_THAT(text, testing::AllOf(HasSubstr("6 entries"), HasSubstr(word)));
  }
}

}  // namespace
}  // namespace calib::text

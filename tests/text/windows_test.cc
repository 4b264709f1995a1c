#include "libcalib/text/windows.h"

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

FileDocuments text_of(std::size_t n_tokens, std::int64_t seq_len, const std::string& option = "f.txt", bool adds_bos = false) {
  FileDocuments f;
  f.option = parse_data_option(option);
  f.name = f.option.path;
  f.adds_bos = adds_bos;
  f.ids.assign(n_tokens, 1);
  cut_windows(0, n_tokens, seq_len, f);
  return f;
}

FileDocuments rows_of(std::size_t n_rows, std::size_t length, const std::string& option = "f.jsonl") {
  FileDocuments f;
  f.option = parse_data_option(option);
  f.name = f.option.path;
  f.rows = true;
  for (std::size_t i = 0; i < n_rows; ++i) {
    f.ids.insert(f.ids.end(), length, 1);
    cut_windows(i * length, (i + 1) * length, 1000, f);
  }
  return f;
}

std::vector<std::size_t> counts(const std::vector<FileDocuments>& files, const WindowRequest& request) {
  std::vector<std::size_t> out;
  for (const auto& chosen : choose_windows(files, request)) out.push_back(chosen.size());
  return out;
}

TEST(Windows, CutsKeepRoomForBosAndDropLoneTokens) {
  EXPECT_THAT(text_of(10, 4).documents, ElementsAre(std::pair(0u, 4u), std::pair(4u, 8u), std::pair(8u, 10u)));
  EXPECT_TRUE(text_of(10, 4).short_tail);
  EXPECT_THAT(text_of(6, 4, "f.txt", true).documents, ElementsAre(std::pair(0u, 3u), std::pair(3u, 6u)));
  EXPECT_EQ(text_of(6, 4, "f.txt", true).n_tokens(), 8);
  EXPECT_EQ(text_of(9, 4).n_documents(), 2);
  EXPECT_EQ(text_of(1, 4).n_documents(), 1) << "all that there is";
  EXPECT_FALSE(rows_of(2, 10).short_tail);
}

TEST(Windows, EvenlySpacedOrFirst) {
  const std::vector<FileDocuments> files = {text_of(105, 10)};
  EXPECT_THAT(choose_windows(files, {10, 4, 128, false})[0], ElementsAre(0, 2, 5, 7));
  EXPECT_THAT(choose_windows(files, {10, 4, 128, true})[0], ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(choose_windows(files, {10, 10, 128, false})[0].size(), 10u);
  EXPECT_THAT(choose_windows({text_of(105, 10, "f:skip=7")}, {10, 3, 128, false})[0], ElementsAre(7, 8, 9));
}

TEST(Windows, UnsetNumberTakesWhatThereIs) {
  EXPECT_EQ(counts({text_of(105, 10)}, {10, 0, 128, false}), (std::vector<std::size_t>{11})) << "with the short tail";
  EXPECT_EQ(counts({text_of(105, 10)}, {10, 0, 10, false}), (std::vector<std::size_t>{10})) << "full windows where they suffice";
  EXPECT_EQ(counts({text_of(105, 10)}, {10, 0, 4, false}), (std::vector<std::size_t>{4}));
  EXPECT_EQ(counts({text_of(5, 10), rows_of(3, 7)}, {10, 0, 128, false}), (std::vector<std::size_t>{1, 3}));
}

TEST(Windows, MoreThanThereIs) {  // TX-04
  const auto text = [](const std::vector<FileDocuments>& files, std::int64_t n, std::int64_t seq_len) {
    return error_text(ErrorKind::kInfeasible, [&] { choose_windows(files, {seq_len, n, 128, false}); });
  };
  EXPECT_THAT(text({text_of(10, 512)}, 4, 512), HasSubstr("have 10 tokens, need 2048 (4 × 512)"));
  EXPECT_THAT(text({text_of(105, 10)}, 11, 10), HasSubstr("have 105 tokens, need 110 (11 × 10)"));
  EXPECT_THAT(text({rows_of(3, 7)}, 4, 512), HasSubstr("have 3 documents, need 4"));
  EXPECT_THAT(text({text_of(100, 10, "f:num=11")}, 0, 10), HasSubstr("(11 × 10)"));
  EXPECT_THAT(text({text_of(100, 10, "f:skip=10")}, 0, 10), HasSubstr("skip=10"));
  EXPECT_THAT(text({text_of(100, 10, "f:share=0.5"), text_of(1000, 10, "g:share=0.5")}, 60, 10), HasSubstr("f: have 100 tokens, need 300"));
}

TEST(Windows, NumAndShare) {
  EXPECT_EQ(counts({text_of(1000, 10, "f:num=3"), text_of(1000, 10)}, {10, 20, 128, false}), (std::vector<std::size_t>{3, 17}));
  EXPECT_EQ(counts({text_of(1000, 10, "f:num=3")}, {10, 0, 2, false}), (std::vector<std::size_t>{3}));
  EXPECT_EQ(counts({text_of(1000, 10, "f:share=0.3"), text_of(1000, 10, "g:share=0.7")}, {10, 20, 128, false}), (std::vector<std::size_t>{6, 14}));
  EXPECT_EQ(counts({text_of(1000, 10, "f:share=0.3"), text_of(500, 10), text_of(1000, 10)}, {10, 30, 128, false}), (std::vector<std::size_t>{9, 7, 14}));
  // Half of the tokens each: windows of 10 tokens against rows of 5 are one to two.
  EXPECT_EQ(counts({text_of(1000, 10, "f:share=0.5"), rows_of(100, 5, "g.jsonl:share=0.5")}, {10, 30, 128, false}), (std::vector<std::size_t>{10, 20}));
  // A free number shrinks until the scarce file can keep its share.
  EXPECT_EQ(counts({text_of(50, 10, "f:share=0.5"), text_of(1000, 10, "g:share=0.5")}, {10, 0, 60, false}), (std::vector<std::size_t>{5, 5}));
  EXPECT_THAT(error_text(ErrorKind::kUsage,
                         [] {
                           choose_windows({text_of(100, 10, "f:share=0.7"), text_of(100, 10, "g:share=0.7")}, {10, 4, 128, false});
                         }),
              HasSubstr("1.4"));
  EXPECT_THAT(error_text(ErrorKind::kUsage, [] { choose_windows({text_of(100, 10, "f:share=1"), text_of(100, 10)}, {10, 4, 128, false}); }), HasSubstr("nothing"));
  EXPECT_THAT(error_text(ErrorKind::kUsage, [] { choose_windows({text_of(100, 10, "f:num=5")}, {10, 4, 128, false}); }), HasSubstr("num="));
}

}  // namespace
}  // namespace calib::text

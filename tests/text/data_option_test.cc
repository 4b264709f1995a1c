#include "libcalib/text/data_option.h"

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

TEST(DataOption, PathsWithAndWithoutOptions) {
  const DataOption plain = parse_data_option("a.txt");
  EXPECT_EQ(plain.path, "a.txt");
  EXPECT_EQ(plain.options, "");
  EXPECT_FALSE(plain.share || plain.num);
  const DataOption all = parse_data_option("dir/a.txt:num=64,skip=10");
  EXPECT_EQ(all.path, "dir/a.txt");
  EXPECT_EQ(all.options, "num=64,skip=10");
  EXPECT_EQ(all.num, 64);
  EXPECT_EQ(all.skip, 10);
  EXPECT_DOUBLE_EQ(*parse_data_option("-:share=0.25").share, 0.25);
  EXPECT_EQ(parse_data_option("-").path, "-");
}

TEST(DataOption, ColonsOfPathsStayInPaths) {
  for (const char* path : {"a:b.txt", "C:\\texts\\a.txt", "a.txt:", "a.txt:foo=1", "x:num", "12:30=late.txt"}) EXPECT_EQ(parse_data_option(path).path, path);
  EXPECT_EQ(parse_data_option("a:b.txt:num=2").path, "a:b.txt");
}

TEST(DataOption, ValuesOutOfRangeAreUsageErrors) {
  for (const char* value : {"a:share=0", "a:share=1.5", "a:share=x", "a:share=nan", "a:num=0", "a:num=-1", "a:num=1.5", "a:num=", "a:skip=-1",
                            "a:num=99999999999999999999", "a:num=1,num=2", "a:share=0.5,num=2", ":num=1"})
    EXPECT_THAT(error_text(ErrorKind::kUsage, [&] { parse_data_option(value); }), testing::HasSubstr(value));
}

}  // namespace
}  // namespace calib::text

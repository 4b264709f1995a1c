#include "libcalib/base/error.h"

#include <map>

#include <gtest/gtest.h>

#include "libcalib/base/model_geometry.h"
#include "tests/support/expect_error.h"

namespace calib {
namespace {

TEST(Error, ExitCodes) {
  const std::map<ErrorKind, int> codes = {
      {ErrorKind::kUsage, 2},      {ErrorKind::kNotFound, 3},    {ErrorKind::kIo, 3},      {ErrorKind::kFormat, 4},  {ErrorKind::kVersion, 4},
      {ErrorKind::kMismatch, 5},   {ErrorKind::kInfeasible, 6},  {ErrorKind::kUnsupported, 7}, {ErrorKind::kNumeric, 8}, {ErrorKind::kInternal, 70}};
  for (const auto& [kind, code] : codes) EXPECT_EQ(exit_code(kind), code);
}

TEST(Error, TextHoldsWhereMessageAndDetails) {
  const Error plain(ErrorKind::kFormat, "file", "got 3, expected 4");
  EXPECT_STREQ(plain.what(), "file: got 3, expected 4");
  EXPECT_STREQ(Error(ErrorKind::kUsage, "", "no file").what(), "no file");
  const Error list(ErrorKind::kMismatch, "m", "2 problems", {"first", "second"});
  EXPECT_STREQ(list.what(), "m: 2 problems\n  first\n  second");
}

TEST(Error, LongListsAreCut) {
  std::vector<std::string> details;
  for (int i = 0; i < 13; ++i) details.push_back("item " + std::to_string(i));
  const Error e(ErrorKind::kMismatch, "m", "13 problems", details);
  const std::string text = e.what();
  EXPECT_NE(text.find("item 9"), std::string::npos);
  EXPECT_EQ(text.find("item 10"), std::string::npos);
  EXPECT_NE(text.find("3 more (13 in all)"), std::string::npos);
  EXPECT_EQ(e.details().size(), 13u);
}

TEST(Error, NamesFromFilesStayOnOneLine) {
  const Error e(ErrorKind::kFormat, "dir\nerror: fake", "bytes \x1b[31m \xC3\x28 \t", {"a\nb"});
  EXPECT_STREQ(e.what(), "dir\\nerror: fake: bytes \\x1b[31m \xEF\xBF\xBD( \\t\n  a\\nb");
  EXPECT_EQ(e.where(), "dir\\nerror: fake");
  const Error cyrillic(ErrorKind::kFormat, "\xD0\xBF\xD1\x83\xD1\x82\xD1\x8C", "x");
  EXPECT_EQ(cyrillic.where(), "\xD0\xBF\xD1\x83\xD1\x82\xD1\x8C");
  const Error endless(ErrorKind::kFormat, std::string(100'000, 'n'), "x");
  EXPECT_LT(std::string(endless.what()).size(), 5000u);
}

TEST(Error, FailFormats) {
  test::expect_error([] { fail(ErrorKind::kNumeric, "layer 3", "scale is {}, expected > {}", -1, 0); }, ErrorKind::kNumeric,
                     {"layer 3: scale is -1, expected > 0"});
  test::expect_error([] { CALIB_CHECK(1 + 1 == 3); }, ErrorKind::kInternal, {"1 + 1 == 3", "test_error.cc"});
}

TEST(Error, SilentSinkByDefault) {
  const LogSink log;
  log.warning("nobody hears this");
  log.note("nor this");
}

TEST(PositionBucket, EdgesArePowersOfTwoTimes256) {
  const std::map<std::int64_t, int> expected = {{0, 0}, {255, 0}, {256, 1}, {511, 1}, {512, 2}, {1023, 2}, {1024, 3}, {2047, 3}, {2048, 4}, {131072, 10}};
  for (const auto& [t, bucket] : expected) EXPECT_EQ(position_bucket(t), bucket) << t;
}

}  // namespace
}  // namespace calib

#include "libcalib/plan/budget.h"

#include <gtest/gtest.h>

#include <locale>

#include "libcalib/base/error.h"

namespace calib::plan {
namespace {

ErrorKind kind_of(const std::string& text) {
  try {
    parse_budget(text);
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    return e.kind();
  }
  ADD_FAILURE() << text << " was accepted";
  return ErrorKind::kInternal;
}

TEST(Budget, EverySpelling) {
  EXPECT_EQ(parse_budget("4.5").kind, Budget::Kind::kEffectiveBits);
  EXPECT_EQ(parse_budget("4.5").value, 4.5);
  EXPECT_EQ(parse_budget("12GiB").kind, Budget::Kind::kBytes);
  EXPECT_EQ(parse_budget("12GiB").value, 12.0 * (1 << 30));
  EXPECT_EQ(parse_budget("1.5kB").value, 1500);
  EXPECT_EQ(parse_budget("300B/token").kind, Budget::Kind::kBytesPerToken);
  EXPECT_EQ(parse_budget("300B/token").value, 300);
  EXPECT_EQ(parse_budget("2KiB/token").value, 2048);
}

TEST(Budget, RefusesWhatItDoesNotKnow) {
  for (const char* text : {"4,5", "", "abc", "-1", "0", "4.5 ", " 4.5", "12gib", "12G", "12/token", "nan", "inf", "1e400", "65", "1e30TB", "+4"})
    EXPECT_EQ(kind_of(text), ErrorKind::kUsage) << text;
}

TEST(Budget, IndependentOfTheGlobalLocale) {
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Comma));
  EXPECT_EQ(parse_budget("4.25").value, 4.25);
  EXPECT_EQ(kind_of("4,25"), ErrorKind::kUsage);
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  std::locale::global(before);
}

TEST(Budget, BytesOfABudget) {
  EXPECT_EQ(budget_bytes(parse_budget("4.5"), 1000, 10, 1), 562);  // floor of 562.5
  EXPECT_EQ(budget_bytes(parse_budget("300B/token"), 1, 10, 2), 6000);
  EXPECT_EQ(budget_bytes(parse_budget("1MiB"), 1, 10, 2), 1 << 20);
  // What was printed as effective bits gives its own byte count back.
  for (const std::int64_t bytes : {53088256LL, 123456789LL, 987654321987LL}) {
    const std::int64_t elements = 94371840;
    const Budget b = parse_budget(fmt::format("{}", 8.0 * static_cast<double>(bytes % 500000000) / elements));
    EXPECT_EQ(budget_bytes(b, elements, 1, 1), bytes % 500000000);
  }
}

TEST(Budget, ParsePositive) {
  EXPECT_EQ(parse_positive("0.05", "--max-kl"), 0.05);
  for (const char* text : {"0,05", "0", "-1", "x", "0.05x"}) EXPECT_THROW(parse_positive(text, "--max-kl"), Error) << text;
}

}  // namespace
}  // namespace calib::plan

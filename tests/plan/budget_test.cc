#include "libcalib/plan/budget.h"

#include <gtest/gtest.h>

#include <locale>

#include "libcalib/base/error.h"
#include "libcalib/base/rng.h"
#include "tests/support/expect_error.h"

namespace calib::plan {
namespace {

using test::expect_error;

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

TEST(Budget, ParseAbove) {
  EXPECT_EQ(parse_above(0, "0.05", "--max-kl", "0.05"), 0.05);
  EXPECT_EQ(parse_above(0, "1", "--max-kl", "0.05"), 1);
  for (const char* text : {"0,05", "0", "-1", "x", "0.05x", "inf", ""})
    expect_error([&] { parse_above(0, text, "--max-kl", "0.05"); }, ErrorKind::kUsage, {"--max-kl", "expected a number above 0, such as 0.05"});
  expect_error([&] { parse_above(1, "1", "--max-ppl-ratio", "1.02"); }, ErrorKind::kUsage, {"--max-ppl-ratio 1", "above 1, such as 1.02"});
}

TEST(Budget, PrintedBoundsAreMet) {
  EXPECT_EQ(rounded_up(3.0751e-5), "3.08e-05");
  EXPECT_EQ(rounded_up(0.25), "0.25");
  EXPECT_EQ(rounded_up(0.9991), "1");
  EXPECT_EQ(rounded_up(0), "0");
  Rng rng(5);
  for (int i = 0; i < 2000; ++i) {
    const double value = std::exp(20 * rng.uniform() - 15), back = parse_above(0, rounded_up(value), "x", "1");
    EXPECT_GE(back, value);
    EXPECT_LE(back, 1.0101 * value);  // three digits: at most 1.01 instead of 1.00
  }
  const std::int64_t elements = 94371840;
  for (const std::int64_t bytes : {34131148LL, 53088256LL, 34091827LL, 11796480LL}) {
    const std::string text = bits_that_allow(bytes, elements);
    EXPECT_GE(budget_bytes(parse_budget(text), elements, 1, 1), bytes) << text;
    EXPECT_LT(parse_budget(text).value, 8.0 * static_cast<double>(bytes) / elements + 0.01 + 1e-9) << text;
  }
  EXPECT_EQ(bits_that_allow(11796480, elements), "1.00");
}

}  // namespace
}  // namespace calib::plan

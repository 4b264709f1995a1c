#include "libcalib/io/json.h"

#include <cmath>
#include <limits>
#include <locale>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/json.h"
#include "libcalib/base/rng.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::io {
namespace {

using nlohmann::ordered_json;
using test::expect_error;

TEST(JsonText, LayoutAndOrder) {
  const ordered_json value = {
      {"z", 1}, {"a", {1.5, 2.0, -0.0}}, {"list", {{{"b", true}}, ordered_json::object()}}, {"none", nullptr}, {"empty", ordered_json::array()}};
  EXPECT_EQ(json_text(value, "f"),
            "{\n  \"z\": 1,\n  \"a\": [1.5, 2.0, -0.0],\n  \"list\": [\n    {\n      \"b\": true\n    },\n    {}\n  ],\n  \"none\": null,\n  \"empty\": []\n}\n");
}

TEST(JsonText, DoublesReadBackEqual) {
  Rng rng(1);
  for (int i = 0; i < 2000; ++i) {
    const double x = std::ldexp(rng.normal(), static_cast<int>(rng.below(600)) - 300);
    const auto back = parse_json_strict(json_text(ordered_json(x), "f"), "f");
    ASSERT_TRUE(back.is_number_float());
    EXPECT_EQ(back.get<double>(), x);
  }
  EXPECT_EQ(json_text(ordered_json(0.040771484375), "f"), "0.040771484375\n");
  EXPECT_EQ(json_text(ordered_json(1e-5), "f"), "1e-05\n");
  EXPECT_EQ(json_text(ordered_json(4.0), "f"), "4.0\n");
  EXPECT_EQ(json_text(ordered_json(std::numeric_limits<std::uint64_t>::max()), "f"), "18446744073709551615\n");
}

TEST(JsonText, RefusesNumbersThatJsonCannotHold) {  // CASES.md PJ-04
  for (const double x : {std::nan(""), std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()})
    expect_error([&] { json_text({{"layers", {{{"scale", x}}}}}, "plan.json"); }, ErrorKind::kNumeric, {"plan.json", "/layers/0/scale"});
}

TEST(JsonText, AnyBytesBecomeValidUtf8) {  // CASES.md PJ-05
  const std::string raw("\xFF\xFE \xC3\x28 \x00 \"quoted\" \\ \xE2\x80\xA8 \x1F\n", 28);
  const std::string text = json_text({{raw, raw}}, "f");
  const auto back = parse_json_strict(text, "f");
  const std::string expected("\xEF\xBF\xBD\xEF\xBF\xBD \xEF\xBF\xBD\x28 \x00 \"quoted\" \\ \xE2\x80\xA8 \x1F\n", 34);
  ASSERT_EQ(back.size(), 1u);
  EXPECT_EQ(back.begin().key(), expected);
  EXPECT_EQ(back.begin().value(), expected);
}

// CASES.md PJ-03: a locale with decimal comma and digit grouping needs no installed locale.
struct CommaAndGroups : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(JsonText, GlobalLocaleChangesNothing) {
  const ordered_json value = {{"n", 1024}, {"x", 1234.5}, {"y", {0.040771484375, 1e-05, 1048576.0}}};
  const std::string before = json_text(value, "f");
  const std::locale old = std::locale::global(std::locale(std::locale::classic(), new CommaAndGroups));
  const std::string during = json_text(value, "f");
  const auto back = parse_json_strict(before, "f");
  std::string message;
  try {
    JsonValue(back, "f").at("y").element(1024);
  } catch (const Error& e) {
    message = e.what();
  }
  std::locale::global(old);
  EXPECT_EQ(during, before);
  EXPECT_EQ(back["x"].get<double>(), 1234.5);
  EXPECT_NE(message.find("1024"), std::string::npos);
  EXPECT_NE(before.find("1024"), std::string::npos);
}

TEST(JsonValue, CountsMayBeWrittenAsWholeDoubles) {  // CASES.md PJ-01
  const auto document =
      parse_json_strict(R"({"a": 4, "b": 4.0, "c": 4.5, "d": "4", "e": true, "f": [4], "g": -1, "h": 1e300, "i": 18446744073709551615})", "p.json");
  const JsonValue root(document, "p.json");
  EXPECT_EQ(root.at("a").integer(), 4);
  EXPECT_EQ(root.at("b").integer(), 4);
  EXPECT_EQ(root.at("i").unsigned_integer(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(root.at("a").number(), 4.0);
  for (const char* key : {"c", "d", "e", "f", "h", "i"})
    expect_error([&] { root.at(key).integer(); }, ErrorKind::kFormat, {"p.json", std::string("/") + key, "expected an integer"});
  for (const char* key : {"d", "e", "f"}) expect_error([&] { root.at(key).number(); }, ErrorKind::kFormat, {std::string("/") + key, "expected a number"});
  expect_error([&] { root.at("g").unsigned_integer(); }, ErrorKind::kFormat, {"/g"});
  expect_error([&] { root.at("absent"); }, ErrorKind::kFormat, {"/absent is missing"});
  expect_error([&] { root.at("f").element(1); }, ErrorKind::kFormat, {"/f has 1 element,"});
  expect_error([&] { root.at("a").at("b"); }, ErrorKind::kFormat, {"/a is 4, expected an object"});
  expect_error([&] { root.at("d").boolean(); }, ErrorKind::kFormat, {"/d is \"4\", expected true or false"});
}

TEST(JsonFile, RoundTripAndForeignContent) {
  const test::TempFolder folder;
  const std::string path = folder.file("a.json");
  write_json_file(path, {{"x", 0.1}});
  EXPECT_EQ(read_json_file(path)["x"].get<double>(), 0.1);
  test::write_file(path, "\x89HDF\r\n\x1a\n");
  expect_error([&] { read_json_file(path); }, ErrorKind::kFormat, {path, "HDF5"});
  test::write_file(path, "{\"x\": 1");
  expect_error([&] { read_json_file(path); }, ErrorKind::kFormat, {path});
  expect_error([&] { read_json_file(folder.file("none")); }, ErrorKind::kNotFound, {"none"});
}

}  // namespace
}  // namespace calib::io

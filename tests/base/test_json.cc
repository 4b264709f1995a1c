#include "libcalib/base/json.h"

#include <clocale>
#include <limits>
#include <locale>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/support/expect_error.h"

namespace calib {
namespace {

using test::expect_error;

nlohmann::json parse(std::string_view text) { return parse_json_strict(text, "file.json"); }
void refused(std::string_view text, std::vector<std::string> parts, std::source_location at = std::source_location::current()) {
  parts.push_back("file.json");
  expect_error([&] { parse(text); }, ErrorKind::kFormat, parts, at);
}

TEST(Json, ReadsValues) {
  const auto j = parse(R"( {"a": [1, -2, 2.5, true, null, "x\u00e9\ud83d\ude00"], "b": {"c": {}}, "": 18446744073709551615} )");
  EXPECT_EQ(j["a"][0], 1);
  EXPECT_EQ(j["a"][1], -2);
  EXPECT_EQ(j["a"][2], 2.5);
  EXPECT_TRUE(j["a"][3].get<bool>());
  EXPECT_TRUE(j["a"][4].is_null());
  EXPECT_EQ(j["a"][5], "x\xC3\xA9\xF0\x9F\x98\x80");
  EXPECT_TRUE(j["b"]["c"].empty());
  EXPECT_EQ(j[""].get<std::uint64_t>(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(parse("3"), 3);
  EXPECT_EQ(parse("\"s\""), "s");
  EXPECT_EQ(parse("1e-05").get<double>(), 1e-05);
  EXPECT_EQ(parse("0.040771484375").get<double>(), 0.040771484375);
}

TEST(Json, DuplicateKeysAreRefused) {
  refused(R"({"a":1,"a":2})", {"\"a\"", "twice"});
  refused(R"({"x":{"y":[{"k":1,"\u006b":2}]}})", {"\"k\"", "/x/y/0"});
  EXPECT_EQ(parse(R"({"a":{"k":1},"b":{"k":2}})")["b"]["k"], 2);
}

TEST(Json, DepthIsLimited) {
  const auto nested = [](int n) { return std::string(static_cast<std::size_t>(n), '[') + std::string(static_cast<std::size_t>(n), ']'); };
  parse(nested(128));
  refused(nested(129), {"128"});
  refused(std::string(1'000'000, '['), {"128"});
  std::string objects;
  for (int i = 0; i < 200; ++i) objects += "{\"k\":";
  refused(objects, {"128"});
}

TEST(Json, DamagedTextIsRefused) {
  for (const char* text : {"",     " ",   "{",   "[1,",   "{\"a\" 1}", "{\"a\":1,}", "[1 2]",    "01",     "+1",      ".5",          "1.",
                           "0x10", "nul", "'a'", "{a:1}", "// c\n1",   "NaN",        "Infinity", "\"\n\"", "\"\\x\"", "\"\\ud800\"", "\"open"}) {
    SCOPED_TRACE(text);
    refused(text, {"byte"});
  }
  refused("{} x", {"byte"});
  refused("[1][2]", {"byte"});
}

TEST(Json, ErrorsNamePlaceAndText) {
  refused("{\n  \"scale\": NaN,\n  \"bits\": 4\n}", {"line 2, column 12 (byte 14): `  \"scale\": NaN,`"});
  refused("{\"a\": 1,\n \"b\": [1, 2", {"line 2, column 12", "ends within a value", "cut off"});
  refused("", {"line 1, column 1", "cut off"});
  std::string many = "[";
  for (int i = 0; i < 2000; ++i) many += "1, ";
  refused(many + "x, 3]", {"line 1, column 6002 (byte 6002): `1, 1, 1, 1, 1, 1, 1, 1, x, 3]`"});
  refused("{\"a\": \"caf\xC3\xA9 \x01\"}", {"line 1, column 14"});
}

TEST(Json, InvalidUtf8IsRefused) {
  refused("{\"a\":\"\xC3\x28\"}", {"UTF-8"});
  refused("{\"\xFF\":1}", {"UTF-8"});
  refused("\"\xED\xA0\x80\"", {"UTF-8"});
}

TEST(Json, NumbersMustBeFinite) {
  refused("1e999", {"out of range"});
  refused("{\"a\":[-1e400]}", {"out of range"});
  EXPECT_EQ(parse("1e308").get<double>(), 1e308);
  EXPECT_EQ(parse("1e-400").get<double>(), 0.0);
}

TEST(Json, NoLibraryTextInMessages) {
  try {
    parse("{\"a\":tru}");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).find("json.exception"), std::string::npos) << e.what();
  }
}

TEST(Json, PlaceholdersAreNamed) {
  refused("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n", {"Git LFS pointer", "12345"});
  refused("\n  <!DOCTYPE HTML>\n<html>", {"HTML page"});
  refused("<html lang=en>", {"HTML page"});
}

struct CommaPunct : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(Json, LocalesDoNotMatter) {
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new CommaPunct));
  const char* comma = std::setlocale(LC_ALL, "de_DE.UTF-8");  // absent on many machines; the other half still counts
  const auto j = parse("[0.040771484375, 1e-05, 1024]");
  EXPECT_EQ(j[0].get<double>(), 0.040771484375);
  EXPECT_EQ(j[1].get<double>(), 1e-05);
  expect_error([] { fail(ErrorKind::kUsage, "", "{} {}", 1024, 0.5); }, ErrorKind::kUsage, {"1024 0.5"});
  if (comma != nullptr) std::setlocale(LC_ALL, "C");
  std::locale::global(before);
}

TEST(ForeignContent, KnowsItsFormats) {
  EXPECT_EQ(describe_foreign_content("{\"a\": 1}"), "");
  EXPECT_EQ(describe_foreign_content(""), "");
  EXPECT_EQ(describe_foreign_content("GGUF\x03"), "GGUF file");
  EXPECT_NE(describe_foreign_content("tjgg....").find("old GGML"), std::string::npos);
  EXPECT_NE(describe_foreign_content("PK\x03\x04").find("zip"), std::string::npos);
  EXPECT_NE(describe_foreign_content("\x1f\x8b\x08").find("gzip"), std::string::npos);
  EXPECT_NE(describe_foreign_content("\x7f" "ELF").find("ELF"), std::string::npos);
  EXPECT_NE(describe_foreign_content("\x89HDF\r\n\x1a\n").find("HDF5"), std::string::npos);
  EXPECT_EQ(describe_foreign_content(std::string("\x02\0\0\0\0\0\0\0{}", 10)), "safetensors file");
  // A header of 35,615 bytes starts with the magic of gzip.
  EXPECT_EQ(describe_foreign_content(std::string("\x1f\x8b\0\0\0\0\0\0{\"a\"", 12)), "safetensors file");
}

}  // namespace
}  // namespace calib

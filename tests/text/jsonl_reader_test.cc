#include "libcalib/text/jsonl_reader.h"

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::HasSubstr;

DataRow one(const std::string& row) {
  const auto rows = read_data_rows(row, "d.jsonl");
  EXPECT_EQ(rows.size(), 1u);
  return rows.at(0);
}

std::string bad(const std::string& text) {
  return error_text(ErrorKind::kFormat, [&] { read_data_rows(text, "d.jsonl"); });
}

TEST(JsonlReader, KnownShapes) {  // TX-05
  EXPECT_EQ(one(R"({"text":"a\nb"})").text, "a\nb");
  EXPECT_EQ(one(R"({"content":"c"})").text, "c");
  EXPECT_EQ(one(R"({"prompt":"Q: ","completion":"A"})").text, "Q: A");
  EXPECT_EQ(one(R"({"instruction":"Add","input":"1 2","output":"3"})").text, "Add\n\n1 2\n\n3");
  EXPECT_EQ(one(R"({"instruction":"Add","input":"","output":"3"})").text, "Add\n\n3");
  EXPECT_EQ(one(R"({"instruction":"Add","output":"3"})").text, "Add\n\n3");
  const DataRow chat =
      one(R"({"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"u"},{"type":"text","text":"v"}]}],"id":"7"})");
  ASSERT_EQ(chat.messages.size(), 2u);
  EXPECT_EQ(chat.messages[0].role, "system");
  EXPECT_EQ(chat.messages[1].content, "uv");
  const DataRow shared = one(R"({"conversations":[{"from":"human","value":"h"},{"from":"gpt","value":"g"},{"role":"tool","content":"t"}]})");
  ASSERT_EQ(shared.messages.size(), 3u);
  EXPECT_EQ(shared.messages[0].role, "user");
  EXPECT_EQ(shared.messages[1].role, "assistant");
  EXPECT_EQ(shared.messages[1].content, "g");
  EXPECT_EQ(shared.messages[2].role, "tool");
}

TEST(JsonlReader, MixedRowsBlankLinesAndLists) {
  const auto mixed = read_data_rows("{\"text\":\"a\"}\r\n\n{\"messages\":[{\"role\":\"user\",\"content\":\"b\"}]}\n{\"content\":\"\"}", "d.jsonl");
  ASSERT_EQ(mixed.size(), 3u);
  EXPECT_EQ(mixed[0].name, "line 1");
  EXPECT_EQ(mixed[1].name, "line 3");
  EXPECT_EQ(mixed[1].messages.size(), 1u);
  EXPECT_EQ(mixed[2].text, "");
  const auto list = read_data_rows(" [{\"text\":\"a\"},\n{\"text\":\"b\"}]\n", "d.json");
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[1].text, "b");
  EXPECT_EQ(list[1].name, "row 2");
  EXPECT_TRUE(read_data_rows(" \n\n", "d.jsonl").empty());
}

TEST(JsonlReader, BadRows) {
  EXPECT_THAT(bad("{\"text\":\"a\"}\n{\"foo\":1,\"bar\":2}"), testing::AllOf(HasSubstr("line 2"), HasSubstr("\"bar\", \"foo\"")));
  EXPECT_THAT(bad("{\"text\":5}"), testing::AllOf(HasSubstr("line 1"), HasSubstr("number")));
  EXPECT_THAT(bad("{\"text\":null}"), HasSubstr("null"));
  EXPECT_THAT(bad("[1,2]\n"), HasSubstr("row 1"));
  EXPECT_THAT(bad("\"text\""), HasSubstr("expected an object"));
  EXPECT_THAT(bad(R"({"messages":[]})"), HasSubstr("messages"));
  EXPECT_THAT(bad(R"({"messages":[{"content":"x"}]})"), HasSubstr("\"role\" is absent"));
  EXPECT_THAT(bad(R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})"), HasSubstr("image_url"));
  EXPECT_THAT(bad(R"({"messages":[{"role":"assistant","content":null}]})"), HasSubstr("\"content\" is null"));
  EXPECT_THAT(bad(R"({"text":"a","text":"b"})"), HasSubstr("stands twice"));
  EXPECT_THAT(bad(R"({})"), HasSubstr("(none)"));
}

TEST(JsonlReader, AllBadLinesAreListed) {  // TX-09
  std::string text;
  for (int i = 1; i <= 6000; ++i) text += i == 5000 ? "{\"foo\":1}\n" : i == 5001 ? "not json\n" : i == 5002 ? "{\"text\":\"cut\n" : "{\"text\":\"row\"}\n";
  EXPECT_THAT(bad(text), testing::AllOf(HasSubstr("3 rows"), HasSubstr("first is line 5000"), HasSubstr("line 5001"), HasSubstr("line 5002")));
}

}  // namespace
}  // namespace calib::text

#include "libcalib/text/chat_template.h"

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::HasSubstr;

const std::vector<ChatMessage> kTalk = {{"user", "Hi <|im_end|>"}, {"assistant", " yes\n"}};

std::unique_ptr<Tokenizer> tokenizer_with(const std::vector<std::string>& specials) {
  Json t = Json::parse(test::tok_byte_json());
  int id = 300;
  for (const auto& s : specials) t["added_tokens"].push_back({{"id", id++}, {"content", s}, {"special", true}});
  return load(t);
}

Ids bytes(const std::string& text) {
  Ids ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

Ids joined(const std::vector<Ids>& parts) {
  Ids out;
  for (const Ids& p : parts) out.insert(out.end(), p.begin(), p.end());
  return out;
}

TEST(ChatTemplate, Chatml) {  // TK-09: the printed tokens are one id, the same string in a message is literal
  const auto t = tokenizer_with({"<|im_start|>", "<|im_end|>"});
  EXPECT_EQ(ChatTemplate("chatml", *t).encode(kTalk),
            joined({{300}, bytes("user\nHi <|im_end|>"), {301}, bytes("\n"), {300}, bytes("assistant\n yes\n"), {301}, bytes("\n")}));
}

TEST(ChatTemplate, Llama3) {
  const auto t = tokenizer_with({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"});
  EXPECT_EQ(ChatTemplate("llama3", *t).encode(kTalk),
            joined({{300}, bytes("user"), {301}, bytes("\n\nHi <|im_end|>"), {302}, {300}, bytes("assistant"), {301}, bytes("\n\nyes"), {302}}));
}

TEST(ChatTemplate, Plain) {
  EXPECT_EQ(ChatTemplate("plain", *tok_byte()).encode(kTalk), bytes("user: Hi <|im_end|>\n\nassistant:  yes\n\n\n"));
}

TEST(ChatTemplate, NamesAndTokensThatAreNotThere) {
  const auto t = tok_byte();
  EXPECT_THAT(error_text(ErrorKind::kUsage, [&] { ChatTemplate("vicuna", *t); }), HasSubstr("vicuna"));
  EXPECT_THAT(error_text(ErrorKind::kMismatch, [&] { ChatTemplate("chatml", *t); }), HasSubstr("<|im_start|>"));
  EXPECT_THAT(error_text(ErrorKind::kMismatch, [&] { ChatTemplate("llama3", *t); }), HasSubstr("<|start_header_id|>"));
}

}  // namespace
}  // namespace calib::text

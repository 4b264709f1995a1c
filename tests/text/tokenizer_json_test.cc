#include <algorithm>

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Json with_pre_tokenizer(Json tokenizer, Json pre) {
  tokenizer["pre_tokenizer"] = std::move(pre);
  return tokenizer;
}

Json letters(const std::vector<std::string>& more, const std::vector<std::string>& merges = {}) {
  std::vector<std::string> vocab;
  for (char c = 'a'; c <= 'z'; ++c) vocab.emplace_back(1, c);
  vocab.push_back("Ġ");
  vocab.insert(vocab.end(), more.begin(), more.end());
  return bpe_json(vocab, merges);
}

TEST(TokenizerJson, IgnoreMergesDefaultsToFalse) {  // TK-02
  Json t = letters({"hello"});
  EXPECT_EQ(load(t)->encode("hello").size(), 5u);
  t["model"]["ignore_merges"] = false;
  EXPECT_EQ(load(t)->encode("hello").size(), 5u);
  t["model"]["ignore_merges"] = true;
  EXPECT_THAT(load(t)->encode("hello"), ElementsAre(27));
  Json merged = letters({"hello", "he", "hel", "lo"}, {"h e", "he l", "l o"});
  EXPECT_EQ(load(merged)->encode("hello"), (Ids{29, 30}));
  merged["model"]["ignore_merges"] = true;
  EXPECT_THAT(load(merged)->encode("hello"), ElementsAre(27));
}

TEST(TokenizerJson, ByteLevelDefaults) {  // TK-05
  Json bytes = Json::parse(test::tok_byte_json());
  const auto count = [&](Json pre) {
    // With ignore_merges off, pieces show only through merges: " stop" is one id where no cut lies before it.
    Json t = with_pre_tokenizer(bytes, std::move(pre));
    t["model"]["vocab"]["Ġs"] = 300;
    t["model"]["vocab"]["ĠĠ"] = 301;
    t["model"]["merges"] = {"Ġ Ġ", "Ġ s"};
    return load(t)->encode("a  s");
  };
  const Json off = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  Json with = off, without = off;
  with["use_regex"] = true;
  without["use_regex"] = false;
  EXPECT_EQ(count(off), (Ids{'a', ' ', 300}));
  EXPECT_EQ(count(with), count(off));
  EXPECT_EQ(count(without), (Ids{'a', 301, 's'}));
  EXPECT_EQ(count({{"type", "ByteLevel"}}), (Ids{' ', 'a', ' ', 300})) << "add_prefix_space is true where it is absent";
}

TEST(TokenizerJson, UnknownPartsAreNamedTogether) {  // TK-04, TK-07
  Json t = letters({});
  t["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {{{"type", "Foo"}}, {{"type", "Digits"}}}}};
  t["normalizer"] = {{"type", "Precompiled"}, {"precompiled_charsmap", ""}};
  t["model"] = {{"type", "Unigram"}, {"vocab", Json::array()}};
  const std::string text = error_text(ErrorKind::kUnsupported, [&] { load(t); });
  for (const char* part : {"Foo", "Precompiled", "Unigram"}) EXPECT_THAT(text, HasSubstr(part));
  Json post = letters({});
  post["post_processor"] = {{"type", "BertProcessing"}, {"sep", {"a", 0}}, {"cls", {"b", 1}}};
  EXPECT_THAT(error_text(ErrorKind::kUnsupported, [&] { load(post); }), HasSubstr("BertProcessing"));
}

TEST(TokenizerJson, AddedTokensWithOnlyIdAndContent) {  // TK-10
  Json t = letters({});
  t["added_tokens"] = {{{"id", 40}, {"content", "yz"}}};
  EXPECT_THAT(load(t)->encode("ayzb"), ElementsAre(0, 40, 1));
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load(letters({"qzz"}, {"q zz"})); }), testing::AllOf(HasSubstr("\"q zz\""), HasSubstr("\"zz\" is not")));
}

TEST(TokenizerJson, MinimalFile) {  // TK-10
  CALIB_SHARED_FILE(file, "tokenizers/minimal/tokenizer.json");
  const auto t = load(Json::parse(read_file(file)));
  EXPECT_THAT(t->encode("0123"), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(t->encode("a"), ElementsAre(0));
  EXPECT_EQ(t->vocab_size(), 10);
}

TEST(TokenizerJson, ByteVocabularyWithoutMerges) {  // TK-11
  std::string all;
  Ids expected;
  for (int c = 1; c < 128; ++c) all += static_cast<char>(c), expected.push_back(c);
  all += "é";
  expected.insert(expected.end(), {0xC3, 0xA9});
  Json t = Json::parse(test::tok_byte_json());
  t["model"]["merges"] = Json::array();
  EXPECT_EQ(load(t)->encode(all), expected);
  t["model"].erase("merges");
  EXPECT_EQ(load(t)->encode(all), expected);
  for (TokenId id = 0; id < 256; ++id) EXPECT_EQ(load(t)->piece(id), std::string(1, static_cast<char>(id)));
}

TEST(TokenizerJson, BytesThatTheVocabularyLacks) {  // TK-11
  const Json t = with_pre_tokenizer(letters({}), {{"type", "ByteLevel"}, {"add_prefix_space", false}});
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load(t)->encode("ab cD"); }), HasSubstr("byte 0x44 at offset 4"));
}

TEST(TokenizerJson, OlderLayouts) {  // TK-11
  const TempFolder folder;
  EXPECT_THAT(error_text(ErrorKind::kNotFound, [&] { load_tokenizer_json(folder.path()); }), HasSubstr("tokenizer.json"));
  write_file(folder.file("vocab.json"), "{}");
  write_file(folder.file("merges.txt"), "");
  EXPECT_THAT(error_text(ErrorKind::kUnsupported, [&] { load_tokenizer_json(folder.path()); }),
              testing::AllOf(HasSubstr("vocab.json, merges.txt"), HasSubstr("tokenizer.json")));
  write_file(folder.file("tokenizer.model"), "\x0a");
  EXPECT_THAT(error_text(ErrorKind::kUnsupported, [&] { load_tokenizer_json(folder.path()); }),
              testing::AllOf(HasSubstr("tokenizer.model"), HasSubstr("tokenizer.json")));
}

TEST(TokenizerJson, FormsOfMerges) {  // TK-01
  Json strings = letters({"ab", "abc"}, {"a b", "ab c"}), pairs = strings, mixed = strings;
  pairs["model"]["merges"] = Json::array({Json::array({"a", "b"}), Json::array({"ab", "c"})});
  mixed["model"]["merges"] = Json::array({"a b", Json::array({"ab", "c"})});
  EXPECT_THAT(load(strings)->encode("abc"), ElementsAre(28));
  EXPECT_THAT(load(pairs)->encode("abc"), ElementsAre(28));
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load(mixed); }), HasSubstr("model.merges[1] = [\"ab\",\"c\"]"));
  for (const char* odd : {"ab", " ab", "a b c", "ab "}) {
    Json t = strings;
    t["model"]["merges"] = {odd};
    EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load(t); }), HasSubstr(odd));
  }
}

TEST(TokenizerJson, PairsAndStringsGiveTheSameIdsOnRealFiles) {  // TK-01
  CALIB_SHARED_FILE(file, "tokenizers/gpt2-pair-merges/tokenizer.json");
  CALIB_SHARED_FILE(text_file, "text/wikitext2_test.txt");
  Json t = Json::parse(read_file(file));
  const std::string text = read_file(text_file);
  const Ids pairs = load(t)->encode(text);
  EXPECT_EQ(pairs.size(), 295'877u);
  EXPECT_EQ(Ids(pairs.begin(), pairs.begin() + 12), (Ids{220, 198, 796, 5199, 1279, 2954, 29, 796, 220, 198, 220, 198}));
  for (Json& merge : t["model"]["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  EXPECT_EQ(load(t)->encode(text), pairs);
}

TEST(TokenizerJson, SpecialStringsInRawTextAreLiteral) {  // TK-09
  CALIB_SHARED_FILE(file, "tokenizers/gpt2-pair-merges/tokenizer.json");
  CALIB_SHARED_FILE(stories_file, "text/tiny_stories.utf8");
  const auto gpt2 = load(Json::parse(read_file(file)));
  const std::string stories = read_file(stories_file);
  EXPECT_EQ(gpt2->encode("<|endoftext|>"), (Ids{27, 91, 437, 1659, 5239, 91, 29}));
  EXPECT_EQ(gpt2->encode("<|endoftext|>", true), (Ids{50256}));
  EXPECT_EQ(gpt2->encode(stories).size(), 64'446u);
  EXPECT_EQ(gpt2->encode(stories, true).size(), 62'550u);
}

TEST(TokenizerJson, ByteFallbackFamily) {  // TK-06, TK-09
  CALIB_SHARED_FILE(file, "tokenizers/phi3-v/tokenizer.json");
  CALIB_SHARED_FILE(config, "tokenizers/phi3-v/tokenizer_config.json");
  CALIB_SHARED_FILE(wikitext, "text/wikitext2_test.txt");
  const auto t = load(Json::parse(read_file(file)), Json::parse(read_file(config)));
  const std::pair<std::string, Ids> cases[] = {{"Hello", {15043}}, {" Hello", {29871, 15043}}, {"  x", {259, 921}}, {"a  b", {263, 29871, 289}},
                                               {"\U0001F600", {29871, 243, 162, 155, 131}}, {std::string(1, '\0'), {29871, 3}}, {"\x1f", {29871, 34}},
                                               {"\r\n", {6756, 13}}, {"", {}}};
  for (const auto& [text, ids] : cases) EXPECT_EQ(t->encode(text), ids) << text;
  EXPECT_EQ(t->bos(), 1);
  EXPECT_EQ(t->eos(), 32000);
  EXPECT_TRUE(t->adds_bos());
  EXPECT_EQ(t->piece(15043), " Hello");
  EXPECT_EQ(t->piece(3), std::string(1, '\0'));
  EXPECT_EQ(t->piece(1), "<s>");
  EXPECT_EQ(t->vocab_size(), 32045);
  const Ids wiki = t->encode(read_file(wikitext));
  EXPECT_EQ(std::count(wiki.begin(), wiki.end(), 0), 0);
}

TEST(TokenizerJson, BosFromPostProcessorAndConfig) {
  CALIB_SHARED_FILE(file, "tokenizers/llama3-style-128/tokenizer.json");
  const Json t = Json::parse(read_file(file));
  EXPECT_TRUE(load(t)->adds_bos());
  EXPECT_EQ(load(t)->bos(), 100);
  const Json names = {{"bos_token", "<|begin_of_text|>"}, {"eos_token", {{"content", "<|eot_id|>"}}}};
  EXPECT_EQ(load(t, names)->eos(), 101);
  EXPECT_THAT(load(t, names)->encode("<|eot_id|>a", true), ElementsAre(101, 64)) << "special by its name in the config";
  EXPECT_EQ(load(t, names)->encode("<|eot_id|>").size(), 10u);
  Json off = names;
  off["add_bos_token"] = false;
  EXPECT_FALSE(load(t, off)->adds_bos());
  Json none = letters({});
  EXPECT_FALSE(load(none)->adds_bos());
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load(none, {{"add_bos_token", true}}); }), HasSubstr("bos_token"));
  const Json two = {{"type", "TemplateProcessing"}, {"single", {{{"SpecialToken", {{"id", "a"}}}}, {{"Sequence", {{"id", "A"}}}}}}};
  none["post_processor"] = two;
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load(none); }), HasSubstr("\"a\""));
}

TEST(TokenizerJson, DamagedFiles) {
  const std::string good = letters({"ab"}, {"a b"}).dump();
  const TempFolder folder;
  const auto broken = [&](const std::string& bytes, ErrorKind kind = ErrorKind::kFormat) {
    write_file(folder.file("tokenizer.json"), bytes);
    return error_text(kind, [&] { load_tokenizer_json(folder.path()); });
  };
  for (std::size_t n = 0; n < good.size(); ++n) EXPECT_THAT(broken(good.substr(0, n)), HasSubstr("tokenizer.json")) << n;
  EXPECT_THAT(broken("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 77\n"), testing::AllOf(HasSubstr("Git LFS pointer"), HasSubstr("77")));
  EXPECT_THAT(broken("<!DOCTYPE html><html>"), HasSubstr("HTML page"));
  EXPECT_THAT(broken("[]"), HasSubstr("not a tokenizer"));
  EXPECT_THAT(broken(R"({"model":{"type":"BPE","vocab":{"a":-1}}})"), HasSubstr("\"a\""));
  EXPECT_THAT(broken(R"({"model":{"type":"BPE","vocab":{"a":1e3}}})"), HasSubstr("\"a\""));
  EXPECT_THAT(broken(R"({"model":{"type":"BPE","vocab":{"a":99999999}}})"), HasSubstr("99999999"));
  EXPECT_THAT(broken(R"({"model":{"type":"BPE","vocab":{"a":0},"unk_token":"zz"}})"), HasSubstr("zz"));
  EXPECT_THAT(broken(R"({"model":{"type":"BPE","vocab":{"a":0},"dropout":0.1}})", ErrorKind::kUnsupported), HasSubstr("dropout"));
  EXPECT_THAT(broken(R"({"model":{"type":"BPE","vocab":{}}})"), HasSubstr("vocab"));
  EXPECT_THAT(broken(R"({"added_tokens":[{"id":0}],"model":{"vocab":{"a":0}}})"), HasSubstr("added_tokens[0]"));
}

TEST(TokenizerJson, HashIsThatOfTheFile) {
  const auto a = load(letters({})), b = load(letters({"ab"})), c = load(letters({}));
  EXPECT_EQ(a->sha256(), c->sha256());
  EXPECT_NE(a->sha256(), b->sha256());
  EXPECT_EQ(a->sha256().size(), 64u);
}

}  // namespace
}  // namespace calib::text

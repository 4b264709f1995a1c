#include "libcalib/text/corpus.h"

#include "libcalib/base/sha256.h"
#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class CorpusTest : public testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& bytes) {
    write_file(folder_.file(name), bytes);
    return folder_.file(name);
  }
  Corpus load_files(const std::vector<std::string>& data, const Tokenizer& tokenizer, std::int64_t seq_len = 512, std::int64_t num = 0,
                    const std::string& chat = "") {
    CorpusRequest r;
    r.data = data;
    r.seq_len = seq_len;
    r.num_samples = num;
    r.chat_template = chat;
    r.default_samples = 5000;
    return load_corpus(r, tokenizer, log_.sink());
  }
  std::string fails(ErrorKind kind, const std::vector<std::string>& data, std::int64_t seq_len = 512, std::int64_t num = 0, const std::string& chat = "") {
    const auto t = tok_byte();
    return error_text(kind, [&] { load_files(data, *t, seq_len, num, chat); });
  }
  TempFolder folder_;
  Log log_;
};

Ids bytes(const std::string& text) {
  Ids ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

TEST_F(CorpusTest, TextBecomesWindowsWithIdentity) {
  const std::string text = random_words(1000);
  const Corpus c = load_files({file("t.txt", text) + ":skip=1"}, *tok_byte(), 300);
  ASSERT_EQ(c.documents.size(), 3u);
  EXPECT_EQ(c.documents[0].ids, bytes(text.substr(300, 300)));
  EXPECT_EQ(c.documents[2].ids, bytes(text.substr(900)));
  const DataIdentity& id = c.identity;
  EXPECT_EQ(id.joining, "windows");
  EXPECT_EQ(id.seq_len, 300);
  EXPECT_EQ(id.n_documents, 3);
  EXPECT_EQ(id.n_tokens, 700);
  EXPECT_EQ(id.n_bos, 0);
  EXPECT_EQ(id.tokenizer_sha256, tok_byte()->sha256());
  ASSERT_EQ(id.files.size(), 1u);
  EXPECT_EQ(id.files[0].sha256, sha256_hex(text));
  EXPECT_EQ(id.files[0].options, "skip=1");
  EXPECT_EQ(id.files[0].path, folder_.file("t.txt"));
  EXPECT_EQ(id.files[0].n_tokens, 700);
  EXPECT_EQ(id.documents_sha256.size(), 64u);
}

TEST_F(CorpusTest, SameWindowsSameHash) {
  const std::string text = random_words(900);
  const auto t = tok_byte();
  const auto hash = [&](std::int64_t seq_len) { return load_files({file("t.txt", text)}, *t, seq_len).identity.documents_sha256; };
  EXPECT_EQ(hash(300), hash(300));
  EXPECT_NE(hash(300), hash(450)) << "the same ids in other windows are other documents";
  EXPECT_EQ(hash(300), load_files({file("copy.txt", "\xEF\xBB\xBF" + text)}, *t, 300).identity.documents_sha256);
}

TEST_F(CorpusTest, EmojiAtPowersOfTwo) {  // TX-01
  std::string text = random_words(70'000);
  for (std::size_t at = 512; at <= 65'536; at *= 2) text.replace(at - 2, 4, "\U0001F600");
  const Corpus c = load_files({file("e.txt", text)}, *tok_byte(), 70'000);
  EXPECT_EQ(c.documents.at(0).ids, bytes(text));
  EXPECT_TRUE(log_.warnings.empty());
}

TEST_F(CorpusTest, LineEnds) {  // TX-02
  CALIB_SHARED_FILE(gpt2_file, "tokenizers/gpt2-pair-merges/tokenizer.json");
  const auto gpt2 = load(Json::parse(read_file(gpt2_file)));
  EXPECT_THAT(load_files({file("lf.txt", "a\nb\n")}, *gpt2).documents.at(0).ids, ElementsAre(64, 198, 65, 198));
  EXPECT_THAT(load_files({file("crlf.txt", "a\r\nb\r\n")}, *gpt2).documents.at(0).ids, ElementsAre(64, 201, 198, 65, 201, 198));
}

TEST_F(CorpusTest, RequestsThatCannotBeMet) {  // TX-04
  const std::string path = file("t.txt", random_words(10));
  EXPECT_THAT(fails(ErrorKind::kInfeasible, {path}, 512, 4), HasSubstr("have 10 tokens, need 2048 (4 × 512)"));
  EXPECT_EQ(load_files({path}, *tok_byte(), 10, 1).documents.size(), 1u);
  EXPECT_THAT(fails(ErrorKind::kUsage, {}), HasSubstr("--data"));
  EXPECT_THAT(fails(ErrorKind::kUsage, {path}, 0), HasSubstr("--seq-len"));
  EXPECT_THAT(fails(ErrorKind::kUsage, {"-", "-"}), HasSubstr("twice"));
  EXPECT_THAT(fails(ErrorKind::kNotFound, {path, folder_.file("none.txt")}), HasSubstr("none.txt"));
}

TEST_F(CorpusTest, RowShapesEqualTheirText) {  // TX-05
  const auto t = tok_byte();
  const auto ids_of = [&](const std::string& row, const std::string& chat = "") {
    return load_files({file("r.jsonl", row + "\n")}, *t, 512, 0, chat).documents.at(0).ids;
  };
  EXPECT_EQ(ids_of(R"({"text":"abc"})"), bytes("abc"));
  EXPECT_EQ(ids_of(R"({"content":"abc"})"), bytes("abc"));
  EXPECT_EQ(ids_of(R"({"prompt":"ab","completion":"c"})"), bytes("abc"));
  const std::string chat = "user: hi\n\nassistant: yes\n\n";
  EXPECT_EQ(ids_of(R"({"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"yes"}]})", "plain"), bytes(chat));
  EXPECT_EQ(ids_of(R"({"conversations":[{"from":"human","value":"hi"},{"from":"gpt","value":"yes"}]})", "plain"), bytes(chat));
  EXPECT_THAT(fails(ErrorKind::kUnsupported, {file("c.jsonl", "{\"text\":\"a\"}\n{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}")}),
              testing::AllOf(HasSubstr("line 2"), HasSubstr("1 of 2"), HasSubstr("--chat-template chatml|llama3|plain")));
  EXPECT_THAT(fails(ErrorKind::kFormat, {file("f.jsonl", "{\"foo\":1}")}), testing::AllOf(HasSubstr("line 1"), HasSubstr("\"foo\"")));
  const Corpus mixed = load_files({file("m.json", R"([{"text":"a"},{"messages":[{"role":"user","content":"hi"}]}])")}, *t, 512, 0, "plain");
  EXPECT_EQ(mixed.documents.size(), 2u);
  EXPECT_EQ(mixed.identity.joining, "rows");
}

TEST_F(CorpusTest, RealConversations) {  // TX-05
  CALIB_SHARED_FILE(path, "text/conversations.jsonl");
  const Corpus c = load_files({path}, *tok_byte(), 4096, 0, "plain");
  EXPECT_EQ(c.documents.size(), 1000u);
  std::size_t n_four = 0;
  for (const Document& d : c.documents) {
    const std::string text(d.ids.begin(), d.ids.end());
    std::size_t n = 0;
    for (std::size_t at = 0; (at = text.find("\n\nuser: ", at)) != std::string::npos; ++at) ++n;
    n_four += n == 1;
  }
  EXPECT_EQ(n_four, 100u);
}

TEST_F(CorpusTest, NoUsableText) {  // TX-06
  EXPECT_THAT(fails(ErrorKind::kFormat, {file("blank.txt", std::string(100, '\n'))}), HasSubstr("no usable text"));
  EXPECT_THAT(fails(ErrorKind::kFormat, {file("empty.txt", "")}), HasSubstr("no usable text"));
  EXPECT_THAT(fails(ErrorKind::kFormat, {file("mark.txt", "\xEF\xBB\xBF")}), HasSubstr("no usable text"));
  std::string rows;
  for (int i = 0; i < 10; ++i) rows += "{\"text\":\"\"}\n";
  EXPECT_THAT(fails(ErrorKind::kFormat, {file("empty.jsonl", rows)}), HasSubstr("no usable text"));
  EXPECT_THAT(fails(ErrorKind::kFormat, {file("empty.ids", "\n\n")}), HasSubstr("no usable text"));
  EXPECT_EQ(load_files({file("some.jsonl", rows + "{\"text\":\"a\"}")}, *tok_byte()).documents.size(), 1u);
  EXPECT_THAT(log_.notes, testing::Contains(HasSubstr("10 rows without text")));
}

TEST_F(CorpusTest, RealTextWithBlankLines) {  // TX-06
  CALIB_SHARED_FILE(path, "text/wiki.utf8");
  const Corpus c = load_files({path}, *tok_byte(), 2048, 128);
  EXPECT_EQ(c.documents.size(), 128u);
  EXPECT_EQ(c.identity.n_tokens, 128 * 2048);
  EXPECT_TRUE(log_.warnings.empty());
}

TEST_F(CorpusTest, OneLineOfTwoMillionBytes) {  // TX-07
  std::string line;
  while (line.size() < 2'000'000) line += "abcdefghij";
  CorpusRequest r;
  r.data = {file("line.txt", line)};
  r.seq_len = 512;
  r.default_samples = 5000;
  r.max_positions = 512;
  const auto t = tok_byte();
  const Corpus c = load_corpus(r, *t);
  EXPECT_EQ(c.documents.size(), 3907u);
  for (const Document& d : c.documents) ASSERT_LE(d.ids.size(), 512u);
  r.seq_len = 4096;
  EXPECT_THAT(error_text(ErrorKind::kUsage, [&] { load_corpus(r, *t); }), testing::AllOf(HasSubstr("4096"), HasSubstr("512")));
}

TEST_F(CorpusTest, RowsAndJoinedTextAreDifferentProtocols) {  // TX-08
  const std::string a = random_words(100), b = random_words(200).substr(100), d = random_words(300).substr(200);
  const auto t = tok_byte();
  const Corpus rows = load_files({file("r.jsonl", Json{{"text", a}}.dump() + "\n" + Json{{"text", b}}.dump() + "\n" + Json{{"text", d}}.dump())}, *t);
  const Corpus joined = load_files({file("j.txt", a + "\n\n" + b + "\n\n" + d)}, *t);
  ASSERT_EQ(rows.documents.size(), 3u);
  ASSERT_EQ(joined.documents.size(), 1u);
  EXPECT_EQ(rows.documents[1].ids, bytes(b));
  EXPECT_EQ(rows.identity.joining, "rows");
  EXPECT_EQ(joined.identity.joining, "windows");
  EXPECT_NE(rows.identity.documents_sha256, joined.identity.documents_sha256);
}

TEST_F(CorpusTest, ExactlyOneBosPerDocument) {  // TK-08
  const auto t = tok_byte_bos();
  const auto with_bos = [](const std::string& text) {
    Ids ids = bytes(text);
    ids.insert(ids.begin(), 256);
    return ids;
  };
  const Corpus raw = load_files({file("p.txt", "plain text")}, *t, 6);
  ASSERT_EQ(raw.documents.size(), 2u);
  EXPECT_EQ(raw.documents[0].ids, with_bos("plain"));
  EXPECT_EQ(raw.documents[1].ids, with_bos(" text"));
  EXPECT_EQ(raw.identity.n_bos, 2);
  EXPECT_TRUE(log_.warnings.empty());
  EXPECT_EQ(load_files({file("b.txt", "<s>text <s>")}, *t).documents.at(0).ids, with_bos("text <s>"));
  EXPECT_THAT(log_.warnings, ElementsAre(testing::AllOf(HasSubstr("b.txt"), HasSubstr("<s>"))));
  EXPECT_EQ(load_files({file("i.ids", "256 1 2\n3 4\n256\n")}, *t).documents.size(), 2u);
  const Corpus ids = load_files({file("i.ids", "256 1 2\n3 4\n")}, *t);
  EXPECT_THAT(ids.documents.at(0).ids, ElementsAre(256, 1, 2));
  EXPECT_THAT(ids.documents.at(1).ids, ElementsAre(256, 3, 4));
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load_files({file("e.txt", "")}, *t); }), HasSubstr("no usable text")) << "an empty document gets no BOS";
}

TEST_F(CorpusTest, BosOfALlama3Tokenizer) {  // TK-08
  CALIB_SHARED_FILE(tokenizer_file, "tokenizers/llama3-style-128/tokenizer.json");
  CALIB_SHARED_FILE(config_file, "tokenizers/llama3-style-128/tokenizer_config.json");
  const auto t = load(Json::parse(read_file(tokenizer_file)), Json::parse(read_file(config_file)));
  const auto count_bos = [](const Document& d) { return std::count(d.ids.begin(), d.ids.end(), 100); };
  for (const std::string text : {"<|begin_of_text|>Hello there", "Hello there"}) {
    const Corpus c = load_files({file("t.txt", text)}, *t);
    EXPECT_EQ(c.documents.at(0).ids.front(), 100);
    EXPECT_EQ(count_bos(c.documents[0]), 1);
    EXPECT_EQ(c.identity.n_tokens, 12);
  }
  EXPECT_EQ(log_.warnings.size(), 1u);
  const Corpus chat = load_files({file("c.jsonl", R"({"messages":[{"role":"user","content":"Hi <|begin_of_text|>"}]})")}, *t, 512, 0, "llama3");
  ASSERT_EQ(chat.documents.size(), 1u);
  EXPECT_EQ(count_bos(chat.documents[0]), 1);
  EXPECT_EQ(Ids(chat.documents[0].ids.begin(), chat.documents[0].ids.begin() + 2), (Ids{100, 104}));
  EXPECT_EQ(chat.documents[0].ids.back(), 101);
}

TEST_F(CorpusTest, BadRowsAreFoundBeforeAnythingElse) {  // TX-09
  std::string rows;
  for (int i = 1; i <= 6000; ++i) rows += i == 5000 ? "{\"foo\":1}\n" : i == 5001 ? "nonsense\n" : i == 5002 ? "{\"text\":\"cut\n" : "{\"text\":\"row\"}\n";
  EXPECT_THAT(fails(ErrorKind::kFormat, {file("r.jsonl", rows)}),
              testing::AllOf(HasSubstr("r.jsonl"), HasSubstr("line 5000"), HasSubstr("line 5001"), HasSubstr("line 5002")));
}

TEST_F(CorpusTest, IdFiles) {
  const auto t = load(Json::parse(test::tok_ids_json(512)));
  const Corpus c = load_files({file("a.ids", "1 403 407 261\n378 432\n")}, *t, 3);
  ASSERT_EQ(c.documents.size(), 2u);
  EXPECT_THAT(c.documents[0].ids, ElementsAre(1, 403, 407)) << "the fourth id alone predicts nothing";
  EXPECT_THAT(log_.notes, testing::Contains(HasSubstr("1 last tokens")));
  EXPECT_THAT(error_text(ErrorKind::kMismatch, [&] { load_files({file("b.ids", "1 512\n")}, *t); }), testing::AllOf(HasSubstr("line 1"), HasSubstr("512")));
}

TEST_F(CorpusTest, SeveralFilesKeepTheirOrderAndIndex) {
  const Corpus c = load_files({file("a.txt", random_words(100)), file("b.ids", "1 2 3\n") + ":num=1"}, *tok_byte(), 50);
  ASSERT_EQ(c.documents.size(), 3u);
  EXPECT_EQ(c.documents[1].file_idx, 0);
  EXPECT_EQ(c.documents[2].file_idx, 1);
  EXPECT_EQ(c.identity.joining, "windows+rows");
  EXPECT_EQ(c.identity.files[1].options, "num=1");
}

TEST_F(CorpusTest, MonotonousTextIsWarnedAbout) {
  load_files({file("m.txt", std::string(1000, 'x'))}, *tok_byte());
  EXPECT_THAT(log_.warnings, ElementsAre(HasSubstr("hardly varies")));
}

}  // namespace
}  // namespace calib::text

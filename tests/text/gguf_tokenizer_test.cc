#include "libcalib/base/mapped_file.h"
#include "libcalib/weights/gguf.h"
#include "tests/support/gguf_writer.h"
#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::HasSubstr;

std::unique_ptr<Tokenizer> load_gguf(const std::string& path, const LogSink& log = {}) {
  auto metadata = weights::parse_gguf(MappedFile(path)).metadata;
  metadata.path = path;
  return load_tokenizer_gguf(metadata, log);
}

struct Vocab {
  std::string model = "gpt2";
  std::optional<std::string> pre = "gpt-2";
  std::vector<std::string> tokens = {"a", "b", "ab", "Ġ", "<s>", "1"};
  std::vector<std::int32_t> types = {1, 1, 1, 1, 3, 1};
  std::vector<std::string> merges = {"a b"};
  std::vector<float> scores;
  std::optional<bool> add_bos, add_space_prefix;
  std::optional<std::uint32_t> bos = 4;
};

std::unique_ptr<Tokenizer> load_vocab(const Vocab& v, const LogSink& log = {}) {
  test::GgufWriter out;
  out.add<std::string>("tokenizer.ggml.model", v.model);
  if (v.pre) out.add<std::string>("tokenizer.ggml.pre", *v.pre);
  out.add_array("tokenizer.ggml.tokens", v.tokens);
  out.add_array("tokenizer.ggml.token_type", v.types);
  if (!v.merges.empty()) out.add_array("tokenizer.ggml.merges", v.merges);
  if (!v.scores.empty()) out.add_array("tokenizer.ggml.scores", v.scores);
  if (v.add_bos) out.add<bool>("tokenizer.ggml.add_bos_token", *v.add_bos);
  if (v.add_space_prefix) out.add<bool>("tokenizer.ggml.add_space_prefix", *v.add_space_prefix);
  if (v.bos) out.add<std::uint32_t>("tokenizer.ggml.bos_token_id", *v.bos);
  const TempFolder folder;
  write_file(folder.file("v.gguf"), out.bytes());
  return load_gguf(folder.file("v.gguf"), log);
}

TEST(GgufTokenizer, ByteLevelVocabulary) {
  const auto t = load_vocab({});
  EXPECT_EQ(t->encode("ab ba"), (Ids{2, 3, 1, 0}));
  EXPECT_EQ(t->piece(3), " ");
  EXPECT_EQ(t->piece(4), "<s>");
  EXPECT_EQ(t->bos(), 4);
  EXPECT_FALSE(t->adds_bos());
  EXPECT_EQ(t->vocab_size(), 6);
  EXPECT_EQ(t->encode("<s>", true), (Ids{4}));
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { t->encode("a<s>"); }), HasSubstr("byte 0x3C at offset 1")) << "literal, and not expressible";
}

TEST(GgufTokenizer, PreTokenizerKey) {
  Log log;
  Vocab v;
  v.pre.reset();
  load_vocab(v, log.sink());
  EXPECT_THAT(log.warnings, testing::ElementsAre(HasSubstr("tokenizer.ggml.pre")));
  v.pre = "viking";
  EXPECT_THAT(error_text(ErrorKind::kUnsupported, [&] { load_vocab(v); }), HasSubstr("viking"));
  v.model = "bert";
  EXPECT_THAT(error_text(ErrorKind::kUnsupported, [&] { load_vocab(v); }), HasSubstr("bert"));
}

TEST(GgufTokenizer, BosDefaultsOfTheFamilies) {
  Vocab v;
  v.pre = "llama-bpe";
  EXPECT_TRUE(load_vocab(v)->adds_bos());
  v.add_bos = false;
  EXPECT_FALSE(load_vocab(v)->adds_bos());
  v.add_bos = true;
  v.bos.reset();
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load_vocab(v); }), HasSubstr("bos_token_id"));
  v.bos = 99;
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load_vocab(v); }), testing::AllOf(HasSubstr("99"), HasSubstr("6 entries")));
}

TEST(GgufTokenizer, WholeWordsBeforeMergesInLlamaBpe) {
  Vocab v;
  v.tokens = {"a", "b", "c", "abc"};
  v.types = {1, 1, 1, 1};
  v.merges = {"a b"};
  v.bos.reset();
  v.tokens.push_back("ab");
  v.types.push_back(1);
  EXPECT_EQ(load_vocab(v)->encode("abc"), (Ids{4, 2}));
  v.pre = "llama-bpe";
  EXPECT_EQ(load_vocab(v)->encode("abc"), (Ids{3}));
}

TEST(GgufTokenizer, ListsThatDoNotBelongTogether) {
  Vocab v;
  v.types.pop_back();
  EXPECT_THAT(error_text(ErrorKind::kMismatch, [&] { load_vocab(v); }), HasSubstr("token_type has 5"));
  Vocab merge;
  merge.merges = {"a zz"};
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load_vocab(merge); }), HasSubstr("\"a zz\""));
  Vocab no_merges;
  no_merges.merges.clear();
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load_vocab(no_merges); }), HasSubstr("merges"));
  Vocab spm;
  spm.model = "llama";
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { load_vocab(spm); }), HasSubstr("scores"));
  Vocab twice;
  twice.tokens[5] = "a";
  Log log;
  EXPECT_EQ(load_vocab(twice, log.sink())->encode("a"), (Ids{5}));
  EXPECT_THAT(log.warnings, testing::ElementsAre(HasSubstr("stand twice")));
}

TEST(GgufTokenizer, SentencePieceVocabulary) {
  Vocab v;
  v.model = "llama";
  v.pre.reset();
  v.tokens = {"<unk>", "<s>", "</s>", "▁", "a", "▁a", "<0x62>", "<tool>"};
  v.types = {2, 3, 3, 1, 1, 1, 6, 4};
  v.scores = {0, 0, 0, -3, -2, -1, 0, 0};
  v.merges.clear();
  v.bos = 1;
  const auto t = load_vocab(v);
  EXPECT_TRUE(t->adds_bos());
  EXPECT_EQ(t->encode("a"), (Ids{5}));
  EXPECT_EQ(t->encode(" a"), (Ids{3, 5}));
  EXPECT_EQ(t->encode("ab"), (Ids{5, 6}));
  EXPECT_EQ(t->encode("a<tool>a"), (Ids{5, 7, 5})) << "user-defined entries are found in raw text";
  EXPECT_EQ(t->piece(5), " a");
  EXPECT_EQ(t->piece(6), "b");
}

// No space in front, runs of spaces and line ends as entries of their own, specials in the middle of text only if asked for.
TEST(GgufTokenizer, GemmaVocabulary) {
  Vocab v;
  v.model = "llama";
  v.pre = "default";
  v.tokens = {"<pad>", "<eos>", "<bos>", "<unk>", "\n", "\n\n", "  ", "▁", "a", "b", "▁a", "ab", "zz", "<0xC3>", "<0xA9>", "[multimodal]", "aa"};
  v.types = {3, 3, 3, 3, 4, 4, 4, 1, 1, 1, 1, 1, 1, 6, 6, 4, 1};
  v.scores = {-1000, -1000, -1000, -1000, -1000, -1000, -1000, -9, -8, -7, -1, -2, -3, -1000, -1000, -1000, -2};
  v.merges.clear();
  v.bos = 2;
  v.add_bos = true;
  v.add_space_prefix = false;
  const auto t = load_vocab(v);
  EXPECT_TRUE(t->adds_bos());
  EXPECT_EQ(t->bos(), 2);
  EXPECT_EQ(t->encode("ab"), (Ids{11})) << "nothing in front";
  EXPECT_EQ(t->encode(" ab"), (Ids{10, 9})) << "the best score joins first";
  EXPECT_EQ(t->encode("aab"), (Ids{16, 9})) << "equal scores: the leftmost";
  EXPECT_EQ(t->encode("  a"), (Ids{6, 8})) << "runs are cut out before anything is joined";
  EXPECT_EQ(t->encode("   a"), (Ids{6, 10}));
  EXPECT_EQ(t->encode("a\n\n\nb"), (Ids{8, 5, 4, 9}));
  EXPECT_EQ(t->encode("\xC3\xA9"), (Ids{13, 14}));
  EXPECT_EQ(t->encode("a[multimodal]b"), (Ids{8, 15, 9}));
  EXPECT_EQ(t->encode("a<bos>b", true), (Ids{8, 2, 9}));
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { t->encode("a<bos>b"); }), HasSubstr("U+003C")) << "literal, and not expressible";
}

TEST(GgufTokenizer, HashFollowsTheVocabulary) {
  Vocab v;
  const std::string first = load_vocab(v)->sha256();
  EXPECT_EQ(load_vocab(v)->sha256(), first);
  v.merges = {"b a"};
  v.tokens[2] = "ba";
  EXPECT_NE(load_vocab(v)->sha256(), first);
}

// TK-12: the 46 texts of llama.cpp against all five vocabularies that are here.
struct Case {
  const char* source;
  const char* vocab;
};
class ReferenceTexts : public testing::TestWithParam<Case> {};

TEST_P(ReferenceTexts, IdsAreEqual) {
  const std::string stem = std::string("vocab/ggml-vocab-") + GetParam().vocab + ".gguf";
  CALIB_SHARED_FILE(source, GetParam().source);
  CALIB_SHARED_FILE(inputs, stem + ".inp");
  CALIB_SHARED_FILE(outputs, stem + ".out");
  const auto tokenizer = source.ends_with(".gguf") ? load_gguf(source) : load_tokenizer_json(source);
  const std::string texts = read_file(inputs), lines = read_file(outputs), separator = "\n__ggml_vocab_test__\n";
  std::size_t n = 0, line_at = 0;
  for (std::size_t at = 0; at < texts.size(); ++n) {
    const auto end = std::min(texts.find(separator, at), texts.size());
    const auto line_end = std::min(lines.find('\n', line_at), lines.size());
    Ids expected;
    std::istringstream line(lines.substr(line_at, line_end - line_at));
    for (TokenId id = 0; line >> id;) expected.push_back(id);
    EXPECT_EQ(tokenizer->encode(texts.substr(at, end - at)), expected) << "text " << n << ": " << texts.substr(at, end - at);
    at = end + separator.size();
    line_at = line_end + 1;
  }
  EXPECT_EQ(n, 46u);
}

INSTANTIATE_TEST_SUITE_P(AllVocabularies, ReferenceTexts,
                         testing::Values(Case{"tokenizers/gpt2-pair-merges", "gpt-2"}, Case{"tokenizers/phi3-v", "phi-3"},
                                         Case{"vocab/ggml-vocab-gpt-2.gguf", "gpt-2"}, Case{"vocab/ggml-vocab-phi-3.gguf", "phi-3"},
                                         Case{"vocab/ggml-vocab-llama-spm.gguf", "llama-spm"}));

}  // namespace
}  // namespace calib::text

// Seeded damage to every kind of input: the only outcomes are a result or a calib::Error of a kind that names bad input.

#include <iterator>

#include "libcalib/base/rng.h"
#include "libcalib/text/corpus.h"
#include "libcalib/text/jsonl_reader.h"
#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

std::string damaged(std::string bytes, Rng& rng) {
  const int n_edits = static_cast<int>(rng.below(4)) + 1;
  for (int i = 0; i < n_edits && !bytes.empty(); ++i) {
    const std::size_t at = rng.below(bytes.size());
    switch (rng.below(4)) {
      case 0: bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng.below(8))); break;
      case 1: bytes.erase(at, rng.below(8) + 1); break;
      case 2: bytes.insert(at, std::string(rng.below(4) + 1, static_cast<char>(rng.below(256)))); break;
      default: bytes.resize(at);
    }
  }
  return bytes;
}

// One value somewhere in the document becomes another one, or its member goes: still JSON, no longer what a reader expects.
std::string with_other_value(Json document, Rng& rng) {
  static const Json others[] = {nullptr, true, 5, -1, 1e9, 2.5, "", "b", "a b", Json::array(), Json::array({"a", "b"}), Json::object(), Json{{"type", "Digits"}}};
  const Json flat = document.flatten();
  Json::json_pointer at(std::next(flat.items().begin(), static_cast<std::ptrdiff_t>(rng.below(flat.size()))).key());
  for (std::uint64_t up = rng.below(3); up > 0 && !at.parent_pointer().empty(); --up) at = at.parent_pointer();
  if (rng.below(4) == 0 && document[at.parent_pointer()].is_object()) document[at.parent_pointer()].erase(at.back());
  else document[at] = others[rng.below(std::size(others))];
  return document.dump();
}

// True if it ended well, false for an error of a kind that bad input may end in; anything else fails the test.
bool ends_orderly(const std::function<void()>& body, const std::string& bytes) {
  try {
    body();
    return true;
  } catch (const Error& e) {
    EXPECT_NE(e.kind(), ErrorKind::kInternal) << e.what() << "\n" << bytes;
    EXPECT_EQ(e.message().find("[json.exception"), std::string::npos) << e.what();
    return false;
  } catch (const std::exception& e) {
    ADD_FAILURE() << "foreign exception: " << e.what() << "\n" << bytes;
    return false;
  }
}

TEST(DamagedInput, TokenizerFiles) {
  Json t = bpe_json({"a", "b", "ab", "Ġ", "<0x41>", "é", "<s>"}, {"a b"});
  t["normalizer"] = {
      {"type", "Sequence"},
      {"normalizers", {{{"type", "NFC"}}, {{"type", "Prepend"}, {"prepend", "a"}}, {{"type", "Replace"}, {"pattern", {{"Regex", "b+"}}}, {"content", "b"}}}}};
  t["pre_tokenizer"] = {{"type", "Sequence"},
                        {"pretokenizers",
                         {{{"type", "Split"}, {"pattern", {{"Regex", R"([^\s\p{L}]?\p{L}+|\s+(?!\S)|(?i:'s))"}}}, {"behavior", "MergedWithNext"}, {"invert", true}},
                          {{"type", "Digits"}, {"individual_digits", true}},
                          {{"type", "Metaspace"}, {"replacement", "_"}},
                          {{"type", "ByteLevel"}, {"add_prefix_space", true}}}}};
  t["post_processor"] = {{"type", "TemplateProcessing"},
                         {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
                         {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {6}}}}}}};
  t["added_tokens"] = {{{"id", 6}, {"content", "<s>"}, {"special", true}, {"lstrip", true}},
                       {{"id", 9}, {"content", "bb"}, {"normalized", true}, {"single_word", true}}};
  t["model"]["unk_token"] = "<s>";
  t["model"]["fuse_unk"] = true;
  t["model"]["byte_fallback"] = true;
  const std::string good = t.dump();
  const std::string config = R"({"bos_token":{"content":"<s>"},"eos_token":"ab","add_bos_token":true,"additional_special_tokens":["b"]})";
  Rng rng(5);
  const TempFolder folder;
  int n_loaded = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::string bytes = i % 2 == 0 ? damaged(good, rng) : with_other_value(t, rng);
    write_file(folder.file("tokenizer.json"), bytes);
    write_file(folder.file("tokenizer_config.json"), i % 3 == 0 ? damaged(config, rng) : config);
    n_loaded += ends_orderly([&] {
      const auto tokenizer = load_tokenizer_json(folder.path());
      for (const auto& text : {std::string("ab <s> bb 12é  b"), std::string("\xff\xc3 \0'S", 6)}) {
        for (const TokenId id : tokenizer->encode(text, i % 3 == 0)) tokenizer->piece(id);
      }
    }, bytes);
  }
  EXPECT_GT(n_loaded, 50) << "damage that never loads tests nothing behind the reader";
}

TEST(DamagedInput, DataFiles) {
  const std::string rows = "{\"text\":\"ab\"}\n{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"\\u00e9\"}]}]}\n"
                           "{\"conversations\":[{\"from\":\"human\",\"value\":\"x\"}]}\n{\"instruction\":\"a\",\"input\":\"\",\"output\":\"b\"}\n";
  const std::string ids = "1 2 3\n255 7\n\n12 13 14 15 16\n";
  const auto tokenizer = tok_byte_bos();
  Rng rng(6);
  const TempFolder folder;
  for (int i = 0; i < 1000; ++i) {
    const bool is_rows = i % 2 == 0;
    const std::string bytes = damaged(is_rows ? rows : ids, rng), path = folder.file(is_rows ? "d.jsonl" : "d.ids");
    write_file(path, bytes);
    CorpusRequest request;
    request.data = {path};
    request.seq_len = static_cast<std::int64_t>(rng.below(6)) + 2;
    request.num_samples = static_cast<std::int64_t>(rng.below(4));
    request.chat_template = "plain";
    ends_orderly([&] {
      const Corpus c = load_corpus(request, *tokenizer);
      for (const Document& d : c.documents) {
        EXPECT_LE(static_cast<std::int64_t>(d.ids.size()), request.seq_len);
        EXPECT_EQ(d.ids.front(), 256);
      }
    }, bytes);
  }
}

TEST(DamagedInput, RandomBytesAsText) {
  const auto tokenizer = tok_byte();
  Rng rng(7);
  const TempFolder folder;
  for (int i = 0; i < 300; ++i) {
    std::string bytes;
    for (std::uint64_t n = rng.below(200); n > 0; --n) bytes += static_cast<char>(rng.below(256));
    write_file(folder.file("t.txt"), bytes);
    CorpusRequest request;
    request.data = {folder.file("t.txt")};
    ends_orderly([&] { load_corpus(request, *tokenizer); }, bytes);
    ends_orderly([&] { tokenizer->encode(bytes); }, bytes);
  }
}

}  // namespace
}  // namespace calib::text

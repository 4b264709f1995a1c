#include "libcalib/text/bpe_model.h"

#include <map>

#include "libcalib/base/rng.h"
#include "libcalib/text/sentencepiece_bpe.h"
#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

BpeModel model_of(const std::vector<std::string>& vocab, const std::vector<std::pair<std::string, std::string>>& merges) {
  BpeModel model("vocab");
  for (std::size_t i = 0; i < vocab.size(); ++i) model.add_entry(vocab[i], static_cast<TokenId>(i));
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const auto& [a, b] = merges[i];
    model.add_merge(a, *model.find(a), b, *model.find(b), static_cast<std::int32_t>(i), *model.find(a + b));
  }
  return model;
}

Ids encode(const BpeModel& model, std::string_view text) {
  BpeModel::Scratch scratch;
  Ids ids;
  model.encode(text, 0, scratch, ids);
  return ids;
}

TEST(BpeModel, LowestRankFirstThenLeftmost) {
  // "bc" (rank 0) is taken before "ab", which then has no "b" left.
  const BpeModel model = model_of({"a", "b", "c", "bc", "ab", "aa"}, {{"b", "c"}, {"a", "b"}, {"a", "a"}});
  EXPECT_THAT(encode(model, "abc"), ElementsAre(0, 3));
  EXPECT_THAT(encode(model, "ab"), ElementsAre(4));
  EXPECT_THAT(encode(model, "aaa"), ElementsAre(5, 0));
  EXPECT_TRUE(encode(model, "").empty());
}

TEST(BpeModel, UnknownCharacters) {
  BpeModel model = model_of({"a", "<0xC3>", "<0xA9>", "?"}, {});
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { encode(model, "aaé"); }), HasSubstr("U+00E9 (first byte 0xC3) at offset 2"));
  model.options.unknown = 3;
  EXPECT_THAT(encode(model, "aééa"), ElementsAre(0, 3, 3, 0));
  model.options.fuse_unknown = true;
  EXPECT_THAT(encode(model, "aééa"), ElementsAre(0, 3, 0));
  model.options.byte_fallback = true;
  model.find_byte_entries();
  EXPECT_THAT(encode(model, "éa"), ElementsAre(1, 2, 0));
  EXPECT_THAT(encode(model, "üa"), ElementsAre(3, 0)) << "fallback needs all bytes of the character";
}

TEST(BpeModel, ErrorsInTheByteAlphabetNameTheByte) {
  BpeModel model = model_of({"a"}, {});
  model.options.byte_alphabet = true;
  EXPECT_THAT(error_text(ErrorKind::kFormat, [&] { encode(model, "aaĠ"); }), HasSubstr("byte 0x20 at offset 2"));
}

// The plain loop that the definition of BPE describes: join the best pair, leftmost first, until none is left.
std::vector<std::string> join_naively(std::vector<std::string> parts, const std::map<std::pair<std::string, std::string>, int>& ranks) {
  while (true) {
    int best = -1, best_rank = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i)
      if (const auto it = ranks.find({parts[i], parts[i + 1]}); it != ranks.end() && (best < 0 || it->second < best_rank))
        best = static_cast<int>(i), best_rank = it->second;
    if (best < 0) return parts;
    parts[static_cast<std::size_t>(best)] += parts[static_cast<std::size_t>(best) + 1];
    parts.erase(parts.begin() + best + 1);
  }
}

TEST(BpeModel, QueueAndCutsEqualThePlainLoopOnRandomMerges) {
  Rng rng(11);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string> vocab = {"a", "b", "c", "d"};
    std::vector<std::pair<std::string, std::string>> merges;
    std::map<std::pair<std::string, std::string>, int> ranks;
    for (int k = 0; k < 12; ++k) {
      const std::string left = vocab[rng.below(vocab.size())], right = vocab[rng.below(vocab.size())];
      if (left.size() + right.size() > 6 || ranks.count({left, right})) continue;
      ranks[{left, right}] = static_cast<int>(merges.size());
      merges.emplace_back(left, right);
      if (std::find(vocab.begin(), vocab.end(), left + right) == vocab.end()) vocab.push_back(left + right);
    }
    const BpeModel model = model_of(vocab, merges);
    std::string text;
    std::vector<std::string> characters;
    for (int i = 0; i < 60; ++i) {
      characters.emplace_back(1, static_cast<char>('a' + rng.below(4)));
      text += characters.back();
    }
    Ids expected;
    for (const std::string& part : join_naively(characters, ranks)) expected.push_back(*model.find(part));
    EXPECT_EQ(encode(model, text), expected);
    ASSERT_TRUE(model.can_cut());
    Ids in_parts;
    BpeModel::Scratch scratch;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t size = model.first_cut(std::string_view(text).substr(at));
      model.encode(std::string_view(text).substr(at, size), at, scratch, in_parts);
      at += size;
    }
    EXPECT_EQ(in_parts, expected);
  }
}

TEST(BpeModel, OneWordOfAMillionCharacters) {  // linear-logarithmic: a quadratic loop would take minutes
  const BpeModel model = model_of({"a", "aa", "aaaa"}, {{"a", "a"}, {"aa", "aa"}});
  EXPECT_EQ(encode(model, std::string(1'000'000, 'a')), Ids(250'000, 2));
}

TEST(SentencePieceBpe, BestScoreFirstAndLeftmostAmongEquals) {
  const std::vector<std::string> pieces = {"a", "b", "c", "ab", "bc"};
  const auto run = [&](double score_ab, double score_bc) {
    BpeModel model("vocab");
    for (std::size_t i = 0; i < pieces.size(); ++i) model.add_entry(pieces[i], static_cast<TokenId>(i));
    add_scored_merges(pieces, {0, 0, 0, score_ab, score_bc}, std::vector<bool>(5, true), model);
    return encode(model, "abc");
  };
  EXPECT_THAT(run(-1, -2), ElementsAre(3, 2));
  EXPECT_THAT(run(-2, -1), ElementsAre(0, 4));
  EXPECT_THAT(run(-1, -1), ElementsAre(3, 2));
}

TEST(SentencePieceBpe, CharactersWithoutAnEntryStillJoin) {
  // "é" is no entry of its own; "éa" is. Alone it falls back to its bytes.
  const std::vector<std::string> pieces = {"a", "éa", "<0xC3>", "<0xA9>"};
  BpeModel model("vocab");
  for (std::size_t i = 0; i < pieces.size(); ++i) model.add_entry(pieces[i], static_cast<TokenId>(i));
  add_scored_merges(pieces, {0, -1, 0, 0}, {true, true, false, false}, model);
  model.options.byte_fallback = true;
  model.find_byte_entries();
  EXPECT_THAT(encode(model, "aéa"), ElementsAre(0, 1));
  EXPECT_THAT(encode(model, "aé"), ElementsAre(0, 2, 3));
}

TEST(SentencePieceBpe, TextNeverBecomesAControlEntry) {
  const std::vector<std::string> pieces = {"<", "s", ">", "<s", "<s>"};
  BpeModel model("vocab");
  for (std::size_t i = 0; i < pieces.size(); ++i) model.add_entry(pieces[i], static_cast<TokenId>(i));
  add_scored_merges(pieces, {0, 0, 0, -1, -1}, {true, true, true, true, false}, model);
  EXPECT_THAT(encode(model, "<s>"), ElementsAre(3, 2));
}

}  // namespace
}  // namespace calib::text

#include "libcalib/text/pre_tokenizer.h"

#include "tests/text/text_fixtures.h"

namespace calib::text {
namespace {

using testing::ElementsAre;
using Pieces = std::vector<std::string>;

Pieces pieces_of(const PreTokenizer& pre, const std::string& text) {
  Pieces out;
  pre.run(text, true, [&](std::string_view piece, std::size_t) { out.emplace_back(piece); });
  return out;
}

Pieces split_by(const std::string_view regex, const std::string& text, SplitBehavior behavior = SplitBehavior::kIsolated, bool invert = false) {
  PreTokenizer pre;
  pre.add(SplitStep{Regex(regex, "test"), behavior, invert});
  return pieces_of(pre, text);
}

TEST(PreTokenizer, ExpressionsOfTheFamilies) {  // TK-03
  for (const auto regex : {kQwen2Regex, kLlama3Regex, kGpt2Regex}) {
    EXPECT_THAT(split_by(regex, "->"), ElementsAre("->"));
    EXPECT_THAT(split_by(regex, "don't  stop"), ElementsAre("don", "'t", " ", " stop"));
  }
  EXPECT_THAT(split_by(kQwen2Regex, "12345"), ElementsAre("1", "2", "3", "4", "5"));
  EXPECT_THAT(split_by(kLlama3Regex, "12345"), ElementsAre("123", "45"));
  EXPECT_THAT(split_by(kGpt2Regex, "12345"), ElementsAre("12345"));
  EXPECT_THAT(split_by(kQwen2Regex, "(x):\n"), ElementsAre("(x", "):\n"));
  EXPECT_THAT(split_by(kLlama3Regex, "(x):\n"), ElementsAre("(x", "):\n"));
  EXPECT_THAT(split_by(kGpt2Regex, "(x):\n"), ElementsAre("(", "x", "):", "\n"));
}

TEST(PreTokenizer, BehavioursOfMatches) {
  const auto run = [](SplitBehavior behavior, bool invert = false) { return split_by("-", "the-final--count-", behavior, invert); };
  EXPECT_THAT(run(SplitBehavior::kIsolated), ElementsAre("the", "-", "final", "-", "-", "count", "-"));
  EXPECT_THAT(run(SplitBehavior::kRemoved), ElementsAre("the", "final", "count"));
  EXPECT_THAT(run(SplitBehavior::kMergedWithPrevious), ElementsAre("the-", "final-", "-", "count-"));
  EXPECT_THAT(run(SplitBehavior::kMergedWithNext), ElementsAre("the", "-final", "-", "-count", "-"));
  EXPECT_THAT(run(SplitBehavior::kContiguous), ElementsAre("the", "-", "final", "--", "count", "-"));
  EXPECT_THAT(run(SplitBehavior::kRemoved, true), ElementsAre("-", "-", "-", "-"));
}

TEST(PreTokenizer, StepsRunInOrder) {  // TK-04
  PreTokenizer pre;
  pre.add(SplitStep{Regex(R"([!-\/:-@\[-`{-~\p{P}])", "test"), SplitBehavior::kContiguous});
  pre.add(ByteAlphabetStep{});
  pre.add(SplitStep{Regex(R"(\p{N})", "test"), SplitBehavior::kContiguous});
  pre.add(SplitStep{Regex(R"(\d{3})", "test")});
  EXPECT_THAT(pieces_of(pre, "ab1234!!"), ElementsAre("ab", "123", "4", "!!"));
  EXPECT_TRUE(pre.maps_bytes());
}

TEST(PreTokenizer, NamedOnes) {
  for (const char* name : {"gpt-2", "llama-bpe", "qwen2", "smollm"}) {
    PreTokenizer pre;
    EXPECT_TRUE(pre.add_named(name)) << name;
    EXPECT_THAT(pieces_of(pre, " a"), ElementsAre("Ġa"));
  }
  PreTokenizer smollm;
  ASSERT_TRUE(smollm.add_named("smollm"));
  EXPECT_THAT(pieces_of(smollm, "in 1234½ x"), ElementsAre("in", "Ġ", "1", "2", "3", "4", "Â½", "Ġx"));
  EXPECT_FALSE(PreTokenizer().add_named("viking"));
}

TEST(PreTokenizer, PrefixSpaceOnlyWhereThereIsNone) {
  PreTokenizer pre;
  pre.add(PrefixSpaceStep{});
  EXPECT_THAT(pieces_of(pre, "a"), ElementsAre(" a"));
  EXPECT_THAT(pieces_of(pre, " a"), ElementsAre(" a"));
  EXPECT_TRUE(pieces_of(pre, "").empty());
}

TEST(PreTokenizer, MetaspacePrependSchemes) {
  const auto run = [](MetaspaceStep::Prepend prepend, bool at_start) {
    PreTokenizer pre;
    pre.add(MetaspaceStep{"_", prepend});
    std::string piece;
    pre.run("a b", at_start, [&](std::string_view p, std::size_t) { piece = p; });
    return piece;
  };
  using Prepend = MetaspaceStep::Prepend;
  EXPECT_EQ(run(Prepend::kAlways, false), "_a_b");
  EXPECT_EQ(run(Prepend::kFirst, true), "_a_b");
  EXPECT_EQ(run(Prepend::kFirst, false), "a_b");
  EXPECT_EQ(run(Prepend::kNever, true), "a_b");
}

TEST(PreTokenizer, OffsetsAreThoseOfTheText) {
  PreTokenizer pre;
  pre.add(SplitStep{Regex(" ", "test"), SplitBehavior::kMergedWithNext});
  pre.add(SplitStep{Regex("b", "test")});
  std::vector<std::size_t> offsets;
  pre.run("aab aba", true, [&](std::string_view, std::size_t offset) { offsets.push_back(offset); });
  EXPECT_THAT(offsets, ElementsAre(0, 2, 3, 5, 6));
}

}  // namespace
}  // namespace calib::text

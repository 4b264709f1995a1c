#include "libcalib/sens/generate.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "libcalib/sens/joint_run.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/expect_error.h"

namespace calib::sens {
namespace {

using test_fixture::no_params;
using test_fixture::OpenModel;
using test_fixture::random_documents;

constexpr std::int64_t kDepth = 70, kTokens = 40;

GenerateOptions options_of(std::int64_t depth = kDepth, std::int64_t n_tokens = kTokens) {
  GenerateOptions options;
  options.depth = depth;
  options.n_tokens = n_tokens;
  return options;
}

/// Greedy choice of every row of a whole document run through the block-major path.
std::vector<text::TokenId> choices_of_document(const model::StreamingModel& model, const std::vector<text::TokenId>& ids, const Contender* contender,
                                               bool packed, ThreadPool& pool) {
  const c10::NoGradGuard no_grad;
  std::unique_ptr<PackedCache> cache;
  if (packed) cache = std::make_unique<PackedCache>(model.identity(), *contender, static_cast<std::int64_t>(ids.size()), pool);
  at::Tensor x = model.load_embedding()->lookup(ids);
  for (std::int64_t l = 0; l < model.n_layers(); ++l) {
    const auto i = static_cast<std::size_t>(l);
    const auto block = model.load_block(l);
    x = packed ? run_block_packed(*block, x, i, *cache) : run_block(*block, x, contender ? &contender->layers[i] : nullptr, kQueryTile, pool);
  }
  const at::Tensor top = at::argmax(model.load_head()->logits(x), -1);
  std::vector<text::TokenId> out;
  for (std::int64_t t = 0; t < top.size(0); ++t) out.push_back(static_cast<text::TokenId>(top[t].item<std::int64_t>()));
  return out;
}

// What is decoded token by token is what a forward pass over prompt and reply chooses at each of its rows.
void expect_replies_of_the_forward_pass(const model::StreamingModel& model, const Contender* contender, bool packed) {
  ThreadPool pool(1);
  const auto prompts = random_documents(2, kDepth, 256);
  GenerateOptions options = options_of();
  options.packed = packed;
  const auto replies = greedy_replies(model, prompts, contender, options, pool);
  ASSERT_EQ(replies.size(), prompts.size());
  for (std::size_t d = 0; d < prompts.size(); ++d) {
    ASSERT_EQ(replies[d].size(), static_cast<std::size_t>(kTokens));
    std::vector<text::TokenId> ids = prompts[d].ids;
    ids.insert(ids.end(), replies[d].begin(), replies[d].end());
    const auto chosen = choices_of_document(model, ids, contender, packed, pool);
    const std::vector<text::TokenId> expected(chosen.begin() + kDepth - 1, chosen.end() - 1);
    EXPECT_EQ(replies[d], expected) << (contender ? contender->header.name : "reference") << (packed ? ", packed" : "") << ", document " << d;
  }
}

TEST(Generate, DecodingEqualsTheForwardPass) {
  for (const char* name : {"m-llama", "m-mistral", "m-gemma3"}) {
    SCOPED_TRACE(name);
    OpenModel m(test::make_tiny_model(name));
    expect_replies_of_the_forward_pass(m.model, nullptr, false);
    // Blocks of 32 leave the window at the prompt and while decoding; every token at once; nothing before the 103rd token.
    const std::pair<const char*, PairTiers> cases[] = {
        {"int2.channel.g32.pre:int4.token.g", {4, 16}}, {"int4.token.g:int4.token.g", {0, 0}}, {"int3.token.g.pre:bf16", {3, 100}}};
    for (const auto& [pair, tiers] : cases) {
      SCOPED_TRACE(fmt::format("sinks {}, window {}", tiers.n_sinks, tiers.window));
      const Contender c = uniform_contender(pair, m.model.identity(), tiers, no_params());
      expect_replies_of_the_forward_pass(m.model, &c, false);
    }
    const Contender control = negative_control(m.model.identity());
    expect_replies_of_the_forward_pass(m.model, &control, false);
  }
}

TEST(Generate, PackedPagesDecodeWhatTheirForwardPassDoes) {
  OpenModel m(test::make_tiny_model("m-llama"));
  for (const char* pair : {"int4.token.g:int4.token.g", "int4.channel.g32.pre:int8.token.g"}) {
    const Contender c = uniform_contender(pair, m.model.identity(), {4, 16}, no_params());
    expect_replies_of_the_forward_pass(m.model, &c, true);
  }
}

TEST(Generate, BatchesDoNotMatter) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto prompts = random_documents(4, kDepth, 256);
  const Contender c = uniform_contender("int4.token.g:int4.token.g", m.model.identity(), {4, 16}, no_params());
  ThreadPool pool(1);
  GenerateOptions options = options_of();
  const auto together = greedy_replies(m.model, prompts, &c, options, pool);
  options.cache_memory_bytes = 1;
  EXPECT_EQ(greedy_replies(m.model, prompts, &c, options, pool), together);
}

TEST(Generate, EndTokenEndsAReplyAlone) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto prompts = random_documents(4, kDepth, 256);
  ThreadPool pool(1);
  GenerateOptions options = options_of();
  const auto open = greedy_replies(m.model, prompts, nullptr, options, pool);
  options.end_token = open[1][5];
  const auto ended = greedy_replies(m.model, prompts, nullptr, options, pool);
  for (std::size_t d = 0; d < prompts.size(); ++d) {
    const auto end = std::find(open[d].begin(), open[d].end(), *options.end_token);
    EXPECT_EQ(ended[d], std::vector<text::TokenId>(open[d].begin(), end == open[d].end() ? end : end + 1)) << d;
  }
}

EvalResult generated(const model::StreamingModel& model, const std::vector<text::Document>& documents, const std::vector<Contender>& contenders,
                     const GenerateOptions& options) {
  ThreadPool pool(1);
  EvalResult result;
  for (const Contender& c : contenders) result.contenders.push_back(c.header);
  generate(model, documents, contenders, options, pool, &result);
  return result;
}

TEST(Generate, TheReferenceAgreesWithItselfAndCoarseKeysDoNot) {
  OpenModel m(test::make_tiny_model("m-llama"));
  Contender exact;
  exact.header.name = "exact";
  exact.layers.resize(static_cast<std::size_t>(m.model.n_layers()));
  const Contender coarse = uniform_contender("int2.token.g:bf16", m.model.identity(), {0, 0}, no_params());
  const EvalResult r = generated(m.model, random_documents(6, 90, 256), {exact, coarse}, options_of());
  const EvalGeneration &self = *r.contenders[0].generation, &other = *r.contenders[1].generation;
  EXPECT_EQ(self.agreeing_prefix.mean, 1);
  EXPECT_EQ(self.agreeing_prefix.se, 0);
  EXPECT_EQ(self.replies.document_rep_4, r.reference_replies->document_rep_4);
  EXPECT_EQ(self.n_catastrophic, 0);
  EXPECT_EQ(self.catastrophic_low, 0);
  EXPECT_LT(self.row_kld.mean, 1e-6);
  EXPECT_LT(other.agreeing_prefix.mean, 0.5);
  EXPECT_GT(other.row_kld.mean, 1e-3);
  EXPECT_EQ(r.reference_replies->hit_cap, 1);
  EXPECT_EQ(r.generation->n_documents, 6);
  EXPECT_EQ(r.generation->depth, kDepth);
}

// Counted by hand from the numbers that the result shows of each document.
TEST(Generate, CatastrophicRepliesAreCounted) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const Contender coarse = negative_control(m.model.identity());
  const EvalResult r = generated(m.model, random_documents(8, 90, 256), {coarse}, options_of());
  const EvalGeneration& g = *r.contenders[0].generation;
  ASSERT_EQ(g.document_row_kld.size(), 8u);
  std::int64_t expected = 0;
  for (std::size_t d = 0; d < 8; ++d)
    expected += g.replies.document_rep_4[d] > r.reference_replies->document_rep_4[d] + 0.2 || g.document_row_kld[d] > 1;
  EXPECT_GT(expected, 0);
  EXPECT_EQ(g.n_catastrophic, expected);
  EXPECT_GE(static_cast<double>(expected) / 8, g.catastrophic_low);
  EXPECT_LE(static_cast<double>(expected) / 8, g.catastrophic_high);
}

TEST(Generate, ShortDocumentsAreLeftOutAndBadDepthsRefused) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const Contender c = uniform_contender("int4.token.g:int4.token.g", m.model.identity(), {4, 16}, no_params());
  auto documents = random_documents(3, 90, 256);
  documents[1].ids.resize(20);
  const EvalResult r = generated(m.model, documents, {c}, options_of(50, 5));
  EXPECT_EQ(r.generation->n_documents, 2);
  EXPECT_TRUE(std::any_of(r.warnings.begin(), r.warnings.end(), [](const std::string& w) { return w.find("1 of 3 documents") != std::string::npos; }));
  test::expect_error([&] { generated(m.model, documents, {c}, options_of(91, 5)); }, ErrorKind::kInfeasible, {"--depth", "91"});
  test::expect_error([&] { generated(m.model, documents, {c}, options_of(4, 5)); }, ErrorKind::kInfeasible, {"--depth", "4 sinks"});
  test::expect_error([&] { generated(m.model, documents, {c}, options_of(90, 4007)); }, ErrorKind::kUsage, {"--generate", "4096 positions"});
}

}  // namespace
}  // namespace calib::sens

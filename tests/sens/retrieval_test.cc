#include "libcalib/sens/retrieval.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "libcalib/sens/generate.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/expect_error.h"

namespace calib::sens {
namespace {

using test_fixture::no_params;
using test_fixture::OpenModel;
using test_fixture::random_documents;

constexpr std::int64_t kPrompt = 100, kAnswer = 5;

std::vector<std::vector<text::TokenId>> replies_of(const model::StreamingModel& model, const std::vector<text::Document>& prompts, const Contender* contender,
                                                   bool packed) {
  GenerateOptions options;
  options.depth = kPrompt, options.n_tokens = kAnswer, options.packed = packed;
  ThreadPool pool(1);
  return greedy_replies(model, prompts, contender, options, pool);
}

/// Texts whose answers are what the exact model replies: a random model finds nothing that it was told.
std::vector<RetrievalCase> answered_cases(const model::StreamingModel& model, const std::vector<text::Document>& prompts) {
  const auto replies = replies_of(model, prompts, nullptr, false);
  std::vector<RetrievalCase> out(prompts.size());
  for (std::size_t d = 0; d < out.size(); ++d) {
    out[d].document = prompts[d];
    out[d].document.ids.insert(out[d].document.ids.end(), replies[d].begin(), replies[d].end());
    out[d].answers = {{kPrompt, kPrompt + kAnswer, 10}};
    if (d % 2 == 0) out[d].depth = 0.1;
  }
  return out;
}

EvalResult retrieved(const model::StreamingModel& model, const std::vector<RetrievalCase>& cases, const std::vector<Contender>& contenders, bool packed) {
  EvalResult result;
  for (const Contender& c : contenders) result.contenders.push_back(c.header);
  EvaluateOptions options;
  options.packed = packed;
  ThreadPool pool(1);
  retrieve(model, cases, contenders, options, pool, &result);
  return result;
}

// One pass over text and answer counts what replies written token by token do.
TEST(Retrieval, HitsAreGreedyRepliesThatAreTheAnswer) {
  for (const char* name : {"m-llama", "m-gemma3"}) {
    OpenModel m(test::make_tiny_model(name));
    const auto prompts = random_documents(8, kPrompt, 256);
    const auto cases = answered_cases(m.model, prompts);
    std::vector<Contender> contenders;
    for (const char* pair : {"bf16:bf16", "int4.token.g:int4.token.g", "int3.token.g:int3.token.g", "int2.token.g:int2.token.g"})
      contenders.push_back(uniform_contender(pair, m.model.identity(), {4, 16}, no_params()));
    for (const bool packed : {false, true}) {
      if (packed && std::string(name) == "m-gemma3") continue;  // sliding windows
      SCOPED_TRACE(fmt::format("{}{}", name, packed ? ", packed" : ""));
      const EvalResult r = retrieved(m.model, cases, contenders, packed);
      EXPECT_EQ(sum_hits(*r.reference_retrieval).hits, 8);
      EXPECT_FALSE(r.reference_retrieval->pass.has_value());
      for (std::size_t c = 0; c < contenders.size(); ++c) {
        const auto replies = replies_of(m.model, prompts, &contenders[c], packed);
        std::int64_t expected = 0;
        for (std::size_t d = 0; d < cases.size(); ++d) expected += std::equal(replies[d].begin(), replies[d].end(), cases[d].document.ids.begin() + kPrompt) ? 1 : 0;
        const EvalRetrieval& got = *r.contenders[c].retrieval;
        EXPECT_EQ(sum_hits(got).hits, expected) << contenders[c].header.name;
        EXPECT_EQ(sum_hits(got).n, 8);
        EXPECT_EQ(got.pass, expected >= 7) << contenders[c].header.name;
      }
      EXPECT_GT(sum_hits(*r.contenders[0].retrieval).hits, sum_hits(*r.contenders[3].retrieval).hits);
      EXPECT_EQ(r.contenders[3].retrieval->pass, false);
    }
  }
}

TEST(Retrieval, TheExactCacheFindsWhatTheReferenceDoes) {
  OpenModel m(test::make_tiny_model("m-llama"));
  Contender exact;
  exact.header.name = "exact";
  exact.layers.resize(static_cast<std::size_t>(m.model.n_layers()));
  for (LayerChange& layer : exact.layers) layer.tiers = {0, 16, 4, 0};
  auto cases = answered_cases(m.model, random_documents(6, kPrompt, 256));
  for (std::size_t d = 0; d < 3; ++d) cases[d].document.ids.back() ^= 1;  // answers that the model does not give
  const EvalResult r = retrieved(m.model, cases, {exact}, false);
  EXPECT_EQ(sum_hits(*r.reference_retrieval).hits, 3);
  ASSERT_EQ(r.contenders[0].retrieval->cells.size(), r.reference_retrieval->cells.size());
  for (std::size_t i = 0; i < r.reference_retrieval->cells.size(); ++i)
    EXPECT_EQ(r.contenders[0].retrieval->cells[i].hits, r.reference_retrieval->cells[i].hits) << i;
  EXPECT_EQ(r.contenders[0].retrieval->pass, true);
}

TEST(Retrieval, EveryAnswerOfATextCountsAlone) {
  OpenModel m(test::make_tiny_model("m-llama"));
  auto cases = answered_cases(m.model, random_documents(2, kPrompt, 256));
  for (RetrievalCase& c : cases) {
    c.depth.reset();
    c.answers = {{kPrompt, kPrompt + 2, 10}, {kPrompt + 2, kPrompt + 4, 20}, {kPrompt + 4, kPrompt + 5, 30}};
    c.document.ids[kPrompt + 4] ^= 1;  // the last answer is not the model's
  }
  const Contender c = uniform_contender("bf16:bf16", m.model.identity(), {4, 16}, no_params());
  const EvalResult r = retrieved(m.model, cases, {c}, false);
  ASSERT_EQ(r.reference_retrieval->cells.size(), 1u);
  EXPECT_EQ(r.reference_retrieval->cells[0].n, 6);
  EXPECT_FALSE(r.reference_retrieval->cells[0].depth.has_value());
  EXPECT_EQ(r.reference_retrieval->cells[0].hits, 4);
}

}  // namespace
}  // namespace calib::sens

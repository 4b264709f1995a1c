// The retrieval smoke test on a trained model: the reference finds the numbers, a BF16 cache too, a ruined one does not.

#include <gtest/gtest.h>

#include "libcalib/sens/retrieval.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/shared_data.h"

namespace calib::sens {
namespace {

TEST(RetrievalTrained, RuinedCachesLoseTheNumbers) {
  CALIB_SMOLLM2(path);
  model::ModelOptions model_options;
  model_options.n_threads = 1;
  const auto model = model::StreamingModel::open(path, model_options);
  const auto tokenizer = model.load_tokenizer();
  text::CorpusRequest request;
  request.data = {std::string(CALIB_SOURCE_DIR) + "/datasets/measure.txt"};
  request.seq_len = 512;
  request.default_samples = 4;
  const auto corpus = text::load_corpus(request, *tokenizer);
  const auto cases = retrieval_cases(*tokenizer, corpus.documents, {480}, model.identity().max_positions, 0);
  std::vector<Contender> contenders;
  for (const char* pair : {"bf16:bf16", "int2.token.g:int2.token.g"})
    contenders.push_back(uniform_contender(pair, model.identity(), {0, 0}, test_fixture::no_params()));
  EvalResult result;
  for (const Contender& c : contenders) result.contenders.push_back(c.header);
  ThreadPool pool(1);
  retrieve(model, cases, contenders, {}, pool, &result);
  const RetrievalSum own = sum_hits(*result.reference_retrieval);
  EXPECT_EQ(own.n, 10);
  EXPECT_GE(own.hits, 8);
  EXPECT_EQ(result.contenders[0].retrieval->pass, true);
  EXPECT_EQ(result.contenders[1].retrieval->pass, false);
  EXPECT_LE(sum_hits(*result.contenders[1].retrieval).hits, 2);
}

}  // namespace
}  // namespace calib::sens

#include "libcalib/model/streaming_runner.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "libcalib/model/kv_tap.h"
#include "tests/model/forward_model.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

using model::RunnerOptions;
using model::StreamingModel;

std::vector<text::Document> documents(const std::vector<std::int64_t>& lengths) {
  std::vector<text::Document> result;
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    text::Document document;
    for (std::int64_t t = 0; t < lengths[d]; ++t)
      document.ids.push_back(static_cast<text::TokenId>((t * 89 + t * t * 7 + static_cast<std::int64_t>(d) * 31) % 260));
    result.push_back(std::move(document));
  }
  return result;
}

struct Calibrated {
  std::vector<stats::LayerStats> layers;
  model::ReferenceNll nll;
  std::vector<model::MassiveToken> massive;
  std::vector<std::string> warnings;
};
Calibrated calibrate(const StreamingModel& opened, const std::vector<text::Document>& docs, const RunnerOptions& options = {}) {
  Calibrated result;
  ThreadPool pool(2);
  LogSink log;
  log.warning = [&](const std::string& text) { result.warnings.push_back(text); };
  model::KvTap tap(4, pool, [&](const stats::LayerStats& layer) { result.layers.push_back(layer); }, log);
  result.nll = model::run_streaming(opened, docs, options, &tap);
  result.massive = tap.massive();
  return result;
}

struct Tiny {
  TempFolder folder;
  explicit Tiny(const TinyModel& model) { write_hf_folder(model, folder.path()); }
  StreamingModel open() const { return StreamingModel::open(folder.path(), {}); }
};

double total(const model::ReferenceNll& nll) {
  double sum = 0;
  for (const double s : nll.sum) sum += s;
  return sum;
}

// Sum over each KV head's query heads of W_o^T W_o: symmetric, positive, and its trace is the squared norm of the whole projection.
TEST(StreamingRunner, OutputMomentComesFromTheWeights) {
  const Tiny tiny(make_tiny_model("m-llama"));
  const StreamingModel opened = tiny.open();
  const Calibrated c = calibrate(opened, documents({20}));
  for (std::size_t l = 0; l < c.layers.size(); ++l) {
    const LayerGeometry& g = c.layers[l].geometry();
    const auto d = static_cast<std::size_t>(g.head_dim);
    const std::vector<double>& m = c.layers[l].output_moment;
    ASSERT_EQ(m.size(), static_cast<std::size_t>(g.n_kv_heads) * d * d);
    double trace = 0;
    for (std::size_t i = 0; i < m.size(); ++i) {
      const std::size_t h = i / (d * d), r = i / d % d, s = i % d;
      EXPECT_EQ(m[i], m[(h * d + s) * d + r]);
      if (r == s) trace += m[i];
    }
    EXPECT_NEAR(trace, squared_norm_of_output_projection(opened, static_cast<std::int64_t>(l)), 1e-6 * trace);
    EXPECT_GT(trace, 0);
  }
}

TEST(StreamingRunner, SpillingChangesNothing) {
  const Tiny tiny(make_tiny_model("m-llama"));
  const auto docs = documents({100, 30, 300, 64});
  const Calibrated a = calibrate(tiny.open(), docs);
  RunnerOptions spill;
  spill.hidden_memory_bytes = 120 * 64 * 4;  // the second document crosses the edge
  const Calibrated b = calibrate(tiny.open(), docs, spill);
  EXPECT_EQ(a.nll.sum, b.nll.sum);
  for (std::size_t l = 0; l < 4; ++l) {
    EXPECT_EQ(a.layers[l].k_post.body.absmax(), b.layers[l].k_post.body.absmax());
    EXPECT_EQ(a.layers[l].key_cov.sum_state(), b.layers[l].key_cov.sum_state());
    EXPECT_EQ(a.layers[l].attention.sum_state(), b.layers[l].attention.sum_state());
  }
}

TEST(StreamingRunner, CollectionDoesNotAlterAndOrderDoesNotMatter) {  // SA-08
  const Tiny tiny(make_tiny_model("m-qwen2-big"));
  const StreamingModel opened = tiny.open();
  const auto docs = documents({80, 256, 17});
  const Calibrated a = calibrate(opened, docs);
  EXPECT_EQ(model::run_streaming(opened, docs, {}, nullptr).sum, a.nll.sum);
  const std::vector<text::Document> turned = {docs[2], docs[0], docs[1]};
  RunnerOptions no_rows;
  no_rows.attention_rows = 0;
  const Calibrated b = calibrate(opened, turned, no_rows);
  EXPECT_NEAR(total(a.nll), total(b.nll), 1e-6 * total(a.nll));
  for (std::size_t l = 0; l < 4; ++l)
    for (const auto part : {&stats::LayerStats::k_pre, &stats::LayerStats::k_post, &stats::LayerStats::v}) {
      const stats::TensorStats &x = (a.layers[l].*part).body, &y = (b.layers[l].*part).body;
      ASSERT_EQ(x.n_channels(), y.n_channels());
      for (int h = 0; h < x.n_heads; ++h)
        for (int c = 0; c < x.head_dim; ++c) {
          // One document's rows are the same whatever is batched with it up to the matrix product's own blocking.
          EXPECT_NEAR(x.max(h, c), y.max(h, c), 1e-5 * x.absmax());
          EXPECT_NEAR(x.min(h, c), y.min(h, c), 1e-5 * x.absmax());
          EXPECT_NEAR(x.mean(h, c), y.mean(h, c), 1e-6 * std::max(1.0, static_cast<double>(x.absmax())));
          EXPECT_EQ(x.n_tokens(), y.n_tokens());
        }
    }
}

TEST(StreamingRunner, CountsAreWhatWasFed) {  // SA-07
  const Tiny tiny(make_tiny_model("m-llama"));
  const Calibrated a = calibrate(tiny.open(), documents({64, 64, 3, 64, 1}));
  for (const auto& layer : a.layers) {
    EXPECT_EQ(layer.k_pre.body.n_tokens(), 3 * 60);
    EXPECT_EQ(layer.k_pre.sink.n_tokens(), 3 * 4 + 3 + 1);
    EXPECT_EQ(layer.v.body.n_tokens() + layer.v.sink.n_tokens(), 196);
  }
  ASSERT_EQ(a.nll.count.size(), 1u);
  EXPECT_EQ(a.nll.count[0], 3 * 63 + 2);
}

TEST(StreamingRunner, LargeBiasesKeepTheirVariance) {  // SA-01
  const TinyModel tiny_model = make_tiny_model("m-qwen2-big");
  const Tiny tiny(tiny_model);
  const StreamingModel opened = tiny.open();
  const auto docs = documents({256, 256});
  const Calibrated a = calibrate(opened, docs);
  for (const std::int64_t l : {0, 3}) {
    std::vector<double> values;  // channel 0 of head 0, body tokens, two passes in double
    for (const auto& d : docs) {
      const Forward f = run_forward(opened, d.ids);
      for (std::size_t t = 4; t < d.ids.size(); ++t) values.push_back(f.layers[static_cast<std::size_t>(l)].k_pre[t * 32]);
    }
    double mean = 0, m2 = 0;
    for (const double v : values) mean += v / static_cast<double>(values.size());
    for (const double v : values) m2 += (v - mean) * (v - mean);
    const stats::TensorStats& k = a.layers[static_cast<std::size_t>(l)].k_pre.body;
    EXPECT_NEAR(k.mean(0, 0), mean, 1e-4);
    // Single and batched runs differ in the last bits of values near 600: 2^-24 * 636 against a spread near 1.
    EXPECT_NEAR(k.moments[0].m2, m2, 2e-4 * m2);
    const double expected = l == 0 ? 600 : 900;
    EXPECT_NEAR(a.layers[static_cast<std::size_t>(l)].k_post.body.head_absmax(0), expected, 0.02 * expected);
    EXPECT_LT(a.layers[static_cast<std::size_t>(l)].k_post.body.head_absmax(1), 20);
  }
  for (const std::size_t l : {1u, 2u}) EXPECT_LT(a.layers[l].k_post.body.absmax(), 20);
}

TEST(StreamingRunner, ScalingQueriesLeavesKeysAndValuesAlone) {  // SA-05
  TinyModel plain = make_tiny_model("m-llama");
  std::erase_if(plain.tensors, [](const TinyTensor& t) { return t.name.find("layers.") != std::string::npos && t.name.find("layers.0.") == std::string::npos; });
  plain.n_layers = 1;
  TinyModel scaled = plain;
  for (float& v : scaled.tensor("model.layers.0.self_attn.q_proj.weight").values) v *= 100;
  const Tiny a(plain), b(scaled);
  const auto docs = documents({200});
  const Calibrated x = calibrate(a.open(), docs), y = calibrate(b.open(), docs);
  EXPECT_EQ(x.layers[0].k_post.body.absmax(), y.layers[0].k_post.body.absmax());
  EXPECT_EQ(x.layers[0].key_cov.sum_state(), y.layers[0].key_cov.sum_state());
  EXPECT_EQ(x.layers[0].value_cov.sum_state(), y.layers[0].value_cov.sum_state());
  EXPECT_NEAR(y.layers[0].q_post.body.absmax(), 100 * x.layers[0].q_post.body.absmax(), 1e-3 * y.layers[0].q_post.body.absmax());
  EXPECT_NE(x.layers[0].attention.sum_state(), y.layers[0].attention.sum_state());
}

TEST(StreamingRunner, NonFiniteValuesNameTheirPlace) {  // SA-11
  TinyModel overflow = make_tiny_model("m-llama");
  for (float& v : overflow.tensor("model.layers.1.self_attn.o_proj.weight").values) v = 3e38f;
  const Tiny a(overflow);
  const auto docs = documents({20});
  expect_error([&] { calibrate(a.open(), docs); }, ErrorKind::kNumeric, {"layer 1", "document 0", "token position"});

  TinyModel nan = make_tiny_model("m-llama");
  nan.tensor("model.layers.2.self_attn.k_proj.weight").values[5] = std::numeric_limits<float>::quiet_NaN();
  const Tiny b(nan);
  expect_error([&] { calibrate(b.open(), docs); }, ErrorKind::kNumeric, {"model.layers.2.self_attn.k_proj.weight"});

  TinyModel infinite = make_tiny_model("m-llama");
  infinite.tensor("model.embed_tokens.weight").values[101 * 64] = std::numeric_limits<float>::infinity();
  const Tiny c(infinite);
  std::vector<text::Document> with_e(1);
  with_e[0].ids = {1, 2, 101};
  expect_error([&] { calibrate(c.open(), with_e); }, ErrorKind::kNumeric, {"model.embed_tokens.weight"});
  with_e[0].ids = {1, 2, 3};
  EXPECT_NO_THROW(calibrate(c.open(), with_e));
}

TEST(StreamingRunner, IdsOutsideTheVocabulary) {
  const Tiny tiny(make_tiny_model("m-llama"));
  std::vector<text::Document> docs(1);
  docs[0].ids = {1, 260};
  expect_error([&] { calibrate(tiny.open(), docs); }, ErrorKind::kMismatch, {"260", "vocabulary"});
}

TEST(KvTap, SilentValuesAreReported) {  // SA-03
  TinyModel silent = make_tiny_model("m-llama");
  for (float& v : silent.tensor("model.layers.1.self_attn.v_proj.weight").values) v = 0;
  const Tiny tiny(silent);
  const Calibrated a = calibrate(tiny.open(), documents({64}));
  EXPECT_EQ(a.layers[1].v.body.absmax(), 0.0f);
  ASSERT_EQ(a.warnings.size(), 1u);
  EXPECT_NE(a.warnings[0].find("layer 1: V"), std::string::npos) << a.warnings[0];
}

TEST(KvTap, MassiveActivationsAreFound) {
  TinyModel tiny_model = make_tiny_model("m-llama");
  auto& embedding = tiny_model.tensor("model.embed_tokens.weight").values;
  for (int c = 0; c < 64; ++c) embedding[200 * 64 + c] = c == 17 ? -5000.0f : 1.0f;
  for (int c = 0; c < 64; ++c) embedding[201 * 64 + c] = c == 17 ? 900.0f : 1.0f;   // too small a ratio
  for (int c = 0; c < 64; ++c) embedding[202 * 64 + c] = c == 17 ? 90.0f : 0.01f;   // too small a value
  const Tiny tiny(tiny_model);
  std::vector<text::Document> docs = documents({80});
  for (text::TokenId& id : docs[0].ids) id %= 200;
  docs[0].ids[9] = 200, docs[0].ids[20] = 201, docs[0].ids[30] = 202;
  const Calibrated a = calibrate(tiny.open(), docs);
  ASSERT_FALSE(a.massive.empty());
  EXPECT_EQ(a.massive[0].layer, 0);
  EXPECT_EQ(a.massive[0].token, 9);
  EXPECT_EQ(a.massive[0].channel, 17);
  EXPECT_EQ(a.massive[0].value, -5000.0);
  EXPECT_EQ(a.massive[0].ratio, 5000.0);
  for (const auto& m : a.massive)
    if (m.layer == 0) { EXPECT_EQ(m.token, 9); }
}

}  // namespace
}  // namespace calib::test

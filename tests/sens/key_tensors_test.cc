// Errors of schemes on the keys and values that real forward passes make: rows QZ-01, QZ-04 and SN-06 of the test catalogue.

#include <cmath>

#include <gtest/gtest.h>

#include "tests/sens/sampled_text.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/shared_data.h"

namespace calib::sens {
namespace {

using test_fixture::OpenModel;

/// Keys and values of one document at one layer, [T, H, D].
struct Tensors {
  LayerGeometry geometry;
  std::vector<float> k_pre, k_post, v;
};

std::vector<Tensors> tensors_of(const model::StreamingModel& model, const std::vector<text::TokenId>& ids) {
  const c10::NoGradGuard no_grad;
  const auto copy = [](const at::Tensor& x) {
    const at::Tensor dense = x.to(at::kFloat).contiguous();
    return std::vector<float>(dense.data_ptr<float>(), dense.data_ptr<float>() + dense.numel());
  };
  std::vector<Tensors> out;
  at::Tensor x = model.load_embedding()->lookup(ids);
  for (std::int64_t l = 0; l < model.n_layers(); ++l) {
    const auto block = model.load_block(l);
    const model::Projected p = block->project(x);
    const at::Tensor k = block->rotate(p.k_pre);
    out.push_back({block->geometry(), copy(p.k_pre), copy(k), copy(p.v)});
    x = block->finish(x, block->attend(block->rotate(p.q_pre), k, p.v));
  }
  return out;
}

double rms_error(const char* scheme, Side side, const LayerGeometry& g, const std::vector<float>& x, const quant::SchemeParams& params = {}) {
  std::vector<float> error(x.size());
  ThreadPool pool(1);
  quantisation_error({0, quant::parse_scheme(scheme), params}, side, g, 0, false, static_cast<std::int64_t>(x.size()) / (g.n_kv_heads * g.head_dim), x.data(),
                     error.data(), pool);
  double sum = 0;
  for (const float e : error) sum += static_cast<double>(e) * e;
  return std::sqrt(sum / static_cast<double>(x.size()));
}

std::vector<text::TokenId> ids_of(std::size_t n, std::int64_t vocab) { return test_fixture::random_documents(1, n, vocab, 7)[0].ids; }

// QZ-01. A float format hardly cares for its scale, unless values pass its largest.
void expect_scale_matters_only_beyond_448(const std::vector<Tensors>& layers, const std::vector<int>& huge) {
  for (std::size_t l = 0; l < layers.size(); ++l)
    for (const Side side : {Side::kK, Side::kV}) {
      const std::vector<float>& x = side == Side::kK ? layers[l].k_post : layers[l].v;
      quant::SchemeParams calibrated, one;
      float absmax = 0;
      for (const float value : x) absmax = std::max(absmax, std::fabs(value));
      calibrated.clip_hi = {absmax};
      one.clip_hi = {448.0f};
      const double ratio = rms_error("fp8e4m3.tensor", side, layers[l].geometry, x, one) / rms_error("fp8e4m3.tensor", side, layers[l].geometry, x, calibrated);
      const bool expected = side == Side::kK && std::find(huge.begin(), huge.end(), static_cast<int>(l)) != huge.end();
      EXPECT_EQ(absmax > 448, expected) << l << side_name(side);
      if (expected) EXPECT_GT(ratio, 5) << l;
      else EXPECT_NEAR(ratio, 1, 0.15) << l << side_name(side) << " absmax " << absmax;
    }
}

TEST(KeyTensors, Qz01Fp8ScalesOfHugeKeys) {
  OpenModel m(test::make_tiny_model("m-qwen2-big"));
  expect_scale_matters_only_beyond_448(tensors_of(m.model, ids_of(256, 256)), {0, 3});
}

TEST(KeyTensors, Qz01Fp8ScalesOfTrainedKeys) {
  CALIB_SHARED_FILE(file, "models/stories260K.bin");
  OpenModel m(*test::restore_s260k());
  expect_scale_matters_only_beyond_448(tensors_of(m.model, ids_of(256, 512)), {});
}

// QZ-04. Trained keys have means that eat a token's range. SN-06. Values are no such thing: they go by token.
TEST(KeyTensors, Qz04CentredKeysAndSn06ValuesByToken) {
  CALIB_SHARED_FILE(file, "models/stories260K.bin");
  OpenModel m(*test::restore_s260k());
  std::vector<Tensors> layers;
  for (const text::Document& d : test_fixture::sampled_sequences(m.model)) {
    const std::vector<Tensors> of_document = tensors_of(m.model, d.ids);
    if (layers.empty()) layers.resize(of_document.size());
    for (std::size_t l = 0; l < layers.size(); ++l) {
      layers[l].geometry = of_document[l].geometry;
      for (const auto part : {&Tensors::k_pre, &Tensors::k_post, &Tensors::v})
        (layers[l].*part).insert((layers[l].*part).end(), (of_document[l].*part).begin(), (of_document[l].*part).end());
    }
  }
  for (const Tensors& t : layers) {
    const LayerGeometry& g = t.geometry;
    const std::size_t row = static_cast<std::size_t>(g.n_kv_heads * g.head_dim), n = t.k_pre.size() / row;
    quant::SchemeParams centred;
    for (std::size_t c = 0; c < row; ++c) {
      double sum = 0;
      for (std::size_t j = 0; j < n; ++j) sum += t.k_pre[j * row + c];
      centred.mean.push_back(static_cast<float>(sum / static_cast<double>(n)));
    }
    EXPECT_LT(rms_error("int4.token.g.pre.center", Side::kK, g, t.k_pre, centred), 0.5 * rms_error("int4.token.g", Side::kK, g, t.k_post)) << g.index;
    EXPECT_LT(rms_error("int4.token.g", Side::kV, g, t.v), rms_error("int4.channel.g32", Side::kV, g, t.v)) << g.index;
  }
}

}  // namespace
}  // namespace calib::sens

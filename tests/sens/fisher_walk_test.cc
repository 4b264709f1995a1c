// The backward walk against finite differences of the model it walks (METHODS.md 7, "Layer alignment test").

#include "libcalib/sens/fisher_walk.h"

#include <cmath>

#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "libcalib/base/rng.h"
#include "libcalib/model/streaming_model.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::sens {
namespace {

constexpr std::int64_t kTokens = 48, kSinks = 4;

class Alignment : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const test::TinyModel tiny = test::make_tiny_model(GetParam());
    test::write_hf_folder(tiny, folder_.file("m"));
    model::ModelOptions options;
    options.n_threads = 1;
    model_.emplace(model::StreamingModel::open(folder_.file("m"), options));
    for (std::int64_t l = 0; l < model_->n_layers(); ++l) blocks_.push_back(model_->load_block(l));
    head_ = model_->load_head();
    Rng rng(17);
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < kTokens; ++t) ids.push_back(static_cast<std::int32_t>(rng.below(256)));
    const c10::NoGradGuard no_grad;
    states_.push_back(model_->load_embedding()->lookup(ids));
    for (const auto& block : blocks_) states_.push_back(run(*block, states_.back(), {}, {}));
    labels_ = sampled_label_gradients(*head_, states_.back(), kSinks, 1, 5, 0, pool_);
  }

  at::Tensor run(const model::Block& block, const at::Tensor& x, const at::Tensor& k_change, const at::Tensor& v_change) const {
    const model::Projected p = block.project(x);
    at::Tensor k = block.rotate(p.k_pre), v = p.v;
    if (k_change.defined()) k = k + k_change;
    if (v_change.defined()) v = v + v_change;
    return block.finish(x, block.attend(block.rotate(p.q_pre), k, v));
  }

  /// Summed NLL of the sampled labels when layer l's K and V are moved.
  double loss(std::size_t l, const at::Tensor& k_change, const at::Tensor& v_change) const {
    const c10::NoGradGuard no_grad;
    at::Tensor x = run(*blocks_[l], states_[l], k_change, v_change);
    for (std::size_t m = l + 1; m < blocks_.size(); ++m) x = run(*blocks_[m], x, {}, {});
    const at::Tensor log_p = at::log_softmax(head_->logits(x).to(at::kDouble), -1);
    double sum = 0;
    for (std::int64_t t = kSinks; t < kTokens; ++t) sum -= log_p[t][labels_.labels[0][static_cast<std::size_t>(t)]].item<double>();
    return sum;
  }

  /// Gradients of K and V of every layer, [T, H, D].
  std::vector<std::pair<at::Tensor, at::Tensor>> walk_back() const {
    std::vector<std::pair<at::Tensor, at::Tensor>> g(blocks_.size());
    std::vector<at::Tensor> d_y = labels_.d_hidden;
    for (std::size_t l = blocks_.size(); l-- > 0;) {
      BlockGraph graph(*blocks_[l], states_[l]);
      const AttentionGradients a = graph.backward(d_y, {}, {});
      g[l] = {a.d_k.select(1, 0).contiguous(), a.d_v.select(1, 0).contiguous()};
    }
    return g;
  }

  /// Half the central difference over what the gradient predicts, when layer l moves along `direction`.
  double ratio(std::size_t l, const at::Tensor& direction, bool key) const {
    const double norm2 = direction.to(at::kDouble).square().sum().item<double>(), predicted = 0.05;
    const at::Tensor step = direction * (predicted / norm2);
    const at::Tensor none;
    const double up = loss(l, key ? step : none, key ? none : step), down = loss(l, key ? -step : none, key ? none : -step);
    return (up - down) / 2 / predicted;
  }

  test::TempFolder folder_;
  ThreadPool pool_{1};
  std::optional<model::StreamingModel> model_;
  std::vector<std::unique_ptr<model::Block>> blocks_;
  std::unique_ptr<model::Head> head_;
  std::vector<at::Tensor> states_;
  LabelGradients labels_;
};

TEST_P(Alignment, EveryLayerMatchesFiniteDifferences) {
  const auto g = walk_back();
  for (std::size_t l = 0; l < g.size(); ++l) {
    EXPECT_NEAR(ratio(l, g[l].first, true), 1.0, 0.05) << "K of layer " << l;
    EXPECT_NEAR(ratio(l, g[l].second, false), 1.0, 0.05) << "V of layer " << l;
  }
}

TEST_P(Alignment, ReversedLayerOrderFails) {
  const auto g = walk_back();
  ASSERT_GE(g.size(), 2u);
  for (std::size_t l = 0; l < g.size(); ++l) {
    const std::size_t mirror = g.size() - 1 - l;
    if (mirror == l) continue;
    EXPECT_GT(std::fabs(ratio(l, g[mirror].first, true) - 1.0), 0.05) << "K of layer " << l;
    EXPECT_GT(std::fabs(ratio(l, g[mirror].second, false) - 1.0), 0.05) << "V of layer " << l;
  }
}

TEST_P(Alignment, LabelsDependOnSeedDocumentAndDrawOnly) {
  const auto a = sampled_label_gradients(*head_, states_.back(), kSinks, 2, 5, 0, pool_);
  ThreadPool other(2);
  const auto b = sampled_label_gradients(*head_, states_.back(), kSinks, 2, 5, 0, other);
  EXPECT_EQ(a.labels, b.labels);
  EXPECT_EQ(a.labels[0], labels_.labels[0]);
  EXPECT_NE(a.labels[0], a.labels[1]);
  EXPECT_NE(a.labels[0], sampled_label_gradients(*head_, states_.back(), kSinks, 1, 5, 1, pool_).labels[0]);
  EXPECT_NE(a.labels[0], sampled_label_gradients(*head_, states_.back(), kSinks, 1, 6, 0, pool_).labels[0]);
  for (std::int64_t t = 0; t < kSinks; ++t) EXPECT_EQ(a.labels[0][static_cast<std::size_t>(t)], -1);
  EXPECT_EQ(a.d_hidden[0].slice(0, 0, kSinks).abs().max().item<float>(), 0.0f);
}

INSTANTIATE_TEST_SUITE_P(Models, Alignment, testing::Values("m-llama", "m-mistral", "m-qwen2-big", "m-qwen3", "m-gemma3"));

}  // namespace
}  // namespace calib::sens

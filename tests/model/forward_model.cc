#include "tests/model/forward_model.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include "libcalib/model/torch_block.h"

namespace calib::test {
namespace {

class KeepAll final : public model::LayerTap {
 public:
  explicit KeepAll(std::vector<CapturedLayer>& layers) : layers_(layers) {}
  void begin_layer(const LayerGeometry& layer) override { geometry_ = layer; }
  void on_document(const model::LayerCapture& c) override {
    const auto n = static_cast<std::size_t>(c.tensors.n_tokens), d = static_cast<std::size_t>(geometry_.head_dim);
    const std::size_t q = n * d * static_cast<std::size_t>(geometry_.n_q_heads), kv = n * d * static_cast<std::size_t>(geometry_.n_kv_heads);
    CapturedLayer layer;
    layer.q_pre.assign(c.tensors.q_pre, c.tensors.q_pre + q);
    layer.q_post.assign(c.tensors.q_post, c.tensors.q_post + q);
    layer.k_pre.assign(c.tensors.k_pre, c.tensors.k_pre + kv);
    layer.k_post.assign(c.tensors.k_post, c.tensors.k_post + kv);
    layer.v.assign(c.tensors.v, c.tensors.v + kv);
    layer.hidden.assign(c.hidden, c.hidden + n * static_cast<std::size_t>(c.hidden_size));
    layers_.push_back(std::move(layer));
  }
  void end_layer(const LayerGeometry&) override {}

 private:
  std::vector<CapturedLayer>& layers_;
  LayerGeometry geometry_;
};

at::Tensor final_hidden(const model::StreamingModel& model, const std::vector<text::TokenId>& ids) {
  at::Tensor x = model.load_embedding()->lookup(ids);
  for (std::int64_t l = 0; l < model.n_layers(); ++l) {
    const auto block = model.load_block(l);
    const model::Projected p = block->project(x);
    x = block->finish(x, block->attend(block->rotate(p.q_pre), block->rotate(p.k_pre), p.v));
  }
  return x;
}

std::vector<float> to_vector(const at::Tensor& x) {
  const at::Tensor host = x.to(at::kFloat).contiguous();
  return {host.data_ptr<float>(), host.data_ptr<float>() + host.numel()};
}

}  // namespace

double Forward::mean_nll() const {
  double sum = 0;
  std::int64_t n = 0;
  for (std::size_t b = 0; b < nll.sum.size(); ++b) sum += nll.sum[b], n += nll.count[b];
  return n ? sum / static_cast<double>(n) : std::numeric_limits<double>::quiet_NaN();
}

std::int64_t Forward::argmax(std::int64_t row) const {
  const auto first = logits.begin() + row * vocab;
  return std::max_element(first, first + vocab) - first;
}

Forward run_forward(const model::StreamingModel& model, const std::vector<text::TokenId>& ids) {
  Forward result;
  KeepAll tap(result.layers);
  text::Document document;
  document.ids = ids;
  result.nll = model::run_streaming(model, {&document, 1}, {}, &tap);
  if (model.has_head()) {
    const c10::InferenceMode inference;
    result.logits = to_vector(model.load_head()->logits(final_hidden(model, ids)));
    result.vocab = model.identity().vocab_size;
  }
  return result;
}

Forward run_forward(const std::string& path, const std::vector<text::TokenId>& ids) {
  return run_forward(model::StreamingModel::open(path, {}), ids);
}

std::vector<float> last_logits(const model::StreamingModel& model, const std::vector<text::TokenId>& ids) {
  const c10::InferenceMode inference;
  const at::Tensor x = final_hidden(model, ids);
  return to_vector(model.load_head()->logits(x.slice(0, x.size(0) - 1)));
}

void load_and_drop_head(const model::StreamingModel& model) { model.load_head(); }

double squared_norm_of_output_projection(const model::StreamingModel& model, std::int64_t layer) {
  double sum = 0;
  for (const float w : to_vector(model.load_block(layer)->output_projection())) sum += static_cast<double>(w) * w;
  return sum;
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size() || a.empty()) return std::numeric_limits<double>::infinity();
  double largest = 0, difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::fabs(static_cast<double>(b[i])));
    difference = std::max(difference, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return largest > 0 ? difference / largest : difference;
}

}  // namespace calib::test

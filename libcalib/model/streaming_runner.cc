#include "libcalib/model/streaming_runner.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <limits>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "libcalib/model/hidden_store.h"
#include "libcalib/model/row_sampling.h"
#include "libcalib/model/torch_block.h"
#include "libcalib/stats/tile_kernels.h"

namespace calib::model {
namespace {

/// Documents are joined up to this many rows for the matrix products; attention and positions stay their own.
constexpr std::int64_t kBatchRows = 1024;
constexpr std::int64_t kLogitTileBytes = std::int64_t{32} << 20;

struct Batch {
  std::size_t first_document = 0, n_documents = 0;
  std::int64_t first_row = 0, n_rows = 0;
};

std::vector<Batch> make_batches(std::span<const text::Document> documents) {
  std::vector<Batch> batches;
  std::int64_t row = 0;
  for (std::size_t d = 0; d < documents.size(); ++d) {
    const auto n = static_cast<std::int64_t>(documents[d].ids.size());
    if (batches.empty() || batches.back().n_rows + n > kBatchRows) batches.push_back({d, 0, row, 0});
    ++batches.back().n_documents;
    batches.back().n_rows += n;
    row += n;
  }
  return batches;
}

at::Tensor to_host_f32(const at::Tensor& x) { return x.to(at::kCPU, at::kFloat).contiguous(); }

/// max |x| of every row of a contiguous fp32 tensor [n, C] on the CPU. NaN and infinity come out as such: as integers, the
/// bits of |x| are ordered like the values, with both on top.
std::vector<float> row_absmax(const at::Tensor& x) {
  const std::int64_t n = x.size(0), width = x.size(1);
  std::vector<float> result(static_cast<std::size_t>(n));
  at::parallel_for(0, n, 256, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const float* row = x.data_ptr<float>() + t * width;
      std::int32_t largest = 0;
      for (std::int64_t c = 0; c < width; ++c) largest = std::max(largest, std::bit_cast<std::int32_t>(row[c]) & 0x7FFFFFFF);
      result[static_cast<std::size_t>(t)] = std::bit_cast<float>(largest);
    }
  });
  return result;
}

/// Softmax rows of the sampled queries. q_post: [T, Q, D], k_post: [T, H, D] -> fp32 [Q, R, T] on the CPU.
at::Tensor sampled_attention(const LayerGeometry& layer, const at::Tensor& q_post, const at::Tensor& k_post,
                             const std::vector<std::int64_t>& rows) {
  const std::int64_t n = k_post.size(0), n_rows = static_cast<std::int64_t>(rows.size()), d = layer.head_dim;
  const auto on_device = at::TensorOptions().dtype(at::kLong).device(q_post.device());
  const at::Tensor row = at::tensor(rows, at::kLong).to(on_device);
  const at::Tensor q = (at::index_select(q_post, 0, row).to(at::kFloat) * layer.softmax_scale).transpose(0, 1).reshape({layer.n_kv_heads, -1, d});
  const at::Tensor k = k_post.to(at::kFloat).transpose(0, 1).contiguous();
  std::vector<at::Tensor> heads;
  for (std::int64_t h = 0; h < layer.n_kv_heads; ++h) heads.push_back(linear_map(q.select(0, h), k.select(0, h)));
  at::Tensor scores = at::stack(heads).view({layer.n_q_heads, n_rows, n});
  scores = to_host_f32(scores);
  float* const p = scores.data_ptr<float>();
  at::parallel_for(0, layer.n_q_heads * n_rows, 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t last = rows[static_cast<std::size_t>(i % n_rows)] + 1;
      const std::int64_t first = layer.sliding_window > 0 ? std::max<std::int64_t>(0, last - layer.sliding_window) : 0;
      float* const keys = p + i * n;
      std::fill(keys, keys + first, 0.0f);
      stats::row_softmax(keys + first, static_cast<std::size_t>(last - first));
      std::fill(keys + last, keys + n, 0.0f);
    }
  });
  return scores;
}

/// Runs one call into libtorch; what it throws becomes ours, without its text.
template <typename F>
auto torch_call(const std::string& where, F&& body) {
  try {
    return body();
  } catch (const c10::OutOfMemoryError&) {
    fail(ErrorKind::kIo, where, "not enough memory on the device; lower --seq-len or use another device");
  } catch (const c10::Error& e) {
    if (std::string(e.what()).find("DefaultCPUAllocator") != std::string::npos)
      fail(ErrorKind::kIo, where, "not enough memory; lower --seq-len, --num-samples or --hidden-mem");
    fail(ErrorKind::kInternal, where, "a tensor operation failed");
  }
}

/// W_o^T W_o of every query head [Q, D, D], summed in double: the same on every device up to the rounding of the weights.
std::vector<double> head_output_moments(const Block& block) {
  const LayerGeometry& g = block.geometry();
  const at::Tensor w = block.output_projection().to(at::kCPU, at::kDouble);  // [C, Q * D]
  std::vector<double> moments;
  for (std::int64_t q = 0; q < g.n_q_heads; ++q) {
    const at::Tensor slice = w.slice(1, q * g.head_dim, (q + 1) * g.head_dim);
    const at::Tensor moment = at::matmul(slice.transpose(0, 1), slice).contiguous();
    moments.insert(moments.end(), moment.data_ptr<double>(), moment.data_ptr<double>() + moment.numel());
  }
  return moments;
}

/// [H, D, D]: their sums over each KV head's group.
std::vector<double> output_moment(const LayerGeometry& g, const std::vector<double>& per_head) {
  const auto size = static_cast<std::size_t>(g.head_dim) * static_cast<std::size_t>(g.head_dim);
  const auto group = static_cast<std::size_t>(g.n_q_heads / g.n_kv_heads);
  std::vector<double> out(size * static_cast<std::size_t>(g.n_kv_heads), 0.0);
  for (std::size_t i = 0; i < per_head.size(); ++i) out[i / size / group * size + i % size] += per_head[i];
  return out;
}

class Walk {
 public:
  Walk(const StreamingModel& model, std::span<const text::Document> documents, const RunnerOptions& options, LayerTap* tap,
       const ProgressFn& progress)
      : model_(model), documents_(documents), options_(options), tap_(tap), progress_(progress), batches_(make_batches(documents)),
        n_rows_(batches_.empty() ? 0 : batches_.back().first_row + batches_.back().n_rows),
        torch_(tensor_options(model.device(), model.dtype())), store_(n_rows_, model.hidden_bytes_per_token(), options.hidden_memory_bytes) {
    state_.n_layers = model.n_layers();
    head_weight_ = options_.reference_nll && model.has_head() && model.block_bytes() > 0
                       ? std::max<std::int64_t>(1, model.head_bytes() / model.block_bytes()) : 0;
    state_.total = n_rows_ * (model.n_layers() + head_weight_);
  }

  ReferenceNll run() {
    const c10::InferenceMode inference;
    embed();
    for (std::int64_t l = 0; l < model_.n_layers(); ++l) layer(l);
    return options_.reference_nll && model_.has_head() ? reference() : ReferenceNll{};
  }

 private:
  void embed() {
    const auto embedding = model_.load_embedding();
    for (const Batch& batch : batches_) {
      std::int64_t row = batch.first_row;
      for (std::size_t d = batch.first_document; d < batch.first_document + batch.n_documents; ++d) {
        save(row, embedding->lookup(documents_[d].ids));
        row += static_cast<std::int64_t>(documents_[d].ids.size());
      }
    }
  }

  void layer(std::int64_t l) {
    const std::string where = fmt::format("layer {}", l);
    state_.layer_idx = l;
    const auto block = torch_call(where, [&] { return model_.load_block(l); });
    if (tap_) {
      tap_->begin_layer(block->geometry());
      const std::vector<double> moments = torch_call(where, [&] { return head_output_moments(*block); });
      tap_->on_output_moment(output_moment(block->geometry(), moments));
      tap_->on_head_output_moments(moments);
    }
    for (const Batch& batch : batches_) {
      torch_call(where, [&] { through_block(*block, batch); });
      report(batch.n_rows, &batch == &batches_.back());
    }
    if (tap_) tap_->end_layer(block->geometry());
  }

  void through_block(const Block& block, const Batch& batch) {
    const at::Tensor x = load(batch.first_row, batch.n_rows);
    const at::Tensor hidden = to_host_f32(x);
    const std::vector<float> absmax = row_absmax(hidden);
    check_finite(absmax, batch);
    const Projected p = block.project(x);
    std::vector<at::Tensor> o;
    std::int64_t row = 0;
    for (std::size_t d = batch.first_document; d < batch.first_document + batch.n_documents; ++d) {
      const std::int64_t end = row + static_cast<std::int64_t>(documents_[d].ids.size());
      const at::Tensor v = p.v.slice(0, row, end);
      const at::Tensor q_post = block.rotate(p.q_pre.slice(0, row, end)), k_post = block.rotate(p.k_pre.slice(0, row, end));
      o.push_back(block.attend(q_post, k_post, v));
      if (tap_)
        capture(block.geometry(), d, {p.q_pre.slice(0, row, end), p.k_pre.slice(0, row, end), v}, q_post, k_post,
                hidden.slice(0, row, end), absmax.data() + row);
      row = end;
    }
    save(batch.first_row, block.finish(x, o.size() == 1 ? o[0] : at::cat(o, 0)));
  }

  void capture(const LayerGeometry& layer, std::size_t document, const Projected& p, const at::Tensor& q_post,
               const at::Tensor& k_post, const at::Tensor& hidden, const float* absmax) {
    LayerCapture capture;
    capture.layer_idx = state_.layer_idx;
    capture.document_idx = static_cast<std::int64_t>(document);
    const at::Tensor q_pre = to_host_f32(p.q_pre), k_pre = to_host_f32(p.k_pre), v = to_host_f32(p.v);
    const at::Tensor q_rotated = to_host_f32(q_post), k_rotated = to_host_f32(k_post);
    capture.tensors = {k_pre.size(0), k_pre.data_ptr<float>(), k_rotated.data_ptr<float>(), v.data_ptr<float>(),
                       q_pre.data_ptr<float>(), q_rotated.data_ptr<float>()};
    RowSample sample = sample_rows(layer, k_pre.size(0), options_.attention_rows, options_.seed, capture.document_idx);
    at::Tensor probabilities;
    if (!sample.rows.empty()) {
      probabilities = sampled_attention(layer, q_post, k_post, sample.rows);
      capture.attention.p = probabilities.data_ptr<float>();
      capture.attention.rows = std::move(sample.rows);
      capture.attention.row_weight = std::move(sample.row_weight);
    }
    capture.hidden = hidden.data_ptr<float>();
    capture.hidden_absmax = absmax;
    capture.hidden_size = hidden.size(1);
    tap_->on_document(capture);
  }

  /// The residual stream that enters layer_idx, that is, leaves the one before.
  void check_finite(const std::vector<float>& absmax, const Batch& batch) const {
    std::size_t row = 0;
    for (std::size_t d = batch.first_document; d < batch.first_document + batch.n_documents; ++d)
      for (std::size_t t = 0; t < documents_[d].ids.size(); ++t, ++row)
        if (!std::isfinite(absmax[row]))
          fail(ErrorKind::kNumeric, state_.layer_idx == 0 ? "embedding" : fmt::format("layer {}", state_.layer_idx - 1),
               "the hidden state is not finite: document {}, token position {}", d, t);
  }

  ReferenceNll reference() {
    state_.layer_idx = model_.n_layers();
    const auto head = torch_call("lm_head", [&] { return model_.load_head(); });
    ReferenceNll nll;
    for (const Batch& batch : batches_) {
      torch_call("lm_head", [&] {
        const at::Tensor x = load(batch.first_row, batch.n_rows);
        check_finite(row_absmax(to_host_f32(x)), batch);
        std::int64_t row = 0;
        for (std::size_t d = batch.first_document; d < batch.first_document + batch.n_documents; ++d) {
          const std::vector<text::TokenId>& ids = documents_[d].ids;
          add_nll(*head, x.slice(0, row, row + static_cast<std::int64_t>(ids.size())), ids, nll);
          row += static_cast<std::int64_t>(ids.size());
        }
      });
      report(batch.n_rows * head_weight_, &batch == &batches_.back());
    }
    return nll;
  }

  void add_nll(const Head& head, const at::Tensor& x, const std::vector<text::TokenId>& ids, ReferenceNll& nll) const {
    const std::int64_t n = static_cast<std::int64_t>(ids.size()) - 1, tile = logit_tile_rows(head.vocab_size());
    for (std::int64_t first = 0; first < n; first += tile) {
      const std::int64_t end = std::min(n, first + tile);
      at::Tensor logits = head.logits(x.slice(0, first, end));
      const std::vector<std::int64_t> next(ids.begin() + first + 1, ids.begin() + end + 1);
      const at::Tensor target = logits.gather(1, at::tensor(next, at::kLong).to(logits.device()).unsqueeze(1));
      const at::Tensor largest = at::amax(logits, 1, /*keepdim=*/true);
      const at::Tensor mass = at::exp_(logits.sub_(largest)).sum(1, /*keepdim=*/true);
      const at::Tensor row_nll = to_host_f32(at::log(mass) + largest - target);
      const float* value = row_nll.data_ptr<float>();
      for (std::int64_t t = first; t < end; ++t) {
        const auto bucket = static_cast<std::size_t>(position_bucket(t));
        if (nll.sum.size() <= bucket) nll.sum.resize(bucket + 1), nll.count.resize(bucket + 1);
        nll.sum[bucket] += static_cast<double>(value[t - first]);
        ++nll.count[bucket];
      }
    }
  }

  at::Tensor load(std::int64_t row, std::int64_t n) const {
    at::Tensor x = at::empty({n, model_.identity().hidden_size}, torch_.device(at::kCPU));
    store_.read(row, n, x.data_ptr());
    return x.to(torch_);
  }
  void save(std::int64_t row, const at::Tensor& x) {
    const at::Tensor host = x.to(at::kCPU).contiguous();
    store_.write(row, host.size(0), host.data_ptr());
  }

  void report(std::int64_t rows, bool layer_finished) {
    state_.done += rows;
    state_.layer_finished = layer_finished;
    if (progress_) progress_(state_);
  }

  const StreamingModel& model_;
  std::span<const text::Document> documents_;
  const RunnerOptions& options_;
  LayerTap* tap_;
  const ProgressFn& progress_;
  std::vector<Batch> batches_;
  std::int64_t n_rows_, head_weight_ = 0;
  at::TensorOptions torch_;
  HiddenStore store_;
  RunProgress state_;
};

/// Multiply-adds a second of the matrix product that dominates a walk.
double measured_macs_per_second(const StreamingModel& model) {
  const c10::InferenceMode inference;
  const std::int64_t c = model.identity().hidden_size, f = model.intermediate_size(), rows = 256;
  const at::TensorOptions torch = tensor_options(model.device(), model.dtype());
  const at::Tensor x = at::ones({rows, c}, torch), w = at::ones({f, c}, torch);
  using Clock = std::chrono::steady_clock;
  double sum = linear_map(x, w).sum().item<double>();  // warm-up: thread pool, kernel selection
  const auto start = Clock::now();
  int n = 0;
  double seconds = 0;
  do {
    sum += linear_map(x, w).select(0, 0).sum().item<double>();
    ++n;
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
  } while (seconds < 0.1 && n < 10000);
  return std::isfinite(sum) ? static_cast<double>(rows * c * f) * n / seconds : 1e9;
}

}  // namespace

std::int64_t logit_tile_rows(std::int64_t vocab_size) {
  return std::clamp<std::int64_t>(kLogitTileBytes / (4 * std::max<std::int64_t>(1, vocab_size)), 1, 512);
}

ReferenceNll run_streaming(const StreamingModel& model, std::span<const text::Document> documents, const RunnerOptions& options,
                           LayerTap* tap, const ProgressFn& progress) {
  return Walk(model, documents, options, tap, progress).run();
}

RunEstimate estimate_run(const StreamingModel& model, std::span<const text::Document> documents, const RunnerOptions& options,
                         bool with_tap) {
  RunEstimate e;
  const std::int64_t element = model.dtype() == "bf16" ? 2 : 4, c = model.identity().hidden_size;
  std::int64_t rows = 0, longest = 0, total = 0;
  double pairs = 0;  // attention scores over all documents, one query head
  for (const Batch& batch : make_batches(documents)) rows = std::max(rows, batch.n_rows), total += batch.n_rows;
  for (const auto& document : documents) {
    const auto n = static_cast<std::int64_t>(document.ids.size());
    longest = std::max(longest, n);
    pairs += 0.5 * static_cast<double>(n) * static_cast<double>(n);
  }
  const bool head = options.reference_nll && model.has_head();
  std::int64_t activations = 0;
  double macs = head ? static_cast<double>(total) * static_cast<double>(model.identity().vocab_size * c) : 0.0;
  for (const LayerGeometry& g : model.identity().layers) {
    const std::int64_t q = std::int64_t{g.n_q_heads} * g.head_dim, kv = std::int64_t{g.n_kv_heads} * g.head_dim;
    // While attention runs: x, its norm, q twice, k twice, v, k and v repeated for the group, o; sampled rows thrice.
    const std::int64_t attention = rows * (3 * c + 5 * q + 3 * kv) * element +
                                   (with_tap ? 3 * 4 * options.attention_rows * longest * g.n_q_heads : 0);
    // While the MLP runs: x, h, its norm and the two wide activations, beside the captured tensors.
    const std::int64_t mlp = rows * (3 * c + 2 * model.intermediate_size() + 3 * q + 4 * kv) * element;
    activations = std::max({activations, attention, mlp});
    macs += static_cast<double>(total) * static_cast<double>(c * (2 * q + 2 * kv + 3 * model.intermediate_size())) +
            2.0 * pairs * static_cast<double>(q);
  }
  e.activation_bytes = activations;
  e.weights_bytes = std::max(model.block_bytes(), head ? model.head_bytes() : 0);
  e.logits_bytes = head ? 2 * logit_tile_rows(model.identity().vocab_size) * model.identity().vocab_size * 4 : 0;
  const std::int64_t hidden = total * model.hidden_bytes_per_token();
  e.hidden_memory_bytes = std::min(hidden, options.hidden_memory_bytes / model.hidden_bytes_per_token() * model.hidden_bytes_per_token());
  e.hidden_spill_bytes = hidden - e.hidden_memory_bytes;
  constexpr double kSustained = 0.65;  // of a lone product's rate, with norms, softmax and memory traffic between products
  e.forward_seconds = torch_call("estimate", [&] { return macs / (kSustained * measured_macs_per_second(model)); });
  return e;
}

}  // namespace calib::model

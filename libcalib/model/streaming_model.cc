#include "libcalib/model/streaming_model.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <fmt/ranges.h>

#include "libcalib/base/utf8.h"
#include "libcalib/model/architecture.h"
#include "libcalib/model/config.h"
#include "libcalib/model/rope.h"
#include "libcalib/model/tensor_map.h"
#include "libcalib/model/tensor_memory.h"
#include "libcalib/model/torch_block.h"
#include "libcalib/weights/checkpoint.h"
#include "libcalib/weights/gguf.h"

namespace calib::model {
namespace {

using weights::TensorInfo;

std::string resolve_device(const std::string& device) {
  if (device == "cpu") return device;
  const std::string index = device.rfind("cuda:", 0) == 0 ? device.substr(5) : device == "cuda" ? "0" : "";
  if (index.empty() || index.size() > 3 || index.find_first_not_of("0123456789") != std::string::npos)
    fail(ErrorKind::kUsage, "--device", "is \"{}\", expected cpu, cuda or cuda:<index>", to_valid_utf8(device));
  if (!at::hasCUDA())
    fail(ErrorKind::kUnsupported, "--device", "{} is not available: no CUDA libtorch in this build or no CUDA device; use --device cpu",
         device);
  return "cuda:" + index;
}

std::string resolve_dtype(const std::string& dtype, const std::string& device) {
  if (dtype == "auto") return device == "cpu" ? "fp32" : "bf16";
  if (dtype == "fp32" || dtype == "bf16") return dtype;
  fail(ErrorKind::kUsage, "--dtype", "is \"{}\", expected auto, fp32 or bf16", to_valid_utf8(dtype));
}

/// Rows of Llama-type q and k in GGUF files hold RoPE pairs adjacent inside each head: row 2i + s is channel i + s D/2.
/// Shape: [heads * D, ...] both ways.
at::Tensor to_half_split(const at::Tensor& x, std::int64_t head_dim) {
  const std::int64_t heads = x.size(0) / head_dim;
  const at::Tensor pairs = x.reshape({heads, head_dim / 2, 2, -1});
  return pairs.transpose(1, 2).reshape(x.sizes()).contiguous();
}

bool is_norm(BlockPart part) {
  switch (part) {
    case BlockPart::kAttentionNorm:
    case BlockPart::kQNorm:
    case BlockPart::kKNorm:
    case BlockPart::kMlpNorm:
    case BlockPart::kPostAttentionNorm:
    case BlockPart::kPostMlpNorm: return true;
    default: return false;
  }
}

class RowEmbedding final : public Embedding {
 public:
  /// `factor` multiplies every row, both rounded to the compute dtype before.
  RowEmbedding(const weights::Checkpoint& checkpoint, const TensorInfo& tensor, double factor, at::TensorOptions options)
      : checkpoint_(checkpoint), tensor_(tensor), options_(options) {
    if (factor != 1.0) factor_ = at::full({1}, factor, at::kFloat).to(options);
  }
  at::Tensor lookup(std::span<const std::int32_t> ids) const override {
    const std::int64_t width = tensor_.shape[1];
    at::Tensor rows = at::empty({static_cast<std::int64_t>(ids.size()), width}, at::kFloat);
    float* out = rows.data_ptr<float>();
    for (std::size_t i = 0; i < ids.size(); ++i, out += width) {
      if (ids[i] < 0 || ids[i] >= tensor_.shape[0])
        fail(ErrorKind::kMismatch, tensor_.name, "token id {} is outside the vocabulary of {} rows: tokenizer and weights do not belong together",
             ids[i], tensor_.shape[0]);
      checkpoint_.read_rows_f32(tensor_, ids[i], 1, {out, static_cast<std::size_t>(width)});
    }
    rows = rows.to(options_);
    return factor_.defined() ? rows.mul_(factor_) : rows;
  }

 private:
  const weights::Checkpoint& checkpoint_;
  const TensorInfo& tensor_;
  at::TensorOptions options_;
  at::Tensor factor_;
};

LayerGeometry layer_geometry(const ModelConfig& config, std::int64_t l, const std::vector<double>& inv_freq) {
  LayerGeometry g;
  g.index = static_cast<int>(l);
  g.n_q_heads = static_cast<int>(config.n_q_heads);
  g.n_kv_heads = static_cast<int>(config.n_kv_heads);
  g.head_dim = static_cast<int>(config.head_dim);
  g.softmax_scale = config.softmax_scale;
  g.sliding_window = config.sliding_window[static_cast<std::size_t>(l)];
  if (config.has_rope[static_cast<std::size_t>(l)]) {
    g.rotary_dim = g.head_dim;
    g.inv_freq = inv_freq;
  } else {
    g.rope_style = RopeStyle::kNone;
  }
  g.llamacpp_adjacent_pairs = config.architecture->llamacpp_adjacent_pairs;
  return g;
}

}  // namespace

at::TensorOptions tensor_options(const std::string& device, const std::string& dtype) {
  return at::TensorOptions().device(at::Device(device)).dtype(dtype == "bf16" ? at::kBFloat16 : at::kFloat);
}

struct StreamingModel::Impl {
  weights::Checkpoint checkpoint;
  ModelConfig config;
  TensorMap map;
  ModelIdentity identity;
  std::shared_ptr<const RopeCache> rope, local_rope;  ///< the latter of layers with a sliding window, where it differs
  std::string device, dtype;

  explicit Impl(weights::Checkpoint opened) : checkpoint(std::move(opened)) {}

  at::Tensor read(const TensorInfo& tensor) const {
    at::Tensor values = at::empty(tensor.shape, at::kFloat);
    checkpoint.read_f32(tensor, {values.data_ptr<float>(), static_cast<std::size_t>(tensor.n_elements)});
    checkpoint.release(tensor);
    return values;
  }
  /// Undefined if the configuration has no such part.
  at::Tensor load(std::int64_t layer, BlockPart part) const {
    const TensorInfo* tensor = map.blocks[static_cast<std::size_t>(layer)][static_cast<std::size_t>(part)];
    if (!tensor) return {};
    if (is_norm(part)) return load_norm(*tensor);
    at::Tensor values = read(*tensor);
    const bool rotated = part == BlockPart::kQ || part == BlockPart::kK || part == BlockPart::kQBias || part == BlockPart::kKBias;
    if (rotated && config.architecture->gguf_rows_permuted && checkpoint.kind() == weights::ContainerKind::kGguf)
      values = to_half_split(values, config.head_dim);
    return values.to(tensor_options(device, dtype));
  }
  /// Where the family multiplies by 1 + w, that sum, in fp32: it is not rounded to the compute dtype.
  at::Tensor load_norm(const TensorInfo& tensor) const {
    const at::Tensor weight = read(tensor);
    if (!config.architecture->norm_plus_one) return weight.to(tensor_options(device, dtype));
    return (checkpoint.kind() == weights::ContainerKind::kGguf ? weight : weight + 1.0).to(tensor_options(device, "fp32"));
  }
  std::int64_t element_bytes() const { return dtype == "bf16" ? 2 : 4; }
};

StreamingModel::StreamingModel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StreamingModel::~StreamingModel() = default;
StreamingModel::StreamingModel(StreamingModel&&) noexcept = default;

StreamingModel StreamingModel::open(const std::string& path, const ModelOptions& options, const LogSink& log) {
  const std::string device = resolve_device(options.device), dtype = resolve_dtype(options.dtype, device);
  auto impl = std::make_unique<Impl>(weights::Checkpoint::open(path, log));
  impl->device = device;
  impl->dtype = dtype;
  impl->config = read_config(impl->checkpoint, log);
  impl->map = map_tensors(impl->config, impl->checkpoint, log);
  if (!impl->config.defaults.empty())
    log.note(fmt::format("{}: keys that were absent, with the values used: {}", path, fmt::join(impl->config.defaults, ", ")));

  const ModelConfig& config = impl->config;
  const std::vector<double> inv_freq = rope_inv_freq(config.rope, config.head_dim);
  const std::vector<double> local_inv_freq = config.local_rope ? rope_inv_freq(*config.local_rope, config.head_dim) : inv_freq;
  impl->rope = std::make_shared<RopeCache>(inv_freq);
  impl->local_rope = config.local_rope ? std::make_shared<RopeCache>(local_inv_freq) : impl->rope;
  ModelIdentity& identity = impl->identity;
  identity.architecture = config.model_type;
  std::filesystem::path named(path);
  if (named.filename().empty()) named = named.parent_path();
  identity.name = to_valid_utf8(named.filename().string());
  identity.n_layers = config.n_layers;
  identity.hidden_size = config.hidden_size;
  identity.vocab_size = config.vocab_size;
  identity.max_positions = config.max_positions;
  identity.fast = options.fast_identity;
  for (std::int64_t l = 0; l < config.n_layers; ++l) {
    const bool local = config.sliding_window[static_cast<std::size_t>(l)] > 0;
    LayerGeometry geometry = layer_geometry(config, l, local ? local_inv_freq : inv_freq);
    if (const TensorInfo* bias = impl->map.blocks[static_cast<std::size_t>(l)][static_cast<std::size_t>(BlockPart::kKBias)]) {
      std::vector<float> values(static_cast<std::size_t>(bias->n_elements));
      impl->checkpoint.read_f32(*bias, values);
      double sum = 0;
      for (const float b : values) sum += static_cast<double>(b) * b;
      geometry.k_bias_norm = std::sqrt(sum);
    }
    identity.layers.push_back(std::move(geometry));
  }
  identity.weights_sha256 = impl->checkpoint.identity_sha256(options.fast_identity);
  const int n_threads = options.n_threads > 0 ? options.n_threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  at::set_num_threads(n_threads);
  reuse_tensor_memory();
  return StreamingModel(std::move(impl));
}

const ModelIdentity& StreamingModel::identity() const { return impl_->identity; }
std::int64_t StreamingModel::n_layers() const { return impl_->config.n_layers; }
const LayerGeometry& StreamingModel::layer(std::int64_t l) const { return impl_->identity.layers.at(static_cast<std::size_t>(l)); }
const std::string& StreamingModel::device() const { return impl_->device; }
const std::string& StreamingModel::dtype() const { return impl_->dtype; }
const std::vector<std::string>& StreamingModel::defaults_used() const { return impl_->config.defaults; }
std::int64_t StreamingModel::intermediate_size() const { return impl_->config.intermediate_size; }

std::unique_ptr<Block> StreamingModel::load_block(std::int64_t l) const {
  const auto load = [&](BlockPart part) { return impl_->load(l, part); };
  BlockWeights w;
  w.attention_norm = load(BlockPart::kAttentionNorm);
  w.q = load(BlockPart::kQ);
  w.k = load(BlockPart::kK);
  w.v = load(BlockPart::kV);
  w.o = load(BlockPart::kO);
  w.q_bias = load(BlockPart::kQBias);
  w.k_bias = load(BlockPart::kKBias);
  w.v_bias = load(BlockPart::kVBias);
  w.o_bias = load(BlockPart::kOBias);
  w.q_norm = load(BlockPart::kQNorm);
  w.k_norm = load(BlockPart::kKNorm);
  w.mlp_norm = load(BlockPart::kMlpNorm);
  w.gate = load(BlockPart::kGate);
  w.up = load(BlockPart::kUp);
  w.down = load(BlockPart::kDown);
  w.gate_bias = load(BlockPart::kGateBias);
  w.up_bias = load(BlockPart::kUpBias);
  w.down_bias = load(BlockPart::kDownBias);
  w.post_attention_norm = load(BlockPart::kPostAttentionNorm);
  w.post_mlp_norm = load(BlockPart::kPostMlpNorm);
  w.activation = impl_->config.architecture->activation;
  return make_block(layer(l), std::move(w), layer(l).sliding_window > 0 ? impl_->local_rope : impl_->rope, impl_->config.rms_epsilon);
}

std::unique_ptr<Embedding> StreamingModel::load_embedding() const {
  const double factor = impl_->config.architecture->scaled_embedding ? std::sqrt(static_cast<double>(impl_->config.hidden_size)) : 1.0;
  return std::make_unique<RowEmbedding>(impl_->checkpoint, *impl_->map.embedding, factor, tensor_options(impl_->device, impl_->dtype));
}

bool StreamingModel::has_head() const { return impl_->map.head != nullptr; }

std::unique_ptr<Head> StreamingModel::load_head() const {
  if (!has_head())
    fail(ErrorKind::kMismatch, impl_->checkpoint.path(), "lm_head.weight is absent and tie_word_embeddings is false: next-token "
         "distributions cannot be computed; metrics that need none (attn_kl, attn_out) still work");
  const at::TensorOptions options = tensor_options(impl_->device, impl_->dtype);
  return make_head(impl_->load_norm(*impl_->map.final_norm), impl_->read(*impl_->map.head).to(options),
                   impl_->config.rms_epsilon);
}

std::unique_ptr<text::Tokenizer> StreamingModel::load_tokenizer(const LogSink& log) const {
  auto tokenizer = impl_->checkpoint.kind() == weights::ContainerKind::kGguf ? text::load_tokenizer_gguf(impl_->checkpoint.gguf(), log)
                                                                             : text::load_tokenizer_json(impl_->checkpoint.folder(), log);
  if (impl_->config.architecture->needs_bos && !tokenizer->adds_bos())
    log.warning(fmt::format("{}: the tokenizer sets no BOS in front of a document (add_bos_token), without which {} is far from what it was "
                            "trained on", impl_->checkpoint.path(), impl_->config.model_type));
  return tokenizer;
}

std::int64_t StreamingModel::block_bytes() const {
  std::int64_t largest = 0;
  for (const auto& block : impl_->map.blocks) {
    std::int64_t n = 0;
    for (const TensorInfo* tensor : block) n += tensor ? tensor->n_elements : 0;
    largest = std::max(largest, n);
  }
  return largest * impl_->element_bytes();
}
std::int64_t StreamingModel::embedding_bytes() const { return impl_->map.embedding->n_elements * impl_->element_bytes(); }
std::int64_t StreamingModel::head_bytes() const { return has_head() ? impl_->map.head->n_elements * impl_->element_bytes() : 0; }
std::int64_t StreamingModel::hidden_bytes_per_token() const { return impl_->config.hidden_size * impl_->element_bytes(); }

}  // namespace calib::model

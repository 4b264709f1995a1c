#include "libcalib/model/config.h"

#include <filesystem>

#include "libcalib/base/mapped_file.h"
#include "libcalib/model/architecture.h"
#include "libcalib/model/config_checks.h"
#include "libcalib/weights/checkpoint.h"

namespace calib::model {
namespace {

/// What GGUF files state by the presence of tensors instead of by a key.
void complete_from_tensors(ModelConfig& config, const weights::Checkpoint& checkpoint) {
  const weights::TensorInfo* embedding = checkpoint.find("token_embd.weight");
  if (embedding && embedding->shape.size() == 2) config.vocab_size = embedding->shape[0];
  config.tied_embedding = checkpoint.find("output.weight") == nullptr;
  const auto present = [&](BlockPart part) { return checkpoint.find(block_tensor_name(*config.architecture, part, 0, true)) != nullptr; };
  if (config.architecture->bias == BiasRule::kConfigured) {
    config.attention_bias = present(BlockPart::kQBias) || present(BlockPart::kKBias) || present(BlockPart::kVBias);
    config.output_bias = present(BlockPart::kOBias);
  }
  if (config.architecture->has_mlp_bias) config.mlp_bias = present(BlockPart::kGateBias);
  if (const weights::TensorInfo* factors = checkpoint.find("rope_freqs.weight")) {
    if (factors->n_elements != config.head_dim / 2)
      fail(ErrorKind::kMismatch, checkpoint.path(), "rope_freqs.weight has {} values, expected {} (half of head_dim {})",
           factors->n_elements, config.head_dim / 2, config.head_dim);
    std::vector<float> values(static_cast<std::size_t>(factors->n_elements));
    checkpoint.read_f32(*factors, values);
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!(values[i] > 0.0f))
        fail(ErrorKind::kFormat, checkpoint.path(), "rope_freqs.weight[{}] is {}, expected a positive divisor", i, values[i]);
    config.rope.freq_factors.assign(values.begin(), values.end());
  }
  for (const char* name : {"rope_factors_long.weight", "rope_factors_short.weight"})
    if (checkpoint.find(name))
      fail(ErrorKind::kUnsupported, checkpoint.path(), "tensor {}: longrope scaling is not offered", name);
}

}  // namespace

void check_heads(const ModelConfig& config, const HeadKeys& keys, const std::string& where) {
  if (config.n_kv_heads > config.n_q_heads || config.n_q_heads % config.n_kv_heads != 0)
    fail(ErrorKind::kFormat, where, "{} {} is not a multiple of {} {}", keys.q_heads, config.n_q_heads, keys.kv_heads,
         config.n_kv_heads);
  if (config.head_dim <= 0)
    fail(ErrorKind::kFormat, where, "{} {} is smaller than {} {} and {} is absent", keys.hidden_size, config.hidden_size,
         keys.q_heads, config.n_q_heads, keys.head_dim);
  if (config.head_dim % 2 != 0)
    fail(ErrorKind::kFormat, where, "head_dim {} is odd; RoPE pairs need an even number ({} or {} / {})", config.head_dim,
         keys.head_dim, keys.hidden_size, keys.q_heads);
}

void check_layer_count(std::int64_t n_layers, const std::string& key, const std::string& where) {
  constexpr std::int64_t kMaxLayers = 65536;
  if (n_layers > kMaxLayers) fail(ErrorKind::kFormat, where, "key {} is {}, expected at most {}", key, n_layers, kMaxLayers);
}

ModelConfig read_config(const weights::Checkpoint& checkpoint, const LogSink& log) {
  if (checkpoint.kind() == weights::ContainerKind::kGguf) {
    if (checkpoint.tensors().empty())
      fail(ErrorKind::kMismatch, checkpoint.path(),
           "no tensors, vocabulary only: this GGUF file holds a tokenizer and no weights; pass the file with the weights");
    ModelConfig config = parse_gguf_config(checkpoint.gguf(), log);
    complete_from_tensors(config, checkpoint);
    return config;
  }
  const std::string path = (std::filesystem::path(checkpoint.folder()) / "config.json").string();
  const MappedFile file(path);
  return parse_hf_config(file.bytes(), path, log);
}

}  // namespace calib::model

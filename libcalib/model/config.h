#pragma once
// What a checkpoint says about its decoder, read strictly from config.json or GGUF metadata.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libcalib/base/error.h"

namespace calib::weights {
class Checkpoint;
class GgufMetadata;
}

namespace calib::model {

struct ArchitectureRow;

enum class RopeScaling { kDefault, kLinear, kLlama3 };

/// RoPE settings before they become frequencies (rope.h).
struct RopeConfig {
  double theta = 10000.0;
  RopeScaling scaling = RopeScaling::kDefault;
  double factor = 1.0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  ///< llama3
  double original_max_positions = 8192;                  ///< llama3
  std::vector<double> freq_factors;  ///< rope_freqs.weight of a GGUF file: divisors of the frequencies, empty if none
};

struct ModelConfig {
  std::string model_type;  ///< llama, mistral, qwen2, qwen3, gemma3_text, smollm3
  const ArchitectureRow* architecture = nullptr;
  std::int64_t n_layers = 0, hidden_size = 0, intermediate_size = 0, vocab_size = 0, max_positions = 0;
  std::int64_t n_q_heads = 0, n_kv_heads = 0, head_dim = 0;
  double rms_epsilon = 1e-6;
  bool tied_embedding = false;   ///< the head shares the embedding's weights
  bool attention_bias = false;   ///< q, k, v (and o where the family has it)
  bool output_bias = false;      ///< o_proj has a bias
  bool mlp_bias = false;
  double softmax_scale = 0.0;    ///< head_dim^-0.5, or query_pre_attn_scalar^-0.5
  RopeConfig rope;
  std::optional<RopeConfig> local_rope;  ///< of layers with a sliding window, where the family gives them their own
  std::vector<std::int64_t> sliding_window;  ///< per layer, keys a row sees (its own included); 0 = all
  std::vector<std::uint8_t> has_rope;        ///< per layer; without, keys are cached as they are projected
  std::vector<std::string> defaults;         ///< "rope_theta=10000" for every key that was absent
};

/// Reads a Hugging Face config.json. A key that is null counts as absent; a wrong JSON type is an error, never converted.
/// Throws: kFormat naming key and value, kUnsupported naming model_type or the key whose feature is not offered.
ModelConfig parse_hf_config(std::string_view text, const std::string& path, const LogSink& log = {});

/// The same from GGUF metadata. vocab_size stays 0: the embedding's shape decides. freq_factors stay empty.
ModelConfig parse_gguf_config(const weights::GgufMetadata& metadata, const LogSink& log = {});

/// Either of the two, by container; for GGUF also vocab_size, tied_embedding, bias flags and freq_factors from its tensors.
/// Throws: as above; kNotFound for a folder without config.json; kMismatch for a vocabulary-only GGUF file.
ModelConfig read_config(const weights::Checkpoint& checkpoint, const LogSink& log = {});

}  // namespace calib::model

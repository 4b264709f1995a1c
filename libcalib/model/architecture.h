#pragma once
// The decoder families that can be run: one table row each. A new family of this shape is a row, not a code path.

#include <cstdint>
#include <string>
#include <vector>

namespace calib::model {

enum class BiasRule {
  kConfigured,  ///< attention_bias of config.json: q, k, v and o together; GGUF: by presence
  kQkv,         ///< always on q, k, v, never on o
  kNever,
};

enum class WindowRule {
  kNone,             ///< sliding_window is not a key of this family
  kAllLayers,        ///< every layer, if sliding_window is set
  kUseSlidingWindow, ///< only with use_sliding_window, on layers >= max_window_layers (or by layer_types)
};

struct ArchitectureRow {
  const char* model_type;         ///< config.json
  const char* gguf_architecture;  ///< general.architecture; empty where GGUF files use another row's name
  BiasRule bias;
  bool has_mlp_bias;              ///< mlp_bias is a key of this family
  bool qk_norm;                   ///< RMS norm of q and k per head, before RoPE
  WindowRule window;
  bool gguf_rows_permuted;        ///< GGUF stores q and k rows with RoPE pairs adjacent
  bool llamacpp_adjacent_pairs;   ///< llama.cpp's NORM rope type (else NEOX)
  std::int64_t default_head_dim;  ///< where head_dim is absent; 0 = hidden_size / num_attention_heads
  std::int64_t default_max_positions;
  std::int64_t default_sliding_window;  ///< where the key is absent (null always means none)
};

const std::vector<ArchitectureRow>& architecture_rows();
/// nullptr if there is no such row.
const ArchitectureRow* find_model_type(const std::string& model_type);
const ArchitectureRow* find_gguf_architecture(const std::string& name);
/// "llama, mistral, qwen2, qwen3", for messages.
std::string supported_model_types();

/// Weights of one block. Order is that of the name table in architecture.cc.
enum class BlockPart {
  kAttentionNorm, kQ, kK, kV, kO, kQBias, kKBias, kVBias, kOBias, kQNorm, kKNorm,
  kMlpNorm, kGate, kUp, kDown, kGateBias, kUpBias, kDownBias,
};
inline constexpr int kNBlockParts = 18;

/// "layers.3.self_attn.q_proj.weight" (without prefix) or "blk.3.attn_q.weight".
std::string block_tensor_name(BlockPart part, std::int64_t layer, bool gguf);

/// Prefixes under which Hugging Face checkpoints hold a decoder; "" among them.
const std::vector<std::string>& decoder_prefixes();

}  // namespace calib::model

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
  kPattern,          ///< every layer but each sliding_window_pattern-th (or by layer_types); such layers have a RoPE of their own
};

enum class Activation { kSilu, kGeluTanh };  ///< of the gated MLP

/// What a family takes where config.json or the GGUF file does not say.
struct FamilyDefaults {
  std::int64_t head_dim = 0;      ///< 0 = hidden_size / num_attention_heads
  std::int64_t max_positions = 0;
  std::int64_t sliding_window = 0;  ///< where the key is absent (null always means none)
  std::int64_t window_pattern = 0;  ///< kPattern
  std::int64_t no_rope_interval = 0;  ///< each such layer has no RoPE; 0 = all have it
  double rope_theta = 10000.0;
  double local_rope_theta = 0.0;    ///< kPattern: of the layers with a window
  bool tied_embedding = false;
  std::int64_t n_q_heads = 0, n_kv_heads = 0, vocab_size = 0;  ///< 0 = required (KV heads: as many as query heads)
  double query_pre_attn_scalar = 0.0;  ///< 0 = not a key of this family, the softmax scale is head_dim^-0.5
};

struct ArchitectureRow {
  const char* model_type;         ///< config.json
  const char* gguf_architecture;  ///< general.architecture; empty where GGUF files use another row's name
  BiasRule bias = BiasRule::kNever;
  bool has_mlp_bias = false;             ///< mlp_bias is a key of this family
  bool qk_norm = false;                  ///< RMS norm of q and k per head, before RoPE
  WindowRule window = WindowRule::kNone;
  bool gguf_rows_permuted = false;       ///< GGUF stores q and k rows with RoPE pairs adjacent
  bool llamacpp_adjacent_pairs = false;  ///< llama.cpp's NORM rope type (else NEOX)
  bool post_norms = false;               ///< RMS norms also behind attention and MLP, before the residual is added
  bool norm_plus_one = false;            ///< RMS norms multiply by 1 + w; GGUF files store 1 + w
  bool scaled_embedding = false;         ///< embedding rows times sqrt(hidden_size), the factor rounded to the compute dtype
  Activation activation = Activation::kSilu;
  bool needs_bos = false;                ///< documents without BOS are far from what the family was trained on
  FamilyDefaults defaults;
};

const std::vector<ArchitectureRow>& architecture_rows();
/// nullptr if there is no such row.
const ArchitectureRow* find_model_type(const std::string& model_type);
const ArchitectureRow* find_gguf_architecture(const std::string& name);
/// "llama, mistral, qwen2, qwen3, gemma3_text, smollm3", for messages.
std::string supported_model_types();

/// Weights of one block. Order is that of the name table in architecture.cc.
enum class BlockPart {
  kAttentionNorm, kQ, kK, kV, kO, kQBias, kKBias, kVBias, kOBias, kQNorm, kKNorm,
  kMlpNorm, kGate, kUp, kDown, kGateBias, kUpBias, kDownBias, kPostAttentionNorm, kPostMlpNorm,
};
inline constexpr int kNBlockParts = 20;

/// "layers.3.self_attn.q_proj.weight" (without prefix) or "blk.3.attn_q.weight". The row matters to norms of Hugging Face
/// checkpoints: post_attention_layernorm is the MLP's input norm, except where the family has post_norms.
std::string block_tensor_name(const ArchitectureRow& row, BlockPart part, std::int64_t layer, bool gguf);

/// Prefixes under which Hugging Face checkpoints hold a decoder; "" among them.
const std::vector<std::string>& decoder_prefixes();

}  // namespace calib::model

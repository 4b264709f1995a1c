#include "libcalib/model/architecture.h"

#include <array>

#include <fmt/format.h>

namespace calib::model {
namespace {

struct PartName {
  const char* hf;    // after "layers.<l>."
  const char* gguf;  // after "blk.<l>."
};

// Indexed by BlockPart.
constexpr std::array<PartName, kNBlockParts> kPartNames = {{
    {"input_layernorm.weight", "attn_norm.weight"},
    {"self_attn.q_proj.weight", "attn_q.weight"},
    {"self_attn.k_proj.weight", "attn_k.weight"},
    {"self_attn.v_proj.weight", "attn_v.weight"},
    {"self_attn.o_proj.weight", "attn_output.weight"},
    {"self_attn.q_proj.bias", "attn_q.bias"},
    {"self_attn.k_proj.bias", "attn_k.bias"},
    {"self_attn.v_proj.bias", "attn_v.bias"},
    {"self_attn.o_proj.bias", "attn_output.bias"},
    {"self_attn.q_norm.weight", "attn_q_norm.weight"},
    {"self_attn.k_norm.weight", "attn_k_norm.weight"},
    {"post_attention_layernorm.weight", "ffn_norm.weight"},
    {"mlp.gate_proj.weight", "ffn_gate.weight"},
    {"mlp.up_proj.weight", "ffn_up.weight"},
    {"mlp.down_proj.weight", "ffn_down.weight"},
    {"mlp.gate_proj.bias", "ffn_gate.bias"},
    {"mlp.up_proj.bias", "ffn_up.bias"},
    {"mlp.down_proj.bias", "ffn_down.bias"},
    {"post_attention_layernorm.weight", "post_attention_norm.weight"},
    {"post_feedforward_layernorm.weight", "post_ffw_norm.weight"},
}};

}  // namespace

const std::vector<ArchitectureRow>& architecture_rows() {
  // Mistral's GGUF files call themselves "llama" and differ from it in nothing that this table states but the window.
  static const std::vector<ArchitectureRow> rows = {
      {.model_type = "llama", .gguf_architecture = "llama", .bias = BiasRule::kConfigured, .has_mlp_bias = true,
       .gguf_rows_permuted = true, .llamacpp_adjacent_pairs = true, .defaults = {.max_positions = 2048}},
      {.model_type = "mistral", .gguf_architecture = "", .window = WindowRule::kAllLayers, .gguf_rows_permuted = true,
       .llamacpp_adjacent_pairs = true, .defaults = {.max_positions = 131072, .sliding_window = 4096}},
      {.model_type = "qwen2", .gguf_architecture = "qwen2", .bias = BiasRule::kQkv, .window = WindowRule::kUseSlidingWindow,
       .defaults = {.max_positions = 32768, .sliding_window = 4096}},
      {.model_type = "qwen3", .gguf_architecture = "qwen3", .bias = BiasRule::kConfigured, .qk_norm = true,
       .window = WindowRule::kUseSlidingWindow, .defaults = {.head_dim = 128, .max_positions = 32768, .sliding_window = 4096}},
      {.model_type = "gemma3_text", .gguf_architecture = "gemma3", .bias = BiasRule::kConfigured, .qk_norm = true,
       .window = WindowRule::kPattern, .post_norms = true, .norm_plus_one = true, .scaled_embedding = true,
       .activation = Activation::kGeluTanh, .needs_bos = true,
       .defaults = {.head_dim = 256, .max_positions = 131072, .sliding_window = 4096, .window_pattern = 6, .rope_theta = 1e6,
                    .local_rope_theta = 10000.0, .tied_embedding = true, .n_q_heads = 8, .n_kv_heads = 4, .vocab_size = 262208,
                    .query_pre_attn_scalar = 256.0}},
      {.model_type = "smollm3", .gguf_architecture = "smollm3", .bias = BiasRule::kConfigured, .has_mlp_bias = true,
       .window = WindowRule::kUseSlidingWindow, .gguf_rows_permuted = true, .llamacpp_adjacent_pairs = true,
       .defaults = {.max_positions = 32768, .no_rope_interval = 4, .rope_theta = 2e6, .tied_embedding = true, .n_q_heads = 16, .n_kv_heads = 4,
                    .vocab_size = 128256}},
  };
  return rows;
}

const ArchitectureRow* find_model_type(const std::string& model_type) {
  for (const ArchitectureRow& row : architecture_rows())
    if (model_type == row.model_type) return &row;
  return nullptr;
}

const ArchitectureRow* find_gguf_architecture(const std::string& name) {
  for (const ArchitectureRow& row : architecture_rows())
    if (!name.empty() && name == row.gguf_architecture) return &row;
  return nullptr;
}

std::string supported_model_types() {
  std::string list;
  for (const ArchitectureRow& row : architecture_rows()) list += (list.empty() ? "" : ", ") + std::string(row.model_type);
  return list;
}

std::string block_tensor_name(const ArchitectureRow& row, BlockPart part, std::int64_t layer, bool gguf) {
  const PartName& name = kPartNames[static_cast<std::size_t>(part)];
  if (gguf) return fmt::format("blk.{}.{}", layer, name.gguf);
  const bool own_name = row.post_norms && part == BlockPart::kMlpNorm;
  return fmt::format("layers.{}.{}", layer, own_name ? "pre_feedforward_layernorm.weight" : name.hf);
}

const std::vector<std::string>& decoder_prefixes() {
  static const std::vector<std::string> prefixes = {"model.", "", "language_model.model.", "model.language_model.", "transformer."};
  return prefixes;
}

}  // namespace calib::model

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
}};

}  // namespace

const std::vector<ArchitectureRow>& architecture_rows() {
  // Mistral's GGUF files call themselves "llama" and differ from it in nothing that this table states but the window.
  static const std::vector<ArchitectureRow> rows = {
      // model_type  gguf     bias                   mlp_b  qknorm window                          perm   norm   hd   positions window
      {"llama", "llama", BiasRule::kConfigured, true, false, WindowRule::kNone, true, true, 0, 2048, 0},
      {"mistral", "", BiasRule::kNever, false, false, WindowRule::kAllLayers, true, true, 0, 131072, 4096},
      {"qwen2", "qwen2", BiasRule::kQkv, false, false, WindowRule::kUseSlidingWindow, false, false, 0, 32768, 4096},
      {"qwen3", "qwen3", BiasRule::kConfigured, false, true, WindowRule::kUseSlidingWindow, false, false, 128, 32768, 4096},
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

std::string block_tensor_name(BlockPart part, std::int64_t layer, bool gguf) {
  const PartName& name = kPartNames[static_cast<std::size_t>(part)];
  return gguf ? fmt::format("blk.{}.{}", layer, name.gguf) : fmt::format("layers.{}.{}", layer, name.hf);
}

const std::vector<std::string>& decoder_prefixes() {
  static const std::vector<std::string> prefixes = {"model.", "", "language_model.model.", "model.language_model.", "transformer."};
  return prefixes;
}

}  // namespace calib::model

#pragma once
// The standard small models of the tests, as Hugging Face folders and as GGUF files.
//
// Values: tensor `name` (full Hugging Face name, "model." included) is filled in row-major order with
//   (float)(normal() * scale) from Rng::for_item(seed, fnv1a64(name)), seed 1,
// scale 1 for model.embed_tokens.weight (but for m-gemma3), 1/sqrt(columns) for every other matrix; norm weights are 1, biases 0.
// fnv1a64: FNV-1a, offset basis 14695981039346656037, prime 1099511628211, over the bytes of the name.
// So every tensor depends on its name and shape only, never on the order of writing.
//
// Common: vocabulary 260, hidden 64, intermediate 128, untied head, RMS epsilon 1e-6, RoPE theta 10000, 4096 positions.
// m-qwen2-big: k_proj.bias is 600/sqrt(2) in channels 0 and 8 of layer 0 and 900/sqrt(2) there in layer 3; in layers 1 and 2
// normal() values from the tensor's stream, scaled to norm 20.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace calib::test {

std::uint64_t fnv1a64(const std::string& text);

struct TinyTensor {
  std::string name;                  ///< Hugging Face name
  std::vector<std::int64_t> shape;   ///< outermost first
  std::vector<float> values;
};

struct TinyModel {
  std::string model_type;            ///< llama, mistral, qwen2, qwen3, gemma3_text, smollm3
  std::int64_t n_layers = 0, hidden = 64, n_q_heads = 0, n_kv_heads = 0, head_dim = 0, intermediate = 128, vocab = 260;
  std::int64_t max_positions = 4096, sliding_window = 0;
  double rms_eps = 1e-6, rope_theta = 10000, local_rope_theta = 10000;
  bool tied = false;                 ///< no lm_head.weight: the head shares the embedding
  bool explicit_head_dim = false;    ///< config.json states head_dim
  bool ids_tokenizer = false;        ///< tok-ids(vocab) instead of tok-byte
  std::vector<TinyTensor> tensors;   ///< embedding, layers in order, norm, head

  bool gemma() const { return model_type == "gemma3_text"; }
  bool layer_slides(std::int64_t l) const { return sliding_window > 0 && (!gemma() || l % 2 == 0); }
  TinyTensor& tensor(const std::string& name);
  const TinyTensor& tensor(const std::string& name) const;
};

/// m-llama, m-mistral (m-llama with model_type mistral and sliding_window 8), m-qwen2, m-qwen2-big, m-qwen3, m-gemma3 (sliding, full,
/// sliding, full; window 8; RoPE theta 1e6 and 10000 in sliding layers; tied; norm weights 0, which the family reads as 1), m-smollm3
/// (m-llama with model_type smollm3, layer 3 without RoPE).
TinyModel make_tiny_model(const std::string& name);
/// The trained stories260K, restored (../shared/data/README.md) and put into Hugging Face order; tied, RMS epsilon 1e-5,
/// 512 positions. Empty without the shared file; throws if the restored bytes do not have the documented sha256.
std::optional<TinyModel> restore_s260k();

struct HfOptions {
  int n_shards = 1;                  ///< > 1: model-0000i-of-0000n.safetensors + index. Shard of layer l: ceil(l n / L)
  std::string dtype = "F32";         ///< F32, F16, BF16, F64 for every tensor
  std::string prefix = "model.";     ///< replaces "model." in every name
};
/// Writes config.json, tokenizer.json and the weights into `folder` (created).
void write_hf_folder(const TinyModel& model, const std::string& folder, const HfOptions& options = {});
/// Shard number from 0 that write_hf_folder() and a split GGUF give a tensor.
int shard_of(const TinyModel& model, const std::string& tensor_name, int n_shards);

std::string config_json(const TinyModel& model);
std::string tok_byte_json();
std::string tok_ids_json(std::int64_t vocab);
/// Sets one top-level key of a JSON file to a value given as JSON text ("null", "8.5", "{}"); "" removes the key.
void patch_json_file(const std::string& path, const std::string& key, const std::string& value_json);

struct GgufOptions {
  std::uint32_t version = 3;
  std::size_t alignment = 32;
  int n_splits = 1;                  ///< > 1: PATH minus ".gguf" + "-0000i-of-0000n.gguf"; metadata of the model in part 1 only
  bool f16_weights = false;          ///< matrices as F16; norms and biases stay F32
  bool write_rope_theta = true;
  bool drop_tokenizer = false;
  std::vector<TinyTensor> extra;     ///< further F32 tensors under GGUF names, in the last part
  std::vector<std::string> omit;     ///< GGUF names left out
};
/// llama and mistral: architecture "llama" with rows of q and k permuted inside each head from half-split to adjacent pairs.
/// mistral states llama.attention.sliding_window. gemma3_text: architecture "gemma3", norm weights plus 1. tok-byte becomes tokenizer model "gpt2", tok-ids
/// model "llama" (one character a piece, equal scores, no space prefix, no automatic BOS). Returns the paths written.
std::vector<std::string> write_gguf(const TinyModel& model, const std::string& path, const GgufOptions& options = {});
/// blk.0.attn_q.weight for model.layers.0.self_attn.q_proj.weight, …; post_attention_layernorm is another norm in gemma3_text.
std::string gguf_name(const std::string& hf_name, bool gemma = false);

/// N bytes of random lower-case words of 2 to 8 letters, single spaces, a newline after every 12th word, seed 3.
std::string txt(std::size_t n_bytes);
/// Text that tok-ids turns into these ids.
std::string ids_text(const std::vector<std::int32_t>& ids);

}  // namespace calib::test

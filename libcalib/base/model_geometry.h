#pragma once
// What an artifact must know about the model, its text and its making: plain structs, written by kvcalib, read by all tools.

#include <cstdint>
#include <string>
#include <vector>

namespace calib {

enum class Side { kK, kV };
inline const char* side_name(Side s) { return s == Side::kK ? "K" : "V"; }

enum class RopeStyle { kNone, kHalfSplit, kInterleaved };  ///< which two channels form a RoPE pair, in Hugging Face channel order

/// Geometry of one layer with attention. Channel order: Hugging Face (FORMATS.md 2).
struct LayerGeometry {
  int index = 0;            ///< layer number in the model (sparse in hybrids)
  int n_q_heads = 0, n_kv_heads = 0, head_dim = 0;
  int rotary_dim = 0;       ///< channels that RoPE turns, from 0; <= head_dim
  RopeStyle rope_style = RopeStyle::kHalfSplit;
  double attention_factor = 1.0;         ///< on cos and sin (YaRN)
  double softmax_scale = 0.0;            ///< tau
  std::int64_t sliding_window = 0;       ///< keys a row sees, its own included; 0 = all
  std::vector<double> inv_freq;          ///< rotary_dim/2 frequencies, scaling applied
  double k_bias_norm = 0.0;              ///< L2 norm of the k_proj bias, 0 without one
  bool llamacpp_adjacent_pairs = false;  ///< llama.cpp holds this family's keys with pairs adjacent (NORM rope)
};

inline bool has_rope(const LayerGeometry& layer) { return layer.rope_style != RopeStyle::kNone && layer.rotary_dim > 0; }

/// A plan is valid only for the model it names.
struct ModelIdentity {
  std::string architecture;   ///< model_type: llama, mistral, qwen2, qwen3, gemma3_text, smollm3
  std::string name;           ///< as given on the command line (base name)
  std::int64_t n_layers = 0, hidden_size = 0, vocab_size = 0, max_positions = 0;
  std::string weights_sha256; ///< over the sorted (name, dtype, shape, content sha256) list, or header hash with --fast-identity
  bool fast = false;          ///< weights_sha256 is file size + header hash
  std::string tokenizer_sha256;
  std::vector<LayerGeometry> layers;
};

struct DataFile {
  std::string path, sha256, options;
  std::int64_t n_documents = 0, n_tokens = 0;
};
/// What was fed. Documents are windows of at most seq_len tokens.
struct DataIdentity {
  std::vector<DataFile> files;
  std::string tokenizer_sha256, joining;  ///< joining: "windows" (a text cut into windows) or "rows" (one row, one document)
  std::int64_t seq_len = 0, n_documents = 0, n_tokens = 0, n_bos = 0;
  std::string documents_sha256;           ///< over all ids, in order: same windows <=> same hash
};

struct Provenance {
  std::string tool, version;
  std::vector<std::string> argv;
  std::string started_utc;
  double seconds = 0;
  std::uint64_t seed = 0;
  std::string device, dtype;
  std::vector<std::pair<std::string, std::string>> parents;  ///< (role, sha256) of every parent artifact
};

/// Position bucket of METHODS.md 3: 0 for t < 256, else 1 + floor(log2(t / 256)).
inline int position_bucket(std::int64_t t) {
  int b = 0;
  for (std::int64_t edge = 256; t >= edge; edge *= 2) ++b;
  return b;
}

}  // namespace calib

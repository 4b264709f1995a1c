#pragma once
// What a model's KV cache looks like, from its configuration alone: also of families that cannot be run here.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "libcalib/base/error.h"
#include "libcalib/base/model_geometry.h"

namespace calib::weights {
class GgufMetadata;
}

namespace calib::model {

struct CacheGeometry {
  std::string model_type;
  std::int64_t n_layers = 0;          ///< of the model, those without a cache of their own included
  std::int64_t max_positions = 0;     ///< 0 = not stated
  std::vector<LayerGeometry> layers;  ///< with a KV cache of their own: heads, head_dim, sliding window; no RoPE frequencies
  std::int64_t n_shared = 0;          ///< layers that read another one's keys and values
  std::int64_t n_without = 0;         ///< layers without keys and values (linear attention, state space)
};

/// Reads config.json; the decoder of a multimodal model stands under `text_config`. Counted: layers of full and sliding
/// attention (`layer_types`, `sliding_window_pattern`, `full_attention_interval`, `attn_layer_period`, or the family's rule), heads
/// that differ between layers, and `num_kv_shared_layers` left out.
/// Throws: kFormat naming the key, kUnsupported for caches of another kind (latent or chunked attention) and where the rule is not known.
CacheGeometry parse_hf_cache_geometry(std::string_view text, const std::string& path);

/// The same from GGUF metadata: per-layer arrays of heads (0 = no cache), `attention.sliding_window`, `attention.shared_kv_layers`.
CacheGeometry parse_gguf_cache_geometry(const weights::GgufMetadata& metadata);

/// A config.json, a folder that holds one, or a GGUF file (any part of a split one that holds the metadata). Weights are neither
/// needed nor read. Throws: kNotFound, kIo, and as above.
CacheGeometry read_cache_geometry(const std::string& path);

}  // namespace calib::model

#pragma once
// Range checks that both readers of a configuration share; `keys` carries the container's own spelling for messages.

#include <string>

#include "libcalib/model/config.h"

namespace calib::model {

struct HeadKeys {
  std::string q_heads, kv_heads, head_dim, hidden_size;
};

/// Throws kFormat naming both keys: heads not divisible, KV heads above query heads, odd head_dim.
void check_heads(const ModelConfig& config, const HeadKeys& keys, const std::string& where);

/// Per-layer arrays are sized from this number: throws kFormat above 65,536 before anything is allocated.
void check_layer_count(std::int64_t n_layers, const std::string& key, const std::string& where);

}  // namespace calib::model

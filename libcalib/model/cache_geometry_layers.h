#pragma once
// Parts that both readers of a cache's geometry share.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libcalib/model/cache_geometry.h"

namespace calib::model {

enum class LayerKind { kFull, kSliding, kNone };

/// What a configuration says of its layers, before it becomes geometry. Lists have one entry per layer.
struct CacheLayers {
  std::string where;                      ///< file, for messages
  std::vector<LayerKind> kind;
  std::vector<std::int64_t> q_heads, kv_heads;
  std::int64_t head_dim = 0;
  std::int64_t sliding_window = 0;        ///< of the layers that slide
  std::int64_t n_shared = 0;              ///< the last ones
};

/// Every `period`-th layer is full, the others slide: layer l is full if (l + 1) % period is 0.
std::vector<LayerKind> every_nth_full(std::int64_t n_layers, std::int64_t period, LayerKind others);

/// The family's period of full layers among sliding ones where the file leaves it to the code; empty if not known. 0 = all slide.
std::optional<std::int64_t> known_sliding_period(const std::string& model_type);

/// Checks and fills geometry.layers, n_shared and n_without. Throws kFormat.
void fill_cache_layers(const CacheLayers& layers, CacheGeometry& geometry);

}  // namespace calib::model

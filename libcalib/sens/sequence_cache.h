#pragma once
// INTERNAL to sens/: K and V of one sequence and layer, grown token by token. Legend: T tokens, Q query heads, H KV heads, D head_dim.

#include <cstdint>
#include <memory>

#include "libcalib/model/torch_block.h"
#include "libcalib/sens/contender.h"
#include "libcalib/sens/packed_cache.h"

namespace calib::sens {

class SequenceCache {
 public:
  virtual ~SequenceCache() = default;
  /// Appends the next T tokens and attends from each of their rows: -> [T, Q*D]. After the first call T is 1.
  virtual at::Tensor extend(const model::Block& block, const model::Projected& p) = 0;
};

/// `change` null: exact and not even rounded. Else what fake quantisation leaves, as the next row reads it. Holds up to `capacity` tokens in fp32.
std::unique_ptr<SequenceCache> make_sequence_cache(const LayerChange* change, std::int64_t capacity, std::int64_t query_tile, ThreadPool& pool);
/// In the runtime's packed pages; `cache` outlives it. layer_idx: position in ModelIdentity::layers.
std::unique_ptr<SequenceCache> make_packed_sequence(PackedCache& cache, std::size_t layer_idx, std::int64_t capacity);

}  // namespace calib::sens

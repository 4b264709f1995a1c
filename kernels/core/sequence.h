#pragma once
// One sequence of a batch, checked, and where its tokens are.

#include <cstdint>

#include "kernels/core/context.h"
#include "kernels/core/token_place.h"

namespace kvrt {

/// Requires: a batch that check_batch() accepts.
Sequence sequence_of(const kvrt_batch& batch, std::int64_t seq);

/// Everything about batch and pools that the host can see: pointers, lengths within the limits, positions without gaps, enough pages,
/// ids inside the pools. Codes: kArgument, kCapacity, kUnsupported.
Status check_batch(const Context& context, const LayerContext& layer, const kvrt_batch& batch);
Status check_pool(const UnitContext& unit, const kvrt_pool& pool, const BlockLayout& page, const char* name);
Status check_pages(const LayerContext& layer, const kvrt_batch& batch, const kvrt_pools& pools);

/// Sink, window (exact, the whole ring) and base pages of a sequence.
void pages_needed(const LayerContext& layer, std::int64_t n_tokens, std::int64_t n_pages[KVRT_SEGMENTS]);

/// Live tokens of one segment at the length after this step, as head `head` of the context sees them.
Segment segment_of(const LayerContext& layer, const kvrt_pools& pools, const Sequence& sequence, int head, kvrt_segment which);

inline std::int64_t page_stride(const kvrt_pool& pool, const BlockLayout& page) { return pool.page_stride ? pool.page_stride : page.page; }

}  // namespace kvrt

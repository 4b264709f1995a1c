#pragma once
// One sequence of a batch, checked, and where its tokens are.

#include <cstdint>

#include "kernels/core/context.h"
#include "kernels/read/segment.h"

namespace kvrt {

struct Sequence {
  std::int64_t first_row = 0, n_rows = 0;   ///< rows that hold a token
  std::int64_t before = 0;                  ///< tokens in the cache before this step
  std::int64_t first_position = 0;          ///< of token 0
  const std::int32_t* pages[KVRT_SEGMENTS] = {};
  std::int64_t n_pages[KVRT_SEGMENTS] = {};

  std::int64_t length() const { return before + n_rows; }
};

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

/// Page and slot of live token i of a segment.
struct TokenPlace {
  std::int64_t page;
  int slot;
};
inline TokenPlace place_of(const Segment& s, std::int64_t i) {
  const std::int64_t p = s.k.codec.page_tokens, slot = (s.first_slot + i) % s.n_slots;
  return {s.pages[slot / p], static_cast<int>(slot % p)};
}
inline const std::uint8_t* page_start(const SegmentSide& side, std::int64_t page) { return side.pool + page * side.page_bytes; }

/// Segment and index in it of token t, 0 <= t < length.
struct TokenIndex {
  kvrt_segment segment;
  std::int64_t index;
};
TokenIndex find_token(const Tiers& tiers, std::int64_t length, std::int64_t t);

/// first_position of a sequence without rows in this step, from the header that a K page before RoPE has. Requires: length > 0.
std::int64_t stored_first_position(const LayerContext& layer, const kvrt_pools& pools, const Sequence& sequence);

inline std::int64_t page_stride(const kvrt_pool& pool, const BlockLayout& page) { return pool.page_stride ? pool.page_stride : page.page; }

}  // namespace kvrt

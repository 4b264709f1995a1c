#pragma once
// Where the tokens of one sequence are: plain data and arithmetic that hosts and devices share.

#include <cstdint>

#include "kernels/core/layout.h"
#include "kernels/core/tiers.h"
#include "kernels/kvrt.h"
#include "kernels/read/segment.h"

namespace kvrt {

/// One sequence of a batch.
struct Sequence {
  std::int64_t first_row = 0, n_rows = 0;   ///< rows that hold a token
  std::int64_t before = 0;                  ///< tokens in the cache before this step
  std::int64_t first_position = 0;          ///< of token 0
  const std::int32_t* pages[KVRT_SEGMENTS] = {};
  std::int64_t n_pages[KVRT_SEGMENTS] = {};

  KVRT_HOST_DEVICE std::int64_t length() const { return before + n_rows; }
};

/// Page and slot of live token i of a segment.
struct TokenPlace {
  std::int64_t page;
  int slot;
};
KVRT_HOST_DEVICE inline TokenPlace place_of(const Segment& s, std::int64_t i) {
  const std::int64_t p = s.k.codec.page_tokens, slot = (s.first_slot + i) % s.n_slots;
  return {s.pages[slot / p], static_cast<int>(slot % p)};
}
KVRT_HOST_DEVICE inline const std::uint8_t* page_start(const SegmentSide& side, std::int64_t page) { return side.pool + page * side.page_bytes; }

/// Segment and index in it of token t, 0 <= t < length.
struct TokenIndex {
  kvrt_segment segment;
  std::int64_t index;
};
KVRT_HOST_DEVICE inline TokenIndex find_token(const Tiers& tiers, std::int64_t length, std::int64_t t) {
  const std::int64_t coded = coded_end(tiers, length);
  if (t < tiers.n_sinks) return {KVRT_SINK, t};
  if (t < coded) return {KVRT_BASE, t - tiers.n_sinks};
  return {KVRT_WINDOW, t - coded};
}

/// Pools of both sides with their strides resolved: exact pages, base pages.
struct PoolSide {
  std::uint8_t *exact, *base;
  std::int64_t exact_stride, base_stride;
};

/// Parts of a unit's pages that place a head block.
struct PageShape {
  std::int64_t header, block;  ///< bytes before the blocks, and of one
};

/// Live tokens of one segment at the length after this step, as one head sees them; all but the codecs.
KVRT_HOST_DEVICE inline void place_segment(const Tiers& t, const Sequence& sequence, kvrt_segment which, int page_tokens, Segment* s) {
  const std::int64_t length = sequence.length(), coded = coded_end(t, length);
  s->pages = sequence.pages[which];
  s->first_slot = 0;
  std::int64_t first_token = 0;
  if (which == KVRT_SINK) {
    s->n_tokens = length < t.n_sinks ? length : t.n_sinks;
    s->n_slots = sink_slots(t);
  } else if (which == KVRT_WINDOW) {
    first_token = coded;
    s->n_tokens = length > coded ? length - coded : 0;
    s->n_slots = ring_slots(t);
    s->first_slot = s->n_slots ? (coded - t.n_sinks) % s->n_slots : 0;
  } else {
    first_token = t.n_sinks;
    s->n_tokens = coded - t.n_sinks;
    s->n_slots = sequence.n_pages[which] * page_tokens;
  }
  s->first_position = sequence.first_position + first_token;
}

}  // namespace kvrt

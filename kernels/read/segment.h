#pragma once
// One decode call on one sequence and KV head, as the read operations see it: which tokens are live and where their bytes are.
// Segments of one sequence are merged by (maximum, sum, output) alone, since attention does not depend on the order of tokens.

#include <cstdint>

#include "kernels/codec/page_codec.h"

namespace kvrt {

/// Bytes of one side. Exact pages (sink, window): bf16 codec over 16-token pages; base pages: the unit's codec.
struct SegmentSide {
  PageCodec codec;                 ///< formats, offsets inside a head block
  const std::uint8_t* pool;        ///< page p starts at pool + p * page_bytes
  std::int64_t page_bytes;         ///< distance of two pages
  std::int64_t block_offset;       ///< inside a page: header + head * block bytes
  const float* mean = nullptr;     ///< `center`: [D] in the coordinates and order of stored rows, added by the cuda kernels; null = none
};

/// One segment (sink, window or base) of one sequence and KV head. Live token i, 0 <= i < n_tokens, is in slot
/// s = (first_slot + i) mod n_slots: page pages[s / P], slot s mod P inside the page, P = codec.page_tokens.
struct Segment {
  SegmentSide k, v;
  const std::int32_t* pages;       ///< page list, in order of tokens; ids are widened before they are multiplied
  std::int64_t n_tokens;           ///< live tokens
  std::int64_t first_slot;         ///< slot of the oldest token: of the ring; 0 for sink and base pages
  std::int64_t n_slots;            ///< slots of the page list
  std::int64_t first_position;     ///< position of live token 0; token i stands at first_position + i (pages carry their own header too)
  bool pre;                        ///< keys are pre-RoPE
};

/// Partial softmax of G query heads over some tokens: base-2 maximum m, sum l of 2^(score - m), O not divided by l. Score is
/// q.k * softmax scale * log2 e. No token: m = -1e30, l = 0, o = 0. Shapes [G], [G], [G, D].
struct Partial {
  float* m;
  float* l;
  float* o;
};

}  // namespace kvrt

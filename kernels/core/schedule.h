#pragma once
// How decode is cut into chunks, one CTA each: the one planner of host and device. A chunk is a run of tiles of one segment (sink,
// window or base pages) of one sequence and KV head; chunks hold about equal bytes, at least 64 KB where a segment has them.

#include <cstdint>

#include "kernels/core/token_place.h"

namespace kvrt {

inline constexpr std::int64_t kMinChunkBytes = 64 * 1024;
inline constexpr std::int64_t kScheduleTile = 16;   ///< slots of a tile
inline constexpr std::int64_t kScheduleUnit = 8;    ///< tiles: chunks begin at multiples of it, 128 tokens

/// Bytes of one unit of tiles, both sides, one head.
struct UnitBytes {
  std::int64_t exact, base;
};
KVRT_HOST_DEVICE constexpr std::int64_t unit_bytes(const UnitBytes& bytes, kvrt_segment which) { return which == KVRT_BASE ? bytes.base : bytes.exact; }

/// Tiles of n_tokens live tokens from first_slot on in a list of n_slots, whole tiles.
KVRT_HOST_DEVICE constexpr std::int64_t tiles_of(std::int64_t first_slot, std::int64_t n_tokens, std::int64_t n_slots) {
  if (n_tokens <= 0) return 0;
  const std::int64_t n = (first_slot % kScheduleTile + n_tokens + kScheduleTile - 1) / kScheduleTile, all = n_slots / kScheduleTile;
  return n < all ? n : all;
}

/// Bytes of a chunk such that `total` bytes make no more than about max_chunks of them.
KVRT_HOST_DEVICE constexpr std::int64_t chunk_bytes(std::int64_t total, std::int64_t max_chunks) {
  const std::int64_t equal = (total + max_chunks - 1) / max_chunks;
  return equal > kMinChunkBytes ? equal : kMinChunkBytes;
}

/// Units of n tiles, and chunks of a segment: none without tiles; at most tiles' bytes / chunk + 1.
KVRT_HOST_DEVICE constexpr std::int64_t schedule_units(std::int64_t n_tiles) { return (n_tiles + kScheduleUnit - 1) / kScheduleUnit; }
KVRT_HOST_DEVICE constexpr std::int64_t chunks_of(std::int64_t n_tiles, std::int64_t bytes_a_unit, std::int64_t bytes_a_chunk) {
  const std::int64_t per_chunk = (bytes_a_chunk + bytes_a_unit - 1) / bytes_a_unit;
  return (schedule_units(n_tiles) + per_chunk - 1) / per_chunk;
}
/// First tile of chunk i of n; chunk n begins behind the last tile.
KVRT_HOST_DEVICE constexpr std::int64_t chunk_begin(std::int64_t n_tiles, std::int64_t n, std::int64_t i) {
  const std::int64_t tile = schedule_units(n_tiles) * i / n * kScheduleUnit;
  return tile < n_tiles ? tile : n_tiles;
}

/// Chunks of one head of a sequence, over its three segments.
KVRT_HOST_DEVICE inline std::int64_t sequence_chunks(const Tiers& tiers, const Sequence& sequence, int page_tokens, const UnitBytes& bytes,
                                                     std::int64_t bytes_a_chunk) {
  std::int64_t n = 0;
  for (int which = 0; which < KVRT_SALIENT; ++which) {
    Segment s;
    place_segment(tiers, sequence, static_cast<kvrt_segment>(which), page_tokens, &s);
    n += chunks_of(tiles_of(s.first_slot, s.n_tokens, s.n_slots), unit_bytes(bytes, static_cast<kvrt_segment>(which)), bytes_a_chunk);
  }
  return n;
}
/// Bytes that one head of a sequence reads.
KVRT_HOST_DEVICE inline std::int64_t sequence_bytes(const Tiers& tiers, const Sequence& sequence, int page_tokens, const UnitBytes& bytes) {
  std::int64_t n = 0;
  for (int which = 0; which < KVRT_SALIENT; ++which) {
    Segment s;
    place_segment(tiers, sequence, static_cast<kvrt_segment>(which), page_tokens, &s);
    n += schedule_units(tiles_of(s.first_slot, s.n_tokens, s.n_slots)) * unit_bytes(bytes, static_cast<kvrt_segment>(which));
  }
  return n;
}

}  // namespace kvrt

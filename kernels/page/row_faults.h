#pragma once
// What page_verify asks of one stored row, on hosts and devices.

#include <cstdint>

#include "kernels/codec/page_header.h"
#include "kernels/core/token_place.h"

namespace kvrt {

/// Grids that an encoder writes: finite, and steps above zero but for rows of zeros in formats whose scale says so. Channels
/// first, first + step, ...
KVRT_HOST_DEVICE inline bool good_scales(const PageCodec& c, const std::uint8_t* block, int slot, int first = 0, int step = 1) {
  if (is_exact(c.format) || is_llamacpp_block(c.format)) return true;
  for (int d = first; d < c.head_dim; d += step) {
    const Grid g = detail::grid_at(c, block, slot, d);
    if (!f32_is_finite(g.scale) || !f32_is_finite(g.lo) || g.scale < 0 || (g.scale == 0 && !is_lm(c.format) && !is_fp4(c.format))) return false;
  }
  return true;
}

/// The header's position of live token i. A slot of the ring may still hold the token of the last turn.
KVRT_HOST_DEVICE inline bool good_position(const std::uint8_t* page, kvrt_segment which, int slot, std::int64_t expected, std::int64_t n_slots) {
  const std::int64_t stored = load_slot_position(page, which == KVRT_BASE ? 1 : 2, slot);
  return stored == expected || (which == KVRT_WINDOW && stored == expected + n_slots);
}

}  // namespace kvrt

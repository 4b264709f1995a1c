#include "kernels/core/device_call.h"

#include <algorithm>

namespace kvrt {

PageSpan touched_pages(const LayerContext& layer, const Sequence& s, kvrt_segment which, Touches touches) {
  const Tiers& t = layer.tiers();
  std::int64_t needed[KVRT_SEGMENTS];
  pages_needed(layer, s.length(), needed);
  PageSpan span{0, needed[which]};
  if (touches == Touches::kLive) return span;
  if (which == KVRT_SINK) return s.before < t.n_sinks ? span : PageSpan{};
  if (which == KVRT_WINDOW) return span;
  // The page of the first token that leaves, to the last page.
  span.first = std::min(needed[which], (coded_end(t, s.before) - t.n_sinks) / layer.units[KVRT_K].base_page.page_tokens);
  return coded_end(t, s.length()) > coded_end(t, s.before) ? span : PageSpan{};
}

void take_control(const LayerContext& layer, const kvrt_limits& limits, DeviceRoom* room) {
  std::int64_t pages[KVRT_SEGMENTS];
  pages_needed(layer, limits.max_length, pages);
  const std::int64_t ids = pages[KVRT_SINK] + pages[KVRT_WINDOW] + pages[KVRT_BASE];
  room->take<std::uint8_t>(limits.max_batch * (static_cast<std::int64_t>(sizeof(DeviceSequence)) + ids * 4));
}

void resolve_pools(const LayerContext& layer, const kvrt_pools& pools, PoolSide out[KVRT_SIDES]) {
  for (int side = 0; side < KVRT_SIDES; ++side) {
    const UnitContext& unit = layer.units[side];
    out[side] = {static_cast<std::uint8_t*>(pools.exact[side].base), static_cast<std::uint8_t*>(pools.base[side].base),
                 page_stride(pools.exact[side], unit.exact_page), page_stride(pools.base[side], unit.base_page)};
  }
}

}  // namespace kvrt

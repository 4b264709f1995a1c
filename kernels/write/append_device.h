#pragma once
// Device code that append and flush share: whose a row is, the row itself, and the page it goes to.

#include "kernels/codec/page_header.h"
#include "kernels/core/rows.h"
#include "kernels/write/append_cuda.h"
#include "kernels/write/encode_warp.h"

namespace kvrt {

/// Last sequence s whose key(s) is at most `at`. key: ascending, key(0) <= at.
template <class Key>
KVRT_DEVICE std::int64_t find_sequence(std::int64_t n, std::int64_t at, Key key) {
  std::int64_t low = 0, high = n - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (key(middle) <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}

KVRT_DEVICE std::uint8_t* exact_page(const AppendArgs& args, const Sequence& s, int side, kvrt_segment segment, std::int64_t slot) {
  return args.pools[side].exact + static_cast<std::int64_t>(s.pages[segment][slot / kExactPageTokens]) * args.pools[side].exact_stride;
}
KVRT_DEVICE std::uint8_t* base_page(const AppendArgs& args, const Sequence& s, int side, std::int64_t page) {
  return args.pools[side].base + static_cast<std::int64_t>(s.pages[KVRT_BASE][page]) * args.pools[side].base_stride;
}
KVRT_DEVICE std::uint8_t* block_of(std::uint8_t* page, const PageShape& shape, int head) { return page + shape.header + head * shape.block; }

/// x <- row of a token of this step: finite, behind RoPE where the layer stores it so.
KVRT_DEVICE void load_new_row(const AppendArgs& args, const Sequence& s, int side, int head, std::int64_t token, float* x, EncodeCounters* counters) {
  const DeviceLayer& layer = *args.layer;
  const kvrt_rows& rows = args.rows[side];
  const auto* from = static_cast<const std::uint8_t*>(rows.data) +
                     row_offset(rows.dtype, rows.row_stride, rows.head_stride, layer.n_heads, layer.head_dim, s.first_row + (token - s.before), head);
  cuda::warp_barrier();
  for (int d = cuda::lane_index(); d < layer.head_dim; d += cuda::kWarp) x[d] = finite_or_zero(load_value(rows.dtype, from, d), counters);
  cuda::warp_barrier();
  if (side != KVRT_K || !args.rotates) return;
  for (int i = cuda::lane_index(); i < layer.rope.n_pairs; i += cuda::kWarp) rope_rotate_pair(layer.rope, s.first_position + token, i, x);
  cuda::warp_barrier();
}

/// x <- body token b as the ring holds it: from the ring, or from this step's rows if it came with them.
KVRT_DEVICE void load_leaving_row(const AppendArgs& args, const Sequence& s, int side, int head, std::int64_t body, WarpRows& rows,
                                  EncodeCounters* counters) {
  const DeviceLayer& layer = *args.layer;
  const DeviceUnit& unit = layer.units[side];
  const std::int64_t token = layer.tiers.n_sinks + body, ring = ring_slots(layer.tiers);
  EncodeCounters elsewhere;  // rows that go through the ring are counted where they are written
  if (token >= s.before) {
    load_new_row(args, s, side, head, token, rows.x, ring > 0 ? &elsewhere : counters);
    if (ring == 0) return;
    for (int d = cuda::lane_index(); d < layer.head_dim; d += cuda::kWarp) rows.x[d] = bf16_to_f32(f32_to_bf16_finite(rows.x[d]));
  } else {
    const std::int64_t slot = body % ring;
    const std::uint8_t* const row = block_of(exact_page(args, s, side, KVRT_WINDOW, slot), unit.exact_page, head) +
                                    slot % kExactPageTokens * unit.exact.row_bytes;
    cuda::warp_barrier();
    for (int d = cuda::lane_index(); d < layer.head_dim; d += cuda::kWarp) {
      rows.x[d] = detail::decode_exact_value(unit.exact, row, d);
    }
  }
  cuda::warp_barrier();
}

}  // namespace kvrt

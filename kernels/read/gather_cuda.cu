// One warp a token and head.

#include "kernels/read/gather_cuda.h"

#include "kernels/core/rows.h"
#include "kernels/page/row_faults.h"
#include "kernels/write/encode_warp.h"

namespace kvrt {
namespace {

/// Where a row's bytes are.
struct RowPlace {
  const PageCodec* codec;
  const std::uint8_t *page, *block;
  std::int64_t position, n_slots;
  int slot;
  kvrt_segment segment;
};
KVRT_DEVICE RowPlace place_row(const GatherArgs& args, std::int64_t token, int head) {
  const DeviceLayer& layer = *args.layer;
  const Sequence& s = args.sequence->sequence;
  const DeviceUnit& unit = layer.units[args.side];
  const TokenIndex at = find_token(layer.tiers, s.length(), token);
  const bool is_base = at.segment == KVRT_BASE;
  const PoolSide& pool = args.pools[args.side];
  Segment segment;
  place_segment(layer.tiers, s, at.segment, unit.page_tokens, &segment);
  const std::int64_t per_page = is_base ? unit.page_tokens : kExactPageTokens, slot = (segment.first_slot + at.index) % segment.n_slots;
  RowPlace p;
  p.codec = is_base ? unit.codecs + head : &unit.exact;
  p.page = (is_base ? pool.base : pool.exact) + static_cast<std::int64_t>(segment.pages[slot / per_page]) * (is_base ? pool.base_stride : pool.exact_stride);
  const PageShape& shape = is_base ? unit.base_page : unit.exact_page;
  p.block = p.page + shape.header + head * shape.block;
  p.position = segment.first_position + at.index;
  p.n_slots = segment.n_slots, p.slot = static_cast<int>(slot % per_page), p.segment = at.segment;
  return p;
}

KVRT_KERNEL(kRowThreads, 4) gather_kernel(const GatherArgs args) {
  KVRT_SHARED(PerWarp<WarpRows>, shared);
  const std::int64_t i = warp_in_grid();
  if (i >= args.n_rows) return;
  WarpRows& rows = shared.mine();
  const DeviceLayer& layer = *args.layer;
  const std::int64_t row = args.first_row + i, token = row / args.n_heads;
  const int head = static_cast<int>(row % args.n_heads), lane = cuda::lane_index(), width = layer.head_dim;
  const RowPlace place = place_row(args, token, head);
  float* const decoded = place.segment == KVRT_BASE ? rows.y : rows.x;
  decode_row_warp(*place.codec, place.block, place.slot, decoded);
  if (place.segment == KVRT_BASE) from_frame_warp(layer.units[args.side].frame, head, rows);
  if (args.rotates) {
    for (int p = lane; p < layer.rope.n_pairs; p += cuda::kWarp) rope_rotate_pair(layer.rope, place.position, p, rows.x);
    cuda::warp_barrier();
  }
  auto* const out = static_cast<std::uint8_t*>(args.out.data) +
                    row_offset(args.out.dtype, args.out.row_stride, args.out.head_stride, args.n_heads, width, token - args.first_token, head);
  for (int d = lane; d < width; d += cuda::kWarp) store_value(args.out.dtype, out, d, rows.x[d]);
  if (!args.faults) return;
  const bool bad_scale = cuda::warp_any(!good_scales(*place.codec, place.block, place.slot, lane, cuda::kWarp));
  const bool bad_position = args.checks_positions && head == 0 && !good_position(place.page, place.segment, place.slot, place.position, place.n_slots);
  if (lane == 0) args.faults[i] = static_cast<std::uint8_t>((bad_scale ? kBadScale : 0) | (bad_position ? kBadPosition : 0));
}

}  // namespace

Status gather_cuda(const GatherArgs& args, void* stream) { return launch_warps(&gather_kernel, args.n_rows, args, stream); }

}  // namespace kvrt

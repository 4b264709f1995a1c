// The first blocks plan, a warp a row (sequence and KV head); the others rotate queries, a warp a query head.

#include "kernels/read/prepare_cuda.h"

#include "kernels/core/rows.h"
#include "kernels/write/encode_warp.h"

namespace kvrt {
namespace {

KVRT_DEVICE void fill_side(const PrepareArgs& args, int side, int head, bool is_base, SegmentSide* out) {
  const DeviceUnit& unit = args.layer->units[side];
  const PoolSide& pool = args.pools[side];
  const PageShape& shape = is_base ? unit.base_page : unit.exact_page;
  out->codec = is_base ? unit.codecs[head] : unit.exact;
  out->pool = is_base ? pool.base : pool.exact;
  out->page_bytes = is_base ? pool.base_stride : pool.exact_stride;
  out->block_offset = shape.header + head * shape.block;
  out->mean = is_base && unit.stored_mean ? unit.stored_mean + static_cast<std::int64_t>(head) * args.layer->head_dim : nullptr;
}

/// Lane `which` of the first three fills that segment; all lanes share the chunks.
KVRT_DEVICE void plan_row(const PrepareArgs& args, std::int64_t row) {
  const DeviceLayer& layer = *args.layer;
  const int head = static_cast<int>(row % args.n_heads), lane = cuda::lane_index();
  const DeviceSequence& s = args.sequences[row / args.n_heads];
  std::int64_t chunk = s.first_chunk + head * s.n_chunks;
  if (lane == 0) {
    args.first_chunk[row] = chunk;
    if (row + 1 == args.n_rows) args.first_chunk[row + 1] = chunk + s.n_chunks;
  }
  if (s.n_chunks == 0) return;
  for (int which = 0; which < KVRT_SALIENT; ++which) {
    const auto segment = static_cast<kvrt_segment>(which);
    const bool is_base = segment == KVRT_BASE;
    const auto index = static_cast<std::int32_t>(row * KVRT_SALIENT + which);
    Segment place;
    place_segment(layer.tiers, s.sequence, segment, layer.units[KVRT_K].page_tokens, &place);
    if (lane == 0) {
      Segment& out = args.segments[index];
      fill_side(args, KVRT_K, head, is_base, &out.k);
      fill_side(args, KVRT_V, head, is_base, &out.v);
      out.pages = place.pages, out.n_tokens = place.n_tokens, out.first_slot = place.first_slot, out.n_slots = place.n_slots;
      out.first_position = place.first_position, out.pre = layer.units[KVRT_K].pre;
    }
    const std::int64_t n_tiles = tiles_of(place.first_slot, place.n_tokens, place.n_slots),
                       n = chunks_of(n_tiles, unit_bytes(args.unit_bytes, segment), args.chunk_bytes);
    for (std::int64_t i = lane; i < n; i += cuda::kWarp) {
      args.chunks[chunk + i] = {index, static_cast<std::int32_t>(row * kQueryFrames + (is_base ? 1 : 0)), chunk_begin(n_tiles, n, i),
                                chunk_begin(n_tiles, n, i + 1)};
    }
    chunk += n;
  }
}

/// Query head i of all rows.
KVRT_DEVICE void rotate_query(const PrepareArgs& args, std::int64_t i, WarpRows& rows) {
  const DeviceLayer& layer = *args.layer;
  const int g = static_cast<int>(i % args.group), width = layer.head_dim, lane = cuda::lane_index();
  const std::int64_t row = i / args.group, n_q_heads = static_cast<std::int64_t>(args.n_heads) * args.group;
  const int head = static_cast<int>(row % args.n_heads);
  const Sequence& s = args.sequences[row / args.n_heads].sequence;
  if (s.n_rows == 0) return;
  const auto* const from = static_cast<const std::uint8_t*>(args.q.data) + row_offset(args.q.dtype, args.q.row_stride, args.q.head_stride, n_q_heads, width,
                                                                                      s.first_row, static_cast<std::int64_t>(head) * args.group + g);
  for (int d = lane; d < width; d += cuda::kWarp) rows.x[d] = load_value(args.q.dtype, from, d);
  cuda::warp_barrier();
  if (args.rotates) {
    for (int p = lane; p < layer.rope.n_pairs; p += cuda::kWarp) rope_rotate_pair(layer.rope, s.first_position + s.before, p, rows.x);
    cuda::warp_barrier();
  }
  float* const exact = args.queries + (row * kQueryFrames * args.group + g) * width;
  float* const base = exact + static_cast<std::int64_t>(args.group) * width;
  const DeviceUnit& unit = layer.units[KVRT_K];
  const DeviceFrame& frame = unit.frame;
  for (int p = lane; p < width; p += cuda::kWarp) {
    cuda::store(exact + p, rows.x[p] * args.factor);
    const int d = frame.block_order ? frame.block_order[p] : p;
    const float q = rows.x[d] * args.factor;
    rows.y[p] = frame.smooth ? q * frame.smooth[head * width + d] : q;
  }
  if (frame.had.size) cuda::hadamard_rotate(frame.had, frame.paley, frame.had_scale, rows.y, width, rows.spare);
  else cuda::warp_barrier();
  const int spread = unit.codecs[0].spread;
  for (int p = lane; p < width; p += cuda::kWarp) cuda::store(base + stored_position(spread, width, p), rows.y[p]);
}

KVRT_KERNEL(kRowThreads, 4) prepare_kernel(const PrepareArgs args) {
  KVRT_SHARED(PerWarp<WarpRows>, shared);
  const std::int64_t i = warp_in_grid(), n_plan_blocks = row_blocks(args.n_rows);
  if (cuda::block_index() < n_plan_blocks) {
    if (i < args.n_rows) plan_row(args, i);
    return;
  }
  const std::int64_t query = i - n_plan_blocks * kRowWarps;
  if (query < args.n_rows * args.group) rotate_query(args, query, shared.mine());
}

}  // namespace

Status prepare_cuda(const PrepareArgs& args, void* stream) {
  return cuda::launch(&prepare_kernel, row_blocks(args.n_rows) + row_blocks(args.n_rows * args.group), kRowThreads, args, stream);
}

}  // namespace kvrt

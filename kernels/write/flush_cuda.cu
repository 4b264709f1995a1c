// One CTA a channel group of one side and head: warps frame its rows into scratch, threads take the channels' ranges, warps encode.

#include "kernels/write/append_device.h"

namespace kvrt {
namespace {

/// Group i of the sides that have them: group varies slowest, then head; keys before values. HasOutliers: as in encode_row_warp().
template <bool HasOutliers>
KVRT_DEVICE void flush_group(const AppendArgs& args, int side, std::int64_t i, WarpRows& rows, float* scratch) {
  const DeviceLayer& layer = *args.layer;
  const int head = static_cast<int>(i % layer.n_heads), step = args.steps[side], width = layer.head_dim;
  const std::int64_t first_coded = i / layer.n_heads * step;
  const DeviceSequence& s = args.sequences[find_sequence(args.n_seqs, first_coded, [&](std::int64_t k) { return args.sequences[k].first_coded; })];
  const DeviceUnit& unit = layer.units[side];
  const PageCodec& codec = unit.codecs[head];
  const std::int64_t body = coded_end(layer.tiers, s.sequence.before) - layer.tiers.n_sinks + (first_coded - s.first_coded);
  std::uint8_t* const page = base_page(args, s.sequence, side, body / codec.page_tokens);
  std::uint8_t* const block = block_of(page, unit.base_page, head);
  const int slot = static_cast<int>(body % codec.page_tokens);
  EncodeCounters counters;
  for (int t = cuda::warp_index(); t < step; t += kRowWarps) {
    load_leaving_row(args, s.sequence, side, head, body + t, rows, &counters);
    to_frame_warp(unit.frame, head, rows, &counters);
    for (int d = cuda::lane_index(); d < width; d += cuda::kWarp) scratch[static_cast<std::int64_t>(t) * width + d] = rows.y[d];
  }
  cuda::block_barrier();
  const bool alone = HasOutliers && codec.out_per_mille > 0;  // one thread does it all
  for (int d = cuda::thread_index(); d < width && !alone; d += kRowThreads) detail::store_channel_params(codec, scratch, width, slot, d, block, &counters);
  if constexpr (HasOutliers) {
    if (alone && cuda::thread_index() == 0) detail::encode_group_with_outliers(codec, scratch, width, slot / step, block, &counters);
  }
  if (unit.base_page.header > 0 && head == 0) {
    for (int t = cuda::thread_index(); t < step; t += kRowThreads) {
      store_slot_position(page, 1, slot + t, s.sequence.first_position + layer.tiers.n_sinks + body + t);
    }
  }
  cuda::block_barrier();
  for (int t = cuda::warp_index(); t < step && !alone; t += kRowWarps) {
    encode_codes_warp(codec, scratch + static_cast<std::int64_t>(t) * width, slot + t, block, rows.spare);
  }
  add_counters(counters, layer.counters->counts[side]);
  cuda::block_barrier();  // the scratch is free
}

template <bool HasOutliers>
KVRT_KERNEL(kRowThreads, 4) flush_kernel(const AppendArgs args) {
  KVRT_SHARED(PerWarp<WarpRows>, shared);
  const int step = args.steps[KVRT_K] > args.steps[KVRT_V] ? args.steps[KVRT_K] : args.steps[KVRT_V];
  float* const scratch = args.scratch + static_cast<std::int64_t>(cuda::block_index()) * step * args.layer->head_dim;
  for (int side = 0; side < KVRT_SIDES; ++side) {
    if (args.steps[side] == 1) continue;
    const std::int64_t n = args.n_coded / args.steps[side] * args.n_heads;
    for (std::int64_t i = cuda::block_index(); i < n; i += args.n_flush_blocks) flush_group<HasOutliers>(args, side, i, shared.mine(), scratch);
  }
}

}  // namespace

Status flush_cuda(const AppendArgs& args, void* stream) {
  return cuda::launch(args.has_outliers ? &flush_kernel<true> : &flush_kernel<false>, args.n_flush_blocks, kRowThreads, args, stream);
}

}  // namespace kvrt

// One warp a row of one side and head: the rows that leave the window are encoded, the new ones go to sinks and window.

#include "kernels/write/append_device.h"

namespace kvrt {
namespace {

struct Launch {
  AppendArgs args;
  std::int64_t n_encoded;  ///< rows of all heads and sides that are encoded
  std::int64_t n_written;  ///< rows of all heads and sides that are looked at
};

/// Row i of those that leave: token varies slowest, then side, then head.
template <bool HasOutliers>
KVRT_DEVICE void encode_leaving(const AppendArgs& args, std::int64_t i, WarpRows& rows) {
  const DeviceLayer& layer = *args.layer;
  const int n_sides = (args.steps[KVRT_K] == 1) + (args.steps[KVRT_V] == 1), head = static_cast<int>(i % layer.n_heads);
  const std::int64_t rest = i / layer.n_heads, coded = rest / n_sides;
  const int side = n_sides == 2 ? static_cast<int>(rest % 2) : args.steps[KVRT_K] == 1 ? KVRT_K : KVRT_V;
  const DeviceSequence& s = args.sequences[find_sequence(args.n_seqs, coded, [&](std::int64_t k) { return args.sequences[k].first_coded; })];
  const DeviceUnit& unit = layer.units[side];
  const PageCodec& codec = unit.codecs[head];
  const std::int64_t body = coded_end(layer.tiers, s.sequence.before) - layer.tiers.n_sinks + (coded - s.first_coded);
  std::uint8_t* const page = base_page(args, s.sequence, side, body / codec.page_tokens);
  const int slot = static_cast<int>(body % codec.page_tokens);
  EncodeCounters counters;
  load_leaving_row(args, s.sequence, side, head, body, rows, &counters);
  to_frame_warp(unit.frame, head, rows, &counters);
  encode_row_warp<HasOutliers>(codec, rows.y, slot, block_of(page, unit.base_page, head), rows.spare, &counters);
  if (unit.base_page.header > 0 && head == 0 && cuda::lane_index() == 0) {
    store_slot_position(page, 1, slot, s.sequence.first_position + layer.tiers.n_sinks + body);
  }
  add_counters(counters, layer.counters->counts[side]);
}

/// Row i of the step. Of the tokens that share a slot of the ring the last one is written.
KVRT_DEVICE void write_exact(const AppendArgs& args, std::int64_t i, WarpRows& rows) {
  const DeviceLayer& layer = *args.layer;
  const Tiers& tiers = layer.tiers;
  const int head = static_cast<int>(i % layer.n_heads), side = static_cast<int>(i / layer.n_heads % KVRT_SIDES);
  const std::int64_t row = args.first_row + i / layer.n_heads / KVRT_SIDES, ring = ring_slots(tiers);
  const Sequence& s = args.sequences[find_sequence(args.n_seqs, row, [&](std::int64_t k) { return args.sequences[k].sequence.first_row; })].sequence;
  if (row - s.first_row >= s.n_rows) return;  // no token
  const std::int64_t token = s.before + (row - s.first_row), body = token - tiers.n_sinks;
  const bool is_sink = body < 0;
  if (!is_sink && ring == 0) return;
  const DeviceUnit& unit = layer.units[side];
  EncodeCounters counters;
  load_new_row(args, s, side, head, token, rows.x, &counters);
  if (is_sink || body + ring >= s.length() - tiers.n_sinks) {
    const std::int64_t slot = is_sink ? token : body % ring;
    const int in_page = static_cast<int>(slot % kExactPageTokens);
    std::uint8_t* const page = exact_page(args, s, side, is_sink ? KVRT_SINK : KVRT_WINDOW, slot);
    encode_exact_row_warp(unit.exact, rows.x, in_page, block_of(page, unit.exact_page, head), &counters);
    if (unit.exact_page.header > 0 && head == 0 && cuda::lane_index() == 0) store_slot_position(page, 2, in_page, s.first_position + token);
  }
  add_counters(counters, layer.counters->counts[side]);
}

template <bool HasOutliers>
KVRT_KERNEL(kRowThreads, 4) append_kernel(const Launch launch) {
  KVRT_SHARED(PerWarp<WarpRows>, shared);
  WarpRows& rows = shared.mine();
  const std::int64_t i = warp_in_grid();
  if (i < launch.n_encoded) encode_leaving<HasOutliers>(launch.args, i, rows);
  else if (i < launch.n_encoded + launch.n_written) write_exact(launch.args, i - launch.n_encoded, rows);
}

}  // namespace

Status append_cuda(const AppendArgs& args, const AppendWork& work, void* stream) {
  Launch launch{args, 0, 0};
  const int n_heads = args.n_heads, n_sides = (args.steps[KVRT_K] == 1) + (args.steps[KVRT_V] == 1);
  if (work.encodes) launch.n_encoded = args.n_coded * n_sides * n_heads;
  if (work.writes) launch.n_written = args.n_rows * KVRT_SIDES * n_heads;
  const auto kernel = args.has_outliers && launch.n_encoded > 0 ? &append_kernel<true> : &append_kernel<false>;
  return launch_warps(kernel, launch.n_encoded + launch.n_written, launch, stream);
}

}  // namespace kvrt

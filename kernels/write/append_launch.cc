#include "kernels/write/append_launch.h"

#include <algorithm>

#include "kernels/write/append_cuda.h"

namespace kvrt {
namespace {

constexpr std::int64_t kMaxFlushBlocks = 128;

int step_of(const UnitContext& unit) { return unit.codecs[0].granularity == Granularity::kChannel ? unit.codecs[0].group : 1; }

/// CTAs of flush: as many as groups can leave at once, up to a bound.
std::int64_t flush_blocks(const LayerContext& layer, std::int64_t n_coded) {
  const int step = std::max(step_of(layer.units[KVRT_K]), step_of(layer.units[KVRT_V]));
  if (step == 1) return 0;
  const std::int64_t smallest = std::min(step_of(layer.units[KVRT_K]) == 1 ? step : step_of(layer.units[KVRT_K]),
                                         step_of(layer.units[KVRT_V]) == 1 ? step : step_of(layer.units[KVRT_V]));
  return std::min(kMaxFlushBlocks, n_coded / smallest * layer.layout.n_kv_heads);
}

float* take_scratch(const LayerContext& layer, std::int64_t n_blocks, DeviceRoom* room) {
  const std::int64_t step = std::max(step_of(layer.units[KVRT_K]), step_of(layer.units[KVRT_V]));
  return room->take<float>(n_blocks * step * layer.layout.head_dim);
}

}  // namespace

std::int64_t append_device_bytes(const LayerContext& layer, const kvrt_limits& limits) {
  DeviceRoom room(nullptr);
  take_control(layer, limits, &room);
  const std::int64_t most = limits.max_length > INT64_MAX / limits.max_batch ? INT64_MAX : limits.max_length * limits.max_batch;
  take_scratch(layer, flush_blocks(layer, std::min<std::int64_t>(most, std::int64_t{1} << 40)), &room);
  return room.used();
}

Status append_on_device(const Call& call, const kvrt_batch& batch, const kvrt_qkv& qkv, const kvrt_pools& pools, void* stream) {
  const LayerContext& layer = *call.layer;
  const Tiers& t = layer.tiers();
  AppendArgs args = {};
  bool overwrites = false;  // a token that leaves in this step from the slot of a token that comes in it
  const auto fill = [&](std::int64_t, DeviceSequence* d) {
    const Sequence& s = d->sequence;
    const std::int64_t from = coded_end(t, s.before), n = coded_end(t, s.length()) - from, ring = ring_slots(t);
    d->first_coded = args.n_coded;
    args.n_coded += n;
    overwrites = overwrites || (n > 0 && ring > 0 && s.before > from && from + ring < s.length());
  };
  DeviceRoom room(call.workspace);
  if (Status status = send_sequences(call, batch, 0, batch.n_seqs, Touches::kAppend, stream, fill, &room, &args.sequences); !status.ok()) return status;
  args.layer = layer.on_device;
  args.n_seqs = batch.n_seqs;
  args.rows[KVRT_K] = qkv.k, args.rows[KVRT_V] = qkv.v;
  args.n_heads = layer.layout.n_kv_heads;
  args.has_outliers = layer.layout.k.outlier_per_mille > 0 || layer.layout.v.outlier_per_mille > 0;
  args.rotates = qkv.k_frame == KVRT_PRE_ROPE && !layer.units[KVRT_K].pre;
  resolve_pools(layer, pools, args.pools);
  args.first_row = batch.row_offsets[0], args.n_rows = batch.row_offsets[batch.n_seqs] - batch.row_offsets[0];
  for (int side = 0; side < KVRT_SIDES; ++side) args.steps[side] = step_of(layer.units[side]);
  args.n_flush_blocks = flush_blocks(layer, args.n_coded);
  args.scratch = take_scratch(layer, args.n_flush_blocks, &room);
  if (args.n_flush_blocks > 0) {
    if (Status status = flush_cuda(args, stream); !status.ok()) return status;
  }
  const bool encodes = args.n_coded > 0 && (args.steps[KVRT_K] == 1 || args.steps[KVRT_V] == 1);
  if (encodes && overwrites) {
    if (Status status = append_cuda(args, {true, false}, stream); !status.ok()) return status;
  }
  if (Status status = append_cuda(args, {encodes && !overwrites, true}, stream); !status.ok()) return status;
  for (const kvrt_side side : {KVRT_K, KVRT_V}) call.context->health(layer, side).add(args.n_coded * args.n_heads, EncodeCounters{});
  return {};
}

}  // namespace kvrt

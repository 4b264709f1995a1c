#include "kernels/read/gather_launch.h"

#include "kernels/read/gather_cuda.h"

namespace kvrt {

std::int64_t gather_device_bytes(const LayerContext& layer, const kvrt_limits& limits) {
  DeviceRoom room(nullptr);
  take_control(layer, limits, &room);
  return room.used();
}

Status gather_on_device(const Call& call, const kvrt_batch& batch, const kvrt_gather_args& args, bool rotates, std::int64_t first_position,
                        const kvrt_pools& pools, void* stream) {
  GatherArgs gather = {};
  DeviceRoom room(call.workspace);
  const auto fill = [&](std::int64_t, DeviceSequence* d) { d->sequence.first_position = first_position; };
  if (Status status = send_sequences(call, batch, args.seq, 1, Touches::kLive, stream, fill, &room, &gather.sequence); !status.ok()) return status;
  gather.layer = call.layer->on_device;
  resolve_pools(*call.layer, pools, gather.pools);
  gather.side = args.side, gather.n_heads = call.layer->layout.n_kv_heads;
  gather.first_row = args.first_token * gather.n_heads, gather.n_rows = args.n_tokens * gather.n_heads, gather.first_token = args.first_token;
  gather.rotates = rotates;
  gather.out = args.out;
  return gather_cuda(gather, stream);
}

}  // namespace kvrt

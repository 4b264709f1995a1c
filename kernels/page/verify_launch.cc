#include "kernels/page/verify_launch.h"

#include <algorithm>

#include "kernels/core/device.h"

namespace kvrt {
namespace {

std::int64_t rows_at_once(const LayerContext& layer) { return kVerifyBytes / 4 / layer.layout.head_dim; }

}  // namespace

std::int64_t verify_device_bytes(const LayerContext& layer, const kvrt_limits& limits) {
  DeviceRoom room(nullptr);
  take_control(layer, limits, &room);
  room.take<float>(kVerifyBytes / 4), room.take<std::uint8_t>(rows_at_once(layer));
  return room.used();
}

Status DeviceRows::start(const Call& call, const kvrt_batch& batch, std::int32_t seq, std::int64_t first_position, const kvrt_pools& pools, void* stream) {
  DeviceRoom room(call.workspace);
  const auto fill = [&](std::int64_t, DeviceSequence* d) { d->sequence.first_position = first_position; };
  if (Status status = send_sequences(call, batch, seq, 1, Touches::kLive, stream, fill, &room, &args_.sequence); !status.ok()) return status;
  stream_ = stream, width_ = call.layer->layout.head_dim, room_ = rows_at_once(*call.layer);
  args_.layer = call.layer->on_device;
  resolve_pools(*call.layer, pools, args_.pools);
  args_.n_heads = call.layer->layout.n_kv_heads;
  rows_ = room.take<float>(kVerifyBytes / 4);
  args_.faults = room.take<std::uint8_t>(room_);
  return {};
}

Status DeviceRows::fetch(std::int64_t row, std::int64_t n_rows, const float** values, std::uint8_t* faults) {
  if (row >= first_ + n_) {
    args_.first_row = first_ = row;
    args_.n_rows = n_ = std::min(room_, n_rows - row);
    // Row `first_` comes first: outputs are counted from token 0.
    args_.out.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(rows_) - static_cast<std::uintptr_t>(row * width_ * 4));
    if (Status status = gather_cuda(args_, stream_); !status.ok()) return status;
    if (Status status = copy_to_host(values_, rows_, n_ * width_ * 4, stream_); !status.ok()) return status;
    if (Status status = copy_to_host(faults_, args_.faults, n_, stream_); !status.ok()) return status;
  }
  *values = values_ + (row - first_) * width_;
  *faults = faults_[row - first_];
  return {};
}

}  // namespace kvrt

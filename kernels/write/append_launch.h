#pragma once
// append on the CUDA backend: the host's share of a call.

#include "kernels/core/device_call.h"

namespace kvrt {

std::int64_t append_device_bytes(const LayerContext& layer, const kvrt_limits& limits);
Status append_on_device(const Call& call, const kvrt_batch& batch, const kvrt_qkv& qkv, const kvrt_pools& pools, void* stream);

}  // namespace kvrt

#pragma once
// gather on the CUDA backend: the host's share of a call.

#include "kernels/core/device_call.h"

namespace kvrt {

std::int64_t gather_device_bytes(const LayerContext& layer, const kvrt_limits& limits);
/// first_position: of token 0, used with `rotates`.
Status gather_on_device(const Call& call, const kvrt_batch& batch, const kvrt_gather_args& args, bool rotates, std::int64_t first_position,
                        const kvrt_pools& pools, void* stream);

}  // namespace kvrt

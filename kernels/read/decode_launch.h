#pragma once
// decode on the CUDA backend: the host's share of a call.

#include "kernels/core/device_call.h"

namespace kvrt {

std::int64_t decode_device_bytes(const LayerContext& layer, const kvrt_limits& limits, int n_processors);
Status decode_on_device(const Call& call, const kvrt_batch& batch, const kvrt_attn& attn, const kvrt_pools& pools, void* stream);

}  // namespace kvrt

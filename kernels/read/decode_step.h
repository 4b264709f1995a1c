#pragma once
// The cpu backend's decode of a whole step: pieces of work for kvrt_limits::parallel_for.

#include <cstdint>

#include "kernels/core/call.h"

namespace kvrt {

/// Scratch of one worker, and what all workers of a call share. Both start at a multiple of 64 bytes.
std::int64_t decode_worker_bytes(const LayerContext& layer);
std::int64_t decode_shared_bytes(const LayerContext& layer, const kvrt_limits& limits);

/// A piece is one sequence and KV head, or one range of its tokens where few sequences would leave workers idle. Results do not depend on
/// the number of workers. Requires: a checked call; does not allocate or throw.
void decode_step(const Call& call, const kvrt_batch& batch, const kvrt_attn& attn, const kvrt_pools& pools);

}  // namespace kvrt

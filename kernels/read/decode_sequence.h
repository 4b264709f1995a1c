#pragma once
// The cpu backend's piece of decode: one sequence and KV head through the vector paths of decode_cpu.h.

#include <cstdint>

#include "kernels/core/sequence.h"
#include "kernels/read/decode_cpu.h"

namespace kvrt {

/// Scratch of one call, which starts at a multiple of 64 bytes.
std::int64_t decode_sequence_bytes(const LayerContext& layer);

/// Attention of the G query heads of one KV head over one sequence. Requires: a checked call; does not allocate or throw.
void decode_sequence(const LayerContext& layer, AttendHead attend, const Sequence& sequence, int head, const kvrt_attn& attn, const kvrt_pools& pools,
                     void* scratch);

}  // namespace kvrt

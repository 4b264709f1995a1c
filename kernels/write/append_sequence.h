#pragma once
// The cpu backend's append of one sequence and head: the bytes of append_reference(), whole runs of tokens at a time. Tokens that enter
// and leave the window within one call never touch its ring.

#include <cstdint>

#include "kernels/core/sequence.h"
#include "kernels/write/write_path.h"

namespace kvrt {

/// Scratch of one call, which starts at a multiple of 64 bytes.
std::int64_t append_scratch_bytes(const LayerContext& layer);

/// Arguments as of append_reference(). Requires: a checked call, head_dim a multiple of 16; does not allocate or throw.
void append_sequence(const LayerContext& layer, const WritePath& path, const Sequence& sequence, int head, const kvrt_qkv& qkv, const kvrt_pools& pools,
                     void* scratch, EncodeCounters counters[KVRT_SIDES], std::int64_t* n_coded);

}  // namespace kvrt

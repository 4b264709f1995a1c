#pragma once
// The reference backend: one loop nest an operation, every byte through the page codecs, sums in double. Written to be read, and the
// oracle of the other backends. Calls are checked before; none of them allocates or throws.

#include <cstdint>

#include "kernels/core/sequence.h"

namespace kvrt {

/// Scratch of one call of any function below.
std::int64_t reference_workspace_bytes(const LayerContext& layer);

/// Writes the rows of one sequence and head, both sides. counters: [KVRT_SIDES], n_coded: rows put into base pages.
void append_reference(const LayerContext& layer, const Sequence& sequence, int head, const kvrt_qkv& qkv, const kvrt_pools& pools, void* scratch,
                      EncodeCounters counters[KVRT_SIDES], std::int64_t* n_coded);

/// Attention of the G query heads of one KV head over one sequence.
void decode_reference(const LayerContext& layer, const Sequence& sequence, int head, const kvrt_attn& attn, const kvrt_pools& pools, void* scratch);

/// Token t of one sequence and head in the unit's frame, fp32 [D]; scratch: D floats.
void read_token(const LayerContext& layer, const kvrt_pools& pools, const Sequence& sequence, int head, kvrt_side side, std::int64_t t, float* out,
                float* scratch);

/// Row r, head h of inputs and outputs.
void load_row(const kvrt_rows& rows, std::int64_t n_heads, int head_dim, std::int64_t row, std::int64_t head, float* out);
void store_row(const kvrt_rows_out& rows, std::int64_t n_heads, int head_dim, std::int64_t row, std::int64_t head, const float* x);

}  // namespace kvrt

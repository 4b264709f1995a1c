#pragma once
// Decode attention of one query step over compressed pages, on CUDA (KERNELS.md 5). decode_cuda() writes one partial result a
// chunk, combine_cuda() merges the chunks of each query row. All pointers are device memory. No allocation, no synchronisation.

#include <cstdint>
#include <string>

#include "kernels/core/device_layer.h"
#include "kernels/core/status.h"
#include "kernels/read/segment.h"

namespace kvrt {

inline constexpr int kTileSlots = 16;  ///< slots of a tile: rows of one matrix product

/// Tiles that hold the live tokens of a segment, in ring order from the tile of first_slot.
KVRT_HOST_DEVICE inline std::int64_t live_tiles(const Segment& s) {
  if (s.n_tokens <= 0) return 0;
  const std::int64_t n = (s.first_slot % kTileSlots + s.n_tokens + kTileSlots - 1) / kTileSlots, all = s.n_slots / kTileSlots;
  return n < all ? n : all;
}

/// Work of one CTA: tiles [tile_begin, tile_end) of one segment against the query heads of one row.
struct DecodeChunk {
  std::int32_t segment;   ///< index into DecodeArgs::segments
  std::int32_t row;       ///< sequence * H + KV head
  std::int64_t tile_begin, tile_end;
};

struct DecodeArgs {
  const Segment* segments;
  const DecodeChunk* chunks;
  std::int64_t n_chunks;
  const float* q;         ///< [n_rows, G, D], in the segments' frame, times softmax scale * log2 e
  int n_query_heads;      ///< G, 1..16
  int head_dim;           ///< D
  Partial partials;       ///< [n_chunks, G], [n_chunks, G], [n_chunks, G, D]
};

/// Kernel families of one side (KERNELS.md 6): b16 = bf16, fp16; i8, i4 = int8, int4 with token.g<N>.
enum class DecodeFamily : std::uint8_t { kB16, kI8, kI4 };

/// Family that stores this codec's pages; false, with `error` naming what has no kernel, if there is none.
bool decode_family(const PageCodec& codec, DecodeFamily* family, std::string* error);

/// Exact (bf16) segments run in the same launch, whatever the families. Refuses by name what has no instance.
Status decode_cuda(const DecodeArgs& args, DecodeFamily k, DecodeFamily v, void* stream);

struct CombineArgs {
  Partial partials;                  ///< as written by decode
  const std::int64_t* first_chunk;   ///< [n_rows + 1]: chunks of row r are first_chunk[r] .. first_chunk[r + 1] - 1
  std::int64_t n_rows;               ///< row r: sequence r / H, KV head r mod H
  int n_query_heads, head_dim;
  int n_kv_heads;                    ///< H
  const float* sink_logit;           ///< [H, G] learned logit of the denominator, natural units, or null
  kvrt_rows_out out;                 ///< [sequences, H G, D]; 0 where a row has no token
  float* log_sum_exp;                ///< [sequences, H G] natural, or null
  float* mass;                       ///< [sequences, H G, KVRT_SEGMENTS] or null
  // Of a context; null: chunks are of one kind, sequence s goes to row s of the outputs.
  const DecodeChunk* chunks;         ///< segment mod 3 is a kvrt_segment
  const DeviceLayer* layer;          ///< `had` of V is undone on the outputs of base pages; null: outputs are as stored
  const DeviceSequence* sequences;   ///< outputs go to first_row of a sequence; those without a row are left alone
};
Status combine_cuda(const CombineArgs& args, void* stream);

}  // namespace kvrt

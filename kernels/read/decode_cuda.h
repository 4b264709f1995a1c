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
inline constexpr int kMaxDecodeDim = 256;  ///< of the kernels

/// Tiles that hold the live tokens of a segment, in ring order from the tile of first_slot.
KVRT_HOST_DEVICE inline std::int64_t live_tiles(const Segment& s) {
  if (s.n_tokens <= 0) return 0;
  const std::int64_t n = (s.first_slot % kTileSlots + s.n_tokens + kTileSlots - 1) / kTileSlots, all = s.n_slots / kTileSlots;
  return n < all ? n : all;
}

/// Work of one CTA: tiles [tile_begin, tile_end) of one segment against the query heads of one row.
struct DecodeChunk {
  std::int32_t segment;   ///< index into DecodeArgs::segments
  std::int32_t row;       ///< of DecodeArgs::q
  std::int64_t tile_begin, tile_end;
};

struct DecodeArgs {
  const Segment* segments;
  const DecodeChunk* chunks;
  std::int64_t n_chunks;
  const float* q;         ///< [rows of queries, G, D] in the coordinates and order of the keys that the row's chunks read, times softmax scale * log2 e
  int n_query_heads;      ///< G
  int head_dim;           ///< D
  float soft_cap;         ///< 0: none; else in the unit of scores (times log2 e)
  const RopeTables* rope; ///< keys before RoPE: in device memory, as its tables are; the coarse one reaches the last position
  int rope_offsets;       ///< the same: more than any offset in a page, P where pages have no gaps; 1 to kRopeFine
  Partial partials;       ///< [n_chunks, G], [n_chunks, G], [n_chunks, G, D]; o in the coordinates of coded values, `center` undone
  float* scores;          ///< two_pass: score_floats() floats, contents do not matter; else null
  std::int32_t max_chunk_tiles;  ///< two_pass: the longest chunk
};

/// Floats of DecodeArgs::scores.
inline std::int64_t score_floats(const DecodeArgs& a) {
  return a.n_chunks * ((a.n_query_heads + 7) / 8) * a.max_chunk_tiles * (8 * kTileSlots);
}

/// Kernel families of one side (KERNELS.md 6): b16 = bf16, fp16; e8 = fp8e4m3; i8, i4 = int8, sint8, int4, sint4; i3, i2 = int3, int2;
/// c4, c3, c2 = nuq, lm. Granularity is a branch inside the kernels.
enum class DecodeFamily : std::uint8_t { kB16, kE8, kI8, kI4, kI3, kI2, kC4, kC3, kC2 };
const char* family_name(DecodeFamily family);

/// Family that stores this codec's pages; false, with `error` naming what has no kernel, if there is none.
bool decode_family(const PageCodec& codec, DecodeFamily* family, std::string* error);

/// True for token groups that do not contain whole lanes' parts of a row: read by the padded kernels of two_pass alone.
bool has_any_groups(const PageCodec& codec, bool is_key);

/// How keys of one family and values of another are decoded: one kernel, or score and pv with the scores in memory between them.
/// Every pair of families has one of the two.
enum class DecodePath : std::uint8_t { kFused, kTwoPass };
/// Keys before RoPE: in which stored order, and so how far from each other the channels of a pair are in the quarter of a row that a
/// lane reads. kNone: keys after RoPE.
enum class KeyPairs : std::uint8_t {
  kNone,
  kSplit,     ///< half-split over all channels, spread<D/2>: D/8
  kHalf,      ///< half-split over half of the channels, spread<D/4>: D/16
  kQuarter,   ///< half-split over a quarter, spread<D/8>: D/32
  kAdjacent,  ///< interleaved, natural order: 1
};
/// That of a base page; false, with `error`, if pages of this kind have no kernel. Of rope only the shape matters.
bool key_pairs(const PageCodec& codec, const RopeTables& rope, KeyPairs* pairs, std::string* error);

struct DecodeUnit {
  DecodeFamily k, v;
  KeyPairs pairs;
  int head_dim;        ///< D
  bool k_general = false, v_general = false;  ///< has_any_groups() of the two codecs
};
/// `error` names what has no kernel. Without CUDA: the answer of a build with the default instances.
bool choose_decode_path(const DecodeUnit& unit, DecodePath* path, std::string* error);

/// Exact (bf16) segments run in the same launch, whatever the families. Takes the path that is asked for, or refuses by name.
Status decode_cuda(const DecodeArgs& args, const DecodeUnit& unit, DecodePath path, void* stream);

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

#pragma once
// Decode attention over compressed pages on the CPU: one call attends one KV head's segment with its G query heads. Any K codec goes
// with any V codec. No allocation; calls on different partials and workspaces may run at the same time.

#include <cstdint>
#include <vector>

#include "kernels/codec/rope.h"
#include "kernels/core/status.h"
#include "kernels/read/segment.h"

namespace kvrt {

inline constexpr int kRopeTile = 32;  ///< offsets inside a tile of tokens

/// G = query heads of this KV head, D = head_dim of both codecs.
struct HeadAttention {
  Segment segment;
  const float* q = nullptr;            ///< [G, D] at its own position (rotated), times softmax scale * log2 e, in the frame and channel order of stored keys
  int n_queries = 0;                   ///< G
  const RopeTables* rope = nullptr;    ///< with segment.pre; its coarse table reaches the segment's last position
  const float* rope_tile = nullptr;    ///< with segment.pre: rope_tile_table()
  const std::int32_t* pair_places = nullptr;  ///< [n_pairs, 2] where both channels of a pair are stored; null = natural order
  float soft_cap = 0.0f;               ///< 0: none; else in the unit of scores, times log2 e
  const float* k_mean = nullptr;       ///< [D] or null: `center` of K, added to keys before they are rotated
  const float* v_mean = nullptr;       ///< [D] or null: `center` of V
  Partial out;                         ///< the segment's tokens are added to it
};

/// One vector path. workspace: decode_workspace_floats() floats, aligned to 64 bytes, contents do not matter.
using AttendHead = void (*)(const HeadAttention& job, float* workspace);
void attend_head_baseline(const HeadAttention& job, float* workspace);
void attend_head_avx2(const HeadAttention& job, float* workspace);
void attend_head_avx512(const HeadAttention& job, float* workspace);

struct DecodeBackend {
  const char* name;
  AttendHead attend;
};
/// The vector paths that this build has and this CPU runs, widest last; the first is kBaselineName.
std::vector<DecodeBackend> decode_backends();
/// The widest path, or the one named by KVRT_FORCE_ISA. Codes: kUnsupported if that is none of decode_backends().
Status choose_decode_backend(DecodeBackend* out);

std::int64_t decode_workspace_floats(int head_dim, int n_queries);

/// What attend_head() requires and the caller checks once per layer. Codes: kArgument.
Status check_head_attention(const HeadAttention& job);

/// [n_pairs, 2, 32]: the first offsets of the fine table, position fastest. Keys of a tile are rotated by their offset inside it,
/// queries back by the position of its first slot.
void rope_tile_table(const RopeTables& rope, float* out);

/// Merges partials of the same query heads over different tokens: out[g] = sum of o / sum of l in one base; lse (or null): natural
/// logarithm of the denominator. Partials without tokens count nothing; a head without any token gives zeros and -infinity.
void combine_partials(const Partial* parts, int n_parts, int n_queries, int head_dim, float* out, float* lse);

/// No token: m = -1e30, l = 0, o = 0.
void clear_partial(const Partial& partial, int n_queries, int head_dim);

/// Scalar, for shapes without a vector unpacker: slots slot + [begin, end) to out + t * stride in stored order, zeros behind channel D.
void decode_rows_scalar(const PageCodec& codec, const std::uint8_t* block, int slot, int begin, int end, std::int64_t stride, float* out);

/// Adds the outliers of slots slot + [begin, end) to decoded codes; token t and stored channel c lie at t * per_row + c * per_channel.
/// Not inline: it is called from the vector paths, which may not share inline functions.
void add_outliers(const PageCodec& codec, const std::uint8_t* block, int slot, int begin, int end, std::int64_t per_row, std::int64_t per_channel, float* out);

}  // namespace kvrt

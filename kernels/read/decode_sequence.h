#pragma once
// The cpu backend's decode of one sequence and KV head. Base tokens are attended in ranges whose borders follow from their number alone,
// and the ranges' partials are merged in order: who attends which range changes no bit.

#include <cstdint>

#include "kernels/core/sequence.h"
#include "kernels/read/decode_cpu.h"

namespace kvrt {

inline constexpr int kMaxRanges = 32;
inline constexpr std::int64_t kRangeTokens = 1024;  ///< the least that is worth a range of its own

/// Ranges of n base tokens in pages of page_tokens: whole pages, as equal as they allow; one range without base tokens.
struct Ranges {
  int n = 1;
  std::int64_t pages = 0;  ///< of each range but the last
};
Ranges ranges_of(std::int64_t n_base_tokens, int page_tokens);
Ranges ranges_of(const LayerContext& layer, const Sequence& sequence);

/// Scratch of one call of the functions below, and the partials of one sequence and head. Both start at a multiple of 64 bytes.
std::int64_t decode_scratch_bytes(const LayerContext& layer);
std::int64_t decode_partials_bytes(const LayerContext& layer);

/// Attends base ranges [first, last); range 0 brings the sink and window tokens with it. Requires: a checked call; like merge_ranges(), does not
/// allocate or throw. Calls on different ranges of one `partials` may run at the same time.
void attend_ranges(const LayerContext& layer, AttendHead attend, const Sequence& sequence, int head, int first, int last, const kvrt_attn& attn,
                   const kvrt_pools& pools, void* partials, void* scratch);

/// Merges all ranges' partials and writes the outputs of the G query heads.
void merge_ranges(const LayerContext& layer, const Sequence& sequence, int head, const kvrt_attn& attn, void* partials, void* scratch);

}  // namespace kvrt

#pragma once
// Encodes and decodes one head block of a page: [codes][params][outliers], the parts and their order of KERNELS.md 3.2.
//   token.g<N>    params [P][D/N], int, nuq: fp16 scale, fp16 lo; fp8, sint, lm: fp16 scale (lm: norm)
//   channel.g<N>  params [P/N][D], fp16 scale, fp16 lo
//   nvfp4, mxfp4  params [P][D/16] E4M3, [P][D/32] E8M0
//   3 bits        codes are plane A [P][D/32][8 bytes], then plane B [P][D/32][4 bytes]; others [P][row]
//   out<p>        entries of codec/outlier.h
// Input is what METHODS.md calls the encoder's input: after bf16 rounding, frame, center, smooth and had. Bytes that belong to slots
// never written may hold anything.

#include <cmath>
#include <cstdint>

#include "kernels/codec/channel_order.h"
#include "kernels/codec/grid_codec.h"
#include "kernels/codec/group_range.h"
#include "kernels/codec/int_codec.h"
#include "kernels/codec/llamacpp_blocks.h"
#include "kernels/codec/outlier.h"
#include "kernels/codec/static_range.h"
#include "kernels/core/scheme.h"

namespace kvrt {

/// Shape of one head block, and the constants of the plan that its head needs.
struct PageCodec {
  Format format = Format::kBf16;
  Granularity granularity = Granularity::kNone;
  int bits = 16;              ///< of a code
  int head_dim = 0;           ///< D
  int group = 0;              ///< N, resolved: never 0 with token or channel; the block of nvfp4, mxfp4
  int page_tokens = 64;       ///< P
  std::int64_t row_bytes = 0;     ///< of one token's codes (plane A for 3 bits)
  std::int64_t plane_b = 0;       ///< offset of plane B, 3 bits only
  std::int64_t params = 0;        ///< offset of the parameters
  StaticRange range;              ///< tensor, head; nvfp4: scale = gamma
  const StaticRange* channel_ranges = nullptr;  ///< channel.static: [D]
  Codebook codebook;              ///< nuq: of the plan; lm: set by make_page_codec
  int spread = 0;                 ///< N of spread<N>: stored order of codes, and of the parameters of channel.g<N>; 0 = natural. Rows
                                  ///< that are encoded and decoded, and groups of channels, are always in model order.
  float clip_alpha = 1.0f;        ///< clip over token and channel groups: their ranges shrink about the mean; 1 = none
  bool pair = false;              ///< one range for both channels of a RoPE pair
  int rotary_dim = 0;             ///< pair: rotated channels
  bool interleaved = false;       ///< pair: (2i, 2i + 1), else (i, i + rotary_dim / 2)
  int out_per_mille = 0;          ///< out<p>
  std::int64_t outliers = 0;      ///< offset of the entries
  const float* ef_u = nullptr;              ///< ef: [D(D+1)/2] of the head, upper triangle by rows; null = nearest codes
  const std::int32_t* ef_order = nullptr;   ///< ef: [D] of the head, channels in the order of feedback
};

/// Requires: a scheme that this build offers, of a valid shape. page_tokens a multiple of the channel group.
KVRT_HOST_DEVICE inline PageCodec make_page_codec(const Scheme& s, int code_bits, int head_dim, int page_tokens) {
  PageCodec c;
  c.format = s.format, c.granularity = s.granularity, c.bits = code_bits;
  c.head_dim = head_dim, c.page_tokens = page_tokens;
  c.group = is_fp4(s.format) ? fp4_block(s.format) : s.granularity == Granularity::kToken && s.group == 0 ? head_dim : s.group;
  const std::int64_t cells = (head_dim + 31) / 32;
  const std::int64_t row = is_llamacpp_block(s.format) ? head_dim / kLlamaBlock * llama_block_bytes(s.format)
                           : code_bits == 16 ? 2 * static_cast<std::int64_t>(head_dim)
                           : code_bits == 3 ? 12 * cells
                                            : 4 * ((static_cast<std::int64_t>(head_dim) * code_bits + 31) / 32);
  c.row_bytes = code_bits == 3 ? 8 * cells : row;
  c.plane_b = 8 * cells * page_tokens;
  c.params = row * page_tokens;
  const std::int64_t groups = c.granularity == Granularity::kToken     ? static_cast<std::int64_t>(page_tokens) * (head_dim / c.group)
                              : c.granularity == Granularity::kChannel ? static_cast<std::int64_t>(page_tokens / c.group) * head_dim
                                                                       : 0;
  c.pair = s.pair;
  c.out_per_mille = s.outlier_per_mille;
  c.outliers = c.params + groups * 4;  // formats with outliers store scale and lo
  if (is_lm(s.format)) c.codebook = lloyd_max_codebook(s.format);
  return c;
}

namespace detail {

KVRT_HOST_DEVICE inline bool is_static(const PageCodec& c) {
  return c.granularity == Granularity::kTensor || c.granularity == Granularity::kHead || c.granularity == Granularity::kChannelStatic;
}
KVRT_HOST_DEVICE inline bool has_stored_lo(Format f) { return is_int(f) || is_nuq(f); }
/// Bytes of one group's parameters.
KVRT_HOST_DEVICE inline int param_stride(Format f) { return has_stored_lo(f) ? 4 : is_fp4(f) ? 1 : 2; }
KVRT_HOST_DEVICE inline std::int64_t param_offset(const PageCodec& c, int slot, int d) {
  const std::int64_t index = c.granularity == Granularity::kChannel
                                 ? static_cast<std::int64_t>(slot / c.group) * c.head_dim + stored_position(c.spread, c.head_dim, d)
                                 : static_cast<std::int64_t>(slot) * (c.head_dim / c.group) + d / c.group;
  return c.params + param_stride(c.format) * index;
}

/// Grid of channel d of a slot, from the constants or from the parameters already in the block.
KVRT_HOST_DEVICE inline Grid grid_at(const PageCodec& c, const std::uint8_t* block, int slot, int d) {
  if (c.granularity == Granularity::kChannelStatic) return {c.channel_ranges[d].lo, c.channel_ranges[d].scale};
  if (is_static(c)) return {c.range.lo, c.range.scale};
  const std::uint8_t* p = block + param_offset(c, slot, d);
  if (c.format == Format::kNvfp4) return {0.0f, e4m3_to_f32(*p) * c.range.scale};
  if (c.format == Format::kMxfp4) return {0.0f, e8m0_to_f32(*p)};
  return {has_stored_lo(c.format) ? f16_to_f32(load_le16(p + 2)) : 0.0f, f16_to_f32(load_le16(p))};
}

/// Pieces of one slot's codes that share no word.
KVRT_HOST_DEVICE inline int slot_pieces(const PageCodec& c) { return row_pieces(c.bits, c.head_dim); }
/// code_of(d): code of channel d, called once for each of the piece, in stored order.
template <class CodeOf>
KVRT_HOST_DEVICE inline void pack_slot_piece(const PageCodec& c, int slot, int piece, CodeOf code_of, std::uint8_t* block) {
  const auto code = [&](int position) { return code_of(stored_channel(c.spread, c.head_dim, position)); };
  std::uint8_t* row = block + slot * c.row_bytes;
  std::uint8_t* plane_b = block + c.plane_b + slot * (c.row_bytes / 2);
  if (c.bits == 3 && !is_int(c.format)) pack_codebook_cell3(c.head_dim, piece, code, row, plane_b);
  else pack_row_piece(c.bits, c.head_dim, piece, code, row, plane_b);
}
template <class CodeOf>
KVRT_HOST_DEVICE inline void pack_slot(const PageCodec& c, int slot, CodeOf code_of, std::uint8_t* block) {
  for (int piece = 0; piece < slot_pieces(c); ++piece) pack_slot_piece(c, slot, piece, code_of, block);
}
KVRT_HOST_DEVICE inline std::uint8_t unpack_slot(const PageCodec& c, const std::uint8_t* block, int slot, int channel) {
  const int d = stored_position(c.spread, c.head_dim, channel);
  const std::uint8_t* row = block + slot * c.row_bytes;
  const std::uint8_t* plane_b = block + c.plane_b + slot * (c.row_bytes / 2);
  if (c.bits == 3 && !is_int(c.format)) return unpack_codebook_code3(row, plane_b, d);
  return unpack_code(c.bits, row, plane_b, d);
}

KVRT_HOST_DEVICE inline void encode_exact_value(const PageCodec& c, const float* x, int d, std::uint8_t* row, EncodeCounters* counters) {
  const float v = finite_or_zero(x[d], counters);
  std::uint16_t h = c.format == Format::kBf16 ? f32_to_bf16_finite(v) : f32_to_f16_rne(v);
  if (c.format == Format::kFp16 && (h & 0x7FFFu) == 0x7C00u) --h, ++counters->saturated;
  store_le16(row + 2 * stored_position(c.spread, c.head_dim, d), h);
}

KVRT_HOST_DEVICE inline float decode_exact_value(const PageCodec& c, const std::uint8_t* row, int d) {
  const std::uint16_t h = load_le16(row + 2 * stored_position(c.spread, c.head_dim, d));
  return c.format == Format::kBf16 ? bf16_to_f32(h) : f16_to_f32(h);
}

/// Block b of 32 channels.
KVRT_HOST_DEVICE inline void encode_llamacpp_block(const PageCodec& c, const float* x, int b, std::uint8_t* row, EncodeCounters* counters) {
  float v[kLlamaBlock];
  for (int i = 0; i < kLlamaBlock; ++i) v[i] = finite_or_zero(x[b * kLlamaBlock + i], counters);
  encode_llama_block(c.format, v, row + b * llama_block_bytes(c.format), counters);
}

KVRT_HOST_DEVICE inline float quiet(float x) { return f32_is_finite(x) ? x : 0.0f; }  // already counted

KVRT_HOST_DEVICE inline void store_affine(std::uint8_t* p, AffineParams a) {
  store_le16(p, a.scale);
  store_le16(p + 2, a.lo);
}

/// Euclidean norm of a group.
KVRT_HOST_DEVICE inline float group_norm(const float* x, int n) {
  return sqrtf(sum_of_lanes(n, [&](int i) { return quiet(x[i]) * quiet(x[i]); }));
}

/// Range of the token group that starts at channel `begin`. Counts the values that are not finite.
KVRT_HOST_DEVICE inline GroupRange token_range(const PageCodec& c, const float* x, int begin, EncodeCounters* counters) {
  const bool clips = c.clip_alpha != 1.0f;
  for (int i = 0; i < c.group; ++i) finite_or_zero(x[begin + i], counters);
  const auto range_at = [&](int first) { return group_range(c.group, clips, [&](int i) { return quiet(x[first + i]); }); };
  const int partner = c.pair ? rope_partner(c.rotary_dim, c.interleaved, begin) / c.group * c.group : begin;
  if (partner == begin) return clipped(range_at(begin), c.group, c.clip_alpha);
  return clipped(joined(range_at(begin), range_at(partner)), 2 * c.group, c.clip_alpha);
}

/// Writes the parameters of the group of one slot that starts at channel `begin`. For lm this is n0, the norm that the codes are found with.
KVRT_HOST_DEVICE inline void store_group_params(const PageCodec& c, const float* x, int slot, int begin, std::uint8_t* block, EncodeCounters* counters) {
  std::uint8_t* p = block + param_offset(c, slot, begin);
  const GroupRange e = token_range(c, x, begin, counters);
  const float absmax = -e.min > e.max ? -e.min : e.max + 0.0f;
  if (is_int(c.format)) {
    store_affine(p, affine_params(e.min, e.max, (1 << c.bits) - 1, counters));
  } else if (is_nuq(c.format)) {
    store_affine(p, affine_params(e.min, e.max, 2, counters));
  } else if (is_sint(c.format)) {
    store_le16(p, symmetric_scale(absmax, (1 << (c.bits - 1)) - 1, counters));
  } else if (is_fp8(c.format)) {
    store_le16(p, fp8_token_scale(absmax, fp8_max(c.format), counters));
  } else if (is_lm(c.format)) {
    EncodeCounters not_stored;
    store_le16(p, norm_scale(group_norm(x + begin, c.group) / sqrtf(static_cast<float>(c.group)), &not_stored));
  } else if (c.format == Format::kMxfp4) {
    *p = mxfp4_scale(absmax);
  } else {
    *p = nvfp4_scale(absmax, c.range.scale);
    for (int i = 0; i < c.group; ++i) counters->saturated += quiet(x[begin + i]) > c.range.max || quiet(x[begin + i]) < c.range.min;
  }
}

/// Norm of a group y whose codes have the entries c. It keeps the projection, <y, decoded> = <y, y>: centroids are shorter than what
/// they stand for, all by about as much, and sums over tokens and logits would shrink with them. Where y and c are more than 45 degrees
/// apart that would stretch them too far, and the length is kept.
KVRT_HOST_DEVICE inline float projecting_norm(float y_norm, float along, float c_norm2) {
  return along * along > 0.5f * (y_norm * y_norm) * c_norm2 && along > 0.0f ? y_norm * y_norm / along : y_norm / sqrtf(c_norm2);
}

/// Replaces n0 in the block of an lm group by its projecting_norm().
KVRT_HOST_DEVICE inline void store_kept_norm(const PageCodec& c, const float* x, int slot, int begin, std::uint8_t* block, EncodeCounters* counters) {
  std::uint8_t* p = block + param_offset(c, slot, begin);
  if (load_le16(p) == 0) return;
  const auto entry = [&](int i) { return c.codebook.entries[unpack_slot(c, block, slot, begin + i)]; };
  const float along = sum_of_lanes(c.group, [&](int i) { return quiet(x[begin + i]) * entry(i); });
  const float c_norm2 = sum_of_lanes(c.group, [&](int i) { return entry(i) * entry(i); });
  store_le16(p, norm_scale(projecting_norm(group_norm(x + begin, c.group), along, c_norm2), counters));
}

/// Replaces scale and lo of an int token group that error feedback has coded by those that keep its mean and its projection,
/// <y - mean, decoded - mean> = <y - mean, y - mean>: with codes chosen for others the range of y no longer fits. Where the two are more than
/// 45 degrees apart, or the result is no normal fp16, they stay.
KVRT_HOST_DEVICE inline bool refits_groups(const PageCodec& c) {
  return c.ef_u && is_int(c.format) && c.granularity == Granularity::kToken && c.out_per_mille == 0;
}
KVRT_HOST_DEVICE inline void refit_group(const PageCodec& c, const float* x, int slot, int begin, std::uint8_t* block) {
  const auto code = [&](int i) { return static_cast<float>(unpack_slot(c, block, slot, begin + i)); };
  const auto value = [&](int i) { return quiet(x[begin + i]); };
  const float n = static_cast<float>(c.group), mean = sum_of_lanes(c.group, value) / n, code_mean = sum_of_lanes(c.group, code) / n;
  const float x2 = sum_of_lanes(c.group, [&](int i) { return (value(i) - mean) * (value(i) - mean); });
  const float code2 = sum_of_lanes(c.group, [&](int i) { return (code(i) - code_mean) * (code(i) - code_mean); });
  const float along = sum_of_lanes(c.group, [&](int i) { return (value(i) - mean) * (code(i) - code_mean); });
  if (!(along * along > 0.5f * x2 * code2 && along > 0.0f)) return;
  const std::uint16_t scale = f32_to_f16_rne(x2 / along), lo = f32_to_f16_rne(mean - f16_to_f32(scale) * code_mean);
  if (!(f16_to_f32(scale) >= kScaleFloor && f16_to_f32(scale) <= kF16Max) || (lo & 0x7C00u) == 0x7C00u) return;
  std::uint8_t* p = block + param_offset(c, slot, begin);
  store_le16(p, scale), store_le16(p + 2, lo);
}

KVRT_HOST_DEVICE inline const StaticRange& static_range_of(const PageCodec& c, int d) {
  return c.granularity == Granularity::kChannelStatic ? c.channel_ranges[d] : c.range;
}
KVRT_HOST_DEVICE inline bool beyond_range(const PageCodec& c, int d, float v) { return v < static_range_of(c, d).min || v > static_range_of(c, d).max; }
KVRT_HOST_DEVICE inline void count_beyond_range(const PageCodec& c, const float* x, int d, EncodeCounters* counters) {
  counters->saturated += beyond_range(c, d, finite_or_zero(x[d], counters));
}

/// Channels of one slot that have an outlier entry, ascending, and what is left to code there.
struct SlotOutliers {
  const std::uint16_t* channels = nullptr;
  float* rests = nullptr;
  int n = 0;
};

/// Error feedback (METHODS.md 4.11): each channel takes the nearest code to what the channels before it left over. An outlier's entry
/// holds the error of its code, and nothing is left. n_lanes callers share the row: w and codes, [D] each, are one memory of theirs,
/// barrier() lets all see what each wrote; alone: lane 0 of 1.
template <class Barrier>
KVRT_HOST_DEVICE inline void feedback_codes(const PageCodec& c, const float* x, int slot, const std::uint8_t* block, const SlotOutliers& outliers,
                                            std::uint8_t* codes, float* w, int lane, int n_lanes, Barrier barrier) {
  for (int i = lane; i < c.head_dim; i += n_lanes) w[i] = quiet(x[c.ef_order[i]]);
  const float* u = c.ef_u;
  for (int i = 0; i < c.head_dim; ++i) {
    barrier();
    const int d = c.ef_order[i];
    const Grid grid = grid_at(c, block, slot, d);
    const float rest = quiet(w[i]);  // sums of huge values may leave fp32
    const std::uint8_t code = grid_code(c.format, c.bits, c.codebook, rest, grid);
    bool picked = false;
    for (int k = 0; k < outliers.n; ++k) {
      if (outliers.channels[k] != d) continue;
      picked = true;
      if (lane == 0) outliers.rests[k] = rest;
    }
    const float error = picked ? 0.0f : (rest - grid_value(c.format, c.bits, c.codebook, code, grid)) / u[0];
    for (int j = i + 1 + lane; j < c.head_dim; j += n_lanes) {
      const float carried = error * u[j - i];
      w[j] = w[j] - carried;
    }
    if (lane == 0) codes[d] = code;
    u += c.head_dim - i;
  }
  barrier();
}

/// Nearest codes of one piece of a slot, on grids that are already fixed.
KVRT_HOST_DEVICE inline void encode_piece(const PageCodec& c, const float* x, int slot, int piece, std::uint8_t* block) {
  pack_slot_piece(c, slot, piece, [&](int d) { return grid_code(c.format, c.bits, c.codebook, quiet(x[d]), grid_at(c, block, slot, d)); }, block);
}
/// Codes of one slot on grids that are already fixed.
KVRT_HOST_DEVICE KVRT_ONE_COPY inline void encode_codes(const PageCodec& c, const float* x, int slot, const SlotOutliers& outliers, std::uint8_t* block) {
  if (c.ef_u) {
    std::uint8_t codes[kMaxFeedbackDim];
    float w[kMaxFeedbackDim];
    feedback_codes(c, x, slot, block, outliers, codes, w, 0, 1, [] {});
    return pack_slot(c, slot, [&](int d) { return codes[d]; }, block);
  }
  for (int k = 0; k < outliers.n; ++k) outliers.rests[k] = quiet(x[outliers.channels[k]]);
  for (int piece = 0; piece < slot_pieces(c); ++piece) encode_piece(c, x, slot, piece, block);
}

/// What the codes alone decode to.
KVRT_HOST_DEVICE inline float coded_value(const PageCodec& c, const std::uint8_t* block, int slot, int d) {
  return grid_value(c.format, c.bits, c.codebook, unpack_slot(c, block, slot, d), grid_at(c, block, slot, d));
}

/// Writes entries [0, n) of a slot. Requires: its codes are in the block.
KVRT_HOST_DEVICE KVRT_ONE_COPY inline void store_outliers(const PageCodec& c, int slot, const SlotOutliers& outliers, std::uint8_t* block, std::uint8_t* entry,
                                            EncodeCounters* counters) {
  for (int k = 0; k < outliers.n; ++k) {
    const int d = outliers.channels[k];
    const std::uint16_t delta = outlier_delta(outliers.rests[k], coded_value(c, block, slot, d), counters);
    store_outlier(entry + 4 * k, slot * c.head_dim + stored_position(c.spread, c.head_dim, d), delta);
  }
}

/// One token of every granularity but channel.g<N>, with its k entries.
KVRT_HOST_DEVICE inline void encode_row_with_outliers(const PageCodec& c, const float* x, int slot, std::uint8_t* block, EncodeCounters* counters) {
  const int d = c.head_dim, k = token_outliers(c.out_per_mille, d);
  float y[kMaxOutlierDim], rests[kMaxTokenOutliers], middle = 0.0f;
  std::uint16_t picks[kMaxTokenOutliers];
  for (int i = 0; i < d; ++i) y[i] = finite_or_zero(x[i], counters);
  const int n = c.granularity == Granularity::kChannelStatic
                    ? pick_static_outliers(y, d, k, [&](int i) { return c.channel_ranges[i]; }, picks)
                    : pick_vector_outliers(y, d, k, picks, &middle);
  const SlotOutliers outliers{picks, rests, n};
  if (is_static(c)) {
    for (int i = 0; i < d; ++i) count_beyond_range(c, y, i, counters);
    for (int i = 0; i < n; ++i) counters->saturated -= beyond_range(c, picks[i], y[picks[i]]);
    encode_codes(c, y, slot, outliers, block);
  } else {
    float kept[kMaxOutlierDim];
    for (int i = 0; i < d; ++i) kept[i] = y[i];
    fill_vector_outliers(kept, d, c.group, picks, n, middle);
    for (int begin = 0; begin < d; begin += c.group) store_group_params(c, kept, slot, begin, block, counters);
    encode_codes(c, y, slot, outliers, block);
  }
  std::uint8_t* const entries = block + c.outliers + 4 * static_cast<std::int64_t>(slot) * k;
  store_outliers(c, slot, outliers, block, entries, counters);
  for (int i = n; i < k; ++i) store_outlier(entries + 4 * i, slot * d, 0);
}

/// Parameters of channel d of the channel group whose first slot is `first`. x: [N, D], stride elements between tokens; range(d): of channel d alone.
template <class RangeOf>
KVRT_HOST_DEVICE inline void store_channel_params(const PageCodec& c, const float* x, std::int64_t stride, int first, int d, std::uint8_t* block,
                                                  EncodeCounters* counters, RangeOf range) {
  for (int t = 0; t < c.group; ++t) finite_or_zero(x[t * stride + d], counters);
  const int partner = c.pair ? rope_partner(c.rotary_dim, c.interleaved, d) : d;
  const GroupRange r = partner == d ? clipped(range(d), c.group, c.clip_alpha) : clipped(joined(range(d), range(partner)), 2 * c.group, c.clip_alpha);
  store_affine(block + param_offset(c, first, d), affine_params(r.min, r.max, (1 << c.bits) - 1, counters));
}
KVRT_HOST_DEVICE inline void store_channel_params(const PageCodec& c, const float* x, std::int64_t stride, int first, int d, std::uint8_t* block,
                                                  EncodeCounters* counters) {
  store_channel_params(c, x, stride, first, d, block, counters, [&](int channel) {
    return group_range(c.group, c.clip_alpha != 1.0f, [&](int t) { return quiet(x[t * stride + channel]); });
  });
}

/// One group of channel.g<N> with its quota of entries.
KVRT_HOST_DEVICE inline void encode_group_with_outliers(const PageCodec& c, const float* x, std::int64_t stride, int group_idx, std::uint8_t* block,
                                                        EncodeCounters* counters) {
  const int first = group_idx * c.group, before = group_outliers_before(c.out_per_mille, c.group, c.head_dim, group_idx);
  const int quota = group_outliers_before(c.out_per_mille, c.group, c.head_dim, group_idx + 1) - before;
  std::uint16_t picks[kMaxGroupOutliers];
  float medians[kMaxOutlierDim];
  const int n_picks = pick_group_outliers([&](int t, int d) { return quiet(x[t * stride + d]); }, c.group, c.head_dim, quota, picks, medians);
  const auto range_without_picks = [&](int channel) {
    float column[kMaxGroupTokens] = {};
    for (int t = 0; t < c.group; ++t) column[t] = quiet(x[t * stride + channel]);
    fill_channel_outliers(column, c.group, c.head_dim, channel, picks, n_picks, medians[channel]);
    return group_range(c.group, c.clip_alpha != 1.0f, [&](int t) { return column[t]; });
  };
  for (int d = 0; d < c.head_dim; ++d) store_channel_params(c, x, stride, first, d, block, counters, range_without_picks);
  std::uint8_t* const starts = block + c.outliers;
  std::uint8_t* const entries = starts + kOutlierStarts + 4 * static_cast<std::int64_t>(before);
  int at = 0;
  for (int t = 0; t < c.group; ++t) {
    if (t % 16 == 0) store_le16(starts + 2 * ((first + t) / 16), static_cast<std::uint16_t>(before + at));
    std::uint16_t channels[kMaxOutlierDim];
    float rests[kMaxOutlierDim];
    int n = 0;
    for (; at + n < n_picks && picks[at + n] / c.head_dim == t; ++n) channels[n] = static_cast<std::uint16_t>(picks[at + n] % c.head_dim);
    const SlotOutliers outliers{channels, rests, n};
    encode_codes(c, x + t * stride, first + t, outliers, block);
    store_outliers(c, first + t, outliers, block, entries + 4 * at, counters);
    at += n;
  }
}

}  // namespace detail

/// Encodes one token into its slot: every granularity but channel.g<N>. x: [D].
KVRT_HOST_DEVICE inline void encode_row(const PageCodec& c, const float* x, int slot, std::uint8_t* block, EncodeCounters* counters) {
  std::uint8_t* row = block + slot * c.row_bytes;
  if (is_exact(c.format)) {
    for (int d = 0; d < c.head_dim; ++d) detail::encode_exact_value(c, x, d, row, counters);
    return;
  }
  if (is_llamacpp_block(c.format)) {
    for (int b = 0; b * kLlamaBlock < c.head_dim; ++b) detail::encode_llamacpp_block(c, x, b, row, counters);
    return;
  }
  if (c.out_per_mille > 0) return detail::encode_row_with_outliers(c, x, slot, block, counters);
  if (detail::is_static(c)) {
    for (int d = 0; d < c.head_dim; ++d) detail::count_beyond_range(c, x, d, counters);
  } else {
    for (int begin = 0; begin < c.head_dim; begin += c.group) detail::store_group_params(c, x, slot, begin, block, counters);
  }
  detail::encode_codes(c, x, slot, {}, block);
  for (int begin = 0; is_lm(c.format) && begin < c.head_dim; begin += c.group) detail::store_kept_norm(c, x, slot, begin, block, counters);
  for (int begin = 0; detail::refits_groups(c) && begin < c.head_dim; begin += c.group) detail::refit_group(c, x, slot, begin, block);
}

/// Encodes tokens [group_idx N, (group_idx + 1) N) of a channel.g<N> page. x: [N, D], stride elements between tokens.
KVRT_HOST_DEVICE inline void encode_channel_group(const PageCodec& c, const float* x, std::int64_t stride, int group_idx, std::uint8_t* block,
                                                  EncodeCounters* counters) {
  if (c.out_per_mille > 0) return detail::encode_group_with_outliers(c, x, stride, group_idx, block, counters);
  const int first = group_idx * c.group;
  for (int d = 0; d < c.head_dim; ++d) detail::store_channel_params(c, x, stride, first, d, block, counters);
  for (int t = 0; t < c.group; ++t) detail::encode_codes(c, x + t * stride, first + t, {}, block);
}

/// The outlier entries of slots [begin, end), which are written; whole groups of channel.g<N> at `end`. Some at either end may belong to
/// other slots of a group.
struct OutlierSpan {
  const std::uint8_t* entries = nullptr;
  int n = 0;
};
KVRT_HOST_DEVICE inline OutlierSpan outlier_span(const PageCodec& c, const std::uint8_t* block, int begin, int end) {
  if (c.out_per_mille == 0 || begin >= end) return {};
  const std::uint8_t* const part = block + c.outliers;
  if (c.granularity != Granularity::kChannel) {
    const int k = token_outliers(c.out_per_mille, c.head_dim);
    return {part + 4 * static_cast<std::int64_t>(begin) * k, (end - begin) * k};
  }
  const int first = load_le16(part + 2 * (begin / 16)), last = group_outliers_before(c.out_per_mille, c.group, c.head_dim, (end - 1) / c.group + 1);
  return {part + kOutlierStarts + 4 * static_cast<std::int64_t>(first), last - first};
}

/// visit(slot, stored channel, delta) for every outlier of slots [begin, end); see outlier_span().
template <class Visit>
KVRT_HOST_DEVICE inline void visit_outliers(const PageCodec& c, const std::uint8_t* block, int begin, int end, Visit visit) {
  const OutlierSpan span = outlier_span(c, block, begin, end);
  for (int i = 0; i < span.n; ++i) {
    const OutlierEntry e = load_outlier(span.entries + 4 * static_cast<std::int64_t>(i));
    const int slot = e.index / c.head_dim;
    if ((e.delta & 0x7FFFu) != 0 && slot >= begin && slot < end) visit(slot, e.index % c.head_dim, f16_to_f32(e.delta));
  }
}

/// Channel d of one token as its code says, without outliers.
KVRT_HOST_DEVICE inline float decode_code(const PageCodec& c, const std::uint8_t* block, int slot, int d) {
  const std::uint8_t* row = block + slot * c.row_bytes;
  if (is_exact(c.format)) return detail::decode_exact_value(c, row, d);
  if (is_llamacpp_block(c.format)) return decode_llama_block(c.format, row + d / kLlamaBlock * llama_block_bytes(c.format), d % kLlamaBlock);
  return detail::coded_value(c, block, slot, d);
}

/// Decodes one token. out: [D].
KVRT_HOST_DEVICE inline void decode_row(const PageCodec& c, const std::uint8_t* block, int slot, float* out) {
  for (int d = 0; d < c.head_dim; ++d) out[d] = decode_code(c, block, slot, d);
  visit_outliers(c, block, slot, slot + 1, [&](int, int position, float delta) { out[stored_channel(c.spread, c.head_dim, position)] += delta; });
}

}  // namespace kvrt

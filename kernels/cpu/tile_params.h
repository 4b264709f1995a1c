#pragma once
// Scale and minimum of the tokens or channels of one tile as fp32, whatever their stored form: value = base * scale + lo, where base is
// the code as a number (kernels/cpu/unpack.h). Internal linkage, like simd.h.

#include "kernels/codec/page_codec.h"
#include "kernels/cpu/tile.h"

namespace kvrt {
namespace {

enum class ParamKind { kNone, kToken, kChannel };

/// kToken: scale, lo of channel group g and token t at [g * kTile + t]; kChannel: of channel c at [c].
struct TileParams {
  ParamKind kind = ParamKind::kNone;
  int group = 0, n_groups = 0;  ///< kToken: channels of a group, groups of a row
  float* scale = nullptr;
  float* lo = nullptr;
  float book[kMaxCodebook] = {};  ///< codebook formats: what an entry counts before scale and lo
};

/// Floats of scratch that load_params() fills: 2 * this for one side.
KVRT_INLINE std::int64_t param_floats(int head_dim) { return head_dim > kTile ? 2 * static_cast<std::int64_t>(head_dim) : 2 * kTile; }

/// n_words words of each of n_rows rows, word-wise: out[w * kTile + row]. n_rows: a multiple of 16, at most kTile.
static void transpose_words(const std::uint8_t* base, std::int64_t stride, int n_words, int n_rows, std::int32_t* out) {
  for (int w = 0; w < n_words; w += kLanes) {
    const int n = n_words - w < kLanes ? n_words - w : kLanes;
    for (int t = 0; t < n_rows; t += kLanes) {
      I rows[kLanes];
      const std::uint8_t* p = base + t * stride + 4 * w;
      if (n == kLanes) {
        for (int i = 0; i < kLanes; ++i) rows[i] = load_int(p + i * stride);
      } else {  // never a byte past a row: the last one may end the pool
#if defined(__AVX512F__)
        const auto mask = static_cast<__mmask16>((1u << n) - 1u);
        for (int i = 0; i < kLanes; ++i) rows[i] = reinterpret_cast<I>(_mm512_maskz_loadu_epi32(mask, p + i * stride));
#else
        for (int i = 0; i < kLanes; ++i) {
          rows[i] = I{};
          for (int j = 0; j < n; ++j) rows[i][j] = read_as<std::int32_t>(p + i * stride + 4 * j);
        }
#endif
      }
      transpose(rows);
      for (int i = 0; i < n; ++i) store_int(out + (w + i) * kTile + t, rows[i]);
    }
  }
}

/// Pairs (fp16 scale, fp16 lo), one 32-bit word each.
KVRT_INLINE void store_pairs(I pairs, float* scale, float* lo) {
  store(scale, f16_lanes(pairs));
  store(lo, f16_lanes(pairs >> 16));
}

/// Parameters of slots [slot, slot + n_rows) of a block. scratch: param_floats(D) floats twice; words: D * kTile.
static TileParams load_params(const PageCodec& c, const std::uint8_t* block, int slot, int n_rows, float* scratch, std::int32_t* words) {
  TileParams p;
  p.scale = scratch, p.lo = scratch + param_floats(c.head_dim);
  const std::uint8_t* const stored = block + c.params;
  const bool has_lo = is_int(c.format) || is_nuq(c.format);
  for (int i = 0; i < c.codebook.size; ++i) p.book[i] = c.codebook.entries[i] + (is_nuq(c.format) ? 1.0f : 0.0f);
  if (c.granularity == Granularity::kChannelStatic) {
    p.kind = ParamKind::kChannel;
    for (int i = 0; i < c.head_dim; ++i) p.scale[i] = c.channel_ranges[i].scale, p.lo[i] = has_lo ? c.channel_ranges[i].lo : 0.0f;
    return p;
  }
  if (c.granularity == Granularity::kChannel) {
    p.kind = ParamKind::kChannel;
    const std::uint8_t* pairs = stored + 4 * static_cast<std::int64_t>(slot / c.group) * c.head_dim;
    for (int i = 0; i < c.head_dim; i += kLanes) store_pairs(load_int(pairs + 4 * i), p.scale + i, p.lo + i);
    return p;
  }
  if (is_exact(c.format)) return p;
  p.kind = ParamKind::kToken;
  const bool is_token = c.granularity == Granularity::kToken;
  p.group = is_token ? c.group : c.head_dim, p.n_groups = c.head_dim / p.group;
  if (!is_token) {
    for (int t = 0; t < kTile; ++t) p.scale[t] = c.range.scale, p.lo[t] = has_lo ? c.range.lo : 0.0f;
  } else if (has_lo) {
    const std::int64_t row = 4 * p.n_groups;
    if (p.n_groups == 1) {
      for (int t = 0; t < n_rows; t += kLanes) store_pairs(load_int(stored + row * (slot + t)), p.scale + t, p.lo + t);
      return p;
    }
    transpose_words(stored + row * slot, row, p.n_groups, n_rows, words);
    for (int g = 0; g < p.n_groups; ++g) {
      for (int t = 0; t < n_rows; t += kLanes) store_pairs(load_int(words + g * kTile + t), p.scale + g * kTile + t, p.lo + g * kTile + t);
    }
  } else {
    const std::int64_t row = 2 * p.n_groups;
    for (int g = 0; g < p.n_groups; ++g) {
      for (int t = 0; t < n_rows; ++t) p.scale[g * kTile + t] = f16_scalar(stored + row * (slot + t) + 2 * g), p.lo[g * kTile + t] = 0.0f;
    }
  }
  return p;
}

}  // namespace
}  // namespace kvrt

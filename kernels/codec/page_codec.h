#pragma once
// Encodes and decodes one head block of a page: [codes][params], the parts and their order of KERNELS.md 3.2.
//   token.g<N>    params [P][D/N], int: fp16 scale, fp16 lo; fp8, sint: fp16 scale
//   channel.g<N>  params [P/N][D], fp16 scale, fp16 lo
//   int3          codes are plane A [P][D/32][8 bytes], then plane B [P][D/32][4 bytes]; others [P][row]
// Input is what METHODS.md calls the encoder's input: after bf16 rounding, frame, center and had. Bytes that belong to slots never
// written may hold anything.

#include <cstdint>

#include "kernels/codec/fp8_codec.h"
#include "kernels/codec/int_codec.h"
#include "kernels/codec/llamacpp_blocks.h"
#include "kernels/codec/range.h"
#include "kernels/core/scheme.h"

namespace kvrt {

/// Shape of one head block.
struct PageCodec {
  Format format = Format::kBf16;
  Granularity granularity = Granularity::kNone;
  int bits = 16;              ///< of a code
  int head_dim = 0;           ///< D
  int group = 0;              ///< N, resolved: never 0 with token or channel
  int page_tokens = 64;       ///< P
  std::int64_t row_bytes = 0;     ///< of one token's codes (plane A for int3)
  std::int64_t plane_b = 0;       ///< offset of plane B, int3 only
  std::int64_t params = 0;        ///< offset of the parameters
  float static_scale = 1.0f;  ///< tensor, head: fp32, a constant of the plan
  float static_limit = 0.0f;  ///< tensor, head: |x| beyond it is counted as saturated
};

/// Requires: a scheme that this build offers, of a valid shape. page_tokens a multiple of the channel group.
KVRT_HOST_DEVICE inline PageCodec make_page_codec(const Scheme& s, int code_bits, int head_dim, int page_tokens) {
  PageCodec c;
  c.format = s.format, c.granularity = s.granularity, c.bits = code_bits;
  c.head_dim = head_dim, c.page_tokens = page_tokens;
  c.group = s.granularity == Granularity::kToken && s.group == 0 ? head_dim : s.group;
  const std::int64_t cells = (head_dim + 31) / 32;
  const std::int64_t row = is_llamacpp_block(s.format) ? head_dim / kLlamaBlock * llama_block_bytes(s.format)
                           : code_bits == 16 ? 2 * static_cast<std::int64_t>(head_dim)
                           : code_bits == 3 ? 12 * cells
                                            : 4 * ((static_cast<std::int64_t>(head_dim) * code_bits + 31) / 32);
  c.row_bytes = code_bits == 3 ? 8 * cells : row;
  c.plane_b = 8 * cells * page_tokens;
  c.params = row * page_tokens;
  return c;
}

namespace detail {

struct CodeRow {
  std::uint8_t* codes;
  std::uint8_t* plane_b;
};
KVRT_HOST_DEVICE inline CodeRow code_row(const PageCodec& c, std::uint8_t* block, int slot) {
  return {block + slot * c.row_bytes, block + c.plane_b + slot * (c.row_bytes / 2)};
}
KVRT_HOST_DEVICE inline bool is_int_format(Format f) {
  return f == Format::kInt8 || f == Format::kInt4 || f == Format::kInt3 || f == Format::kInt2;
}
KVRT_HOST_DEVICE inline float fp8_value(Format f, std::uint8_t code) { return f == Format::kFp8E4m3 ? e4m3_to_f32(code) : e5m2_to_f32(code); }
KVRT_HOST_DEVICE inline std::uint8_t fp8_code(Format f, float x) { return f == Format::kFp8E4m3 ? f32_to_e4m3(x) : f32_to_e5m2(x); }
KVRT_HOST_DEVICE inline float fp8_max(Format f) { return f == Format::kFp8E4m3 ? kE4m3Max : kE5m2Max; }

KVRT_HOST_DEVICE inline void encode_exact(const PageCodec& c, const float* x, std::uint8_t* row, EncodeCounters* counters) {
  for (int d = 0; d < c.head_dim; ++d) {
    const float v = finite_or_zero(x[d], counters);
    std::uint16_t h = c.format == Format::kBf16 ? f32_to_bf16_finite(v) : f32_to_f16_rne(v);
    if (c.format == Format::kFp16 && (h & 0x7FFFu) == 0x7C00u) --h, ++counters->saturated;
    store_le16(row + 2 * d, h);
  }
}

KVRT_HOST_DEVICE inline void encode_int_token(const PageCodec& c, const float* x, int slot, std::uint8_t* block, EncodeCounters* counters) {
  const int n_groups = c.head_dim / c.group, qmax = (1 << c.bits) - 1;
  std::uint8_t* params = block + c.params + 4 * static_cast<std::int64_t>(slot) * n_groups;
  for (int g = 0; g < n_groups; ++g) {
    float min = finite_or_zero(x[g * c.group], counters), max = min;
    for (int i = 1; i < c.group; ++i) {
      const float v = finite_or_zero(x[g * c.group + i], counters);
      if (v < min) min = v;
      if (v > max) max = v;
    }
    const AffineParams p = affine_params(min, max, qmax, counters);
    store_le16(params + 4 * g, p.scale);
    store_le16(params + 4 * g + 2, p.lo);
  }
  const CodeRow row = code_row(c, block, slot);
  pack_row(c.bits, c.head_dim, [&](int d) {
    const std::uint8_t* p = params + 4 * (d / c.group);
    const float v = f32_is_finite(x[d]) ? x[d] : 0.0f;
    return affine_code(v, f16_to_f32(load_le16(p)), f16_to_f32(load_le16(p + 2)), qmax);
  }, row.codes, row.plane_b);
}

KVRT_HOST_DEVICE inline void encode_fp8(const PageCodec& c, const float* x, int slot, std::uint8_t* block, EncodeCounters* counters) {
  const bool is_token = c.granularity == Granularity::kToken;
  const int group = is_token ? c.group : c.head_dim, n_groups = c.head_dim / group;
  const CodeRow row = code_row(c, block, slot);
  for (int g = 0; g < n_groups; ++g) {
    float absmax = 0, scale = c.static_scale;
    for (int i = 0; i < group; ++i) {
      const float v = finite_or_zero(x[g * group + i], counters), a = v < 0 ? -v : v;
      if (a > absmax) absmax = a;
      if (!is_token && a > c.static_limit) ++counters->saturated;
    }
    if (is_token) {
      const std::uint16_t stored = fp8_token_scale(absmax, fp8_max(c.format), counters);
      store_le16(block + c.params + 2 * (static_cast<std::int64_t>(slot) * n_groups + g), stored);
      scale = f16_to_f32(stored);
    }
    for (int i = 0; i < group; ++i) {
      const float v = f32_is_finite(x[g * group + i]) ? x[g * group + i] : 0.0f;
      row.codes[g * group + i] = fp8_code(c.format, v / scale);
    }
  }
  for (int d = c.head_dim; d < c.row_bytes; ++d) row.codes[d] = 0;
}

KVRT_HOST_DEVICE inline void encode_sint(const PageCodec& c, const float* x, int slot, std::uint8_t* block, EncodeCounters* counters) {
  const int n_groups = c.head_dim / c.group, half = 1 << (c.bits - 1), m = half - 1;
  std::uint8_t* params = block + c.params + 2 * static_cast<std::int64_t>(slot) * n_groups;
  for (int g = 0; g < n_groups; ++g) {
    float absmax = 0;
    for (int i = 0; i < c.group; ++i) {
      const float v = finite_or_zero(x[g * c.group + i], counters), a = v < 0 ? -v : v;
      if (a > absmax) absmax = a;
    }
    store_le16(params + 2 * g, symmetric_scale(absmax, m, counters));
  }
  const CodeRow row = code_row(c, block, slot);
  pack_row(c.bits, c.head_dim, [&](int d) {
    const float v = f32_is_finite(x[d]) ? x[d] : 0.0f;
    return static_cast<std::uint8_t>(symmetric_code(v, f16_to_f32(load_le16(params + 2 * (d / c.group))), m) + half);
  }, row.codes, row.plane_b);
}

KVRT_HOST_DEVICE inline void encode_llamacpp(const PageCodec& c, const float* x, std::uint8_t* row, EncodeCounters* counters) {
  for (int b = 0; b * kLlamaBlock < c.head_dim; ++b) {
    float v[kLlamaBlock];
    for (int i = 0; i < kLlamaBlock; ++i) v[i] = finite_or_zero(x[b * kLlamaBlock + i], counters);
    encode_llama_block(c.format, v, row + b * llama_block_bytes(c.format), counters);
  }
}

}  // namespace detail

/// Encodes one token into its slot: every granularity but channel.g<N>. x: [D].
KVRT_HOST_DEVICE inline void encode_row(const PageCodec& c, const float* x, int slot, std::uint8_t* block, EncodeCounters* counters) {
  std::uint8_t* row = block + slot * c.row_bytes;
  if (detail::is_int_format(c.format)) detail::encode_int_token(c, x, slot, block, counters);
  else if (c.format == Format::kBf16 || c.format == Format::kFp16) detail::encode_exact(c, x, row, counters);
  else if (c.format == Format::kFp8E4m3 || c.format == Format::kFp8E5m2) detail::encode_fp8(c, x, slot, block, counters);
  else if (c.format == Format::kSint8 || c.format == Format::kSint4) detail::encode_sint(c, x, slot, block, counters);
  else detail::encode_llamacpp(c, x, row, counters);
}

/// Encodes tokens [group_idx N, (group_idx + 1) N) of a channel.g<N> page. x: [N, D], stride elements between tokens.
KVRT_HOST_DEVICE inline void encode_channel_group(const PageCodec& c, const float* x, std::int64_t stride, int group_idx, std::uint8_t* block,
                                                  EncodeCounters* counters) {
  const int qmax = (1 << c.bits) - 1;
  std::uint8_t* params = block + c.params + 4 * static_cast<std::int64_t>(group_idx) * c.head_dim;
  for (int d = 0; d < c.head_dim; ++d) {
    float min = finite_or_zero(x[d], counters), max = min;
    for (int t = 1; t < c.group; ++t) {
      const float v = finite_or_zero(x[t * stride + d], counters);
      if (v < min) min = v;
      if (v > max) max = v;
    }
    const AffineParams p = affine_params(min, max, qmax, counters);
    store_le16(params + 4 * d, p.scale);
    store_le16(params + 4 * d + 2, p.lo);
  }
  for (int t = 0; t < c.group; ++t) {
    const detail::CodeRow row = detail::code_row(c, block, group_idx * c.group + t);
    pack_row(c.bits, c.head_dim, [&](int d) {
      const float v = f32_is_finite(x[t * stride + d]) ? x[t * stride + d] : 0.0f;
      return affine_code(v, f16_to_f32(load_le16(params + 4 * d)), f16_to_f32(load_le16(params + 4 * d + 2)), qmax);
    }, row.codes, row.plane_b);
  }
}

/// Decodes one token. out: [D].
KVRT_HOST_DEVICE inline void decode_row(const PageCodec& c, const std::uint8_t* block, int slot, float* out) {
  const std::uint8_t* row = block + slot * c.row_bytes;
  for (int d = 0; d < c.head_dim; ++d) {
    if (detail::is_int_format(c.format)) {
      const std::int64_t index = c.granularity == Granularity::kToken
                                     ? static_cast<std::int64_t>(slot) * (c.head_dim / c.group) + d / c.group
                                     : static_cast<std::int64_t>(slot / c.group) * c.head_dim + d;
      const std::uint8_t* p = block + c.params + 4 * index;
      const std::uint8_t code = unpack_code(c.bits, row, block + c.plane_b + slot * (c.row_bytes / 2), d);
      out[d] = affine_value(code, f16_to_f32(load_le16(p)), f16_to_f32(load_le16(p + 2)));
    } else if (c.format == Format::kFp8E4m3 || c.format == Format::kFp8E5m2) {
      float scale = c.static_scale;
      if (c.granularity == Granularity::kToken) {
        scale = f16_to_f32(load_le16(block + c.params + 2 * (static_cast<std::int64_t>(slot) * (c.head_dim / c.group) + d / c.group)));
      }
      out[d] = detail::fp8_value(c.format, row[d]) * scale;
    } else if (c.format == Format::kSint8 || c.format == Format::kSint4) {
      const std::int64_t index = static_cast<std::int64_t>(slot) * (c.head_dim / c.group) + d / c.group;
      const int code = unpack_code(c.bits, row, nullptr, d) - (1 << (c.bits - 1));
      out[d] = static_cast<float>(code) * f16_to_f32(load_le16(block + c.params + 2 * index));
    } else if (is_llamacpp_block(c.format)) {
      out[d] = decode_llama_block(c.format, row + d / kLlamaBlock * llama_block_bytes(c.format), d % kLlamaBlock);
    } else {
      out[d] = c.format == Format::kBf16 ? bf16_to_f32(load_le16(row + 2 * d)) : f16_to_f32(load_le16(row + 2 * d));
    }
  }
}

}  // namespace kvrt

#include "libcalib/weights/gguf_dequant.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "kernels/codec/half.h"

namespace calib::weights {
namespace {

using Byte = std::uint8_t;

constexpr GgufTensorType kTypes[] = {
    {0, "F32", TensorType::kF32, {1, 4}},         {1, "F16", TensorType::kF16, {1, 2}},
    {2, "Q4_0", TensorType::kQ4_0, {32, 18}},     {3, "Q4_1", TensorType::kQ4_1, {32, 20}},
    {6, "Q5_0", TensorType::kQ5_0, {32, 22}},     {7, "Q5_1", TensorType::kQ5_1, {32, 24}},
    {8, "Q8_0", TensorType::kQ8_0, {32, 34}},     {10, "Q2_K", TensorType::kQ2K, {256, 84}},
    {11, "Q3_K", TensorType::kQ3K, {256, 110}},   {12, "Q4_K", TensorType::kQ4K, {256, 144}},
    {13, "Q5_K", TensorType::kQ5K, {256, 176}},   {14, "Q6_K", TensorType::kQ6K, {256, 210}},
    {16, "IQ2_XXS", TensorType::kOther, {256, 66}}, {17, "IQ2_XS", TensorType::kOther, {256, 74}},
    {18, "IQ3_XXS", TensorType::kOther, {256, 98}}, {19, "IQ1_S", TensorType::kOther, {256, 50}},
    {20, "IQ4_NL", TensorType::kIq4Nl, {32, 18}}, {21, "IQ3_S", TensorType::kOther, {256, 110}},
    {22, "IQ2_S", TensorType::kOther, {256, 82}}, {23, "IQ4_XS", TensorType::kOther, {256, 136}},
    {24, "I8", TensorType::kI8, {1, 1}},          {25, "I16", TensorType::kI16, {1, 2}},
    {26, "I32", TensorType::kI32, {1, 4}},        {27, "I64", TensorType::kI64, {1, 8}},
    {28, "F64", TensorType::kF64, {1, 8}},        {29, "IQ1_M", TensorType::kOther, {256, 56}},
    {30, "BF16", TensorType::kBF16, {1, 2}},      {34, "TQ1_0", TensorType::kOther, {256, 54}},
    {35, "TQ2_0", TensorType::kOther, {256, 66}}, {39, "MXFP4", TensorType::kOther, {32, 17}},
    {40, "NVFP4", TensorType::kOther, {64, 36}},
};

float half(const Byte* p) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, p, 2);
  return kvrt::f16_to_f32(bits);
}
int low(Byte b) { return b & 0xF; }
int high(Byte b) { return b >> 4; }

// Q4_0: f16 d | 16 bytes, low nibbles are values 0 to 15, high nibbles 16 to 31 | value = d (q - 8)
void q4_0(const Byte* p, float* y) {
  const float d = half(p);
  for (int j = 0; j < 16; ++j) y[j] = d * static_cast<float>(low(p[2 + j]) - 8), y[j + 16] = d * static_cast<float>(high(p[2 + j]) - 8);
}
// Q4_1: f16 d, f16 m | 16 bytes as Q4_0 | value = d q + m
void q4_1(const Byte* p, float* y) {
  const float d = half(p), m = half(p + 2);
  for (int j = 0; j < 16; ++j) y[j] = d * static_cast<float>(low(p[4 + j])) + m, y[j + 16] = d * static_cast<float>(high(p[4 + j])) + m;
}
// Q5_0: f16 d | 32 fifth bits, bit j for value j | 16 bytes as Q4_0 | value = d (q - 16)
void q5_0(const Byte* p, float* y) {
  const float d = half(p);
  std::uint32_t fifth = 0;
  std::memcpy(&fifth, p + 2, 4);
  for (int j = 0; j < 16; ++j) {
    y[j] = d * static_cast<float>((low(p[6 + j]) | static_cast<int>(fifth >> j & 1) << 4) - 16);
    y[j + 16] = d * static_cast<float>((high(p[6 + j]) | static_cast<int>(fifth >> (j + 16) & 1) << 4) - 16);
  }
}
// Q5_1: f16 d, f16 m | 32 fifth bits | 16 bytes | value = d q + m
void q5_1(const Byte* p, float* y) {
  const float d = half(p), m = half(p + 2);
  std::uint32_t fifth = 0;
  std::memcpy(&fifth, p + 4, 4);
  for (int j = 0; j < 16; ++j) {
    y[j] = d * static_cast<float>(low(p[8 + j]) | static_cast<int>(fifth >> j & 1) << 4) + m;
    y[j + 16] = d * static_cast<float>(high(p[8 + j]) | static_cast<int>(fifth >> (j + 16) & 1) << 4) + m;
  }
}
// Q8_0: f16 d | 32 int8 | value = d q
void q8_0(const Byte* p, float* y) {
  const float d = half(p);
  for (int j = 0; j < 32; ++j) y[j] = d * static_cast<float>(static_cast<std::int8_t>(p[2 + j]));
}
// IQ4_NL: f16 d | 16 bytes of indices as Q4_0 | value = d table[q]
void iq4_nl(const Byte* p, float* y) {
  static constexpr std::int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  const float d = half(p);
  for (int j = 0; j < 16; ++j) y[j] = d * kTable[low(p[2 + j])], y[j + 16] = d * kTable[high(p[2 + j])];
}

// Q2_K: 16 bytes scale (low nibble) and minimum (high nibble) of 16 groups | 64 bytes of 2-bit codes | f16 d, f16 dmin.
// Codes: each half of 128 values has 32 bytes; bits 2s, 2s+1 of byte l are value 32 s + l of that half.
void q2_k(const Byte* p, float* y) {
  const Byte *scales = p, *codes = p + 16;
  const float d = half(p + 80), dmin = half(p + 82);
  for (int i = 0; i < 256; ++i) {
    const int in_half = i % 128, q = codes[i / 128 * 32 + in_half % 32] >> (2 * (in_half / 32)) & 3;
    y[i] = d * static_cast<float>(low(scales[i / 16])) * static_cast<float>(q) - dmin * static_cast<float>(high(scales[i / 16]));
  }
}
// Q3_K: 32 bytes of third bits (bit i/32 of byte i%32; clear means -4) | 64 bytes of 2-bit codes as Q2_K | 12 bytes with
// sixteen 6-bit scales (4 low bits in the nibbles of bytes 0 to 7, 2 high bits in bytes 8 to 11) | f16 d. Scales are offset by 32.
void q3_k(const Byte* p, float* y) {
  const Byte *third = p, *codes = p + 32, *packed = p + 96;
  const float d = half(p + 108);
  for (int g = 0; g < 16; ++g) {
    const int low4 = g < 8 ? low(packed[g]) : high(packed[g - 8]), high2 = packed[8 + g % 4] >> (2 * (g / 4)) & 3;
    const float scale = d * static_cast<float>((low4 | high2 << 4) - 32);
    for (int i = 16 * g; i < 16 * g + 16; ++i) {
      const int in_half = i % 128, q = codes[i / 128 * 32 + in_half % 32] >> (2 * (in_half / 32)) & 3;
      y[i] = scale * static_cast<float>(q - (third[i % 32] >> (i / 32) & 1 ? 0 : 4));
    }
  }
}

struct ScaleMin {
  int scale, min;
};
// Eight 6-bit scales and minima in 12 bytes (Q4_K, Q5_K): the first four in the low 6 bits of bytes 0 to 3 and 4 to 7; of the
// last four, the low nibbles lie in bytes 8 to 11 and the two high bits on top of the first eight bytes.
ScaleMin scale_min(const Byte* packed, int group) {
  if (group < 4) return {packed[group] & 63, packed[group + 4] & 63};
  return {low(packed[group + 4]) | packed[group - 4] >> 6 << 4, high(packed[group + 4]) | packed[group] >> 6 << 4};
}
// Q4_K: f16 d, f16 dmin | 12 bytes of scales | 128 bytes: 32 bytes hold groups 2b (low nibbles) and 2b + 1 (high nibbles).
// value = d scale q - dmin min
void q4_k(const Byte* p, float* y) {
  const float d = half(p), dmin = half(p + 2);
  for (int g = 0; g < 8; ++g) {
    const ScaleMin s = scale_min(p + 4, g);
    const float scale = d * static_cast<float>(s.scale), min = dmin * static_cast<float>(s.min);
    const Byte* codes = p + 16 + g / 2 * 32;
    for (int l = 0; l < 32; ++l) y[32 * g + l] = scale * static_cast<float>(g % 2 ? high(codes[l]) : low(codes[l])) - min;
  }
}
// Q5_K: as Q4_K with 32 bytes of fifth bits (bit g of byte l) before the codes.
void q5_k(const Byte* p, float* y) {
  const float d = half(p), dmin = half(p + 2);
  const Byte* fifth = p + 16;
  for (int g = 0; g < 8; ++g) {
    const ScaleMin s = scale_min(p + 4, g);
    const float scale = d * static_cast<float>(s.scale), min = dmin * static_cast<float>(s.min);
    const Byte* codes = p + 48 + g / 2 * 32;
    for (int l = 0; l < 32; ++l)
      y[32 * g + l] = scale * static_cast<float>((g % 2 ? high(codes[l]) : low(codes[l])) | (fifth[l] >> g & 1) << 4) - min;
  }
}
// Q6_K: 128 bytes of low nibbles | 64 bytes of 2-bit tops | 16 int8 scales | f16 d. In each half of 128 values, quarter r
// (32 values) takes nibble r / 2 of byte 32 (r % 2) + l and bits 2r, 2r+1 of top byte l. value = d scale (q - 32)
void q6_k(const Byte* p, float* y) {
  const Byte *nibbles = p, *tops = p + 128, *scales = p + 192;
  const float d = half(p + 208);
  for (int g = 0; g < 16; ++g) {
    const float scale = d * static_cast<float>(static_cast<std::int8_t>(scales[g]));
    for (int i = 16 * g; i < 16 * g + 16; ++i) {
      const int h = i / 128, r = i % 128 / 32, l = i % 32;
      const Byte b = nibbles[64 * h + 32 * (r % 2) + l];
      y[i] = scale * static_cast<float>(((r < 2 ? low(b) : high(b)) | (tops[32 * h + l] >> (2 * r) & 3) << 4) - 32);
    }
  }
}

template <typename T>
void plain(const Byte* p, std::int64_t n, float* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    T v;
    std::memcpy(&v, p + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    out[i] = static_cast<float>(v);
  }
}
template <float (*Convert)(std::uint16_t)>
void halves(const Byte* p, std::int64_t n, float* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint16_t v;
    std::memcpy(&v, p + 2 * i, 2);
    out[i] = Convert(v);
  }
}
template <void (*Block)(const Byte*, float*)>
void blocks(const Byte* p, std::int64_t n, BlockLayout layout, float* out) {
  for (std::int64_t i = 0; i < n; i += layout.elements, p += layout.bytes) Block(p, out + i);
}

}  // namespace

const GgufTensorType* find_gguf_type(std::uint32_t code) {
  const auto it = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const GgufTensorType& t) { return t.code == code; });
  return it == std::end(kTypes) ? nullptr : it;
}

BlockLayout block_layout(TensorType type) {
  switch (type) {
    case TensorType::kU8: case TensorType::kBool: case TensorType::kF8E4M3: case TensorType::kF8E5M2: return {1, 1};
    case TensorType::kU16: return {1, 2};
    case TensorType::kU32: return {1, 4};
    case TensorType::kU64: return {1, 8};
    case TensorType::kOther: return {};
    default: break;
  }
  return std::find_if(std::begin(kTypes), std::end(kTypes), [&](const GgufTensorType& t) { return t.type == type; })->block;
}

bool dequantizes(TensorType type) {
  return type != TensorType::kOther && type != TensorType::kF8E4M3 && type != TensorType::kF8E5M2;
}

void dequantize(TensorType type, const void* bytes, std::int64_t n, float* out) {
  const Byte* p = static_cast<const Byte*>(bytes);
  const BlockLayout layout = block_layout(type);
  CALIB_CHECK(dequantizes(type) && n % layout.elements == 0);
  switch (type) {
    case TensorType::kF32: std::memcpy(out, p, static_cast<std::size_t>(n) * 4); return;
    case TensorType::kF16: return halves<kvrt::f16_to_f32>(p, n, out);
    case TensorType::kBF16: return halves<kvrt::bf16_to_f32>(p, n, out);
    case TensorType::kF64: return plain<double>(p, n, out);
    case TensorType::kI8: return plain<std::int8_t>(p, n, out);
    case TensorType::kI16: return plain<std::int16_t>(p, n, out);
    case TensorType::kI32: return plain<std::int32_t>(p, n, out);
    case TensorType::kI64: return plain<std::int64_t>(p, n, out);
    case TensorType::kU8: case TensorType::kBool: return plain<std::uint8_t>(p, n, out);
    case TensorType::kU16: return plain<std::uint16_t>(p, n, out);
    case TensorType::kU32: return plain<std::uint32_t>(p, n, out);
    case TensorType::kU64: return plain<std::uint64_t>(p, n, out);
    case TensorType::kQ4_0: return blocks<q4_0>(p, n, layout, out);
    case TensorType::kQ4_1: return blocks<q4_1>(p, n, layout, out);
    case TensorType::kQ5_0: return blocks<q5_0>(p, n, layout, out);
    case TensorType::kQ5_1: return blocks<q5_1>(p, n, layout, out);
    case TensorType::kQ8_0: return blocks<q8_0>(p, n, layout, out);
    case TensorType::kQ2K: return blocks<q2_k>(p, n, layout, out);
    case TensorType::kQ3K: return blocks<q3_k>(p, n, layout, out);
    case TensorType::kQ4K: return blocks<q4_k>(p, n, layout, out);
    case TensorType::kQ5K: return blocks<q5_k>(p, n, layout, out);
    case TensorType::kQ6K: return blocks<q6_k>(p, n, layout, out);
    case TensorType::kIq4Nl: return blocks<iq4_nl>(p, n, layout, out);
    case TensorType::kF8E4M3: case TensorType::kF8E5M2: case TensorType::kOther: break;
  }
  CALIB_CHECK(!"a readable type");
}

}  // namespace calib::weights

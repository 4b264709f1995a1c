#pragma once
// One code on one grid: the formats whose value is a function of a code, a scale and an offset. The scale is the stored (rounded) one.
//   int   code * scale + lo               sint  (code - 2^(b-1)) * scale      fp8, fp4  float(code) * scale
//   nuq   (entry + 1) * scale + lo        lm    entry * scale
// Product and sum round separately (for integers under an fp16 scale the product is exact, so this equals one fused operation).

#include <cstdint>

#include "kernels/codec/codebook.h"
#include "kernels/codec/fp4_codec.h"
#include "kernels/codec/fp8_codec.h"
#include "kernels/codec/range.h"
#include "kernels/core/scheme.h"

namespace kvrt {

struct Grid {
  float lo = 0.0f, scale = 1.0f;
};

KVRT_HOST_DEVICE constexpr bool is_int(Format f) { return f >= Format::kInt8 && f <= Format::kInt2; }
KVRT_HOST_DEVICE constexpr bool is_sint(Format f) { return f == Format::kSint8 || f == Format::kSint4; }
KVRT_HOST_DEVICE constexpr bool is_fp8(Format f) { return f == Format::kFp8E4m3 || f == Format::kFp8E5m2; }
KVRT_HOST_DEVICE constexpr bool is_exact(Format f) { return f == Format::kBf16 || f == Format::kFp16; }
KVRT_HOST_DEVICE constexpr float fp8_max(Format f) { return f == Format::kFp8E4m3 ? kE4m3Max : kE5m2Max; }

/// Requires: x finite; book: that of nuq and lm formats, unused by the rest. A norm of 0 (lm) gives the entry above the middle.
KVRT_HOST_DEVICE inline std::uint8_t grid_code(Format f, int bits, const Codebook& book, float x, Grid g) {
  if (is_int(f)) return affine_code(x, g.scale, g.lo, (1 << bits) - 1);
  if (is_sint(f)) return static_cast<std::uint8_t>(symmetric_code(x, g.scale, (1 << (bits - 1)) - 1) + (1 << (bits - 1)));
  if (is_nuq(f)) return nearest_entry(book, (x - g.lo) / g.scale - 1.0f);
  if (is_lm(f)) return g.scale == 0.0f ? static_cast<std::uint8_t>(book.size / 2) : nearest_entry(book, x / g.scale);
  if (f == Format::kFp8E4m3) return f32_to_e4m3(x / g.scale);
  return f == Format::kFp8E5m2 ? f32_to_e5m2(x / g.scale) : f32_to_e2m1(x / g.scale);
}

KVRT_HOST_DEVICE inline float grid_value(Format f, int bits, const Codebook& book, std::uint8_t code, Grid g) {
  if (is_int(f)) return affine_value(code, g.scale, g.lo);
  if (is_sint(f)) return static_cast<float>(code - (1 << (bits - 1))) * g.scale;
  if (is_nuq(f)) {
    const float product = (book.entries[code] + 1.0f) * g.scale;
    return product + g.lo;
  }
  if (is_lm(f)) return book.entries[code] * g.scale;
  if (f == Format::kFp8E4m3) return e4m3_to_f32(code) * g.scale;
  return (f == Format::kFp8E5m2 ? e5m2_to_f32(code) : e2m1_to_f32(code)) * g.scale;
}

}  // namespace kvrt

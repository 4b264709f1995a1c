#pragma once
// Grid of a static range: thresholds that the plan holds in fp32 -> offset and step of its codes (KERNELS.md 4.1).

#include "kernels/codec/grid_codec.h"

namespace kvrt {

/// Value of code c: c * scale + lo (int, nuq), c * scale (sint, fp8); nvfp4: scale = gamma. Values below min or above max are counted as saturated.
struct StaticRange {
  float lo = 0.0f, scale = 1.0f;
  float min = 0.0f, max = 0.0f;
};

/// Steps of a range [lo, hi] in codes 0..steps: integers 2^b - 1, codebooks 2.
KVRT_HOST_DEVICE constexpr float static_steps(Format f) {
  return f == Format::kInt8 ? 255.0f : f == Format::kInt4 ? 15.0f : f == Format::kInt3 ? 7.0f : f == Format::kInt2 ? 3.0f : 2.0f;
}

/// int*, nuq*: scale = (hi - lo) / steps; sint*: max(|lo|, |hi|) / m, both at least 2^-14;
/// fp8, nvfp4: absmax hi / max of the format (448, 57344, 6 * 448), lo unused.
/// Requires: finite thresholds with finite hi - lo, lo <= hi.
KVRT_HOST_DEVICE inline StaticRange static_range(Format f, float lo, float hi) {
  StaticRange r;
  if (is_fp8(f) || f == Format::kNvfp4) {
    r.scale = fp8_static_scale(hi, is_fp8(f) ? fp8_max(f) : kE2m1Max * kE4m3Max);
    r.min = -hi, r.max = hi;
    return r;
  }
  if (is_sint(f)) {
    const float below = lo < 0 ? -lo : lo, above = hi < 0 ? -hi : hi;
    r.max = below > above ? below : above;
    r.min = -r.max;
    r.scale = r.max / (f == Format::kSint8 ? 127.0f : 7.0f);
  } else {
    r.lo = r.min = lo, r.max = hi;
    r.scale = (hi - lo) / static_steps(f);
  }
  if (!(r.scale >= kScaleFloor)) r.scale = kScaleFloor;
  return r;
}

}  // namespace kvrt

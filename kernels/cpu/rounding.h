#pragma once
// The number formats of kernels/codec as operations on fp32 lanes: each gives the value that encoding and decoding would give.
// Internal linkage, like simd.h.

#include "kernels/codec/range.h"
#include "kernels/core/scheme.h"
#include "kernels/cpu/simd.h"

namespace kvrt {
namespace {

/// Largest fp16 value <= v, saturating at +-65504.
template <class V>
KVRT_INLINE V f16_down(V v) {
  using Int = IntOf<V>;
  const Int u = bits_as<Int>(v), rest = u & 0x1FFF, zero = u & 0;
  const Int away = v < 0.0f ? (rest != 0 ? zero + 0x2000 : zero) : zero;
  const V normal = bits_as<V>((u & ~0x1FFF) + away);
  const V steps = v * 0x1p24f;
  V whole = nearest_integer(steps);
  whole = whole > steps ? whole - 1.0f : whole;
  const V grid = magnitude(v) < kF16MinNormal ? whole * 0x1p-24f : normal;
  return minimum(maximum(grid, splat<V>(-kF16Max)), splat<V>(kF16Max));
}
template <class V>
KVRT_INLINE V f16_up(V v) { return -f16_down<V>(-v); }
/// Nearest fp16 value, ties to even; not saturated (the caller looks at values beyond 65504).
template <class V>
KVRT_INLINE V f16_nearest(V v) {
  using Int = IntOf<V>;
  const Int u = bits_as<Int>(v);
  const V normal = bits_as<V>((u + 0xFFF + ((u >> 13) & 1)) & ~0x1FFF);
  const V small = nearest_integer(v * 0x1p24f) * 0x1p-24f;
  const V grid = magnitude(v) < kF16MinNormal ? small : normal;
  return bits_as<V>(bits_as<Int>(grid) | (u & INT32_MIN));  // a value that rounds to zero keeps its sign
}
/// bf16 of a finite value, as an fp32 value; the top half step keeps the largest bf16.
template <class V>
KVRT_INLINE V bf16_nearest(V v) {
  using Int = IntOf<V>;
  const Int u = bits_as<Int>(v);
  const V rounded = bits_as<V>((u + 0x7FFF + ((u >> 16) & 1)) & ~0xFFFF);
  return minimum(maximum(rounded, splat<V>(-0x1.FEp127f)), splat<V>(0x1.FEp127f));
}

struct Counts {
  Tally non_finite, saturated, floored;
};

template <class V>
struct Affine {
  V scale, lo;
};
template <class V>
KVRT_INLINE Affine<V> affine_lanes(V min, V max, float qmax, Counts* c) {
  const V lo = f16_down<V>(min);
  const V step = (max - lo) / qmax;
  const V raw = f16_up<V>(step);
  Tally::add_to(&c->saturated, magnitude(min) > kF16Max);
  Tally::add_to(&c->saturated, step > kF16Max);
  Tally::add_to(&c->floored, raw < kScaleFloor);
  return {maximum(raw, splat<V>(kScaleFloor)), lo};
}
/// Round trip of x / scale through a small float with a sign, times scale: E4M3 (mantissa 3, bias 7), E5M2 (2, 15), E2M1 (1, 1).
/// Nearest, ties to even, saturating.
template <int kMantissa, int kBias, class V>
KVRT_INLINE V float_round_trip(V x, V scale) {
  using Int = IntOf<V>;
  constexpr int kDrop = 23 - kMantissa;
  constexpr float kMax = kMantissa == 3 ? 448.0f : kMantissa == 2 ? 57344.0f : 6.0f;
  constexpr float kMinNormal = kMantissa == 3 ? 0x1p-6f : kMantissa == 2 ? 0x1p-14f : 1.0f;
  constexpr float kStep = kMinNormal / (1 << kMantissa);
  static_assert((kMantissa == 3 && kBias == 7) || (kMantissa == 2 && kBias == 15) || (kMantissa == 1 && kBias == 1), "one of the three formats");
  const V y = x / scale;
  const V a = minimum(magnitude(y), splat<V>(kMax));
  const Int u = bits_as<Int>(a);
  const V normal = bits_as<V>((u + ((1 << (kDrop - 1)) - 1) + ((u >> kDrop) & 1)) & ~((1 << kDrop) - 1));
  const V small = ((a * (1.0f / kStep) + 0x1p23f) - 0x1p23f) * kStep;
  const V value = a < kMinNormal ? small : normal;
  return bits_as<V>(bits_as<Int>(value) | (bits_as<Int>(y) & INT32_MIN)) * scale;
}
template <class V>
KVRT_INLINE V fp8_round_trip(Format f, V x, V scale) {
  return f == Format::kFp8E4m3 ? float_round_trip<3, 7>(x, scale) : float_round_trip<2, 15>(x, scale);
}

template <class V>
KVRT_INLINE V finite_or_zero_lanes(V v, Counts* c) {
  const auto bad = (bits_as<IntOf<V>>(v) & 0x7F800000) == 0x7F800000;
  Tally::add_to(&c->non_finite, bad);
  return bad ? V{} : v;
}

}  // namespace
}  // namespace kvrt

#pragma once
// Vector pieces that decode attention needs beside simd.h: loads of narrow integers, fp16, transposition, exp2. A tile is kTile tokens
// of one head. Internal linkage, like simd.h; results may differ in the last bit between instruction sets (products are contracted).

#include <cstdint>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "kernels/cpu/simd.h"

namespace kvrt {
namespace {

constexpr int kTile = 32;                        ///< tokens of a tile
constexpr int kTileVectors = kTile / kLanes;

template <class T>
KVRT_INLINE T read_as(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
KVRT_INLINE I load_int(const void* p) { return read_as<I>(p); }
KVRT_INLINE void store_int(std::int32_t* p, I v) { __builtin_memcpy(p, &v, sizeof v); }
KVRT_INLINE I splat_int(std::int32_t x) { return x - I{}; }
// Unsigned bytes and half-words, one a lane. By intrinsics where there are some: g++ 12 widens __builtin_convertvector lane by lane.
#if defined(__AVX512F__)
KVRT_INLINE I load_bytes(const std::uint8_t* p) { return reinterpret_cast<I>(_mm512_maskz_cvtepu8_epi32(0xFFFF, read_as<__m128i>(p))); }
KVRT_INLINE I load_halves(const std::uint8_t* p) { return reinterpret_cast<I>(_mm512_maskz_cvtepu16_epi32(0xFFFF, read_as<__m256i>(p))); }
#elif defined(__AVX2__)
KVRT_INLINE I load_bytes(const std::uint8_t* p) { return reinterpret_cast<I>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
KVRT_INLINE I load_halves(const std::uint8_t* p) { return reinterpret_cast<I>(_mm256_cvtepu16_epi32(read_as<__m128i>(p))); }
#elif defined(__ARM_NEON)
KVRT_INLINE I load_bytes(const std::uint8_t* p) {
  const uint8x8_t bytes = vcreate_u8(read_as<std::uint32_t>(p));
  return reinterpret_cast<I>(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}
KVRT_INLINE I load_halves(const std::uint8_t* p) { return reinterpret_cast<I>(vmovl_u16(vcreate_u16(read_as<std::uint64_t>(p)))); }
#else
KVRT_INLINE I load_bytes(const std::uint8_t* p) {
  const std::uint32_t w = read_as<std::uint32_t>(p);
  return I{static_cast<std::int32_t>(w & 0xFF), static_cast<std::int32_t>(w >> 8 & 0xFF), static_cast<std::int32_t>(w >> 16 & 0xFF),
           static_cast<std::int32_t>(w >> 24)};
}
KVRT_INLINE I load_halves(const std::uint8_t* p) {
  const std::uint64_t w = read_as<std::uint64_t>(p);
  return I{static_cast<std::int32_t>(w & 0xFFFF), static_cast<std::int32_t>(w >> 16 & 0xFFFF), static_cast<std::int32_t>(w >> 32 & 0xFFFF),
           static_cast<std::int32_t>(w >> 48)};
}
#endif
KVRT_INLINE F to_float(I v) { return __builtin_convertvector(v, F); }
KVRT_INLINE std::uint32_t word_at(const std::uint8_t* p) { return read_as<std::uint32_t>(p); }

/// Lane numbers 0, 1, 2 ...
KVRT_INLINE I lane_index() {
  I v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

/// fp16 bits in the low half of each lane (the high half is ignored) to fp32, exact for finite values.
KVRT_INLINE F f16_lanes(I h) {
#if defined(__AVX512F__)
  // masked forms with all lanes on: g++ 12 warns of the plain ones' undefined source
  return reinterpret_cast<F>(_mm512_maskz_cvtph_ps(0xFFFF, _mm512_maskz_cvtepi32_epi16(0xFFFF, reinterpret_cast<__m512i>(h))));
#elif defined(__F16C__)
  const __m256i low = _mm256_and_si256(reinterpret_cast<__m256i>(h), _mm256_set1_epi32(0xFFFF));
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  return reinterpret_cast<F>(_mm256_cvtph_ps(packed));
#elif defined(__ARM_NEON)
  return reinterpret_cast<F>(vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(reinterpret_cast<uint32x4_t>(h)))));
#else
  const I magnitude_bits = h & 0x7FFF, sign = (h & 0x8000) << 16;
  const F normal = bits_as<F>((magnitude_bits << 13) + (112 << 23));
  const F small = to_float(magnitude_bits) * 0x1p-24f;
  const F value = magnitude_bits < 0x400 ? small : normal;
  return bits_as<F>(bits_as<I>(value) | sign);
#endif
}
KVRT_INLINE float f16_scalar(const std::uint8_t* p) {
#if defined(__F16C__)
  return _cvtsh_ss(read_as<std::uint16_t>(p));
#else
  return f16_lanes(splat_int(read_as<std::uint16_t>(p)))[0];
#endif
}

/// One step of a transposition: rows a and b exchange the blocks of kStep lanes off their diagonal.
template <int kStep, int... kLane>
KVRT_INLINE void exchange(I* a, I* b, std::integer_sequence<int, kLane...>) {
  const I top = __builtin_shufflevector(*a, *b, ((kLane & kStep) ? kLanes + kLane - kStep : kLane)...);
  const I bottom = __builtin_shufflevector(*a, *b, ((kLane & kStep) ? kLanes + kLane : kLane + kStep)...);
  *a = top, *b = bottom;
}
template <int kStep>
KVRT_INLINE void transpose_from(I* rows) {
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & kStep)) exchange<kStep>(rows + i, rows + i + kStep, std::make_integer_sequence<int, kLanes>{});
  }
  if constexpr (kStep > 1) transpose_from<kStep / 2>(rows);
}
/// kLanes rows of kLanes words, in place.
KVRT_INLINE void transpose(I* rows) { transpose_from<kLanes / 2>(rows); }

/// 2^x for x <= 0, within 2^-22; below 2^-126: 0.
KVRT_INLINE F exp2_lanes(F x) {
  const F bounded = maximum(x, splat<F>(-126.0f)), whole = nearest_integer(bounded), f = bounded - whole;
  F p = splat<F>(1.540353039338161e-4f);  // ln2^k / k!
  p = p * f + 1.333355814642844e-3f;
  p = p * f + 9.618129107628477e-3f;
  p = p * f + 5.550410866482158e-2f;
  p = p * f + 2.402265069591007e-1f;
  p = p * f + 6.931471805599453e-1f;
  p = p * f + 1.0f;
  const I exponent = (__builtin_convertvector(whole, I) + 127) << 23;
  return x < -126.0f ? F{} : p * bits_as<F>(exponent);
}

}  // namespace
}  // namespace kvrt

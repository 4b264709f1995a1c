#pragma once
// Warp matrix products and the 16-bit arithmetic of their operands. Fragments of m16n8k16 (lane = 4g + q, PTX ISA, "Matrix
// fragments"); each 32-bit register holds two 16-bit values, the lower index in the low half:
//   A  a0: row g, columns 2q 2q+1    a1: row g+8, the same    a2: row g, columns 2q+8 2q+9    a3: row g+8, the same
//   B  b0: rows 2q 2q+1, column g    b1: rows 2q+8 2q+9, column g
//   C  c0 c1: row g, columns 2q 2q+1                          c2 c3: row g+8, the same

#include <cmath>

#include "kernels/cuda/warp.h"

namespace kvrt::cuda {

/// c += A B over fp16 operands, fp32 sums.
KVRT_DEVICE void mma_f16(float c[4], const std::uint32_t a[4], const std::uint32_t b[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  executor::mma_f16(c, a, b);
#endif
}
/// c += A B over bf16 operands, fp32 sums.
KVRT_DEVICE void mma_bf16(float c[4], const std::uint32_t a[4], const std::uint32_t b[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  executor::mma_bf16(c, a, b);
#endif
}

/// Transposes an 8 x 8 matrix of 16-bit values: lane gives (row g; columns 2q, 2q+1) and gets (rows 2q, 2q+1; column g).
KVRT_DEVICE std::uint32_t transpose_8x8(std::uint32_t v) {
#if defined(__CUDACC__)
  std::uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
#else
  const std::uint32_t* words = executor::exchange("movmatrix", &v, 1);
  const int g = lane_index() / 4, q = lane_index() % 4;
  std::uint32_t r = 0;
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t pair = words[(4 * (2 * q + i) + g / 2) * executor::kMaxWords];
    r |= ((pair >> (16 * (g % 2))) & 0xFFFFu) << (16 * i);
  }
  return r;
#endif
}

/// Two values to fp16 (nearest even), `low` in the low half.
KVRT_DEVICE std::uint32_t pack_f16(float low, float high) {
#if defined(__CUDACC__)
  std::uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return f32_to_f16_rne(low) | static_cast<std::uint32_t>(f32_to_f16_rne(high)) << 16;
#endif
}
/// Two values to bf16 (nearest even), `low` in the low half.
KVRT_DEVICE std::uint32_t pack_bf16(float low, float high) {
#if defined(__CUDACC__)
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return f32_to_bf16(low) | static_cast<std::uint32_t>(f32_to_bf16(high)) << 16;
#endif
}
KVRT_DEVICE float f16_value(std::uint16_t bits) {
#if defined(__CUDACC__)
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
#else
  return f16_to_f32(bits);
#endif
}
KVRT_DEVICE float low_f16(std::uint32_t pair) { return f16_value(static_cast<std::uint16_t>(pair)); }
KVRT_DEVICE float high_f16(std::uint32_t pair) { return f16_value(static_cast<std::uint16_t>(pair >> 16)); }
KVRT_DEVICE float low_bf16(std::uint32_t pair) { return bf16_to_f32(static_cast<std::uint16_t>(pair)); }
KVRT_DEVICE float high_bf16(std::uint32_t pair) { return bf16_to_f32(static_cast<std::uint16_t>(pair >> 16)); }

#if !defined(__CUDACC__)
namespace detail {
/// fp16 of a b + c, rounded once: the double sum is rounded to odd, which the second rounding cannot mistake for a tie.
inline std::uint16_t fma_f16(std::uint16_t a, std::uint16_t b, std::uint16_t c) {
  const double product = static_cast<double>(f16_to_f32(a)) * static_cast<double>(f16_to_f32(b)), addend = f16_to_f32(c);
  double sum = product + addend;
  const double back = sum - product, lost = (product - (sum - back)) + (addend - back);
  if (std::isfinite(sum)) {
    std::uint64_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    if (lost != 0 && !(bits & 1u)) bits += (lost > 0) == (sum > 0) ? 1u : ~std::uint64_t{0};
    std::memcpy(&sum, &bits, sizeof sum);
  }
  float narrow = static_cast<float>(sum);
  if (std::isfinite(narrow) && static_cast<double>(narrow) != sum) {
    std::uint32_t bits = f32_bits(narrow);
    if (!(bits & 1u)) bits += (std::fabs(sum) > std::fabs(static_cast<double>(narrow))) ? 1u : ~0u;
    narrow = f32_from_bits(bits);
  }
  return f32_to_f16_rne(narrow);
}
}  // namespace detail
#endif

/// a b + c in both halves, fp16, rounded once.
KVRT_DEVICE std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
#if defined(__CUDACC__)
  std::uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
#else
  const auto half = [&](int shift) {
    return static_cast<std::uint32_t>(detail::fma_f16(static_cast<std::uint16_t>(a >> shift), static_cast<std::uint16_t>(b >> shift),
                                                      static_cast<std::uint16_t>(c >> shift)));
  };
  return half(0) | half(16) << 16;
#endif
}
/// a + b in both halves, fp16.
KVRT_DEVICE std::uint32_t add_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDACC__)
  std::uint32_t r;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  return fma_f16x2(a, 0x3C003C00u, b);
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
/// Two E4M3 bytes, by the instruction of sm_89 and later.
KVRT_DEVICE std::uint32_t e4m3x2_to_f16x2(std::uint16_t bytes) {
  std::uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(bytes));
  return r;
}
#endif

/// 1 / x, relative error at most 2^-22.
KVRT_DEVICE float reciprocal_approx(float x) {
#if defined(__CUDACC__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / x;
#endif
}

/// a b in both halves, fp16, rounded once.
KVRT_DEVICE std::uint32_t mul_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDACC__)
  std::uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  return fma_f16x2(a, b, 0x80008000u);
#endif
}
/// -a in both halves.
KVRT_DEVICE std::uint32_t negate_f16x2(std::uint32_t a) {
#if defined(__CUDACC__)
  std::uint32_t r;
  asm("neg.f16x2 %0, %1;" : "=r"(r) : "r"(a));
  return r;
#else
  return a ^ 0x80008000u;
#endif
}

/// 2^x, relative error at most 2^-22, subnormal results are 0.
KVRT_DEVICE float exp2_approx(float x) {
#if defined(__CUDACC__)
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  const float r = std::exp2(x);
  return r < 0x1p-126f ? 0.0f : r;
#endif
}

}  // namespace kvrt::cuda

#pragma once
// Levels and parameters of encoders to stored bytes, the counterpart of unpack.h: a row of codes, one a byte, becomes the words of
// kernels/codec/int_codec.h and codebook.h by whole 64-bit words. Little-endian, as every host with a vector path is.
// Internal linkage, like simd.h.

#include "kernels/codec/page_codec.h"
#include "kernels/cpu/tile.h"

namespace kvrt {
namespace {

/// Codes of one row are padded with zeros to whole cells.
KVRT_INLINE int padded_codes(int d) { return (d + 31) / 32 * 32; }

template <class T>
KVRT_INLINE void write_as(void* p, T v) { __builtin_memcpy(p, &v, sizeof v); }

/// Levels 0...255 as bytes.
KVRT_INLINE void store_bytes(std::uint8_t* p, F level) {
  const I v = __builtin_convertvector(level, I);
#if defined(__AVX512F__)
  write_as(p, _mm512_maskz_cvtepi32_epi8(0xFFFF, reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(reinterpret_cast<__m256i>(v)), _mm256_extracti128_si256(reinterpret_cast<__m256i>(v), 1));
  write_as(p, static_cast<std::int64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves))));
#elif defined(__ARM_NEON)
  const uint16x4_t halves = vmovn_u32(reinterpret_cast<uint32x4_t>(v));
  write_as(p, vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0));
#else
  write_as(p, static_cast<std::uint32_t>(v[0] | v[1] << 8 | v[2] << 16 | v[3] << 24));
#endif
}
KVRT_INLINE void store_bytes(std::uint8_t* p, float level) { *p = static_cast<std::uint8_t>(static_cast<std::int32_t>(level)); }
/// The low halves of each lane.
KVRT_INLINE void store_halves(std::uint8_t* p, I v) {
#if defined(__AVX512F__)
  write_as(p, _mm512_maskz_cvtepi32_epi16(0xFFFF, reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m256i low = _mm256_and_si256(reinterpret_cast<__m256i>(v), _mm256_set1_epi32(0xFFFF));
  write_as(p, _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#elif defined(__ARM_NEON)
  write_as(p, vmovn_u32(reinterpret_cast<uint32x4_t>(v)));
#else
  const auto half = [&](int i) { return static_cast<std::uint64_t>(static_cast<std::uint32_t>(v[i]) & 0xFFFF) << 16 * i; };
  write_as(p, half(0) | half(1) | half(2) | half(3));
#endif
}
KVRT_INLINE void store_halves(std::uint8_t* p, std::int32_t v) { write_as(p, static_cast<std::uint16_t>(v)); }

/// fp16 bits of values that fp16 holds.
template <class V>
KVRT_INLINE IntOf<V> f16_bits(V v) {
  using Int = IntOf<V>;
  const Int u = bits_as<Int>(v), a = u & 0x7FFFFFFF;
  const V steps = bits_as<V>(a) * 0x1p24f + 0x1p23f;  // of subnormals: a whole number below 2^10
  const Int normal = (a - (112 << 23)) >> 13, small = bits_as<Int>(steps) & 0x3FF;
  return (a < (113 << 23) ? small : normal) | ((u >> 16) & 0x8000);
}

// --- eight codes, one a byte, to their bits ---

KVRT_INLINE std::uint32_t pack4(std::uint64_t x) {
  x = (x | x >> 4) & 0x00FF00FF00FF00FFu;
  x = (x | x >> 8) & 0x0000FFFF0000FFFFu;
  return static_cast<std::uint32_t>(x | x >> 16);
}
KVRT_INLINE std::uint32_t pack2(std::uint64_t x) {
  x = (x | x >> 6) & 0x000F000F000F000Fu;
  x = (x | x >> 12) & 0x000000FF000000FFu;
  return static_cast<std::uint32_t>((x | x >> 24) & 0xFFFF);
}
/// The first five of eight 3-bit codes.
KVRT_INLINE std::uint32_t pack3_of_five(std::uint64_t x) {
  x = (x | x >> 5) & 0x0000003F003F003Fu;
  return static_cast<std::uint32_t>((x & 0x3F) | (x >> 10 & 0xFC0) | (x >> 20 & 0x7000));
}
/// High bits of eight 3-bit codes, to bits 0, 1, 4, 5, 8, 9, 12, 13.
KVRT_INLINE std::uint32_t pack_high_bits(std::uint64_t x) {
  x = x >> 2 & 0x0101010101010101u;
  x = (x | x >> 7) & 0x0003000300030003u;
  x = (x | x >> 12) & 0x0000003300000033u;
  return static_cast<std::uint32_t>((x | x >> 24) & 0x3333);
}

/// codes: [padded_codes(d)] in stored order. row: plane A for 3 bits.
static void pack_codes(int bits, bool is_codebook, int d, const std::uint8_t* codes, std::uint8_t* row, std::uint8_t* plane_b) {
  if (bits == 8) {
    const int whole = (d + 3) / 4 * 4;
    for (int i = 0; i < whole; i += 4) write_as(row + i, read_as<std::uint32_t>(codes + i));
  } else if (bits == 4) {
    for (int i = 0; i < d; i += 8) write_as(row + i / 2, pack4(read_as<std::uint64_t>(codes + i)));
  } else if (bits == 2) {
    for (int i = 0; i < d; i += 16) write_as(row + i / 4, pack2(read_as<std::uint64_t>(codes + i)) | pack2(read_as<std::uint64_t>(codes + i + 8)) << 16);
  } else if (is_codebook) {
    for (int i = 0; i < d; i += 32) {
      std::uint32_t low[2], high = 0;
      for (int h = 0; h < 2; ++h) {
        const std::uint64_t x = read_as<std::uint64_t>(codes + i + 16 * h), y = read_as<std::uint64_t>(codes + i + 16 * h + 8);
        constexpr std::uint64_t kLowBits = 0x0303030303030303u;
        low[h] = pack2(x & kLowBits) | pack2(y & kLowBits) << 16;
        high |= (pack_high_bits(x) | pack_high_bits(y) << 16) << 2 * h;
      }
      write_as(row + i / 4, low[0]), write_as(row + i / 4 + 4, low[1]), write_as(plane_b + i / 8, high);
    }
  } else {
    for (int i = 0; i < d; i += 32) {
      std::uint32_t words[3] = {};
      for (int h = 0; h < 2; ++h) {
        const std::uint8_t* half = codes + i + 16 * h;
        for (int w = 0; w < 3; ++w) {  // five codes, and one bit of the sixteenth
          const std::uint64_t five = read_as<std::uint32_t>(half + 5 * w) | static_cast<std::uint64_t>(half[5 * w + 4]) << 32;
          words[w] |= (pack3_of_five(five) | (half[15] >> w & 1u) << 15) << 16 * h;
        }
      }
      write_as(row + i / 4, words[0]), write_as(row + i / 4 + 4, words[1]), write_as(plane_b + i / 8, words[2]);
    }
  }
}

/// 32 codes of a block of llama.cpp (kernels/codec/llamacpp_blocks.h); returns the end.
KVRT_INLINE std::uint8_t* pack_llamacpp_codes(int bits, const std::uint8_t* codes, std::uint8_t* out) {
  std::uint64_t x[4];
  __builtin_memcpy(x, codes, sizeof x);
  if (bits == 8) {
    __builtin_memcpy(out, x, sizeof x);
    return out + sizeof x;
  }
  if (bits == 5) {  // bit 4 of each
    std::uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= static_cast<std::uint32_t>((x[i] >> 4 & 0x0101010101010101u) * 0x0102040810204080u >> 56) << 8 * i;
    write_as(out, word), out += sizeof word;
  }
  constexpr std::uint64_t kNibbles = 0x0F0F0F0F0F0F0F0Fu;
  for (int i = 0; i < 2; ++i) write_as(out + 8 * i, (x[i] & kNibbles) | (x[i + 2] & kNibbles) << 4);
  return out + 16;
}

/// A row of kBytes-byte elements from model order to the order of spread<N> (kernels/codec/channel_order.h), in runs of N / 4.
template <int kBytes>
static void to_stored_order(int spread, int d, const std::uint8_t* from, std::uint8_t* to) {
  const int quarter = spread / 4;
  for (int begin = 0; begin < d; begin += quarter) {
    const int at = begin % spread / quarter * (d / 4) + begin / spread * quarter;
    for (int i = 0; i < quarter * kBytes; ++i) to[at * kBytes + i] = from[begin * kBytes + i];
  }
}

}  // namespace
}  // namespace kvrt

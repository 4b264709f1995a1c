// Intrinsics of kernels/cuda/ as the host computes them, and the code words of codec/code_words.h over all codes.

#include <cmath>
#include <cstring>

#include "gtest/gtest.h"
#include "kernels/codec/code_words.h"
#include "kernels/codec/int_codec.h"
#include "kernels/cuda/mma.h"
#include "libcalib/base/rng.h"

namespace kvrt {
namespace {

TEST(BytePermute, SelectsBytesAndSigns) {
  EXPECT_EQ(cuda::byte_permute(0x33221100u, 0x77665544u, 0x3210u), 0x33221100u);
  EXPECT_EQ(cuda::byte_permute(0x33221100u, 0x77665544u, 0x7654u), 0x77665544u);
  EXPECT_EQ(cuda::byte_permute(0x33221100u, 0x77665544u, 0x0725u), 0x00772255u);
  EXPECT_EQ(cuda::byte_permute(0x00FF8001u, 0x0000007Fu, 0xCA98u), 0x00FFFF00u);  // sign of bytes 0, 1, 2 and 4
}

TEST(HalfPairs, PackRoundsToNearestEven) {
  EXPECT_EQ(cuda::pack_f16(1.0f, 2.0f), 0x40003C00u);
  EXPECT_EQ(cuda::pack_f16(1.0f + 0x1p-11f, 1.0f + 3 * 0x1p-11f), 0x3C023C00u);
  EXPECT_EQ(cuda::pack_bf16(1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f), 0x3F823F80u);
  EXPECT_EQ(cuda::low_f16(0xC0003C00u), 1.0f);
  EXPECT_EQ(cuda::high_f16(0xC0003C00u), -2.0f);
}

TEST(HalfPairs, FusedMultiplyAddRoundsOnce) {
  calib::Rng rng(5);
  for (int i = 0; i < 20000; ++i) {
    const auto half = [&] { return f32_to_f16_rne(static_cast<float>(rng.normal() * std::exp2(rng.normal() * 4))); };
    const std::uint16_t a = half(), b = half(), c = half();
    // 22 bits of product and 11 of the addend are exact in long double over this range of exponents.
    const long double exact = static_cast<long double>(f16_to_f32(a)) * f16_to_f32(b) + static_cast<long double>(f16_to_f32(c));
    const std::uint32_t pair = cuda::fma_f16x2(a | a << 16, b | b << 16, c | c << 16);
    ASSERT_EQ(pair & 0xFFFFu, pair >> 16);
    const auto result = static_cast<std::uint16_t>(pair);
    if (std::fabs(exact) > 65000 || (result & 0x7FFFu) == 0) continue;  // neighbours beyond the ends
    const long double error = std::fabs(exact - f16_to_f32(result));
    for (const int step : {-1, 1}) {  // no neighbour is nearer
      const auto neighbour = static_cast<std::uint16_t>(result + step);
      ASSERT_LE(error, std::fabs(exact - f16_to_f32(neighbour)));
    }
  }
  EXPECT_EQ(cuda::add_f16x2(0x64076407u, 0xE400E400u), 0x47004700u);  // 1031 - 1024
}

/// A row of `bits`-bit codes 0, 1, 2, ... from `first`, modulo their number.
struct Row {
  std::uint8_t bytes[32];
  Row(int bits, int first) {
    pack_row(bits, 256 / bits, [&](int c) { return static_cast<std::uint8_t>((first + c) % (1 << bits)); }, bytes, nullptr);
  }
  std::uint32_t word(int i) const { return load_le32(bytes + 4 * i); }
};

TEST(CodeWords, Int4HoldsEveryCodeAtItsChannel) {
  for (int first = 0; first < 16; ++first) {
    const Row row(4, first);
    for (int step = 0; step < 2; ++step) {
      for (int reg = 0; reg < 2; ++reg) {
        const std::uint32_t w = int4_words::step_word(row.word(1), step);
        const std::uint32_t pair = reg == 0 ? int4_words::low_pair(w) : int4_words::high_pair(w);
        const float bias = reg == 0 ? int4_words::kLowBias : int4_words::kHighBias;
        const std::uint32_t minus = reg == 0 ? int4_words::kMinusLowBias : int4_words::kMinusHighBias;
        for (int half = 0; half < 2; ++half) {
          const int code = unpack_code(4, row.bytes, nullptr, 8 + int4_words::channel(step, reg, half));
          EXPECT_EQ(half == 0 ? cuda::low_f16(pair) : cuda::high_f16(pair), bias + static_cast<float>(code));
          const std::uint32_t plain = cuda::add_f16x2(pair, minus);
          EXPECT_EQ(half == 0 ? cuda::low_f16(plain) : cuda::high_f16(plain), static_cast<float>(code));
        }
      }
    }
  }
}

TEST(CodeWords, Int4TokenPairsAlternateTheirBias) {
  for (int first = 0; first < 16; ++first) {
    const Row a(4, first), b(4, 3 * first + 5);
    for (int part = 0; part < 2; ++part) {
      for (int step = 0; step < 2; ++step) {
        const std::uint32_t w = int4_words::step_word(int4_words::token_pair(a.word(2), b.word(2), part), step);
        for (int reg = 0; reg < 2; ++reg) {
          const int channel = 16 + 4 * part + 2 * step + reg;
          const std::uint32_t pair = reg == 0 ? int4_words::low_pair_alternating(w) : int4_words::high_pair_alternating(w);
          EXPECT_EQ(cuda::low_f16(pair), (reg == 0 ? int4_words::kLowBias : int4_words::kHighBias) + unpack_code(4, a.bytes, nullptr, channel));
          EXPECT_EQ(cuda::high_f16(pair), (reg == 0 ? int4_words::kLowOddBias : int4_words::kHighOddBias) + unpack_code(4, b.bytes, nullptr, channel));
        }
      }
    }
  }
}

TEST(CodeWords, Int8HoldsEveryCodeAndAlternates) {
  for (int first = 0; first < 256; ++first) {
    const Row a(8, first), b(8, 7 * first + 11);
    for (int index = 0; index < 2; ++index) {
      const std::uint32_t pair = int8_words::pair(a.word(3), index);
      EXPECT_EQ(cuda::low_f16(pair), int8_words::kBias + unpack_code(8, a.bytes, nullptr, 12 + 2 * index));
      EXPECT_EQ(cuda::high_f16(pair), int8_words::kBias + unpack_code(8, a.bytes, nullptr, 13 + 2 * index));
      for (int part = 0; part < 2; ++part) {
        const std::uint32_t both = int8_words::alternating(int8_words::pair(int8_words::token_pair(a.word(3), b.word(3), part), index));
        EXPECT_EQ(cuda::low_f16(both), int8_words::kBias + unpack_code(8, a.bytes, nullptr, 12 + 2 * part + index));
        EXPECT_EQ(cuda::high_f16(both), int8_words::kOddBias + unpack_code(8, b.bytes, nullptr, 12 + 2 * part + index));
      }
    }
  }
}

}  // namespace
}  // namespace kvrt

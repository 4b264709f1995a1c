#include "kernels/codec/int_codec.h"

#include <vector>

#include "gtest/gtest.h"

namespace kvrt {
namespace {

struct PackedRow {
  std::vector<std::uint8_t> row, plane_b;
};
PackedRow pack(int bits, const std::vector<std::uint8_t>& codes) {
  const int n = static_cast<int>(codes.size()), cells = (n + 31) / 32;
  PackedRow p;
  p.row.assign(static_cast<std::size_t>(bits == 3 ? 8 * cells : 4 * ((n * bits + 31) / 32)), 0xFF);
  p.plane_b.assign(static_cast<std::size_t>(bits == 3 ? 4 * cells : 0), 0xFF);
  pack_row(bits, n, [&](int c) { return codes[static_cast<std::size_t>(c)]; }, p.row.data(), p.plane_b.data());
  return p;
}
bool bit(const std::vector<std::uint8_t>& bytes, std::size_t i) { return bytes[i / 8] >> (i % 8) & 1; }

/// Where bit b of the code of channel c lies, straight from the text of KERNELS.md 3.3: (plane, bit number in the plane).
std::pair<int, std::size_t> place(int bits, std::size_t c, std::size_t b) {
  const std::size_t width = static_cast<std::size_t>(bits);
  if (bits != 3) return {0, c * width + b};  // little-endian words: bit i of the row is bit i of the byte string
  const std::size_t cell = c / 32, half = c % 32 / 16, r = c % 16;
  const std::size_t word = r < 15 ? r / 5 : b, in_word = 16 * half + (r < 15 ? 3 * (r % 5) + b : 15);
  return word < 2 ? std::make_pair(0, cell * 64 + word * 32 + in_word) : std::make_pair(1, cell * 32 + in_word);
}

TEST(IntCodec, EveryCodeAtEveryPositionSetsItsBitsAndNoOthers) {
  for (const int bits : {8, 4, 3, 2}) {
    for (const std::size_t n : {32u, 64u, 80u, 100u}) {
      for (std::size_t c = 0; c < n; ++c) {
        for (int code = 0; code < (1 << bits); ++code) {
          std::vector<std::uint8_t> codes(n, 0);
          codes[c] = static_cast<std::uint8_t>(code);
          const PackedRow p = pack(bits, codes);
          std::size_t n_set = 0;
          for (const auto* plane : {&p.row, &p.plane_b}) {
            for (std::size_t i = 0; i < plane->size() * 8; ++i) n_set += bit(*plane, i);
          }
          ASSERT_EQ(n_set, static_cast<std::size_t>(__builtin_popcount(static_cast<unsigned>(code))));
          for (std::size_t b = 0; b < static_cast<std::size_t>(bits); ++b) {
            const auto [plane, at] = place(bits, c, b);
            ASSERT_EQ(bit(plane ? p.plane_b : p.row, at), (code >> b & 1) != 0) << bits << " bits, channel " << c << ", code " << code;
          }
          ASSERT_EQ(unpack_code(bits, p.row.data(), p.plane_b.data(), static_cast<int>(c)), code);
        }
      }
    }
  }
}

TEST(IntCodec, MixedRowsComeBackAndPadsAreZero) {
  for (const int bits : {8, 4, 3, 2}) {
    for (const std::size_t n : {8u, 72u, 100u, 128u, 256u}) {
      std::vector<std::uint8_t> codes(n);
      std::uint32_t seed = 9;
      for (std::uint8_t& c : codes) c = static_cast<std::uint8_t>((seed = seed * 1664525u + 1013904223u) >> (32 - bits));
      const PackedRow p = pack(bits, codes);
      for (std::size_t c = 0; c < n; ++c) {
        ASSERT_EQ(unpack_code(bits, p.row.data(), p.plane_b.data(), static_cast<int>(c)), codes[c]);
      }
      const std::size_t padded = bits == 3 ? (n + 31) / 32 * 32 : p.row.size() * 8 / static_cast<std::size_t>(bits);
      for (std::size_t c = n; c < padded; ++c) {
        ASSERT_EQ(unpack_code(bits, p.row.data(), p.plane_b.data(), static_cast<int>(c)), 0);
      }
    }
  }
}

TEST(IntCodec, WordsAreLittleEndian) {
  const PackedRow p = pack(4, {1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_EQ(p.row, (std::vector<std::uint8_t>{0x21, 0x43, 0x65, 0x87}));
  std::vector<std::uint8_t> codes(32, 0);
  codes[15] = 5;  // bits 0 and 2: bit 15 of words 0 and 2
  codes[16] = 7;  // bits 16..18 of word 0
  const PackedRow q = pack(3, codes);
  EXPECT_EQ(q.row, (std::vector<std::uint8_t>{0x00, 0x80, 0x07, 0x00, 0, 0, 0, 0}));
  EXPECT_EQ(q.plane_b, (std::vector<std::uint8_t>{0x00, 0x80, 0x00, 0x00}));
}

}  // namespace
}  // namespace kvrt

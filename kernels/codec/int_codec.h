#pragma once
// Order of integer codes in a row (KERNELS.md 3.3), little-endian 32-bit words; c = stored channel:
//   8 bit   byte c
//   4 bit   word c/8, bits 4(c mod 8)
//   2 bit   word c/16, bits 2(c mod 16)
//   3 bit   cells of 32 codes in three words, words 0 and 1 in plane A, word 2 in plane B. h = c/16 picks the half-word, r = c mod 16:
//           r < 15: word r/5, bits 16h + 3(r mod 5) .. +2;   r = 15: bit b of the code is bit 16h + 15 of word b
// Codes of padding channels are 0.

#include <cstdint>

#include "kernels/core/host_device.h"

namespace kvrt {

KVRT_HOST_DEVICE inline void store_le32(std::uint8_t* p, std::uint32_t w) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<std::uint8_t>(w >> (8 * i));
}
KVRT_HOST_DEVICE inline std::uint32_t load_le32(const std::uint8_t* p) {
  return p[0] | static_cast<std::uint32_t>(p[1]) << 8 | static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
}
KVRT_HOST_DEVICE inline void store_le16(std::uint8_t* p, std::uint16_t h) {
  p[0] = static_cast<std::uint8_t>(h), p[1] = static_cast<std::uint8_t>(h >> 8);
}
KVRT_HOST_DEVICE inline std::uint16_t load_le16(const std::uint8_t* p) { return static_cast<std::uint16_t>(p[0] | p[1] << 8); }

/// Three words of one 3-bit cell. codes: 32 values 0..7.
KVRT_HOST_DEVICE inline void pack_cell3(const std::uint8_t* codes, std::uint32_t words[3]) {
  words[0] = words[1] = words[2] = 0;
  for (int c = 0; c < 32; ++c) {
    const int half = c / 16, r = c % 16;
    const std::uint32_t code = codes[c];
    if (r < 15) {
      words[r / 5] |= code << (16 * half + 3 * (r % 5));
    } else {
      for (int b = 0; b < 3; ++b) words[b] |= ((code >> b) & 1u) << (16 * half + 15);
    }
  }
}
KVRT_HOST_DEVICE inline std::uint8_t unpack_cell3(const std::uint32_t words[3], int c) {
  const int half = c / 16, r = c % 16;
  if (r < 15) return static_cast<std::uint8_t>((words[r / 5] >> (16 * half + 3 * (r % 5))) & 7u);
  std::uint32_t code = 0;
  for (int b = 0; b < 3; ++b) code |= ((words[b] >> (16 * half + 15)) & 1u) << b;
  return static_cast<std::uint8_t>(code);
}

/// Pieces of a packed row of n codes that no other piece shares a word with.
KVRT_HOST_DEVICE constexpr int row_pieces(int bits, int n) { return bits == 3 ? (n + 31) / 32 : (n * bits + 31) / 32; }

/// Packs piece `piece` of a row of n codes: a word, or a cell of 3-bit codes. bits: 8, 4, 3 or 2. row: plane A for 3 bits (8 bytes a cell),
/// plane_b: 4 bytes a cell, 3 bits only. code(c) gives the code of channel c and is called once for each channel of the piece, in order.
template <class CodeOf>
KVRT_HOST_DEVICE inline void pack_row_piece(int bits, int n, int piece, CodeOf code, std::uint8_t* row, std::uint8_t* plane_b) {
  if (bits == 3) {
    std::uint8_t codes[32];
    KVRT_ROLLED
    for (int i = 0; i < 32; ++i) codes[i] = piece * 32 + i < n ? code(piece * 32 + i) : std::uint8_t{0};
    std::uint32_t words[3];
    pack_cell3(codes, words);
    store_le32(row + 8 * piece, words[0]);
    store_le32(row + 8 * piece + 4, words[1]);
    store_le32(plane_b + 4 * piece, words[2]);
    return;
  }
  const int per_word = 32 / bits;
  std::uint32_t word = 0;
  KVRT_ROLLED
  for (int i = 0; i < per_word && piece * per_word + i < n; ++i) word |= static_cast<std::uint32_t>(code(piece * per_word + i)) << (bits * i);
  store_le32(row + 4 * piece, word);
}
/// All pieces, in order.
template <class CodeOf>
KVRT_HOST_DEVICE inline void pack_row(int bits, int n, CodeOf code, std::uint8_t* row, std::uint8_t* plane_b) {
  for (int piece = 0; piece < row_pieces(bits, n); ++piece) pack_row_piece(bits, n, piece, code, row, plane_b);
}

/// Code of channel c of a packed row.
KVRT_HOST_DEVICE inline std::uint8_t unpack_code(int bits, const std::uint8_t* row, const std::uint8_t* plane_b, int c) {
  if (bits == 3) {
    const int cell = c / 32;
    const std::uint32_t words[3] = {load_le32(row + 8 * cell), load_le32(row + 8 * cell + 4), load_le32(plane_b + 4 * cell)};
    return unpack_cell3(words, c % 32);
  }
  const int per_word = 32 / bits;
  return static_cast<std::uint8_t>((load_le32(row + 4 * (c / per_word)) >> (bits * (c % per_word))) & ((1u << bits) - 1u));
}

}  // namespace kvrt

#pragma once
// Codebooks: 4, 8 or 16 sorted entries, each an int8 level times one fp32 step, and the nearest entry by midpoints (KERNELS.md 4.1).
// Order of 3-bit codebook codes in a row (`nuq3`, `lm3`), cells of 32 codes in three words; c = channel of the cell:
//   plane A (words 0, 1)  the low two bits, word c/16, bits 2(c mod 16)
//   plane B (word 2)      the high bit, bit 4 floor((c mod 16) / 2) + 2 floor(c / 16) + (c mod 2)
// so that one word of plane B, shifted by 0 or 2, selects bytes of a table. 4 and 2 bits are stored as integer codes are.

#include <cstdint>

#include "kernels/codec/int_codec.h"
#include "kernels/core/scheme.h"

namespace kvrt {

inline constexpr int kMaxCodebook = 16;

KVRT_HOST_DEVICE constexpr bool is_nuq(Format f) { return f == Format::kNuq4 || f == Format::kNuq3 || f == Format::kNuq2; }
KVRT_HOST_DEVICE constexpr bool is_lm(Format f) { return f == Format::kLm4 || f == Format::kLm3 || f == Format::kLm2; }

/// Entries beyond `size` are unused.
struct Codebook {
  int size = 0;
  float entries[kMaxCodebook] = {};        ///< ascending: fp32 (level * step)
  float midpoints[kMaxCodebook - 1] = {};  ///< fp32 ((entry i + entry i + 1) / 2)
};

/// From fp32 entries, as a plan holds them. Requires: ascending, size <= 16.
KVRT_HOST_DEVICE constexpr Codebook codebook_of_entries(const float* entries, int size) {
  Codebook book;
  book.size = size;
  for (int i = 0; i < size; ++i) book.entries[i] = entries[i];
  for (int i = 0; i + 1 < size; ++i) book.midpoints[i] = (book.entries[i] + book.entries[i + 1]) * 0.5f;
  return book;
}

/// levels: [size] ascending. Requires: size <= 16, step finite and > 0.
KVRT_HOST_DEVICE constexpr Codebook make_codebook(const std::int8_t* levels, int size, float step) {
  float entries[kMaxCodebook] = {};
  for (int i = 0; i < size; ++i) entries[i] = static_cast<float>(levels[i]) * step;
  return codebook_of_entries(entries, size);
}

/// Lloyd-Max codebook of N(0,1), entries rounded to the stored grid (largest centroid / 127). Requires: is_lm(f).
KVRT_HOST_DEVICE constexpr Codebook lloyd_max_codebook(Format f) {
  constexpr std::int8_t k4[] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};
  constexpr std::int8_t k3[] = {-127, -79, -45, -14, 14, 45, 79, 127};
  constexpr std::int8_t k2[] = {-127, -38, 38, 127};
  if (f == Format::kLm4) return make_codebook(k4, 16, 2.732590f / 127.0f);
  if (f == Format::kLm3) return make_codebook(k3, 8, 2.151946f / 127.0f);
  return make_codebook(k2, 4, 1.510418f / 127.0f);
}

/// Index of the nearest entry, ties to the lower one: the number of midpoints below y.
KVRT_HOST_DEVICE inline std::uint8_t nearest_entry(const Codebook& book, float y) {
  int code = 0;
  for (int i = 0; i + 1 < book.size; ++i) code += y > book.midpoints[i] ? 1 : 0;
  return static_cast<std::uint8_t>(code);
}

/// Sum of value(0..n-1) as 32 lanes compute it: lane l adds elements l, l + 32, ... in order, then lanes are added over xor 16, 8, 4, 2, 1.
template <class Value>
KVRT_HOST_DEVICE inline float sum_of_lanes(int n, Value value) {
  float partial[5] = {}, sum = 0.0f;  // of the left halves of the tree whose right halves are to come
  KVRT_ROLLED
  for (int leaf = 0; leaf < 32; ++leaf) {
    const int lane = (leaf & 1) << 4 | (leaf & 2) << 2 | (leaf & 4) | (leaf & 8) >> 2 | leaf >> 4;
    sum = 0.0f;
    KVRT_ROLLED
    for (int i = lane; i < n; i += 32) {
      const float v = value(i);
      sum = i == lane ? v : sum + v;
    }
    bool is_right = true;  // so far up
    for (int level = 0; level < 5; ++level) {
      if (!is_right) continue;
      is_right = leaf >> level & 1;
      if (is_right) sum = partial[level] + sum;
      else partial[level] = sum;
    }
  }
  return sum;
}

/// Packs cell `cell` of a row of n 3-bit codebook codes. row: plane A, 8 bytes a cell; plane_b: 4 bytes a cell. code(c) as in pack_row_piece().
template <class CodeOf>
KVRT_HOST_DEVICE inline void pack_codebook_cell3(int n, int cell, CodeOf code, std::uint8_t* row, std::uint8_t* plane_b) {
  std::uint32_t low[2] = {0, 0}, high = 0;
  KVRT_ROLLED
  for (int c = 0; c < 32 && 32 * cell + c < n; ++c) {
    const std::uint32_t v = code(32 * cell + c), bits = (v & 3u) << (2 * (c % 16));
    if (c < 16) low[0] |= bits;
    else low[1] |= bits;
    high |= (v >> 2) << (4 * (c % 16 / 2) + 2 * (c / 16) + c % 2);
  }
  store_le32(row + 8 * cell, low[0]);
  store_le32(row + 8 * cell + 4, low[1]);
  store_le32(plane_b + 4 * cell, high);
}
/// All cells, in order.
template <class CodeOf>
KVRT_HOST_DEVICE inline void pack_codebook_row3(int n, CodeOf code, std::uint8_t* row, std::uint8_t* plane_b) {
  for (int cell = 0; 32 * cell < n; ++cell) pack_codebook_cell3(n, cell, code, row, plane_b);
}
/// Code of channel n of a packed row.
KVRT_HOST_DEVICE inline std::uint8_t unpack_codebook_code3(const std::uint8_t* row, const std::uint8_t* plane_b, int n) {
  const int cell = n / 32, c = n % 32;
  const std::uint32_t low = load_le32(row + 8 * cell + 4 * (c / 16)) >> (2 * (c % 16)) & 3u;
  const std::uint32_t high = load_le32(plane_b + 4 * cell) >> (4 * (c % 16 / 2) + 2 * (c / 16) + c % 2) & 1u;
  return static_cast<std::uint8_t>(low | high << 2);
}

}  // namespace kvrt

#pragma once
// Codes of one tile to fp32: by rows [token][D] for values, by columns [D][kTile] for keys. Values are those of decode_row() but for
// the sign of zero and one rounding where product and sum are contracted. NaN codes of fp8 are the exception: no encoder emits them.
// Column order comes from a transposition of whole 32-bit words, so that a field of a word is the same channel in every lane.
// Internal linkage, like simd.h.

#include "kernels/cpu/tile_params.h"

namespace kvrt {
namespace {

/// What a code stands for before scale and minimum.
enum class Base { kUnsigned, kSymmetric, kBook, kE4m3, kE5m2, kBf16, kFp16 };

/// Codes of up to 4 bits are looked up where a permutation takes any 4-bit index: bits above the code need no masking, since the table
/// repeats itself, and scale and minimum go into the table.
constexpr bool by_table(Base base, int bits) { return kLanes == 16 && bits <= 4 && base != Base::kBook; }
template <Base kBase, int kBits>
constexpr std::int32_t kFieldMask = by_table(kBase, kBits) ? -1 : static_cast<std::int32_t>((1u << kBits) - 1u);

template <Base kBase, int kBits>
KVRT_INLINE F table_of_codes() {
  return to_float((lane_index() & ((1 << kBits) - 1)) - (kBase == Base::kSymmetric ? 1 << (kBits - 1) : 0));
}
KVRT_INLINE F look_up([[maybe_unused]] F table, [[maybe_unused]] I index) {
#if defined(__AVX512F__)
  return reinterpret_cast<F>(_mm512_maskz_permutexvar_ps(0xFFFF, reinterpret_cast<__m512i>(index), reinterpret_cast<__m512>(table)));
#else
  return table;
#endif
}

/// table[code], code 0..15. table: 16 entries.
KVRT_INLINE F look_up_entry(const float* table, I code) {
#if defined(__AVX512F__)
  return look_up(load<F>(table), code);
#elif defined(__AVX2__)
  return reinterpret_cast<F>(_mm256_i32gather_ps(table, reinterpret_cast<__m256i>(code), 4));
#elif defined(__ARM_NEON)
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(table);
  const uint8x16x4_t entries = {vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)};
  const I places = code * 0x04040404 + 0x03020100;  // the four bytes of an entry
  return reinterpret_cast<F>(vqtbl4q_u8(entries, reinterpret_cast<uint8x16_t>(places)));
#else
  F v;
  for (int i = 0; i < kLanes; ++i) v[i] = table[code[i]];
  return v;
#endif
}

template <Base kBase, int kBits>
KVRT_INLINE F base_value([[maybe_unused]] const float* book, I code) {
  if constexpr (by_table(kBase, kBits)) {
    return look_up(table_of_codes<kBase, kBits>(), code);
  } else if constexpr (kBase == Base::kBook) {
    return look_up_entry(book, code);
  } else if constexpr (kBase == Base::kUnsigned) {
    return to_float(code);
  } else if constexpr (kBase == Base::kSymmetric) {
    return to_float(code - (1 << (kBits - 1)));
  } else if constexpr (kBase == Base::kBf16) {
    return bits_as<F>(code << 16);
  } else if constexpr (kBase == Base::kFp16) {
    return f16_lanes(code);
  } else {
    constexpr int kMantissa = kBase == Base::kE4m3 ? 3 : 2, kBias = kBase == Base::kE4m3 ? 7 : 15;
    const I magnitude_bits = code & 0x7F;
    const F normal = bits_as<F>((magnitude_bits << (23 - kMantissa)) + ((127 - kBias) << 23));
    const F small = to_float(magnitude_bits) * (kBase == Base::kE4m3 ? 0x1p-9f : 0x1p-16f);
    const F value = magnitude_bits < (1 << kMantissa) ? small : normal;
    return bits_as<F>(bits_as<I>(value) | ((code & 0x80) << 24));
  }
}

/// Where bits of a 3-bit cell stand, by channel modulo 16: word and first bit; channel 15 is spread over the three words.
constexpr std::int32_t kCellShift[16] = {0, 3, 6, 9, 12, 0, 3, 6, 9, 12, 0, 3, 6, 9, 12, 15};

/// Codes of channels [c, c + kLanes) of one row, lane by lane, with bits above the code under by_table(). c: a multiple of kLanes.
template <Base kBase, int kBits>
KVRT_INLINE I row_codes(const std::uint8_t* row, const std::uint8_t* plane_b, int c) {
  if constexpr (kBits == 16) {
    return load_halves(row + 2 * c);
  } else if constexpr (kBits == 8) {
    return load_bytes(row + c);
  } else if constexpr (kBits == 3 && kBase == Base::kBook) {
    const int cell = c / 32, half = c % 32 / 16;
    const I r = lane_index() + c % 16;
    const I low = splat_int(read_as<std::int32_t>(row + 8 * cell + 4 * half)) >> 2 * r & 3;
    const I high = splat_int(read_as<std::int32_t>(plane_b + 4 * cell)) >> (4 * (r >> 1) + 2 * half + (r & 1)) & 1;
    return low | high << 2;
  } else if constexpr (kBits == 3) {
    const int cell = c / 32, half = c % 32 / 16, first = c % 16;
    const std::uint32_t w0 = word_at(row + 8 * cell) >> (16 * half), w1 = word_at(row + 8 * cell + 4) >> (16 * half);
    const std::uint32_t w2 = word_at(plane_b + 4 * cell) >> (16 * half);
    const auto last = static_cast<std::int32_t>((w0 >> 15 & 1u) | (w1 >> 15 & 1u) << 1 | (w2 >> 15 & 1u) << 2);
    const I r = lane_index() + first;
    const I words = r < 5 ? splat_int(static_cast<std::int32_t>(w0)) : r < 10 ? splat_int(static_cast<std::int32_t>(w1))
                                                                              : splat_int(static_cast<std::int32_t>(w2));
    const I codes = words >> load_int(kCellShift + first) & kFieldMask<kBase, 3>;
    return r == 15 ? splat_int(last) : codes;
  } else {
    constexpr int kPerWord = 32 / kBits;
    I words;
    if constexpr (kPerWord >= kLanes) {
      const std::uint32_t w = word_at(row + 4 * (c / kPerWord)) >> (kBits * (c % kPerWord));
      words = splat_int(static_cast<std::int32_t>(w));
    } else {
      const std::uint8_t* p = row + 4 * (c / kPerWord);
      words = lane_index() < kPerWord ? splat_int(read_as<std::int32_t>(p)) : splat_int(read_as<std::int32_t>(p + 4));
    }
    return words >> (lane_index() % kPerWord * kBits) & kFieldMask<kBase, kBits>;
  }
}

struct TileRef {
  const PageCodec* codec;
  const std::uint8_t* block;
  int slot, n_rows;  ///< first slot of the tile, a multiple of 16; rows that the page has from there, a multiple of 16, at most kTile
};

/// value = base * scale + lo for the codes of one token's group or of one channel.
template <Base kBase, int kBits>
struct ScaledCodes {
  F scale, lo;  ///< under by_table(): lo is the table of values
  const float* book;
  KVRT_INLINE ScaledCodes of(const TileParams& p, float scale, float lo) {
    const F s = splat<F>(scale), l = splat<F>(lo);
    if constexpr (by_table(kBase, kBits)) return {s, table_of_codes<kBase, kBits>() * s + l, p.book};
    else return {s, l, p.book};
  }
  KVRT_INLINE F value(const ScaledCodes& a, I code) {
    if constexpr (by_table(kBase, kBits)) return look_up(a.lo, code);
    else return base_value<kBase, kBits>(a.book, code) * a.scale + a.lo;
  }
};

/// Rows [begin, end) of a tile. out: [kTile][D].
template <Base kBase, int kBits, ParamKind kKind>
static void unpack_rows(const TileRef& tile, const TileParams& p, int begin, int end, float* out) {
  using Scaled = ScaledCodes<kBase, kBits>;
  const PageCodec& c = *tile.codec;
  const int d = c.head_dim, group = kKind == ParamKind::kToken ? p.group : d;
  for (int t = begin; t < end; ++t) {
    const std::int64_t slot = tile.slot + t;
    const std::uint8_t* row = tile.block + slot * c.row_bytes;
    const std::uint8_t* plane_b = tile.block + c.plane_b + slot * (c.row_bytes / 2);
    float* target = out + static_cast<std::int64_t>(t) * d;
    for (int g = 0; g * group < d; ++g) {
      const Scaled scaled = kKind == ParamKind::kToken ? Scaled::of(p, p.scale[g * kTile + t], p.lo[g * kTile + t]) : Scaled{};
      for (int i = g * group; i < (g + 1) * group; i += kLanes) {
        const I code = row_codes<kBase, kBits>(row, plane_b, i);
        if constexpr (kKind == ParamKind::kToken) store(target + i, Scaled::value(scaled, code));
        else if constexpr (kKind == ParamKind::kChannel) store(target + i, base_value<kBase, kBits>(p.book, code) * load<F>(p.scale + i) + load<F>(p.lo + i));
        else store(target + i, base_value<kBase, kBits>(p.book, code));
      }
    }
  }
}

/// Columns of a tile of kV vectors; kNone: codes as numbers, without scale and lo. out: [D][kTile]; words: D * kTile of scratch.
template <Base kBase, int kBits, ParamKind kKind, int kV>
KVRT_INLINE void unpack_columns_of(const TileRef& tile, const TileParams& p, float* out, std::int32_t* words) {
  using Scaled = ScaledCodes<kBase, kBits>;
  constexpr int kRows = kV * kLanes;
  const PageCodec& c = *tile.codec;
  const int d = c.head_dim;
  const std::uint8_t* base = tile.block + tile.slot * c.row_bytes;
  const auto put = [&](int channel, auto code_of) {
    const Scaled scaled = kKind == ParamKind::kChannel ? Scaled::of(p, p.scale[channel], p.lo[channel]) : Scaled{};
    const std::int64_t group = kKind == ParamKind::kToken ? channel / p.group * kTile : 0;
    float* target = out + static_cast<std::int64_t>(channel) * kTile;
    for (int v = 0; v < kV; ++v, target += kLanes) {
      const I code = code_of(v);
      if constexpr (kKind == ParamKind::kChannel) store(target, Scaled::value(scaled, code));
      else if constexpr (kKind == ParamKind::kToken)
        store(target, base_value<kBase, kBits>(p.book, code) * load<F>(p.scale + group + v * kLanes) + load<F>(p.lo + group + v * kLanes));
      else store(target, base_value<kBase, kBits>(p.book, code));
    }
  };
  if constexpr (kBits == 3) {
    const int n_cells = d / 32 + (d % 32 != 0);
    std::int32_t* words_b = words + 2 * n_cells * kTile;
    transpose_words(base, c.row_bytes, 2 * n_cells, kRows, words);
    transpose_words(tile.block + c.plane_b + tile.slot * (c.row_bytes / 2), c.row_bytes / 2, n_cells, kRows, words_b);
    for (int half = 0; half < d / 16; ++half) {
      const int cell = half / 2, top = half % 2 * 16;
      I w[3][kV], low[kV], high[kV];  // low, high: the two planes of a codebook's cell
      for (int v = 0; v < kV; ++v) {
        low[v] = load_int(words + half * kTile + v * kLanes), high[v] = load_int(words_b + cell * kTile + v * kLanes);
      }
      for (int v = 0; v < kV; ++v) {
        w[0][v] = load_int(words + 2 * cell * kTile + v * kLanes) >> top, w[1][v] = load_int(words + (2 * cell + 1) * kTile + v * kLanes) >> top;
        w[2][v] = load_int(words_b + cell * kTile + v * kLanes) >> top;
      }
      if constexpr (kBase == Base::kBook) {
        for (int r = 0; r < 16; ++r) {
          const int at = 4 * (r / 2) + 2 * (half % 2) + r % 2;
          put(16 * half + r, [&](int v) { return (low[v] >> 2 * r & 3) | (high[v] >> at & 1) << 2; });
        }
        continue;
      }
      for (int r = 0; r < 15; ++r) put(16 * half + r, [&](int v) { return w[r / 5][v] >> kCellShift[r] & kFieldMask<kBase, 3>; });
      put(16 * half + 15, [&](int v) { return (w[0][v] >> 15 & 1) | (w[1][v] >> 14 & 2) | (w[2][v] >> 13 & 4); });
    }
  } else {
    constexpr int kPerWord = 32 / kBits;
    transpose_words(base, c.row_bytes, d / kPerWord, kRows, words);  // 16 channels are whole words of every width
    for (int w = 0; w < d / kPerWord; ++w) {
      I word[kV];
      for (int v = 0; v < kV; ++v) word[v] = load_int(words + w * kTile + v * kLanes);
      for (int i = 0; i < kPerWord; ++i) put(w * kPerWord + i, [&](int v) { return word[v] >> (kBits * i) & kFieldMask<kBase, kBits>; });
    }
  }
}
template <Base kBase, int kBits, ParamKind kKind>
static void unpack_columns(const TileRef& tile, const TileParams& p, float* out, std::int32_t* words) {
  if (tile.n_rows == kTile) unpack_columns_of<kBase, kBits, kKind, kTileVectors>(tile, p, out, words);
  else unpack_columns_of<kBase, kBits, kKind, kTileVectors / 2>(tile, p, out, words);
}

/// Rows of llama.cpp blocks (kernels/codec/llamacpp_blocks.h).
constexpr Iq4NlLevels kIq4NlTable = {};
template <Format kFormat>
static void unpack_llama_rows(const TileRef& tile, int begin, int end, float* out) {
  constexpr bool kHasMin = kFormat == Format::kQ4_1 || kFormat == Format::kQ5_1;
  constexpr bool kFifth = kFormat == Format::kQ5_0 || kFormat == Format::kQ5_1;
  constexpr int kHeader = 2 + 2 * kHasMin, kMid = kHasMin || kFormat == Format::kIq4Nl ? 0 : kFifth ? 16 : 8;
  const PageCodec& c = *tile.codec;
  for (int t = begin; t < end; ++t) {
    const std::uint8_t* row = tile.block + (tile.slot + t) * c.row_bytes;
    for (int b = 0; b < c.head_dim / kLlamaBlock; ++b, row += llama_block_bytes(kFormat)) {
      const F scale = splat<F>(f16_scalar(row)), min = kHasMin ? splat<F>(f16_scalar(row + 2)) : F{};
      float* target = out + static_cast<std::int64_t>(t) * c.head_dim + b * kLlamaBlock;
      for (int i = 0; i < kLlamaBlock; i += kLanes) {
        I code;
        if constexpr (kFormat == Format::kQ8_0) {
          code = load_bytes(row + kHeader + i);
          code = (code ^ 0x80) - 0x80;  // sign
        } else {
          code = load_bytes(row + kHeader + 4 * kFifth + i % 16);
          code = i < 16 ? code & 15 : code >> 4;
          if constexpr (kFifth) {
            const auto fifth = static_cast<std::int32_t>(word_at(row + kHeader) >> i);
            code |= (splat_int(fifth) >> lane_index() & 1) << 4;
          }
          code -= kMid;
        }
        const F base = kFormat == Format::kIq4Nl ? look_up_entry(kIq4NlTable.level, code) : to_float(code);
        store(target + i, base * scale + min);
      }
    }
  }
}

/// [kTile][D] to [D][kTile].
static void transpose_tile(const float* rows, int d, int n_rows, float* columns) {
  for (int c = 0; c < d; c += kLanes) {
    for (int t = 0; t < n_rows; t += kLanes) {
      I block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = load_int(rows + static_cast<std::int64_t>(t + i) * d + c);
      transpose(block);
      for (int i = 0; i < kLanes; ++i) store(columns + static_cast<std::int64_t>(c + i) * kTile + t, bits_as<F>(block[i]));
    }
  }
}

}  // namespace
}  // namespace kvrt

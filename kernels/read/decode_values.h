#pragma once
// Device code of the fused decode kernel, part 3: outputs from the pages of each value family. Values are the A operand, transposed:
// 16 channels x 16 tokens. Lane 4g + q reads tokens 2q, 2q + 1, 2q + 8, 2q + 9 of a tile and the channels [g D/8, (g + 1) D/8);
// output tile i holds the channels g D/8 + 2i (o[i][0..1]) and g D/8 + 2i + 1 (o[i][2..3]) of heads 2q and 2q + 1.
//
// Where one (scale, minimum) covers the row, the scale goes into the weights, P' = f16(p s 2^e), the codes enter with alternating
// bias and the minimum is summed apart; elsewhere the values themselves enter in fp16, P' = f16(p 2^e).

#include "kernels/read/decode_keys.h"

namespace kvrt {

/// Tokens of a tile that lane 4g + q reads as operand A.
KVRT_DEVICE int value_token(int quad, int i) { return 2 * quad + i % 2 + 8 * (i / 2); }

inline constexpr float kWeightScale = 0x1p10f;  ///< 2^e where no scale is folded in: weights down to 2^-34 count

/// Shared by int4 and int8 with token.g<N>. Codes gives words<D>() (of one lane's part of a row), biases and
/// operands(even words, odd words, tile, alternating) -> the pair of registers of rows g and g + 8.
template <class Codes, int D>
struct TokenValues {
  static constexpr bool kIsBf16 = false, kMayFold = true;
  static constexpr int kWords = Codes::template words<D>();

  KVRT_DEVICE static bool folds_scale(const SideView& view) { return cuda::reread(view.n_groups) == 1; }
  KVRT_DEVICE static std::uint32_t row_params(const SideView& view, const std::uint8_t* block, int slot) {
    return load_token_params(view, block, slot, 0, 1);
  }
  /// Σ of rounded weights, to what the biases added to each output row (0: c0 c1, 1: c2 c3). Parity is that of the tokens.
  KVRT_DEVICE static float bias(int row, bool is_odd) { return Codes::bias(row, is_odd); }
  KVRT_DEVICE static float undo(const SideView& view) { return folds_scale(view) ? 1.0f : kUndoHalf; }

  /// live: of the lane's four tokens. weights: [N][2], operand B. o: [N][D / 16][4].
  template <int N>
  KVRT_DEVICE static void accumulate(const SideView& view, const std::uint8_t* block, int slot, const bool (&live)[4],
                                     const std::uint32_t (&weights)[N][2], float (&o)[N][D / 16][4]) {
    const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
    std::uint32_t words[4][kWords];
    KVRT_UNROLL
    for (int i = 0; i < 4; ++i) {
      load_row(block + (slot + value_token(quad, i)) * (32 * kWords) + g * (4 * kWords), words[i]);
    }
    const bool is_folded = folds_scale(view);
    std::uint32_t scale[2] = {0, 0}, lo[2] = {0, 0};
    if (!is_folded) {
      KVRT_UNROLL
      for (int i = 0; i < 4; i += 2) {
        std::uint32_t p[2];
        KVRT_UNROLL
        for (int j = 0; j < 2; ++j) {
          const std::uint32_t params = load_token_params(view, block, slot + value_token(quad, i + j), g, 8);
          p[j] = live[i + j] ? cuda::fma_f16x2(params, kHalfPair, 0x80008000u) : 0u;
        }
        scale[i / 2] = cuda::byte_permute(p[0], p[1], 0x5410u);
        lo[i / 2] = cuda::byte_permute(p[0], p[1], 0x7632u);
      }
    }
    KVRT_UNROLL
    for (int tile = 0; tile < D / 16; ++tile) {
      std::uint32_t a[4];  // rows g and g + 8 of the token pairs (2q, 2q + 1), then (2q + 8, 2q + 9)
      KVRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        KVRT_UNROLL
        for (int row = 0; row < 2; ++row) {
          const std::uint32_t raw = Codes::raw_pair(words[2 * half], words[2 * half + 1], tile);
          a[2 * half + row] = is_folded ? Codes::alternating(raw, row)
                                        : cuda::fma_f16x2(cuda::add_f16x2(Codes::biased(raw, row), Codes::minus_bias(row)), scale[half], lo[half]);
        }
      }
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) cuda::mma_f16(o[n][tile], a, weights[n]);
    }
  }
};

struct Int4ValueCodes {
  template <int D>
  KVRT_DEVICE static constexpr int words() { return D / 64; }
  KVRT_DEVICE static constexpr float bias(int row, bool is_odd) {
    return row == 0 ? (is_odd ? int4_words::kLowOddBias : int4_words::kLowBias) : (is_odd ? int4_words::kHighOddBias : int4_words::kHighBias);
  }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int row) { return row == 0 ? int4_words::kMinusLowBias : int4_words::kMinusHighBias; }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw_pair(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], int tile) {
    return int4_words::step_word(int4_words::token_pair(even[tile / 4], odd[tile / 4], tile % 4 / 2), tile % 2);
  }
  KVRT_DEVICE static std::uint32_t biased(std::uint32_t raw, int row) { return row == 0 ? int4_words::low_pair(raw) : int4_words::high_pair(raw); }
  KVRT_DEVICE static std::uint32_t alternating(std::uint32_t raw, int row) {
    return row == 0 ? int4_words::low_pair_alternating(raw) : int4_words::high_pair_alternating(raw);
  }
};
struct Int8ValueCodes {
  template <int D>
  KVRT_DEVICE static constexpr int words() { return D / 32; }
  KVRT_DEVICE static constexpr float bias(int, bool is_odd) { return is_odd ? int8_words::kOddBias : int8_words::kBias; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int) { return int8_words::kMinusBias; }
  template <int W>
  KVRT_DEVICE static std::uint32_t raw_pair(const std::uint32_t (&even)[W], const std::uint32_t (&odd)[W], int tile) {
    return int8_words::token_pair(even[tile / 2], odd[tile / 2], tile % 2);
  }
  KVRT_DEVICE static std::uint32_t biased(std::uint32_t raw, int row) { return int8_words::pair(raw, row); }
  KVRT_DEVICE static std::uint32_t alternating(std::uint32_t raw, int row) { return int8_words::alternating(int8_words::pair(raw, row)); }
};

/// bf16 or fp16 rows. Words of masked tokens are replaced by 0: bytes nobody wrote may be NaN.
template <int D, bool IsBf16>
struct PlainValues {
  static constexpr bool kIsBf16 = IsBf16, kMayFold = false;
  static constexpr int kWords = D / 16;
  KVRT_DEVICE static bool folds_scale(const SideView&) { return false; }
  KVRT_DEVICE static std::uint32_t row_params(const SideView&, const std::uint8_t*, int) { return 0; }
  KVRT_DEVICE static float bias(int, bool) { return 0.0f; }
  KVRT_DEVICE static float undo(const SideView&) { return 1.0f; }

  template <int N>
  KVRT_DEVICE static void accumulate(const SideView&, const std::uint8_t* block, int slot, const bool (&live)[4],
                                     const std::uint32_t (&weights)[N][2], float (&o)[N][D / 16][4]) {
    const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
    constexpr int kPart = 4;  // words of one load
    KVRT_UNROLL
    for (int part = 0; part < kWords; part += kPart) {
      std::uint32_t words[4][kPart];
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) {
        load_row(block + (slot + value_token(quad, i)) * (2 * D) + g * (4 * kWords) + 4 * part, words[i]);
        KVRT_UNROLL
        for (int j = 0; j < kPart; ++j) words[i][j] = live[i] ? words[i][j] : 0u;
      }
      KVRT_UNROLL
      for (int j = 0; j < kPart; ++j) {
        const std::uint32_t a[4] = {token_pair16(words[0][j], words[1][j], 0), token_pair16(words[0][j], words[1][j], 1),
                                    token_pair16(words[2][j], words[3][j], 0), token_pair16(words[2][j], words[3][j], 1)};
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) {
          if (IsBf16) cuda::mma_bf16(o[n][part + j], a, weights[n]);
          else cuda::mma_f16(o[n][part + j], a, weights[n]);
        }
      }
    }
  }
};

}  // namespace kvrt

#pragma once
// Device code of the fused decode kernel, part 2: scores of 16 tokens from the pages of each key family. Keys are the A operand;
// lane 4g + q reads rows g and g + 8 and the channels [q D/4, (q + 1) D/4) of the stored row (16-bit rows: pieces of 8 channels).

#include "kernels/codec/code_words.h"
#include "kernels/read/decode_query.h"

namespace kvrt {

/// The words of one lane's part of a row. W words at p, in vectors as wide as its alignment (4 W bytes, at most 16).
template <int W>
KVRT_DEVICE void load_row(const std::uint8_t* p, std::uint32_t (&words)[W]) {
  constexpr int kVector = W < 4 ? W : 4;
  KVRT_UNROLL
  for (int i = 0; i < W; i += kVector) {
    std::uint32_t part[kVector];
    cuda::load_stream<kVector>(p + 4 * i, part);
    KVRT_UNROLL
    for (int j = 0; j < kVector; ++j) words[i + j] = part[j];
  }
}

/// (scale, minimum) of group `part * n_groups / n_parts` of `slot`, token.g<N>: the group of a lane that reads part `part` of a row.
KVRT_DEVICE std::uint32_t load_token_params(const SideView& view, const std::uint8_t* block, int slot, int part, int n_parts) {
  const int n_groups = cuda::reread(view.n_groups);
  return cuda::load_shared_word(block + cuda::reread(view.params) + 4 * (slot * n_groups + part * n_groups / n_parts));
}

/// (scale, minimum) as a pair of each, times a power of two given as fp16 bits.
struct PairedParams {
  std::uint32_t scale, lo;
};
KVRT_DEVICE PairedParams pair_params(std::uint32_t params, std::uint32_t factor_pair) {
  const std::uint32_t scaled = cuda::fma_f16x2(params, factor_pair, 0x80008000u);
  return {cuda::byte_permute(scaled, scaled, 0x1010u), cuda::byte_permute(scaled, scaled, 0x3232u)};
}
inline constexpr std::uint32_t kHalfPair = 0x38003800u;  ///< 0.5: decoded values reach twice fp16's range
inline constexpr float kUndoHalf = 2.0f;

/// Shared by int4 and int8 with token.g<N>. Codes gives: kWords (of one lane's part of a row), kStepsPerWord, channel(),
/// bias(reg), minus_bias(reg), operand(word, step in word, reg).
template <class Codes, int D>
struct TokenKeys {
  static constexpr bool kIsBf16 = false;
  static constexpr int kWords = Codes::template words<D>();
  KVRT_DEVICE static int channel(int quad, int step, int reg, int half) { return quad * (D / 4) + Codes::channel(step, reg, half); }
  KVRT_DEVICE static constexpr float bias(int reg) { return Codes::bias(reg); }

  /// s: scores (base 2) of tokens slot + g (s[n][0..1]) and slot + g + 8 (s[n][2..3]).
  template <int N>
  KVRT_DEVICE static void score(const SideView& view, const std::uint8_t* block, int slot, const QueryFragments<D, N>& query,
                                float (&s)[N][4]) {
    const int lane = cuda::lane_index(), quad = lane % 4, row = slot + lane / 4;
    std::uint32_t words[2][kWords], params[2];
    KVRT_UNROLL
    for (int r = 0; r < 2; ++r) {
      load_row(block + (row + 8 * r) * (16 * kWords) + quad * (4 * kWords), words[r]);
      params[r] = load_token_params(view, block, row + 8 * r, quad, 4);
    }
    if (cuda::reread(view.n_groups) == 1) {
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        KVRT_UNROLL
        for (int i = 0; i < 4; ++i) s[n][i] = query.start[n][i % 2];
      }
      KVRT_UNROLL
      for (int step = 0; step < D / 16; ++step) {
        std::uint32_t a[4];
        KVRT_UNROLL
        for (int i = 0; i < 4; ++i) a[i] = Codes::operand(words[i % 2][step / Codes::kStepsPerWord], step % Codes::kStepsPerWord, i / 2);
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) cuda::mma_f16(s[n], a, query.b[n][step]);
      }
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        KVRT_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float scale = cuda::low_f16(params[i / 2]) * query.scale[n][i % 2];
          s[n][i] = scale * s[n][i] + cuda::high_f16(params[i / 2]) * query.sum[n][i % 2];
        }
      }
    } else {  // groups cut the row: the values themselves, in fp16
      const PairedParams p[2] = {pair_params(params[0], kHalfPair), pair_params(params[1], kHalfPair)};
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        KVRT_UNROLL
        for (int i = 0; i < 4; ++i) s[n][i] = 0;
      }
      KVRT_UNROLL
      for (int step = 0; step < D / 16; ++step) {
        std::uint32_t a[4];
        KVRT_UNROLL
        for (int i = 0; i < 4; ++i) {
          const std::uint32_t biased = Codes::operand(words[i % 2][step / Codes::kStepsPerWord], step % Codes::kStepsPerWord, i / 2);
          a[i] = cuda::fma_f16x2(cuda::add_f16x2(biased, Codes::minus_bias(i / 2)), p[i % 2].scale, p[i % 2].lo);
        }
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) cuda::mma_f16(s[n], a, query.b[n][step]);
      }
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) {
        KVRT_UNROLL
        for (int i = 0; i < 4; ++i) s[n][i] *= kUndoHalf * query.scale[n][i % 2];
      }
    }
  }
};

struct Int4KeyCodes {
  static constexpr int kStepsPerWord = 2;
  template <int D>
  KVRT_DEVICE static constexpr int words() { return D / 32; }
  KVRT_DEVICE static int channel(int step, int reg, int half) { return 8 * (step / 2) + int4_words::channel(step % 2, reg, half); }
  KVRT_DEVICE static constexpr float bias(int reg) { return reg == 0 ? int4_words::kLowBias : int4_words::kHighBias; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int reg) { return reg == 0 ? int4_words::kMinusLowBias : int4_words::kMinusHighBias; }
  KVRT_DEVICE static std::uint32_t operand(std::uint32_t word, int step, int reg) {
    const std::uint32_t w = int4_words::step_word(word, step);
    return reg == 0 ? int4_words::low_pair(w) : int4_words::high_pair(w);
  }
};
struct Int8KeyCodes {
  static constexpr int kStepsPerWord = 1;
  template <int D>
  KVRT_DEVICE static constexpr int words() { return D / 16; }
  KVRT_DEVICE static int channel(int step, int reg, int half) { return 4 * step + 2 * reg + half; }
  KVRT_DEVICE static constexpr float bias(int) { return int8_words::kBias; }
  KVRT_DEVICE static constexpr std::uint32_t minus_bias(int) { return int8_words::kMinusBias; }
  KVRT_DEVICE static std::uint32_t operand(std::uint32_t word, int, int reg) { return int8_words::pair(word, reg); }
};

/// bf16 or fp16 rows. Quad lane q reads 16 bytes at 64 j + 16 q: channels 32 j + 8 q .. + 7, two steps of 4.
template <int D, bool IsBf16>
struct PlainKeys {
  static constexpr bool kIsBf16 = IsBf16;
  KVRT_DEVICE static int channel(int quad, int step, int reg, int half) {
    return 32 * (step / 2) + 8 * quad + 4 * (step % 2) + 2 * reg + half;
  }
  KVRT_DEVICE static constexpr float bias(int) { return 0.0f; }

  template <int N>
  KVRT_DEVICE static void score(const SideView&, const std::uint8_t* block, int slot, const QueryFragments<D, N>& query, float (&s)[N][4]) {
    const int lane = cuda::lane_index(), quad = lane % 4, row = slot + lane / 4;
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] = 0;
    }
    KVRT_UNROLL
    for (int piece = 0; piece < D / 32; ++piece) {
      std::uint32_t words[2][4];
      KVRT_UNROLL
      for (int r = 0; r < 2; ++r) load_row(block + (row + 8 * r) * (2 * D) + 64 * piece + 16 * quad, words[r]);
      KVRT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t a[4] = {words[0][2 * half], words[1][2 * half], words[0][2 * half + 1], words[1][2 * half + 1]};
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) {
          if (IsBf16) cuda::mma_bf16(s[n], a, query.b[n][2 * piece + half]);
          else cuda::mma_f16(s[n], a, query.b[n][2 * piece + half]);
        }
      }
    }
    KVRT_UNROLL
    for (int n = 0; n < N; ++n) {
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) s[n][i] *= query.scale[n][i % 2];
    }
  }
};

}  // namespace kvrt

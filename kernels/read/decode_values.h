#pragma once
// Device code of the decode kernels, part 6: outputs from the pages of each value family. Values are the A operand, transposed:
// 16 channels x 16 tokens. Lane 4g + q reads tokens 2q, 2q + 1, 2q + 8, 2q + 9 of a tile; registers 2i and 2i + 1 of its channels
// are rows g and g + 8 of output tile i: o[i][0..1] and o[i][2..3], heads 2q and 2q + 1.
//
// Where one (scale, offset) covers the row, the scale goes into the weights, P' = f16(p s 2^e), the codes enter with alternating
// bias and the offset is summed apart. Constants of the plan are applied to the sums of codes at the end. Elsewhere the values
// themselves enter in fp16, P' = f16(p 2^e).

#include "kernels/read/decode_keys.h"
#include "kernels/read/decode_value_codes.h"

namespace kvrt {

/// Tokens of a tile that lane 4g + q reads as operand A.
KVRT_DEVICE int value_token(int quad, int i) { return 2 * quad + i % 2 + 8 * (i / 2); }

inline constexpr float kFirstWeightScale = 0x1p100f;  ///< 2^e before the first scale is known: any moves it
inline constexpr float kWeightScale = 0x1p10f;  ///< 2^e where no scale is folded in: weights down to 2^-34 count

/// kIsPadded: as of CodedKeys.
template <class Codes, int D, bool kIsPadded>
struct CodedValues {
  static constexpr bool kIsBf16 = false, kMayFold = true, kIsBiased = true;

  KVRT_DEVICE static bool folds_scale(const SideView& view) { return cuda::reread(view.mode) == ParamMode::kRow && cuda::reread(view.n_groups) != 0; }
  /// Of token `slot`, as stored; with folds_scale().
  KVRT_DEVICE static std::uint32_t row_params(const SideView& view, const std::uint8_t* block, int slot) {
    return TokenParams<Codes>(view, block, slot).of_group(0);
  }
  KVRT_DEVICE static float row_scale(const SideView& view, std::uint32_t params) { return value_scale<Codes>(view, params); }
  KVRT_DEVICE static float row_lo(const SideView& view, std::uint32_t params) { return value_lo<Codes>(view, params); }

  KVRT_DEVICE static int channel(int g, int reg) { return Codes::channel(g, reg); }
  /// To multiply with sums of rounded weights of even or odd tokens: what biases added to the register's output.
  KVRT_DEVICE static constexpr float bias(int reg, bool is_odd) { return Codes::bias(reg, is_odd); }
  KVRT_DEVICE static bool has_bias(const SideView& view) { return view.mode == ParamMode::kRow; }
  /// Output of a channel = scale * sum + lo * Σ p, besides what folds_scale() has summed.
  KVRT_DEVICE static ChannelGrid grid(const SideView& view, int channel) {
    if (view.mode != ParamMode::kRow) return {undo_value_factor<Codes>(), 0.0f};
    if (view.ranges != nullptr) return channel_grid(view, channel);
    return {view.scale, view.lo};
  }

  /// live: of the lane's four tokens. weights: [N][2], operand B. o: [N][D / 16][4].
  template <int N>
  KVRT_DEVICE static void accumulate(const SideView& view, const std::uint8_t* block, int slot, const bool (&live)[4],
                                     const std::uint32_t (&weights)[N][2], float (&o)[N][D / 16][4]) {
    const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
    std::uint32_t words[4][Codes::kWords];
    Table table;
    KVRT_UNROLL
    for (int i = 0; i < 4; ++i) {
      Codes::load(view, block, slot + value_token(quad, i), g, words[i]);
      if (!Codes::kCanBeNan) continue;
      KVRT_UNROLL
      for (int j = 0; j < Codes::kWords; ++j) words[i][j] = live[i] ? words[i][j] : 0u;
    }
    if (Codes::kIsTable) {
      KVRT_UNROLL
      for (int i = 0; i < kTableWords; ++i) table[i] = cuda::reread(view.table[i]);
    }
    const ParamMode mode = cuda::reread(view.mode);
    if (mode == ParamMode::kRow) {
      KVRT_UNROLL
      for (int tile = 0; tile < D / 16; ++tile) {
        std::uint32_t a[4];  // rows g and g + 8 of the token pairs (2q, 2q + 1), then (2q + 8, 2q + 9)
        KVRT_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int reg = 2 * tile + i % 2;
          a[i] = Codes::alternating(Codes::raw(words[i / 2 * 2], words[i / 2 * 2 + 1], table, g, reg), reg);
        }
        KVRT_UNROLL
        for (int n = 0; n < N; ++n) cuda::mma_f16(o[n][tile], a, weights[n]);
      }
      return;
    }
    // Scales differ along the row: the values themselves, in fp16.
    const std::uint32_t minus_zero = Codes::kHasZero ? cuda::reread(view.minus_zero) : 0u;
    if (Codes::kHasChannelGroups && mode == ParamMode::kChannel) {
      const std::uint8_t* const params = channel_params(view, block, slot);
      const bool any = live[0] || live[1] || live[2] || live[3];
      add_values<N>(view, words, table, minus_zero, g, weights, o, [&](int reg, ValuePairs (&p)[2]) {
        const int c = kIsPadded ? cuda::reread(view.group[channel(g, reg)]) : channel(g, reg);
        const std::uint32_t w = any ? value_params<Codes>(view, cuda::load_shared_word(params + 4 * c)) : 0u;
        p[0] = p[1] = value_pairs(w, w);
      });
    } else if (!kIsPadded || mode == ParamMode::kGroups) {
      ValuePairs of_tokens[2];
      token_pairs(view, block, slot, g >> cuda::reread(view.lane_shift), live, of_tokens);
      add_values<N>(view, words, table, minus_zero, g, weights, o, [&](int, ValuePairs (&p)[2]) { p[0] = of_tokens[0], p[1] = of_tokens[1]; });
    } else {
      add_values<N>(view, words, table, minus_zero, g, weights, o, [&](int reg, ValuePairs (&p)[2]) {
        token_pairs(view, block, slot, cuda::reread(view.group[channel(g, reg)]), live, p);
      });
    }
  }

 private:
  /// Whether any lane's channel of a register is in the row: that of the first one is the least. Padded kernels ask for each register, since the
  /// compiler would move the loads for all of them before the first product otherwise, and run out of registers.
  KVRT_DEVICE static bool has_channel(const SideView& view, int reg) { return !kIsPadded || channel(0, reg) < cuda::reread(view.head_dim); }
  /// (even token, odd token) pairs of scale' and lo' of a group; 0 for tokens that are not live.
  KVRT_DEVICE static void token_pairs(const SideView& view, const std::uint8_t* block, int slot, int group, const bool (&live)[4], ValuePairs (&p)[2]) {
    const int quad = cuda::lane_index() % 4;
    KVRT_UNROLL
    for (int half = 0; half < 2; ++half) {
      std::uint32_t w[2];
      KVRT_UNROLL
      for (int j = 0; j < 2; ++j) {
        const std::uint32_t params = value_params<Codes>(view, TokenParams<Codes>(view, block, slot + value_token(quad, 2 * half + j)).of_group(group));
        w[j] = live[2 * half + j] ? params : 0u;
      }
      p[half] = value_pairs(w[0], w[1]);
    }
  }
  /// pairs_of(reg, p) gives the parameters of both token pairs.
  template <int N, class PairsOf>
  KVRT_DEVICE static void add_values(const SideView& view, const std::uint32_t (&words)[4][Codes::kWords], const Table& table, std::uint32_t minus_zero,
                                     int g, const std::uint32_t (&weights)[N][2], float (&o)[N][D / 16][4], PairsOf pairs_of) {
    KVRT_UNROLL
    for (int tile = 0; tile < D / 16; ++tile) {
      std::uint32_t a[4] = {0, 0, 0, 0};
      KVRT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const int reg = 2 * tile + row;
        if (!has_channel(view, reg)) continue;
        ValuePairs p[2];
        pairs_of(reg, p);
        std::uint32_t minus = Codes::minus_bias(reg);
        if (Codes::kHasZero) minus = cuda::add_f16x2(minus, minus_zero);
        KVRT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t raw = Codes::raw(words[2 * half], words[2 * half + 1], table, g, reg);
          a[2 * half + row] = cuda::fma_f16x2(cuda::add_f16x2(Codes::biased(raw, reg), minus), p[half].scale, p[half].lo);
        }
      }
      KVRT_UNROLL
      for (int n = 0; n < N; ++n) cuda::mma_f16(o[n][tile], a, weights[n]);
    }
  }
};

/// bf16 or fp16 rows. Words of masked tokens are replaced by 0: bytes nobody wrote may be NaN.
template <int D, bool IsBf16, bool kIsPadded>
struct PlainValues {
  static constexpr bool kIsBf16 = IsBf16, kMayFold = false, kIsBiased = false;
  static constexpr int kWords = D / 16;
  KVRT_DEVICE static bool folds_scale(const SideView&) { return false; }
  KVRT_DEVICE static std::uint32_t row_params(const SideView&, const std::uint8_t*, int) { return 0; }
  KVRT_DEVICE static float row_scale(const SideView&, std::uint32_t) { return 1.0f; }
  KVRT_DEVICE static float row_lo(const SideView&, std::uint32_t) { return 0.0f; }
  KVRT_DEVICE static int channel(int g, int reg) { return g * (D / 8) + reg; }
  KVRT_DEVICE static constexpr float bias(int, bool) { return 0.0f; }
  KVRT_DEVICE static bool has_bias(const SideView&) { return false; }
  KVRT_DEVICE static ChannelGrid grid(const SideView&, int) { return {1.0f, 0.0f}; }

  template <int N>
  KVRT_DEVICE static void accumulate(const SideView& view, const std::uint8_t* block, int slot, const bool (&live)[4],
                                     const std::uint32_t (&weights)[N][2], float (&o)[N][D / 16][4]) {
    const int lane = cuda::lane_index(), g = lane / 4, quad = lane % 4;
    const int row_words = kIsPadded ? cuda::reread(view.row_words) : D / 2;
    constexpr int kPart = 4;  // words of one load
    KVRT_UNROLL
    for (int part = 0; part < kWords; part += kPart) {
      if (kIsPadded && part >= cuda::reread(view.row_words)) break;
      std::uint32_t words[4][kPart];
      KVRT_UNROLL
      for (int i = 0; i < 4; ++i) {
        load_words<kIsPadded, kPart>(block + (slot + value_token(quad, i)) * (4 * row_words), g * kWords + part, row_words, words[i]);
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

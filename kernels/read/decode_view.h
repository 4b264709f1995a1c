#pragma once
// Device code of the decode kernels, part 1: what the loop over tiles needs of one side of a segment. It lives in shared memory and
// is read again for every tile, since registers are what limits the loop. Granularity is a branch that all threads take alike.

#include "kernels/codec/table_words.h"
#include "kernels/cuda/memory.h"
#include "kernels/read/decode_cuda.h"

namespace kvrt {



/// Where the scale and offset of a code come from.
enum class ParamMode : std::int32_t {
  kRow,      ///< one pair a token (token.g), or constants: tensor, head, channel.static
  kGroups,   ///< token.g<N>, the channels that 1, 2 or 4 lanes read make a group
  kGeneral,  ///< token.g<N>, any N: read by the padded kernels alone
  kChannel,  ///< channel.g<N>
};

/// Value of code n: scale' * (n - zero) + lo', from stored scale and lo (0 where a format has none):
/// scale' = scale * step, lo' = lo + scale * unit.
struct SideView {
  const std::uint8_t* first;   ///< head block of page p: first + p * page_bytes
  std::int64_t page_bytes;
  std::int32_t params, plane_b;  ///< offsets in a block
  std::int32_t row_words;      ///< 32-bit words of a row (plane A for 3 bits)
  std::int32_t head_dim;       ///< D
  std::int32_t n_groups;       ///< parameters a token; 0: none
  std::int32_t param_bytes;    ///< 4: fp16 scale, fp16 lo; 2: fp16 scale; 0: none in the block
  std::int32_t channel_group;  ///< N of channel.g<N>, else 0
  ParamMode mode;
  float scale, lo;             ///< of tensor and head; else 1, 0
  float zero;                  ///< code of value 0 (sint, codebooks), else 0
  std::uint32_t minus_zero;    ///< pair of fp16 -zero
  float step, unit;            ///< codebooks: step of the levels, 1 for nuq and 0 for lm; else 1, 0
  const StaticRange* ranges;   ///< channel.static: [D] in model order, else null
  const float* mean;           ///< center: [D] in stored order, or null
  std::int32_t spread;         ///< order of stored channels
  std::int32_t lane_shift;     ///< kGroups: lane i of a row reads group i >> lane_shift
  std::uint32_t table[kTableWords];
  /// Of the channel stored at a position: its group in token.g<N>, its position in channel.g<N>. Behind the row, those of the last one.
  std::uint8_t group[kMaxDecodeDim];
};

/// Threads of a block fill a view together. width: of the products; row_lanes: lanes that share a row of it. A barrier must follow.
KVRT_DEVICE void view_side(const SegmentSide& side, int width, int row_lanes, int thread, int n_threads, SideView* view) {
  const PageCodec& c = side.codec;
  const bool is_token = c.granularity == Granularity::kToken, is_channel = c.granularity == Granularity::kChannel;
  if (is_token || is_channel) {
    for (int p = thread; p < width; p += n_threads) {
      const int at = p < c.head_dim ? p : c.head_dim - 1;
      view->group[p] = static_cast<std::uint8_t>(is_token ? stored_channel(c.spread, c.head_dim, at) / c.group : at);
    }
  }
  if (thread != 0) return;
  const bool is_table = is_nuq(c.format) || is_lm(c.format), has_range = c.granularity == Granularity::kTensor || c.granularity == Granularity::kHead;
  view->first = side.pool + side.block_offset, view->page_bytes = side.page_bytes;
  view->params = static_cast<std::int32_t>(c.params), view->plane_b = static_cast<std::int32_t>(c.plane_b);
  view->row_words = static_cast<std::int32_t>((is_exact(c.format) ? 2 * c.head_dim : c.row_bytes) / 4), view->head_dim = c.head_dim;
  view->n_groups = is_token ? c.head_dim / c.group : 0;
  view->param_bytes = is_token || is_channel ? detail::param_stride(c.format) : 0;
  view->channel_group = is_channel ? c.group : 0;
  const int lane_channels = width / row_lanes, lanes = is_token ? c.group / lane_channels : 0;  // of a group
  view->lane_shift = lanes == 4 ? 2 : lanes == 2 ? 1 : 0;
  view->mode = is_channel ? ParamMode::kChannel
               : !is_token || c.group == c.head_dim ? ParamMode::kRow
               : c.spread == 0 && c.group % lane_channels == 0 && (lanes & (lanes - 1)) == 0 ? ParamMode::kGroups
                                                               : ParamMode::kGeneral;
  view->scale = has_range ? c.range.scale : 1.0f, view->lo = has_range && !is_fp8(c.format) && !is_sint(c.format) ? c.range.lo : 0.0f;
  view->zero = is_table ? kLevelZero : c.format == Format::kSint8 ? 128.0f : c.format == Format::kSint4 ? 8.0f : 0.0f;
  view->minus_zero = cuda::pack_f16(-view->zero, -view->zero);
  view->step = is_table ? codebook_step(c.codebook) : 1.0f, view->unit = is_nuq(c.format) ? 1.0f : 0.0f;
  view->ranges = c.granularity == Granularity::kChannelStatic ? c.channel_ranges : nullptr;
  view->mean = side.mean, view->spread = c.spread;
  for (int i = 0; is_table && i < kTableWords; ++i) view->table[i] = table_word(c.codebook, view->step, i);
}

KVRT_DEVICE const std::uint8_t* page_block(const SideView& view, std::int64_t page) {
  return cuda::reread(view.first) + page * cuda::reread(view.page_bytes);
}

/// Where the stored parameters of a token are, and those of its groups: fp16 scale in the low half, fp16 lo (or 0) in the high half.
template <class Codes>
struct TokenParams {
  const std::uint8_t* first;
  int bytes;  ///< of a group

  KVRT_DEVICE TokenParams(const SideView& view, const std::uint8_t* block, int slot)
      : bytes(Codes::kParamBytes != 0 ? Codes::kParamBytes : cuda::reread(view.param_bytes)) {
    first = block + cuda::reread(view.params) + bytes * (slot * cuda::reread(view.n_groups));
  }
  KVRT_DEVICE std::uint32_t of_group(int group) const {
    const std::uint8_t* const p = first + bytes * group;
    return bytes == 4 ? cuda::load_shared_word(p) : cuda::load_shared_half(p);
  }
};
/// channel.g<N>: words of the channels, in stored order, for the tile of 16 tokens from `slot`.
KVRT_DEVICE const std::uint8_t* channel_params(const SideView& view, const std::uint8_t* block, int slot) {
  return block + cuda::reread(view.params) + 4 * (slot / cuda::reread(view.channel_group) * cuda::reread(view.head_dim));
}

/// scale' and lo' of stored parameters.
template <class Codes>
KVRT_DEVICE float value_scale(const SideView& view, std::uint32_t params) {
  const float scale = cuda::low_f16(params);
  return Codes::kIsTable ? scale * cuda::reread(view.step) : scale;
}
template <class Codes>
KVRT_DEVICE float value_lo(const SideView& view, std::uint32_t params) {
  const float lo = cuda::high_f16(params);
  return Codes::kIsTable ? lo + cuda::low_f16(params) * cuda::reread(view.unit) : lo;
}

/// scale' and lo' as fp16, in the low and the high half, times the factor that keeps values of integer formats inside fp16.
template <class Codes>
KVRT_DEVICE constexpr float value_factor() { return Codes::kHalvesValues ? 0.5f : 1.0f; }
template <class Codes>
KVRT_DEVICE std::uint32_t value_params(const SideView& view, std::uint32_t params) {
  if (Codes::kIsTable) return cuda::pack_f16(value_scale<Codes>(view, params), value_lo<Codes>(view, params));
  return Codes::kHalvesValues ? cuda::fma_f16x2(params, 0x38003800u, 0x80008000u) : params;
}
/// Undoes it.
template <class Codes>
KVRT_DEVICE constexpr float undo_value_factor() { return 1.0f / value_factor<Codes>(); }

/// (a, b) of the low halves, and of the high halves.
KVRT_DEVICE std::uint32_t low_halves(std::uint32_t a, std::uint32_t b) { return cuda::byte_permute(a, b, 0x5410u); }
KVRT_DEVICE std::uint32_t high_halves(std::uint32_t a, std::uint32_t b) { return cuda::byte_permute(a, b, 0x7632u); }

/// The words of one lane's part of a row: words [begin, begin + W) of the row at `row`, in vectors as wide as their alignment
/// (4 W bytes, at most 16). Is padded: the row ends before the part does; single words, zeros behind the end.
template <bool kIsPadded, int W, int kAll>
KVRT_DEVICE void load_words(const std::uint8_t* row, int begin, int row_words, std::uint32_t (&words)[kAll], int at = 0) {
  if (kIsPadded) {
    const int n_words = row_words - begin;
    KVRT_UNROLL
    for (int i = 0; i < W; ++i) {
      std::uint32_t word[1] = {0};
      if (i < n_words) cuda::load_stream<1>(row + 4 * (begin + i), word);
      words[at + i] = word[0];
    }
    return;
  }
  constexpr int kVector = W < 4 ? W : 4;
  KVRT_UNROLL
  for (int i = 0; i < W; i += kVector) {
    std::uint32_t part[kVector];
    cuda::load_stream<kVector>(row + 4 * (begin + i), part);
    KVRT_UNROLL
    for (int j = 0; j < kVector; ++j) words[at + i + j] = part[j];
  }
}

}  // namespace kvrt

// One warp a head and group of tokens (a token, without channel groups).

#include "kernels/write/fake_quant_cuda.h"

#include "kernels/write/encode_warp.h"

namespace kvrt {
namespace {

/// Codes of the widest row; scale and minimum of every channel; outliers of one token.
constexpr int kRowRoom = 2 * kMaxDeviceDim, kParamsRoom = 4 * kMaxDeviceDim, kOutlierRoom = 4 * kMaxTokenOutliers;

/// What one warp works on: a head block of one slot.
struct WarpBlock {
  WarpRows rows;
  PageCodec codec;
  alignas(16) std::uint8_t bytes[kRowRoom + kParamsRoom + kOutlierRoom];
};

/// The codec of the unit over a block that holds one slot.
KVRT_DEVICE void start_block(const DeviceUnit& unit, int head, WarpBlock& block) {
  if (cuda::lane_index() == 0) {
    block.codec = unit.codecs[head];
    block.codec.plane_b = block.codec.row_bytes;
    block.codec.params = kRowRoom, block.codec.outliers = kRowRoom + kParamsRoom;
  }
  cuda::warp_barrier();
}

/// The tokens of one head that are encoded together: step rows [D], stride elements apart.
struct HeadGroup {
  const DeviceUnit& unit;
  int head, width;
  std::int64_t index, stride;
  const float* x;
  float* out;
};
/// Group i: token varies slowest, then head.
KVRT_DEVICE HeadGroup group_at(const DeviceFakeQuantArgs& args, std::int64_t i) {
  const int head = static_cast<int>(i % args.n_heads), width = args.layer->head_dim;
  const std::int64_t stride = static_cast<std::int64_t>(args.n_heads) * width, index = i / args.n_heads;
  const std::int64_t first = index * args.step * stride + static_cast<std::int64_t>(head) * width;
  return {args.layer->units[args.side], head, width, index, stride, args.x + first, args.out + first};
}

/// rows.y <- row t, in the encoder's coordinates.
KVRT_DEVICE void frame_row(const HeadGroup& group, int t, WarpRows& rows) {
  EncodeCounters ignored;
  cuda::warp_barrier();
  for (int d = cuda::lane_index(); d < group.unit.frame.head_dim; d += cuda::kWarp) rows.x[d] = cuda::load(group.x + t * group.stride + d);
  to_frame_warp(group.unit.frame, group.head, rows, &ignored);
}
/// Row t of the output <- the value of what a slot holds.
KVRT_DEVICE void read_back(const HeadGroup& group, int t, const PageCodec& codec, const std::uint8_t* block, int slot, WarpRows& rows) {
  decode_row_warp(codec, block, slot, rows.y);
  from_frame_warp(group.unit.frame, group.head, rows);
  for (int d = cuda::lane_index(); d < group.unit.frame.head_dim; d += cuda::kWarp) cuda::store(group.out + t * group.stride + d, rows.x[d]);
}

/// A group: rows wait framed in the output until the ranges of its channels are known, and come back decoded. block: holds `slot`, and
/// with outliers the whole group behind it, which are picked over all its rows: one thread encodes it.
template <bool HasOutliers>
KVRT_DEVICE void through_codec(const HeadGroup& group, int step, const PageCodec& codec, std::uint8_t* block, int slot, WarpRows& rows) {
  EncodeCounters ignored;
  for (int t = 0; t < step; ++t) {
    frame_row(group, t, rows);
    if (step == 1) break;  // rows.y
    for (int d = cuda::lane_index(); d < group.width; d += cuda::kWarp) cuda::store(group.out + t * group.stride + d, rows.y[d]);
  }
  cuda::warp_barrier();
  const bool alone = HasOutliers && step > 1 && codec.out_per_mille > 0;
  for (int d = cuda::lane_index(); d < group.width && step > 1 && !alone; d += cuda::kWarp) {
    detail::store_channel_params(codec, group.out, group.stride, slot, d, block, &ignored);
  }
  if constexpr (HasOutliers) {
    if (alone && cuda::lane_index() == 0) detail::encode_group_with_outliers(codec, group.out, group.stride, slot / step, block, &ignored);
  }
  cuda::warp_barrier();
  for (int t = 0; t < step; ++t) {
    const int at = alone ? slot + t : slot;
    if (!alone) encode_row_warp<HasOutliers>(codec, step == 1 ? rows.y : group.out + t * group.stride, at, block, rows.spare, &ignored, step > 1);
    read_back(group, t, codec, block, at, rows);
  }
}

template <bool HasOutliers>
KVRT_KERNEL(kRowThreads, 4) fake_quant_kernel(const DeviceFakeQuantArgs args) {
  KVRT_SHARED(PerWarp<WarpBlock>, shared);
  WarpBlock& mine = shared.mine();
  const std::int64_t n = args.n_tokens / args.step * args.n_heads, i = warp_in_grid();
  if (HasOutliers && args.pages && i >= args.n_pages) return;
  for (std::int64_t at = i; at < n; at += HasOutliers && args.pages ? args.n_pages : n) {
    const HeadGroup group = group_at(args, at);
    const PageCodec* codec = &group.unit.codecs[group.head];
    std::uint8_t* block = mine.bytes;
    int slot = 0;
    if (HasOutliers && args.pages) {  // a block of a page for each warp
      block = args.pages + i * args.page_bytes;
      slot = static_cast<int>(group.index % (codec->page_tokens / args.step)) * args.step;
    } else {
      start_block(group.unit, group.head, mine);
      codec = &mine.codec;
    }
    through_codec<HasOutliers>(group, args.step, *codec, block, slot, mine.rows);
  }
}

}  // namespace

Status fake_quant_cuda(const DeviceFakeQuantArgs& args, void* stream) {
  const std::int64_t all = args.n_tokens / args.step * args.n_heads, n = args.pages && args.n_pages < all ? args.n_pages : all;
  return launch_warps(args.has_outliers ? &fake_quant_kernel<true> : &fake_quant_kernel<false>, n, args, stream);
}

}  // namespace kvrt

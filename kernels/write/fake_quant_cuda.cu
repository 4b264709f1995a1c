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
/// All rows, which wait in the output.
KVRT_DEVICE void frame_rows(const HeadGroup& group, int step, WarpRows& rows) {
  for (int t = 0; t < step; ++t) {
    frame_row(group, t, rows);
    for (int d = cuda::lane_index(); d < group.width; d += cuda::kWarp) cuda::store(group.out + t * group.stride + d, rows.y[d]);
  }
  cuda::warp_barrier();
}
/// Row t of the output <- the value of what a slot holds.
KVRT_DEVICE void read_back(const HeadGroup& group, int t, const PageCodec& codec, const std::uint8_t* block, int slot, WarpRows& rows) {
  decode_row_warp(codec, block, slot, rows.y);
  from_frame_warp(group.unit.frame, group.head, rows);
  for (int d = cuda::lane_index(); d < group.unit.frame.head_dim; d += cuda::kWarp) cuda::store(group.out + t * group.stride + d, rows.x[d]);
}

/// block: started.
template <bool HasOutliers>
KVRT_DEVICE void token_alone(const HeadGroup& group, WarpBlock& block) {
  EncodeCounters ignored;
  frame_row(group, 0, block.rows);
  encode_row_warp<HasOutliers>(block.codec, block.rows.y, 0, block.bytes, block.rows.spare, &ignored);
  read_back(group, 0, block.codec, block.bytes, 0, block.rows);
}

KVRT_DEVICE void channel_group(const HeadGroup& group, int step, WarpBlock& block) {
  EncodeCounters ignored;
  frame_rows(group, step, block.rows);
  for (int d = cuda::lane_index(); d < group.width; d += cuda::kWarp) {
    detail::store_channel_params(block.codec, group.out, group.stride, 0, d, block.bytes, &ignored);
  }
  cuda::warp_barrier();
  for (int t = 0; t < step; ++t) {
    encode_codes_warp(block.codec, group.out + t * group.stride, 0, block.bytes, block.rows.spare);
    read_back(group, t, block.codec, block.bytes, 0, block.rows);
  }
}

/// Outliers of a group are picked over all its rows: a block of a page for each warp, in which one thread encodes.
KVRT_DEVICE void channel_group_with_outliers(const HeadGroup& group, int step, std::uint8_t* page, WarpRows& rows) {
  const PageCodec& codec = group.unit.codecs[group.head];
  const int in_page = static_cast<int>(group.index % (codec.page_tokens / step));
  EncodeCounters ignored;
  frame_rows(group, step, rows);
  if (cuda::lane_index() == 0) detail::encode_group_with_outliers(codec, group.out, group.stride, in_page, page, &ignored);
  cuda::warp_barrier();
  for (int t = 0; t < step; ++t) read_back(group, t, codec, page, in_page * step + t, rows);
}

template <bool HasOutliers>
KVRT_KERNEL(kRowThreads, 4) fake_quant_kernel(const DeviceFakeQuantArgs args) {
  KVRT_SHARED(PerWarp<WarpBlock>, shared);
  WarpBlock& block = shared.mine();
  const std::int64_t n = args.n_tokens / args.step * args.n_heads, i = warp_in_grid();
  if constexpr (HasOutliers) {
    if (args.pages) {
      for (std::int64_t at = i; i < args.n_pages && at < n; at += args.n_pages) {
        channel_group_with_outliers(group_at(args, at), args.step, args.pages + i * args.page_bytes, block.rows);
      }
      return;
    }
  }
  if (i >= n) return;
  const HeadGroup group = group_at(args, i);
  start_block(group.unit, group.head, block);
  if (args.step == 1) token_alone<HasOutliers>(group, block);
  else channel_group(group, args.step, block);
}

}  // namespace

Status fake_quant_cuda(const DeviceFakeQuantArgs& args, void* stream) {
  const std::int64_t all = args.n_tokens / args.step * args.n_heads, n = args.pages && args.n_pages < all ? args.n_pages : all;
  return launch_warps(args.has_outliers ? &fake_quant_kernel<true> : &fake_quant_kernel<false>, n, args, stream);
}

}  // namespace kvrt

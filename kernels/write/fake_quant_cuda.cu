// One warp a head and group of tokens (a token, without channel groups).

#include "kernels/write/fake_quant_cuda.h"

#include "kernels/write/encode_warp.h"

namespace kvrt {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / cuda::kWarp;
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

/// rows.x <- the value of what slot 0 holds; then out.
KVRT_DEVICE void read_back(const DeviceUnit& unit, int head, WarpBlock& block, float* out) {
  decode_row_warp(block.codec, block.bytes, 0, block.rows.y);
  from_frame_warp(unit.frame, head, block.rows);
  for (int d = cuda::lane_index(); d < unit.frame.head_dim; d += cuda::kWarp) cuda::store(out + d, block.rows.x[d]);
}

KVRT_DEVICE void frame_row(const DeviceUnit& unit, int head, const float* x, WarpRows& rows) {
  EncodeCounters ignored;
  cuda::warp_barrier();
  for (int d = cuda::lane_index(); d < unit.frame.head_dim; d += cuda::kWarp) rows.x[d] = cuda::load(x + d);
  to_frame_warp(unit.frame, head, rows, &ignored);
}

/// Outliers of a group are picked over all its rows: a block of a page for each warp, in which one thread encodes.
KVRT_DEVICE void group_with_outliers(const DeviceFakeQuantArgs& args, const DeviceUnit& unit, int head, std::int64_t group, std::int64_t stride,
                                     const float* x, float* out, std::uint8_t* page, WarpRows& rows) {
  const PageCodec& codec = unit.codecs[head];
  const int width = args.layer->head_dim, in_page = static_cast<int>(group % (codec.page_tokens / args.step));
  EncodeCounters ignored;
  for (int t = 0; t < args.step; ++t) {
    frame_row(unit, head, x + t * stride, rows);
    for (int d = cuda::lane_index(); d < width; d += cuda::kWarp) cuda::store(out + t * stride + d, rows.y[d]);
  }
  cuda::warp_barrier();
  if (cuda::lane_index() == 0) detail::encode_group_with_outliers(codec, out, stride, in_page, page, &ignored);
  cuda::warp_barrier();
  for (int t = 0; t < args.step; ++t) {
    decode_row_warp(codec, page, in_page * args.step + t, rows.y);
    from_frame_warp(unit.frame, head, rows);
    for (int d = cuda::lane_index(); d < width; d += cuda::kWarp) cuda::store(out + t * stride + d, rows.x[d]);
    cuda::warp_barrier();
  }
}

template <bool HasOutliers>
KVRT_KERNEL(kThreads, 4) fake_quant_kernel(const DeviceFakeQuantArgs args) {
  struct Shared {
    WarpBlock blocks[kWarps];
  };
  KVRT_SHARED(Shared, shared);
  WarpBlock& block = shared.blocks[cuda::warp_index()];
  const std::int64_t i = static_cast<std::int64_t>(cuda::block_index()) * kWarps + cuda::warp_index();
  if (i >= args.n_tokens / args.step * args.n_heads || (args.pages && i >= args.n_pages)) return;
  const int head = static_cast<int>(i % args.n_heads), width = args.layer->head_dim;
  const DeviceUnit& unit = args.layer->units[args.side];
  const std::int64_t stride = static_cast<std::int64_t>(args.n_heads) * width, first = i / args.n_heads * args.step * stride + static_cast<std::int64_t>(head) * width;
  if constexpr (HasOutliers) {
    if (args.pages) {
      for (std::int64_t task = i; task < args.n_tokens / args.step * args.n_heads; task += args.n_pages) {
        const std::int64_t group = task / args.n_heads, at = group * args.step * stride + task % args.n_heads * width;
        const int of = static_cast<int>(task % args.n_heads);
        group_with_outliers(args, unit, of, group, stride, args.x + at, args.out + at, args.pages + i * args.page_bytes, block.rows);
      }
      return;
    }
  }
  EncodeCounters ignored;
  start_block(unit, head, block);
  if (args.step == 1) {
    frame_row(unit, head, args.x + first, block.rows);
    encode_row_warp<HasOutliers>(block.codec, block.rows.y, 0, block.bytes, block.rows.spare, &ignored);
    return read_back(unit, head, block, args.out + first);
  }
  // The group's rows wait in the output, in the encoder's coordinates.
  for (int t = 0; t < args.step; ++t) {
    frame_row(unit, head, args.x + first + t * stride, block.rows);
    for (int d = cuda::lane_index(); d < width; d += cuda::kWarp) cuda::store(args.out + first + t * stride + d, block.rows.y[d]);
  }
  cuda::warp_barrier();
  for (int d = cuda::lane_index(); d < width; d += cuda::kWarp) detail::store_channel_params(block.codec, args.out + first, stride, 0, d, block.bytes, &ignored);
  cuda::warp_barrier();
  for (int t = 0; t < args.step; ++t) {
    encode_codes_warp(block.codec, args.out + first + t * stride, 0, block.bytes, block.rows.spare);
    read_back(unit, head, block, args.out + first + t * stride);
  }
}

}  // namespace

Status fake_quant_cuda(const DeviceFakeQuantArgs& args, void* stream) {
  const std::int64_t all = args.n_tokens / args.step * args.n_heads, n = args.pages && args.n_pages < all ? args.n_pages : all;
  const std::int64_t n_blocks = (n + kWarps - 1) / kWarps;
  return args.has_outliers ? cuda::launch(&fake_quant_kernel<true>, n_blocks, kThreads, args, stream)
                           : cuda::launch(&fake_quant_kernel<false>, n_blocks, kThreads, args, stream);
}

}  // namespace kvrt

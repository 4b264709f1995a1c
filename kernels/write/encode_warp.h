#pragma once
// Device code of the write operations: one warp frames and encodes rows through the functions of codec/page_codec.h, each lane its own
// channels, groups, words or blocks. The bytes are those of encode_row() and encode_channel_group().

#include "kernels/core/device_layer.h"
#include "kernels/cuda/hadamard_warp.h"
#include "kernels/cuda/memory.h"
#include "kernels/write/frame.h"

namespace kvrt {

/// CTAs of the kernels whose warps work on rows.
inline constexpr int kRowThreads = 128, kRowWarps = kRowThreads / cuda::kWarp;

/// Shared memory of a CTA: what each warp has to itself.
template <class T>
struct PerWarp {
  T of_warp[kRowWarps];
  KVRT_DEVICE T& mine() { return of_warp[cuda::warp_index()]; }
};

/// Number of the calling warp in the launch.
KVRT_DEVICE std::int64_t warp_in_grid() { return static_cast<std::int64_t>(cuda::block_index()) * kRowWarps + cuda::warp_index(); }

/// CTAs that hold n_warps.
KVRT_HOST_DEVICE constexpr std::int64_t row_blocks(std::int64_t n_warps) { return (n_warps + kRowWarps - 1) / kRowWarps; }

/// Starts kernel(args) with at least n_warps warps.
template <class Args>
Status launch_warps(void (*kernel)(Args), std::int64_t n_warps, const Args& args, void* stream) {
  return cuda::launch(kernel, row_blocks(n_warps), kRowThreads, args, stream);
}

/// Rows that one warp works on, in shared memory.
struct WarpRows {
  float x[kMaxDeviceDim];      ///< in the model's coordinates
  float y[kMaxDeviceDim];      ///< the encoder's input
  float spare[kMaxDeviceDim + kMaxDeviceDim / 4];
};

/// y from x. A barrier stands behind.
KVRT_DEVICE void to_frame_warp(const DeviceFrame& frame, int head, WarpRows& rows, EncodeCounters* counters) {
  cuda::warp_barrier();
  for (int p = cuda::lane_index(); p < frame.head_dim; p += cuda::kWarp) rows.y[p] = frame_value(frame, head, rows.x, p, counters);
  if (frame.had.size) cuda::hadamard_rotate(frame.had, frame.paley, frame.had_scale, rows.y, frame.head_dim, rows.spare);
  cuda::warp_barrier();
}
/// x from decoded values y, which are overwritten. A barrier stands behind.
KVRT_DEVICE void from_frame_warp(const DeviceFrame& frame, int head, WarpRows& rows) {
  cuda::warp_barrier();
  if (frame.had.size) cuda::hadamard_rotate(frame.had, frame.paley_transposed, frame.had_scale, rows.y, frame.head_dim, rows.spare);
  for (int p = cuda::lane_index(); p < frame.head_dim; p += cuda::kWarp) {
    int d;
    const float v = unframed_value(frame, head, rows.y, p, &d);
    rows.x[d] = v;
  }
  cuda::warp_barrier();
}

/// Codes of one slot on grids that are fixed; spare: [D + D / 4]. A barrier stands behind.
KVRT_DEVICE void encode_codes_warp(const PageCodec& c, const float* x, int slot, std::uint8_t* block, float* spare) {
  auto* const codes = reinterpret_cast<std::uint8_t*>(spare + c.head_dim);
  const int lane = cuda::lane_index();
  if (c.ef_u) {  // each channel waits for the one before it: all lanes find the code, and share what it leaves to the others
    detail::feedback_codes(c, x, slot, block, {}, codes, spare, lane, cuda::kWarp, [] { cuda::warp_barrier(); });
  } else {
    for (int d = lane; d < c.head_dim; d += cuda::kWarp) {
      codes[d] = grid_code(c.format, c.bits, c.codebook, detail::quiet(x[d]), detail::grid_at(c, block, slot, d));
    }
    cuda::warp_barrier();
  }
  for (int piece = lane; piece < detail::slot_pieces(c); piece += cuda::kWarp) {
    detail::pack_slot_piece(c, slot, piece, [&](int d) { return codes[d]; }, block);
  }
  cuda::warp_barrier();
}

/// encode_row_warp() of formats that are is_exact(). A barrier stands behind.
KVRT_DEVICE void encode_exact_row_warp(const PageCodec& c, const float* x, int slot, std::uint8_t* block, EncodeCounters* counters) {
  for (int d = cuda::lane_index(); d < c.head_dim; d += cuda::kWarp) detail::encode_exact_value(c, x, d, block + slot * c.row_bytes, counters);
  cuda::warp_barrier();
}

/// encode_row() by a warp. x: [D], seen by all lanes. A barrier stands behind. HasOutliers: of schemes with out<p>, whose rows one lane
/// encodes: they need a stack that the other kernels shall not have. in_group: a row of a channel group whose parameters stand.
template <bool HasOutliers>
KVRT_DEVICE void encode_row_warp(const PageCodec& c, const float* x, int slot, std::uint8_t* block, float* spare, EncodeCounters* counters,
                                 bool in_group = false) {
  std::uint8_t* const row = block + slot * c.row_bytes;
  const int lane = cuda::lane_index();
  if (is_exact(c.format)) return encode_exact_row_warp(c, x, slot, block, counters);
  if (is_llamacpp_block(c.format)) {
    for (int b = lane; b * kLlamaBlock < c.head_dim; b += cuda::kWarp) detail::encode_llamacpp_block(c, x, b, row, counters);
    return cuda::warp_barrier();
  }
  if constexpr (HasOutliers) {
    if (c.out_per_mille > 0 && !in_group) {
      if (lane == 0) detail::encode_row_with_outliers(c, x, slot, block, counters);
      return cuda::warp_barrier();
    }
  }
  if (detail::is_static(c)) {
    for (int d = lane; d < c.head_dim; d += cuda::kWarp) detail::count_beyond_range(c, x, d, counters);
  } else if (!in_group) {
    for (int g = lane; g * c.group < c.head_dim; g += cuda::kWarp) detail::store_group_params(c, x, slot, g * c.group, block, counters);
    cuda::warp_barrier();
  }
  encode_codes_warp(c, x, slot, block, spare);
  if (in_group || !(is_lm(c.format) || detail::refits_groups(c))) return;
  for (int g = lane; g * c.group < c.head_dim; g += cuda::kWarp) {
    if (is_lm(c.format)) detail::store_kept_norm(c, x, slot, g * c.group, block, counters);
    else detail::refit_group(c, x, slot, g * c.group, block);
  }
  cuda::warp_barrier();
}

/// decode_row() by a warp. A barrier stands behind.
KVRT_DEVICE void decode_row_warp(const PageCodec& c, const std::uint8_t* block, int slot, float* out) {
  for (int d = cuda::lane_index(); d < c.head_dim; d += cuda::kWarp) out[d] = decode_code(c, block, slot, d);
  cuda::warp_barrier();
  if (c.out_per_mille == 0) return;
  if (cuda::lane_index() == 0) {
    visit_outliers(c, block, slot, slot + 1, [&](int, int position, float delta) { out[stored_channel(c.spread, c.head_dim, position)] += delta; });
  }
  cuda::warp_barrier();
}

/// Adds what the lanes counted to the layer's counters.
KVRT_DEVICE void add_counters(const EncodeCounters& c, std::int64_t* counts) {
  if (c.non_finite) cuda::atomic_add(counts, c.non_finite);
  if (c.saturated) cuda::atomic_add(counts + 1, c.saturated);
  if (c.floored) cuda::atomic_add(counts + 2, c.floored);
}

}  // namespace kvrt

// Merges the partial results of the chunks of a row: one CTA a query head. Outputs of base pages are turned back before they meet those
// of exact pages.

#include "kernels/core/rows.h"
#include "kernels/cuda/hadamard_warp.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/mma.h"
#include "kernels/read/decode_cuda.h"

namespace kvrt {
namespace {

constexpr int kThreads = 128;
constexpr float kNothing = -1e30f;
constexpr float kLn2 = 0.693147180559945309f, kLog2e = 1.44269504088896341f;

struct Shared {
  float base[kMaxDeviceDim], spare[kMaxDeviceDim];
};

KVRT_DEVICE int segment_of(const CombineArgs& args, std::int64_t chunk) { return args.chunks ? cuda::load(&args.chunks[chunk].segment) % KVRT_SALIENT : 0; }

/// Σ o 2^(m - top) of channel d over the chunks [begin, end) that are in base pages, or are not.
KVRT_DEVICE float merge_channel(const CombineArgs& args, std::int64_t begin, std::int64_t end, int head, int d, float top, bool splits, bool of_base) {
  float o = 0;
  for (std::int64_t c = begin; c < end; ++c) {
    const std::int64_t partial = c * args.n_query_heads + head;
    // Chunks without a token are skipped, whatever their output holds.
    if (!(cuda::load(args.partials.l + partial) > 0) || (splits && (segment_of(args, c) == KVRT_BASE) != of_base)) continue;
    o += cuda::load(args.partials.o + partial * args.head_dim + d) * cuda::exp2_approx(cuda::load(args.partials.m + partial) - top);
  }
  return o;
}

KVRT_KERNEL(kThreads, 4) combine_kernel(const CombineArgs args) {
  KVRT_SHARED(Shared, shared);
  const int heads = args.n_query_heads, dim = args.head_dim;
  const std::int64_t item = cuda::block_index(), row = item / heads;
  const int head = static_cast<int>(item - row * heads), kv_head = static_cast<int>(row % args.n_kv_heads);
  std::int64_t out_row = row / args.n_kv_heads;
  if (args.sequences) {
    const Sequence& s = args.sequences[out_row].sequence;
    if (s.n_rows == 0) return;
    out_row = s.first_row;
  }
  const std::int64_t begin = cuda::load(args.first_chunk + row), end = cuda::load(args.first_chunk + row + 1);
  const std::int64_t n_q_heads = static_cast<std::int64_t>(args.n_kv_heads) * heads, q_head = static_cast<std::int64_t>(kv_head) * heads + head;
  const bool has_logit = args.sink_logit != nullptr;
  const float logit = has_logit ? kLog2e * cuda::load(args.sink_logit + q_head) : kNothing;

  float top = logit;
  for (std::int64_t c = begin; c < end; ++c) {
    if (cuda::load(args.partials.l + c * heads + head) > 0) top = fmaxf(top, cuda::load(args.partials.m + c * heads + head));
  }
  float sums[KVRT_SALIENT] = {0, 0, 0};
  for (std::int64_t c = begin; c < end; ++c) {
    const float l = cuda::load(args.partials.l + c * heads + head);
    if (!(l > 0)) continue;
    const float weight = l * cuda::exp2_approx(cuda::load(args.partials.m + c * heads + head) - top);
    const int which = segment_of(args, c);
    sums[0] += which == 0 ? weight : 0.0f, sums[1] += which == 1 ? weight : 0.0f, sums[2] += which == 2 ? weight : 0.0f;
  }
  const float sum = sums[0] + sums[1] + sums[2] + (has_logit ? cuda::exp2_approx(logit - top) : 0.0f);

  const DeviceFrame* const frame = args.layer ? &args.layer->units[KVRT_V].frame : nullptr;
  const bool turns = frame && frame->had.size > 0 && args.chunks;
  if (turns) {
    for (int d = cuda::thread_index(); d < dim; d += kThreads) shared.base[d] = merge_channel(args, begin, end, head, d, top, true, true);
    cuda::block_barrier();
    if (cuda::warp_index() == 0) cuda::hadamard_rotate(frame->had, frame->paley_transposed, frame->had_scale, shared.base, dim, shared.spare);
    cuda::block_barrier();
  }
  auto* const out =
      static_cast<std::uint8_t*>(args.out.data) + row_offset(args.out.dtype, args.out.row_stride, args.out.head_stride, n_q_heads, dim, out_row, q_head);
  for (int d = cuda::thread_index(); d < dim; d += kThreads) {
    const float o = merge_channel(args, begin, end, head, d, top, turns, false) + (turns ? shared.base[d] : 0.0f);
    store_value(args.out.dtype, out, d, sum > 0 ? o / sum : 0.0f);
  }
  if (cuda::thread_index() != 0) return;
  const std::int64_t scalar = out_row * n_q_heads + q_head;
  if (args.log_sum_exp) cuda::store(args.log_sum_exp + scalar, sum > 0 ? kLn2 * (top + log2f(sum)) : -INFINITY);
  for (int i = 0; args.mass && i < KVRT_SEGMENTS; ++i) {
    const float part = i == 0 ? sums[0] : i == 1 ? sums[1] : i == 2 ? sums[2] : 0.0f;
    cuda::store(args.mass + scalar * KVRT_SEGMENTS + i, sum > 0 ? part / sum : 0.0f);
  }
}

}  // namespace

Status combine_cuda(const CombineArgs& args, void* stream) {
  if (args.layer && args.head_dim > kMaxDeviceDim) {
    return Status(Code::kUnsupported, "combine on cuda has head_dim up to " + std::to_string(kMaxDeviceDim) + ", not " + std::to_string(args.head_dim));
  }
  return cuda::launch(&combine_kernel, args.n_rows * args.n_query_heads, kThreads, args, stream);
}

}  // namespace kvrt

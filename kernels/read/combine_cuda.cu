// Merges the partial results of the chunks of a row: one CTA a query head.

#include "kernels/cuda/memory.h"
#include "kernels/cuda/mma.h"
#include "kernels/read/decode_cuda.h"

namespace kvrt {
namespace {

constexpr int kThreads = 128;
constexpr float kNothing = -1e30f;
constexpr float kLn2 = 0.693147180559945309f, kLog2e = 1.44269504088896341f;

KVRT_KERNEL(kThreads, 8) combine_kernel(const CombineArgs args) {
  const int heads = args.n_query_heads, dim = args.head_dim;
  const std::int64_t item = cuda::block_index(), row = item / heads;
  const int head = static_cast<int>(item - row * heads);
  const std::int64_t begin = cuda::load(args.first_chunk + row), end = cuda::load(args.first_chunk + row + 1);
  const bool has_logit = args.sink_logit != nullptr;
  const float logit = has_logit ? kLog2e * cuda::load(args.sink_logit + (row % args.n_kv_heads) * heads + head) : kNothing;

  float top = logit;
  for (std::int64_t c = begin; c < end; ++c) {
    if (cuda::load(args.partials.l + c * heads + head) > 0) top = fmaxf(top, cuda::load(args.partials.m + c * heads + head));
  }
  float sum = has_logit ? cuda::exp2_approx(logit - top) : 0.0f;
  for (std::int64_t c = begin; c < end; ++c) {
    const float l = cuda::load(args.partials.l + c * heads + head);
    if (l > 0) sum += l * cuda::exp2_approx(cuda::load(args.partials.m + c * heads + head) - top);
  }
  for (int d = cuda::thread_index(); d < dim; d += kThreads) {
    float o = 0;
    for (std::int64_t c = begin; c < end; ++c) {
      const std::int64_t partial = c * heads + head;
      // Chunks without a token are skipped, whatever their output holds.
      if (cuda::load(args.partials.l + partial) > 0) {
        o += cuda::load(args.partials.o + partial * dim + d) * cuda::exp2_approx(cuda::load(args.partials.m + partial) - top);
      }
    }
    cuda::store(args.out + item * dim + d, sum > 0 ? o / sum : 0.0f);
  }
  if (cuda::thread_index() == 0 && args.log_sum_exp != nullptr) {
    cuda::store(args.log_sum_exp + item, sum > 0 ? kLn2 * (top + log2f(sum)) : -INFINITY);
  }
}

}  // namespace

Status combine_cuda(const CombineArgs& args, void* stream) {
  return cuda::launch(&combine_kernel, args.n_rows * args.n_query_heads, kThreads, args, stream);
}

}  // namespace kvrt

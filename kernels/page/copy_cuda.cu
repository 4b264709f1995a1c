// One CTA a page and side, 16 bytes a thread at a time where the pool is aligned so.

#include "kernels/page/copy_cuda.h"

#include "kernels/cuda/memory.h"

namespace kvrt {
namespace {

constexpr int kThreads = 128;

template <int N>
KVRT_DEVICE void copy_words(std::uint8_t* to, const std::uint8_t* from, std::int64_t n) {
  for (std::int64_t at = static_cast<std::int64_t>(cuda::thread_index()) * 4 * N; at < n; at += kThreads * 4 * N) {
    std::uint32_t w[N];
    cuda::load_stream<N>(from + at, w);
    cuda::store_words<N>(to + at, w);
  }
}

KVRT_KERNEL(kThreads, 4) copy_kernel(const KVRT_GRID_CONSTANT CopyArgs args) {
  const int i = cuda::block_index() / KVRT_SIDES, side = cuda::block_index() % KVRT_SIDES;
  if (args.from[i] == args.to[i]) return;
  const std::int64_t stride = args.strides[side], n = args.bytes[side];
  std::uint8_t* const to = args.pools[side] + args.to[i] * stride;
  const std::uint8_t* const from = args.pools[side] + args.from[i] * stride;
  if ((reinterpret_cast<std::uintptr_t>(args.pools[side]) | static_cast<std::uintptr_t>(stride)) % 16 == 0) copy_words<4>(to, from, n);
  else for (std::int64_t at = cuda::thread_index(); at < n; at += kThreads) to[at] = from[at];
}

}  // namespace

Status copy_cuda(const CopyArgs& args, void* stream) { return cuda::launch(&copy_kernel, static_cast<std::int64_t>(args.n) * KVRT_SIDES, kThreads, args, stream); }

}  // namespace kvrt

#include "kernels/read/stream_cuda.h"

#include "kernels/cuda/memory.h"

namespace kvrt {
namespace {

constexpr int kThreads = 256, kVectorBytes = 16;

KVRT_KERNEL(kThreads, 4) stream_kernel(const StreamArgs args) {
  const std::int64_t thread = static_cast<std::int64_t>(cuda::block_index()) * kThreads + cuda::thread_index();
  const std::int64_t step = args.n_blocks * kThreads * kVectorBytes;
  std::uint32_t sum = 0;
  KVRT_UNROLL_BY(4)
  for (std::int64_t at = thread * kVectorBytes; at < args.bytes; at += step) {
    std::uint32_t w[4];
    cuda::load_stream<4>(args.data + at, w);
    sum ^= w[0] ^ w[1] ^ w[2] ^ w[3];
  }
  cuda::store(args.sums + thread, sum);
}

}  // namespace

Status stream_cuda(const StreamArgs& args, void* stream) { return cuda::launch(&stream_kernel, args.n_blocks, kThreads, args, stream); }

}  // namespace kvrt

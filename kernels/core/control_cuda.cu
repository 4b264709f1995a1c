#include "kernels/core/control.h"
#include "kernels/cuda/memory.h"

namespace kvrt {
namespace {

constexpr int kThreads = 256;

template <int Room>
KVRT_KERNEL(kThreads, 1) upload_kernel(const KVRT_GRID_CONSTANT UploadArgs<Room> args) {
  for (std::int64_t i = cuda::thread_index(); i < args.bytes; i += kThreads) cuda::store(args.to + i, args.data[i]);
}

}  // namespace

Status upload_small_cuda(const UploadArgs<kSmallUpload>& args, void* stream) { return cuda::launch(&upload_kernel<kSmallUpload>, 1, kThreads, args, stream); }
Status upload_large_cuda(const UploadArgs<kLargeUpload>& args, void* stream) { return cuda::launch(&upload_kernel<kLargeUpload>, 1, kThreads, args, stream); }

}  // namespace kvrt

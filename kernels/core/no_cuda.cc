// The CUDA operations of a build without CUDA: refused by name.

#include "kernels/core/control.h"
#include "kernels/core/device.h"
#include "kernels/page/copy_cuda.h"
#include "kernels/read/decode_cuda.h"
#include "kernels/read/gather_cuda.h"
#include "kernels/read/prepare_cuda.h"
#include "kernels/read/stream_cuda.h"
#include "kernels/write/append_cuda.h"
#include "kernels/write/fake_quant_cuda.h"

namespace kvrt {
namespace {
Status refuse(const char* operation) {
  return Status(Code::kUnsupported, std::string(operation) + " on cuda: this build of kvrt has no CUDA kernels (KVRT_WITH_CUDA=OFF)");
}
}  // namespace

bool has_cuda() { return false; }
Status open_device(int, DeviceProperties*) { return refuse("a context"); }
Status allocate_device(int, std::int64_t, void**) { return refuse("memory"); }
void release_device(int, void*) {}
Status copy_to_device(int, void*, const void*, std::int64_t) { return refuse("memory"); }
Status copy_to_host(void*, const void*, std::int64_t, void*) { return refuse("memory"); }

Status upload_small_cuda(const UploadArgs<kSmallUpload>&, void*) { return refuse("memory"); }
Status upload_large_cuda(const UploadArgs<kLargeUpload>&, void*) { return refuse("memory"); }
Status append_cuda(const AppendArgs&, const AppendWork&, void*) { return refuse("append"); }
Status flush_cuda(const AppendArgs&, void*) { return refuse("flush"); }
Status fake_quant_cuda(const DeviceFakeQuantArgs&, void*) { return refuse("fake_quant"); }
Status prepare_cuda(const PrepareArgs&, void*) { return refuse("rotate_q"); }
Status decode_cuda(const DecodeArgs&, const DecodeUnit&, DecodePath, void*) { return refuse("decode"); }
Status combine_cuda(const CombineArgs&, void*) { return refuse("combine"); }
Status gather_cuda(const GatherArgs&, void*) { return refuse("gather"); }
Status copy_cuda(const CopyArgs&, void*) { return refuse("copy"); }
Status stream_cuda(const StreamArgs&, void*) { return refuse("stream"); }

}  // namespace kvrt

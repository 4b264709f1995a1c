// The CUDA operations of a build without CUDA: refused by name.

#include "kernels/read/decode_cuda.h"
#include "kernels/read/stream_cuda.h"

namespace kvrt {
namespace {
Status refuse(const char* operation) {
  return Status(Code::kUnsupported, std::string(operation) + " on cuda: this build of kvrt has no CUDA kernels (KVRT_WITH_CUDA=OFF)");
}
}  // namespace

Status decode_cuda(const DecodeArgs&, const DecodeUnit&, DecodePath, void*) { return refuse("decode"); }
Status combine_cuda(const CombineArgs&, void*) { return refuse("combine"); }
Status stream_cuda(const StreamArgs&, void*) { return refuse("stream"); }

}  // namespace kvrt

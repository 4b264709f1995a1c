#pragma once
// How the CUDA backend decodes a layer.

#include <string>

#include "kernels/kvrt.h"
#include "kernels/read/decode_cuda.h"

namespace kvrt {

struct CudaPath {
  kvrt_path path = KVRT_PATH_MISSING;
  DecodeFamily k = DecodeFamily::kB16, v = DecodeFamily::kB16;
  std::string reason;  ///< of a missing path
  kvrt_side side = KVRT_K;  ///< that the reason is about
};

/// codecs: of base pages. group: query heads a KV head.
CudaPath cuda_path(const PageCodec& k, const PageCodec& v, bool pre, int group);

}  // namespace kvrt

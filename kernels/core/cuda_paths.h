#pragma once
// How the CUDA backend decodes a layer.

#include <string>

#include "kernels/core/plan.h"
#include "kernels/read/decode_cuda.h"

namespace kvrt {

struct CudaPath {
  kvrt_path path = KVRT_PATH_MISSING;
  DecodeUnit unit = {};
  DecodePath decode = DecodePath::kFused;
  std::string reason;  ///< of a missing path
  kvrt_side side = KVRT_K;  ///< that the reason is about
};

/// codecs: of base pages. rope: of keys before RoPE, else null.
CudaPath cuda_path(const PageCodec& k, const PageCodec& v, const RopeTables* rope);
/// The same before a context exists.
CudaPath cuda_path(const LayerPlan& layer);

}  // namespace kvrt

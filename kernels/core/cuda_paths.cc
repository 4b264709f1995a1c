#include "kernels/core/cuda_paths.h"

namespace kvrt {

CudaPath cuda_path(const PageCodec& k, const PageCodec& v, bool pre, int group) {
  CudaPath out;
  const auto missing = [&](kvrt_side side, std::string reason) {
    out.side = side, out.reason = std::move(reason);
    return out;
  };
  if (pre) return missing(KVRT_K, "decode on cuda has no kernel for keys before RoPE");
  std::string reason;
  if (!decode_family(k, &out.k, &reason)) return missing(KVRT_K, reason);
  if (!decode_family(v, &out.v, &reason)) return missing(KVRT_V, reason);
  using F = DecodeFamily;
  const bool has_pair = (out.k == out.v) || (out.k == F::kI8 && out.v == F::kI4);
  if (!has_pair) return missing(KVRT_V, "decode on cuda has no kernel for this pair of formats");
  if (k.head_dim != 64 && k.head_dim != 128) return missing(KVRT_K, "decode on cuda has head_dim 64 and 128, not " + std::to_string(k.head_dim));
  if (group > 16) return missing(KVRT_K, "decode on cuda has up to 16 query heads a KV head, not " + std::to_string(group));
  out.path = KVRT_PATH_FUSED;
  return out;
}

}  // namespace kvrt

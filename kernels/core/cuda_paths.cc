#include "kernels/core/cuda_paths.h"

namespace kvrt {

CudaPath cuda_path(const PageCodec& k, const PageCodec& v, const RopeTables* rope) {
  CudaPath out;
  const auto missing = [&](kvrt_side side, std::string reason) {
    out.side = side, out.reason = std::move(reason);
    return out;
  };
  std::string reason;
  if (!decode_family(k, &out.unit.k, &reason)) return missing(KVRT_K, reason);
  if (!decode_family(v, &out.unit.v, &reason)) return missing(KVRT_V, reason);
  if (rope && !key_pairs(k, *rope, &out.unit.pairs, &reason)) return missing(KVRT_K, reason);
  out.unit.head_dim = k.head_dim;
  out.unit.k_general = has_any_groups(k, true), out.unit.v_general = has_any_groups(v, false);
  if (!choose_decode_path(out.unit, &out.decode, &reason)) return missing(KVRT_K, reason);
  out.path = out.decode == DecodePath::kFused ? KVRT_PATH_FUSED : KVRT_PATH_TWO_PASS;
  return out;
}

CudaPath cuda_path(const LayerPlan& layer) {
  PageCodec codecs[KVRT_SIDES];
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    const Scheme& scheme = layer.units[side].scheme;
    codecs[side] = make_page_codec(scheme, code_bits(scheme.format), layer.layout.head_dim, layer.layout.page_tokens);
    codecs[side].spread = layer.units[side].spread;
  }
  RopeTables rope;
  rope.n_pairs = layer.rotary_dim / 2, rope.interleaved = layer.rope_style == KVRT_ROPE_INTERLEAVED;
  return cuda_path(codecs[KVRT_K], codecs[KVRT_V], layer.units[KVRT_K].scheme.pre ? &rope : nullptr);
}

}  // namespace kvrt

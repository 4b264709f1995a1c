#pragma once
// Device code of the decode kernels: launches with keys before RoPE.

#include "kernels/read/decode_keys_pre_exact.h"
#include "kernels/read/decode_two_pass.h"

namespace kvrt {

/// Positions between the channels of a pair in a lane's quarter of a row.
constexpr int pair_distance(KeyPairs pairs, int head_dim) {
  return pairs == KeyPairs::kAdjacent ? 1 : head_dim / (pairs == KeyPairs::kSplit ? 8 : pairs == KeyPairs::kHalf ? 16 : 32);
}
template <DecodeFamily K, int D, KeyPairs Pairs>
using PreKeysOf = PreKeys<typename detail::FamilyTypes<K, D, false>::KeyCodes, D, pair_distance(Pairs, D)>;

template <DecodeFamily K, DecodeFamily V, int D, int N>
Status launch_fused_pre(const DecodeArgs& args, void* stream) {
  return cuda::launch(&decode_kernel<PreKeysOf<K, D, KeyPairs::kSplit>, ValuesOf<V, D, false>, PreExactKeys<D>, D, N>, decode_blocks(args, N),
                      kDecodeThreads, args, stream, pre_shared_bytes(D, N, args.rope_offsets));
}
template <DecodeFamily K, int D, KeyPairs Pairs>
Status launch_score_pre(const DecodeArgs& args, void* stream) {
  return cuda::launch(&score_kernel<PreKeysOf<K, D, Pairs>, PreExactKeys<D>, D>, decode_blocks(args, 1), kDecodeThreads, args, stream,
                      pre_shared_bytes(D, 1, args.rope_offsets));
}

}  // namespace kvrt

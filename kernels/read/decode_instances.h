#pragma once
// The kernels of instances.txt as host functions, one explicit instantiation a line, each in a translation unit of its own.

#include "kernels/read/decode_cuda.h"

// Lines of instances.txt that a build compiles: KVRT_IF_<head_dim>_<head tiles>, and KVRT_IF_<head_dim>_P<padded> for two_pass. The sets
// are those of instances.cmake: few (fused, head_dim 64), default (none of the macros), all.
#define KVRT_IF_64_1(...) __VA_ARGS__
#if defined(KVRT_CUDA_FEW_INSTANCES)
#define KVRT_IF_128_1(...)
#define KVRT_IF_64_P0(...)
#define KVRT_IF_128_P0(...)
#else
#define KVRT_IF_128_1(...) __VA_ARGS__
#define KVRT_IF_64_P0(...) __VA_ARGS__
#define KVRT_IF_128_P0(...) __VA_ARGS__
#endif
#if defined(KVRT_CUDA_ALL_INSTANCES)
#define KVRT_IF_256_1(...) __VA_ARGS__
#define KVRT_IF_64_2(...) __VA_ARGS__
#define KVRT_IF_128_2(...) __VA_ARGS__
#define KVRT_IF_256_P0(...) __VA_ARGS__
#define KVRT_IF_128_P1(...) __VA_ARGS__
#define KVRT_IF_256_P1(...) __VA_ARGS__
#else
#define KVRT_IF_256_1(...)
#define KVRT_IF_64_2(...)
#define KVRT_IF_128_2(...)
#define KVRT_IF_256_P0(...)
#define KVRT_IF_128_P1(...)
#define KVRT_IF_256_P1(...)
#endif
#define KVRT_IF_64_kHalf(...) KVRT_IF_64_2(__VA_ARGS__)
#define KVRT_IF_64_kQuarter(...) KVRT_IF_64_2(__VA_ARGS__)
#define KVRT_IF_128_kHalf(...) KVRT_IF_128_2(__VA_ARGS__)
#define KVRT_IF_128_kQuarter(...) KVRT_IF_128_2(__VA_ARGS__)
#define KVRT_IF_64_kSplit(...) KVRT_IF_64_P0(__VA_ARGS__)
#define KVRT_IF_64_kAdjacent(...) KVRT_IF_64_P0(__VA_ARGS__)
#define KVRT_IF_128_kSplit(...) KVRT_IF_128_P0(__VA_ARGS__)
#define KVRT_IF_128_kAdjacent(...) KVRT_IF_128_P0(__VA_ARGS__)
#define KVRT_IF_256_kSplit(...) KVRT_IF_256_P0(__VA_ARGS__)
#define KVRT_IF_256_kAdjacent(...) KVRT_IF_256_P0(__VA_ARGS__)

namespace kvrt {

/// D: width of the products. N: tiles of 8 heads.
template <DecodeFamily K, DecodeFamily V, int D, int N>
Status launch_fused(const DecodeArgs& args, void* stream);
/// First pass: fp32 scores of a key family. D also for every head_dim below it (padded).
template <DecodeFamily K, int D, bool kIsPadded>
Status launch_score(const DecodeArgs& args, void* stream);
/// Keys before RoPE: fused with kSplit, and first passes.
template <DecodeFamily K, DecodeFamily V, int D, int N>
Status launch_fused_pre(const DecodeArgs& args, void* stream);
template <DecodeFamily K, int D, KeyPairs Pairs>
Status launch_score_pre(const DecodeArgs& args, void* stream);
/// Second pass: softmax and outputs of a value family.
template <DecodeFamily V, int D, bool kIsPadded>
Status launch_pv(const DecodeArgs& args, void* stream);

}  // namespace kvrt

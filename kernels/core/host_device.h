#pragma once
// Marks functions that compile for the host and for CUDA devices.

#if defined(__CUDACC__)
#define KVRT_HOST_DEVICE __host__ __device__
/// Keeps a loop with a large body one loop in device code.
#define KVRT_ROLLED _Pragma("unroll 1")
/// Keeps a large function one copy in device code. Its callers have a stack.
#define KVRT_ONE_COPY __noinline__
#else
#define KVRT_HOST_DEVICE
#define KVRT_ROLLED
#define KVRT_ONE_COPY
#endif

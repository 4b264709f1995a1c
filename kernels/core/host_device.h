#pragma once
// Marks functions that compile for the host and for CUDA devices.

#if defined(__CUDACC__)
#define KVRT_HOST_DEVICE __host__ __device__
/// Keeps a loop with a large body one loop in device code.
#define KVRT_ROLLED _Pragma("unroll 1")
#else
#define KVRT_HOST_DEVICE
#define KVRT_ROLLED
#endif

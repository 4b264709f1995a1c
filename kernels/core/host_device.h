#pragma once
// Marks functions that compile for the host and for CUDA devices.

#if defined(__CUDACC__)
#define KVRT_HOST_DEVICE __host__ __device__
#else
#define KVRT_HOST_DEVICE
#endif

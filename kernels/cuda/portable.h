#pragma once
// The language of the kernels: one source that nvcc compiles for a GPU and g++ compiles for the executor of tests/kernels/simt,
// which runs every CUDA thread on the CPU. Kernels use these names only: no intrinsic, PTX or <<<>>> stands outside kernels/cuda/.
// Grids and blocks have one dimension; blocks are whole warps.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels/core/host_device.h"
#include "kernels/core/status.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define KVRT_DEVICE __device__ __forceinline__
/// min_blocks: CTAs that must fit an SM, hence the register cap 65536 / (threads * min_blocks).
#define KVRT_KERNEL(threads, min_blocks) __global__ void __launch_bounds__(threads, min_blocks)
/// A kernel argument that is indexed: read where it was put, not copied.
#define KVRT_GRID_CONSTANT __grid_constant__
#define KVRT_UNROLL _Pragma("unroll")
#define KVRT_PRAGMA(text) _Pragma(#text)
#define KVRT_UNROLL_BY(n) KVRT_PRAGMA(unroll n)
/// Declares `name`, the only shared object of a kernel.
#define KVRT_SHARED(type, name) __shared__ type name
#else
#include <functional>
#define KVRT_DEVICE inline
#define KVRT_KERNEL(threads, min_blocks) void
#define KVRT_GRID_CONSTANT
#define KVRT_UNROLL
#define KVRT_UNROLL_BY(n)
#define KVRT_SHARED(type, name) type& name = *static_cast<type*>(::kvrt::cuda::executor::shared(sizeof(type)))
#endif

namespace kvrt::cuda {

inline constexpr int kWarp = 32;

#if !defined(__CUDACC__)
/// What the executor provides to the thread that runs. Defined in tests/kernels/simt/executor.cc.
namespace executor {
inline constexpr int kMaxWords = 8;
int thread();
int block();
void* shared(std::size_t bytes);                ///< the block's shared memory, 0xCD at its start
void* dynamic_shared();                         ///< what the launch asked for besides, 0xCD at its start
void block_barrier();
/// Every lane of the warp gives n words; returns the warp's words [32][kMaxWords], valid until the lane's next call but one.
/// All lanes must meet in the same operation.
const std::uint32_t* exchange(const char* operation, const std::uint32_t* words, int n);
void mma_f16(float c[4], const std::uint32_t a[4], const std::uint32_t b[2]);
void mma_bf16(float c[4], const std::uint32_t a[4], const std::uint32_t b[2]);
void access(const void* address, int bytes, bool is_store);  ///< checks alignment, counts bytes
Status run(std::int64_t n_blocks, int n_threads, std::size_t shared_bytes, const std::function<void()>& kernel);
/// The device that contexts find, and its memory: host memory, 0xFF at its start.
bool has_code_for_device();
void* allocate(std::size_t bytes);
void release(void* memory);
}  // namespace executor
#endif

KVRT_DEVICE int thread_index() {
#if defined(__CUDACC__)
  return static_cast<int>(threadIdx.x);
#else
  return executor::thread();
#endif
}
KVRT_DEVICE int block_index() {
#if defined(__CUDACC__)
  return static_cast<int>(blockIdx.x);
#else
  return executor::block();
#endif
}
KVRT_DEVICE void block_barrier() {
#if defined(__CUDACC__)
  __syncthreads();
#else
  executor::block_barrier();
#endif
}

/// The shared memory that launch() was asked for, aligned to 16 bytes.
KVRT_DEVICE void* dynamic_shared() {
#if defined(__CUDACC__)
  extern __shared__ uint4 kvrt_dynamic_shared[];
  return kvrt_dynamic_shared;
#else
  return executor::dynamic_shared();
#endif
}

/// PRMT: byte i of the result is byte (selector >> 4i) & 7 of b:a; with bit 3 of the nibble set, its sign bit eight times.
KVRT_HOST_DEVICE inline std::uint32_t byte_permute(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
#if defined(__CUDA_ARCH__)
  std::uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
#else
  const std::uint64_t bytes = static_cast<std::uint64_t>(b) << 32 | a;
  std::uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t nibble = selector >> (4 * i);
    std::uint32_t byte = static_cast<std::uint32_t>(bytes >> (8 * (nibble & 7u))) & 0xFFu;
    if (nibble & 8u) byte = byte & 0x80u ? 0xFFu : 0u;
    r |= byte << (8 * i);
  }
  return r;
#endif
}

/// Starts kernel(args) on n_blocks of n_threads in the stream, with shared_bytes of dynamic shared memory; returns without waiting.
template <class Args>
Status launch(void (*kernel)(Args), std::int64_t n_blocks, int n_threads, const Args& args, void* stream, std::size_t shared_bytes = 0) {
  if (n_blocks > 0x7FFFFFFF) return Status(Code::kCapacity, "more blocks than one launch takes: " + std::to_string(n_blocks));
  if (n_blocks <= 0) return Status();
#if defined(__CUDACC__)
  cudaError_t error = cudaSuccess;
  // Static and dynamic parts together need leave beyond 48 KB.
  if (shared_bytes > 0) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error == cudaSuccess) {
    kernel<<<static_cast<unsigned>(n_blocks), static_cast<unsigned>(n_threads), shared_bytes, static_cast<cudaStream_t>(stream)>>>(args);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) return Status();
  return Status(Code::kCuda, std::string("kernel launch: ") + cudaGetErrorString(error) + " (" + std::to_string(static_cast<int>(error)) + ")");
#else
  static_cast<void>(stream);
  return executor::run(n_blocks, n_threads, shared_bytes, [&] { kernel(args); });
#endif
}

}  // namespace kvrt::cuda

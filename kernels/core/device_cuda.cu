// The CUDA runtime behind core/device.h; on the executor of tests/kernels/simt device memory is host memory.

#include "kernels/core/device.h"

#include "kernels/cuda/portable.h"

namespace kvrt {
namespace {

Status no_code(int index, const std::string& name) {
#if defined(KVRT_CUDA_TARGETS)
  const char* const targets = KVRT_CUDA_TARGETS;
#else
  const char* const targets = "other devices";
#endif
  return Status(Code::kMismatch, "device " + std::to_string(index) + " is " + name + "; this build of kvrt has code for " + targets);
}

#if defined(__CUDACC__)
Status cuda_status(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());  // an error that is not sticky in the driver is taken here
  return Status(Code::kCuda, std::string(call) + ": " + cudaGetErrorString(error) + " (" + std::to_string(static_cast<int>(error)) + ")");
}

/// The device of the calling thread, put back at the end.
class OnDevice {
 public:
  explicit OnDevice(int index) {
    static_cast<void>(cudaGetDevice(&before_));
    status_ = cuda_status(cudaSetDevice(index), "cudaSetDevice");
  }
  ~OnDevice() { static_cast<void>(cudaSetDevice(before_)); }
  const Status& status() const { return status_; }

 private:
  int before_ = 0;
  Status status_;
};

KVRT_KERNEL(32, 1) probe_kernel(const int) {}
#endif

}  // namespace

bool has_cuda() { return true; }

#if defined(__CUDACC__)

Status open_device(int index, DeviceProperties* out) {
  int n = 0;
  if (Status status = cuda_status(cudaGetDeviceCount(&n), "cudaGetDeviceCount"); !status.ok()) return status;
  if (index < 0 || index >= n) return Status(Code::kArgument, "device index " + std::to_string(index) + ", this machine has " + std::to_string(n) + " GPUs");
  cudaDeviceProp p;
  if (Status status = cuda_status(cudaGetDeviceProperties(&p, index), "cudaGetDeviceProperties"); !status.ok()) return status;
  const OnDevice on(index);
  if (!on.status().ok()) return on.status();
  out->name = std::string(p.name) + " (" + std::to_string(p.major) + "." + std::to_string(p.minor) + ")";
  out->n_processors = p.multiProcessorCount;
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction || error == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();
    return no_code(index, out->name);
  }
  return cuda_status(error, "cudaFuncGetAttributes");
}

Status allocate_device(int index, std::int64_t n, void** out) {
  const OnDevice on(index);
  if (!on.status().ok()) return on.status();
  return cuda_status(cudaMalloc(out, static_cast<std::size_t>(n)), "cudaMalloc");
}

void release_device(int index, void* memory) {
  const OnDevice on(index);
  cudaFree(memory);
}

Status copy_to_device(int index, void* to, const void* from, std::int64_t n) {
  const OnDevice on(index);
  if (!on.status().ok()) return on.status();
  return cuda_status(cudaMemcpy(to, from, static_cast<std::size_t>(n), cudaMemcpyHostToDevice), "cudaMemcpy");
}

Status copy_to_host(void* to, const void* from, std::int64_t n, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (Status status = cuda_status(cudaMemcpyAsync(to, from, static_cast<std::size_t>(n), cudaMemcpyDeviceToHost, s), "cudaMemcpyAsync"); !status.ok()) return status;
  return cuda_status(cudaStreamSynchronize(s), "cudaStreamSynchronize");
}

#else

Status open_device(int index, DeviceProperties* out) {
  if (index != 0) return Status(Code::kArgument, "device index " + std::to_string(index) + ", this machine has 1 GPUs");
  out->name = "executor (0.0)", out->n_processors = 4;
  return cuda::executor::has_code_for_device() ? Status() : no_code(index, out->name);
}

Status allocate_device(int, std::int64_t n, void** out) {
  *out = cuda::executor::allocate(static_cast<std::size_t>(n));
  return *out ? Status() : Status(Code::kCuda, "cudaMalloc: out of memory (2)");
}

void release_device(int, void* memory) { cuda::executor::release(memory); }

Status copy_to_device(int, void* to, const void* from, std::int64_t n) {
  std::memcpy(to, from, static_cast<std::size_t>(n));
  return {};
}

Status copy_to_host(void* to, const void* from, std::int64_t n, void*) {
  std::memcpy(to, from, static_cast<std::size_t>(n));
  return {};
}

#endif

}  // namespace kvrt

#pragma once
// Memory and streams of a CUDA device, for contexts: everything here but copies between calls happens when a context is created or where
// the interface says that it waits. Builds without CUDA refuse by name.

#include <cstdint>
#include <string>

#include "kernels/core/status.h"

namespace kvrt {

/// What scheduling needs of a device.
struct DeviceProperties {
  std::string name;         ///< "NVIDIA H200 (9.0)"
  int n_processors = 0;     ///< SMs
};

/// True in builds with the CUDA kernels.
bool has_cuda();

/// Finds device `index` and checks that this build has code for it. Codes: kUnsupported (a build without CUDA), kCuda (driver),
/// kArgument (no such device), kMismatch (names the device and the built targets).
Status open_device(int index, DeviceProperties* out);

/// Device memory of `index`, n > 0 bytes. Codes: kCuda.
Status allocate_device(int index, std::int64_t n, void** out);
void release_device(int index, void* memory);
/// Copies that have ended when the call returns.
Status copy_to_device(int index, void* to, const void* from, std::int64_t n);
/// After everything before it in the stream.
Status copy_to_host(void* to, const void* from, std::int64_t n, void* stream);

}  // namespace kvrt

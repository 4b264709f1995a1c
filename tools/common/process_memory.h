#pragma once
// The memory of this process as the operating system counts it.

#include <cstdint>

namespace calib::tools {

/// Highest resident memory so far, bytes; 0 where the system does not say.
std::int64_t peak_memory_bytes();
/// Resident now, bytes.
std::int64_t resident_memory_bytes();

/// Lets freed activations be used again without a trip to the kernel: by default every large tensor is mapped and unmapped
/// anew, and its pages are cleared each time. Call once, before the first tensor.
void keep_freed_memory();

}  // namespace calib::tools

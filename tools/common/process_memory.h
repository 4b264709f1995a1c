#pragma once
// The memory of this process as the operating system counts it.

#include <cstdint>

namespace calib::tools {

/// Highest resident memory so far, bytes; 0 where the system does not say.
std::int64_t peak_memory_bytes();
/// Resident now, bytes.
std::int64_t resident_memory_bytes();

}  // namespace calib::tools

#pragma once
// The memory of this process as the operating system counts it.

#include <cstdint>

namespace calib::tools {

/// Highest resident memory so far, bytes; 0 where the system does not say.
std::int64_t peak_memory_bytes();
/// Resident now, bytes.
std::int64_t resident_memory_bytes();

/// Keeps every block of 1 MiB and more a mapping of its own that goes back to the system when freed. glibc raises that size
/// as it sees large blocks freed; tensors then share a heap with small blocks that live on, and peak memory creeps up with
/// every layer. Call once, before the first tensor.
void map_large_blocks();

}  // namespace calib::tools

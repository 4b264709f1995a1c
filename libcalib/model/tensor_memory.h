#pragma once
// Memory of large CPU tensors, kept between uses.

#include <cstdint>

namespace calib::model {

/// From now on freed CPU tensors of 1 MiB and more are kept for the next tensor of their size instead of going back to the
/// system, which would clear every page anew for each activation. What is kept never adds to the peak: live and kept blocks
/// together stay within the most that live ones alone have needed. Process-wide; later calls do nothing. Thread-safe.
void reuse_tensor_memory();

/// Bytes of live and of kept blocks; 0 before reuse_tensor_memory().
struct TensorMemory {
  std::int64_t live = 0, kept = 0, peak_live = 0;
};
TensorMemory tensor_memory();

}  // namespace calib::model

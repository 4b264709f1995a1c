#pragma once
// Memory of large CPU tensors, kept between uses.

#include <cstdint>

namespace calib::model {

/// From now on CPU tensors of 1 MiB and more live in one range of addresses whose freed pages serve the next tensor instead of
/// going back to the system, which would clear every page anew for each activation. The pages ever touched stay close to the
/// most that live tensors alone have needed. Process-wide; later calls do nothing. Thread-safe.
void reuse_tensor_memory();

/// Bytes of live tensors, their peak, and of the pages touched so far; 0 before reuse_tensor_memory().
struct TensorMemory {
  std::int64_t live = 0, peak_live = 0, touched = 0;
};
TensorMemory tensor_memory();

}  // namespace calib::model

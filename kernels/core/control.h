#pragma once
// The control arrays of a call (sequences, page ids) on their way to the device: they travel as kernel arguments, so that a call copies
// them before it returns, keeps no staging memory, never waits, and can be captured in a graph (with the values it had).

#include <cstdint>

#include "kernels/core/status.h"

namespace kvrt {

/// Bytes that one launch carries: arguments end at 32764 bytes, and small calls shall not pay for large ones.
inline constexpr int kSmallUpload = 3968, kLargeUpload = 32640;

template <int Room>
struct UploadArgs {
  std::uint8_t* to;
  std::int64_t bytes;
  std::uint8_t data[Room];
};
Status upload_small_cuda(const UploadArgs<kSmallUpload>& args, void* stream);
Status upload_large_cuda(const UploadArgs<kLargeUpload>& args, void* stream);

/// Writes bytes one behind the other to device memory.
class ControlWriter {
 public:
  ControlWriter(void* to, void* stream) : stream_(stream) { args_.to = static_cast<std::uint8_t*>(to), args_.bytes = 0; }
  Status put(const void* data, std::int64_t bytes);
  /// Sends what is left.
  Status finish();

 private:
  void* stream_;
  UploadArgs<kLargeUpload> args_;
};

}  // namespace kvrt

#include "kernels/core/control.h"

#include <algorithm>
#include <cstring>

namespace kvrt {

Status ControlWriter::put(const void* data, std::int64_t bytes) {
  const auto* from = static_cast<const std::uint8_t*>(data);
  while (bytes > 0) {
    const std::int64_t n = std::min<std::int64_t>(bytes, kLargeUpload - args_.bytes);
    std::memcpy(args_.data + args_.bytes, from, static_cast<std::size_t>(n));
    args_.bytes += n, from += n, bytes -= n;
    if (args_.bytes < kLargeUpload) continue;
    if (Status status = finish(); !status.ok()) return status;
  }
  return {};
}

Status ControlWriter::finish() {
  if (args_.bytes == 0) return {};
  Status status;
  if (args_.bytes <= kSmallUpload) {
    UploadArgs<kSmallUpload> small;
    small.to = args_.to, small.bytes = args_.bytes;
    std::memcpy(small.data, args_.data, static_cast<std::size_t>(args_.bytes));
    status = upload_small_cuda(small, stream_);
  } else {
    status = upload_large_cuda(args_, stream_);
  }
  args_.to += args_.bytes, args_.bytes = 0;
  return status;
}

}  // namespace kvrt

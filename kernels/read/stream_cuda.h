#pragma once
// Plain read of a buffer on CUDA: the bandwidth yardstick of the read operations.

#include <cstdint>

#include "kernels/core/status.h"

namespace kvrt {

struct StreamArgs {
  const std::uint8_t* data;  ///< aligned to 16 bytes
  std::int64_t bytes;        ///< multiple of 16
  std::int64_t n_blocks;
  std::uint32_t* sums;       ///< [n_blocks * 256], xor of what each thread read: keeps the loads
};
Status stream_cuda(const StreamArgs& args, void* stream);

}  // namespace kvrt

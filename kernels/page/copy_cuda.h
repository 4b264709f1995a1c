#pragma once
// Whole pages to other places of their pool, on CUDA.

#include <cstdint>

#include "kernels/core/status.h"
#include "kernels/kvrt.h"

namespace kvrt {

inline constexpr int kCopiesALaunch = 448;  ///< their ids travel as kernel arguments

struct CopyArgs {
  std::uint8_t* pools[KVRT_SIDES];
  std::int64_t strides[KVRT_SIDES], bytes[KVRT_SIDES];  ///< bytes: of one page, a multiple of 16
  std::int32_t n;
  std::int32_t from[kCopiesALaunch], to[kCopiesALaunch];
};
/// Copies go on at the same time: no page is both read and written.
Status copy_cuda(const CopyArgs& args, void* stream);

}  // namespace kvrt

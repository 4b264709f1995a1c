#pragma once
// decode(encode(x)) on CUDA, without a page: one row's codes and the parameters of its group at a time, in shared memory.

#include <cstdint>

#include "kernels/core/device_layer.h"
#include "kernels/core/status.h"

namespace kvrt {

struct DeviceFakeQuantArgs {
  const DeviceLayer* layer;
  int side, n_heads;
  int step;                  ///< DeviceUnit::step(); divides n_tokens
  bool has_outliers;         ///< out<p>
  std::int64_t n_tokens;
  const float* x;            ///< [n_tokens, H, D]
  float* out;                ///< the same; may be x
  std::uint8_t* pages;       ///< out<p> of channel groups: [n_pages, page_bytes], one head block each; else null
  std::int64_t n_pages, page_bytes;
};
Status fake_quant_cuda(const DeviceFakeQuantArgs& args, void* stream);

}  // namespace kvrt

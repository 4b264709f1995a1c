#pragma once
// page_verify on the CUDA backend: rows come to the host piece by piece, in order.

#include "kernels/core/device_call.h"
#include "kernels/read/gather_cuda.h"

namespace kvrt {

inline constexpr int kVerifyBytes = 32 * 1024;  ///< of decoded values that come at once, on the caller's stack

std::int64_t verify_device_bytes(const LayerContext& layer, const kvrt_limits& limits);

/// Decoded rows of one side of a sequence, [n, D], and their faults (RowFault), as verify visits them: row = token * H + head.
class DeviceRows {
 public:
  /// first_position: of the sequence; checks_positions: of keys whose pages have them.
  Status start(const Call& call, const kvrt_batch& batch, std::int32_t seq, std::int64_t first_position, const kvrt_pools& pools, void* stream);
  void select(kvrt_side side, bool checks_positions) { args_.side = side, args_.checks_positions = checks_positions, first_ = n_ = 0; }
  /// Waits for the stream when row is not among those that came last. Requires: rows in order, row < n_rows.
  Status fetch(std::int64_t row, std::int64_t n_rows, const float** values, std::uint8_t* faults);

 private:
  GatherArgs args_ = {};
  void* stream_ = nullptr;
  float* rows_ = nullptr;
  int width_ = 0;
  std::int64_t first_ = 0, n_ = 0, room_ = 0;
  float values_[kVerifyBytes / 4];
  std::uint8_t faults_[kVerifyBytes / 4];
};

}  // namespace kvrt

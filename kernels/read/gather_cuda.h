#pragma once
// Stored tokens of one sequence in order, on CUDA: the values of read_token(), and what verify asks of each.

#include <cstdint>

#include "kernels/core/device_layer.h"
#include "kernels/core/status.h"

namespace kvrt {

/// What one row's bytes look like. Bits of RowFaults.
enum RowFault : std::uint8_t { kBadScale = 1, kBadPosition = 2 };

struct GatherArgs {
  const DeviceLayer* layer;
  const DeviceSequence* sequence;
  PoolSide pools[KVRT_SIDES];
  int side, n_heads;
  std::int64_t first_row, n_rows;  ///< rows token * H + head
  std::int64_t first_token;        ///< token that row 0 of `out` holds
  bool rotates;                    ///< keys stored before RoPE, by first_position of the sequence
  kvrt_rows_out out;               ///< [tokens, H, D]
  std::uint8_t* faults;            ///< [n_rows] or null
  bool checks_positions;
};
Status gather_cuda(const GatherArgs& args, void* stream);

}  // namespace kvrt

#pragma once
// append on CUDA (KERNELS.md 5): exit blocks of channel groups (flush), single tokens that leave the window, and exact pages. The bytes
// are those of append_reference(). Pointers are device memory. No allocation, no synchronisation.

#include <cstdint>

#include "kernels/core/device_layer.h"
#include "kernels/core/status.h"

namespace kvrt {

struct AppendArgs {
  const DeviceLayer* layer;
  const DeviceSequence* sequences;
  std::int64_t n_seqs;
  kvrt_rows rows[KVRT_SIDES];     ///< k, v: rows of sequence s start at its first_row
  int n_heads;                    ///< of the layer
  bool rotates;                   ///< keys come before RoPE and are stored behind it
  PoolSide pools[KVRT_SIDES];
  std::int64_t first_row, n_rows; ///< of all sequences, rows without token included
  std::int64_t n_coded;           ///< tokens that leave the window in this step, over all sequences
  bool has_outliers;              ///< a side has out<p>
  int steps[KVRT_SIDES];          ///< tokens encoded together: DeviceUnit::step()
  float* scratch;                 ///< [n_flush_blocks, N, D] rows of channel groups, N the larger of steps
  std::int64_t n_flush_blocks;    ///< CTAs of flush
};

/// What one launch of append does.
struct AppendWork {
  bool encodes;   ///< tokens that leave, on the sides without channel groups
  bool writes;    ///< sinks, window
};

/// Reads the ring, writes base pages: comes before the ring is overwritten.
Status flush_cuda(const AppendArgs& args, void* stream);
Status append_cuda(const AppendArgs& args, const AppendWork& work, void* stream);

}  // namespace kvrt

#pragma once
// What decode reads besides pages, made on the device in one launch: segments, chunks and their CSR (core/schedule.h), and queries as the
// segments meet them (rotate_q): at their position, times softmax scale * log2 e, once in the model's coordinates for exact pages and once
// in those of stored base rows.

#include <cstdint>

#include "kernels/core/device_layer.h"
#include "kernels/core/schedule.h"
#include "kernels/read/decode_cuda.h"

namespace kvrt {

inline constexpr int kQueryFrames = 2;  ///< row of a chunk's query: 2 * (sequence * H + head) + (1 for base pages)

struct PrepareArgs {
  const DeviceLayer* layer;
  const DeviceSequence* sequences;
  std::int64_t n_rows;         ///< sequences * H
  int n_heads, group;
  PoolSide pools[KVRT_SIDES];
  UnitBytes unit_bytes;
  std::int64_t chunk_bytes;
  kvrt_rows q;                 ///< [rows, G H, D]
  bool rotates;                ///< queries come before RoPE
  float factor;                ///< softmax scale * log2 e
  Segment* segments;           ///< [n_rows, 3] in the order of kvrt_segment
  DecodeChunk* chunks;
  std::int64_t* first_chunk;   ///< [n_rows + 1]
  float* queries;              ///< [n_rows, kQueryFrames, G, D]
};
Status prepare_cuda(const PrepareArgs& args, void* stream);

}  // namespace kvrt

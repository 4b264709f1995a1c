#pragma once
// A layer of a context as CUDA kernels read it: plain data in device memory, pointers into device memory. Built once, when the
// context is created (core/device_tables.h).

#include <cstdint>

#include "kernels/codec/hadamard_order.h"
#include "kernels/codec/page_codec.h"
#include "kernels/codec/rope.h"
#include "kernels/core/token_place.h"

namespace kvrt {

inline constexpr int kMaxDeviceDim = 512;  ///< largest head_dim of the CUDA kernels that hold a row in shared memory

/// Constants between the model's coordinates and the encoder's input; names as in FakeQuantJob, for the functions of write/frame.h.
struct DeviceFrame {
  int head_dim;
  bool round_input_to_bf16;
  const std::int32_t* block_order;        ///< [D] or null
  const float *mean, *smooth;             ///< [H, D] or null
  HadamardOrder had;                      ///< size 0 without had
  float had_scale;
  const std::uint64_t *paley, *paley_transposed;  ///< [kMaxPaley] rows, bit set = -1
};

struct DeviceUnit {
  DeviceFrame frame;
  const PageCodec* codecs;                ///< [H] of base pages
  PageCodec exact;
  PageShape base_page, exact_page;
  int page_tokens;                        ///< P of base pages
  bool pre;
  const float* stored_mean;               ///< [H, D] in the coordinates and order of stored rows, null without center

  /// Tokens that are encoded together: N of channel.g<N>, else 1.
  KVRT_HOST_DEVICE int step() const { return codecs[0].granularity == Granularity::kChannel ? codecs[0].group : 1; }
};

/// What encoders met, one array a side: non_finite, saturated, floored.
struct DeviceCounters {
  std::int64_t counts[KVRT_SIDES][3];
};

struct DeviceLayer {
  DeviceUnit units[KVRT_SIDES];
  Tiers tiers;
  RopeTables rope;
  int n_heads, group, head_dim;
  DeviceCounters* counters;
};

/// One sequence of a call, with what the host counted before the launch. Its page lists hold the pages that the call touches.
struct DeviceSequence {
  Sequence sequence;
  std::int64_t first_coded = 0;   ///< append: coded tokens of the sequences before this one
  std::int64_t first_chunk = 0;   ///< decode: chunks of the sequences before this one, over all heads
  std::int64_t n_chunks = 0;      ///< decode: of one head
};

}  // namespace kvrt

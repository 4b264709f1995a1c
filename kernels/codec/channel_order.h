#pragma once
// `spread<N>`, the stored channel order of keys (KERNELS.md 3.3): a row is four equal chunks, one a lane of a quad; chunk q holds
// channels rN + qN/4 ... rN + (q+1)N/4 - 1 for r = 0, 1, ... With N = rotary_dim / 2 one lane holds both channels of a RoPE pair.

#include "kernels/core/host_device.h"

namespace kvrt {

/// Where channel d is stored. spread 0: natural order. Requires: 4 divides N, N divides D.
KVRT_HOST_DEVICE constexpr int stored_position(int spread, int head_dim, int d) {
  if (spread == 0) return d;
  const int quarter = spread / 4, r = d / spread, within = d % spread;
  return within / quarter * (head_dim / 4) + r * quarter + within % quarter;
}

/// The channel that is stored at a position.
KVRT_HOST_DEVICE constexpr int stored_channel(int spread, int head_dim, int position) {
  if (spread == 0) return position;
  const int quarter = spread / 4, chunk = position / (head_dim / 4), within = position % (head_dim / 4);
  return within / quarter * spread + chunk * quarter + within % quarter;
}

}  // namespace kvrt

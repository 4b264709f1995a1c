#pragma once
// The two tables of one RoPE, computed in double and rounded once, and what the CPU's decode wants of them.

#include <cstdint>
#include <vector>

#include "kernels/codec/rope.h"

namespace kvrt {

struct RopeStorage {
  std::vector<float> coarse, fine;

  /// factor: the attention factor, goes into the coarse table. Positions 0 ... n_positions - 1 can be rotated.
  RopeStorage(const std::vector<double>& inv_freq, double factor, std::int64_t n_positions);
  RopeTables tables(bool interleaved) const;
};

}  // namespace kvrt

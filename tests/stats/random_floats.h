#pragma once
// Seeded fp32 test data.

#include <cstdint>
#include <vector>

#include "libcalib/base/rng.h"

namespace calib::test {

inline std::vector<float> normal_floats(std::size_t n, std::uint64_t seed, double mean = 0.0, double std = 1.0) {
  Rng rng(seed);
  std::vector<float> out(n);
  for (float& x : out) x = static_cast<float>(mean + std * rng.normal());
  return out;
}

}  // namespace calib::test

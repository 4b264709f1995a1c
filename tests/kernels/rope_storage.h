#pragma once
// RoPE tables of one frequency list, with the memory they stand in.

#include <cmath>
#include <vector>

#include "kernels/codec/rope.h"
#include "kernels/read/decode_cpu.h"

namespace kvrt::test {

struct RopeStorage {
  /// Positions 0 ... n_positions - 1.
  RopeStorage(const std::vector<double>& inv_freq, bool interleaved, std::int64_t n_positions) {
    const std::size_t n_pairs = inv_freq.size();
    const auto fill = [&](std::int64_t n, std::int64_t step, std::vector<float>* table) {
      for (std::int64_t r = 0; r < n; ++r) {
        for (const double f : inv_freq) table->push_back(static_cast<float>(std::cos(static_cast<double>(r * step) * f)));
        for (const double f : inv_freq) table->push_back(static_cast<float>(std::sin(static_cast<double>(r * step) * f)));
      }
    };
    fill((n_positions + kRopeCoarse - 1) / kRopeCoarse, kRopeCoarse, &coarse);
    fill(kRopeFine, 1, &fine);
    tables = {coarse.data(), fine.data(), static_cast<int>(n_pairs), interleaved};
    tile.resize(n_pairs * 2 * kRopeTile);
    rope_tile_table(tables, tile.data());
  }
  RopeStorage(const RopeStorage&) = delete;
  RopeStorage& operator=(const RopeStorage&) = delete;

  std::vector<float> coarse, fine, tile;
  RopeTables tables;
};

}  // namespace kvrt::test

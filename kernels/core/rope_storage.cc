#include "kernels/core/rope_storage.h"

#include <cmath>

namespace kvrt {
namespace {

/// Cosines, then sines, of positions 0, step, 2 step, ...
std::vector<float> angles(const std::vector<double>& inv_freq, double factor, std::int64_t n, std::int64_t step) {
  std::vector<float> table;
  table.reserve(static_cast<std::size_t>(n) * 2 * inv_freq.size());
  for (std::int64_t r = 0; r < n; ++r) {
    for (const double f : inv_freq) table.push_back(static_cast<float>(factor * std::cos(static_cast<double>(r * step) * f)));
    for (const double f : inv_freq) table.push_back(static_cast<float>(factor * std::sin(static_cast<double>(r * step) * f)));
  }
  return table;
}

}  // namespace

RopeStorage::RopeStorage(const std::vector<double>& inv_freq, double factor, std::int64_t n_positions)
    : coarse(angles(inv_freq, factor, (n_positions + kRopeCoarse - 1) / kRopeCoarse, kRopeCoarse)), fine(angles(inv_freq, 1.0, kRopeFine, 1)) {}

RopeTables RopeStorage::tables(bool interleaved) const {
  RopeTables t;
  t.coarse = coarse.data(), t.fine = fine.data();
  t.n_pairs = static_cast<int>(fine.size() / (2 * kRopeFine));
  t.interleaved = interleaved;
  return t;
}

}  // namespace kvrt

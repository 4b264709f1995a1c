#pragma once
// Outliers of one run of the vector paths of fake_quant and append, found by the functions of codec/outlier.h. Not inline: the vector paths are compiled
// several times and may not share inline functions.

#include <cstdint>

#include "kernels/write/fake_quant_job.h"

namespace kvrt {

struct FoundOutliers {
  int n = 0;
  int n_beyond = 0;  ///< of them, beyond a static threshold
};

/// rows: [n, D] finite, tokens [first, first + n) of one head; n = N for channel groups. picks: row * D + channel, ascending, room for
/// kMaxGroupOutliers. kept: [n, D] out, what ranges are taken from: the rows with their outliers moved into the range of the rest.
FoundOutliers find_outliers(const FakeQuantJob& job, const StaticGrids& grids, const float* rows, std::int64_t first, int n, float* kept,
                            std::uint16_t* picks);

/// Writes the entries of slots [slot, slot + n), whose codes are in the block; n = N for channel groups. picks, rests: [n_picks], of
/// find_outliers(), and what was to be coded there.
void store_outlier_entries(const PageCodec& codec, int slot, int n, const std::uint16_t* picks, float* rests, int n_picks, std::uint8_t* block,
                           EncodeCounters* counters);

}  // namespace kvrt

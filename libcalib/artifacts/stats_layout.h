#pragma once
// INTERNAL to artifacts/: names inside stats.h5 that its writer and reader share (schemas/stats.md).

#include <string>

#include <fmt/format.h>

namespace calib::artifacts {

inline constexpr char kStatsSchema[] = "kvcalib.stats";
inline constexpr int kStatsVersion = 1;

/// "/layers/07": the layer number of the model, at least two digits.
inline std::string layer_group(int index) { return fmt::format("/layers/{:02}", index); }

}  // namespace calib::artifacts

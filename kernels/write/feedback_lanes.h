#pragma once
// Error feedback on vector lanes: the tokens of a run are the lanes, the channels are walked in the order of the plan, with the
// operations of feedback_codes() in codec/page_codec.h. Internal linkage, like cpu/simd.h.

#include "kernels/write/lane_run.h"

namespace kvrt {
namespace {

/// Where lo and scale of (row, channel) lie: base + row * row_stride + (channel / group) * 1.
struct GridPlace {
  const float *lo, *scale;
  int row_stride, group;
};

/// Replaces every row by the levels of its codes. Requires: the grids are fixed. grid.level(x, scale, lo) is the code as a number,
/// grid.value(level, scale, lo) what it decodes to.
template <class Grid>
static void feed_back(Run* run, GridPlace place, Grid grid) {
  const int d = run->d, n_groups = (d - 1) / place.group + 1;
  float* const rest = run->lanes;
  float* const lo = rest + static_cast<std::int64_t>(d) * kLanes;
  float* const scale = lo + static_cast<std::int64_t>(d) * kLanes;
  float* const marks = scale + static_cast<std::int64_t>(d) * kLanes;  // 1 + number of the outlier, 0 = none
  int pick = 0;
  for (int first = 0; first < run->n; first += kLanes) {
    const int n = run->n - first < kLanes ? run->n - first : kLanes;
    for (int l = 0; l < kLanes; ++l) {
      const int row = first + (l < n ? l : 0);  // lanes without a token repeat the first one
      const float* x = run->rows + static_cast<std::int64_t>(row) * d;
      for (int i = 0; i < d; ++i) rest[i * kLanes + l] = x[run->ef_order[i]];
      for (int g = 0; g < n_groups; ++g) {
        lo[g * kLanes + l] = place.lo[static_cast<std::int64_t>(row) * place.row_stride + g];
        scale[g * kLanes + l] = place.scale[static_cast<std::int64_t>(row) * place.row_stride + g];
      }
    }
    if (run->n_picks > 0) {
      for (int i = 0; i < d * kLanes; ++i) marks[i] = 0.0f;
      for (; pick < run->n_picks && run->picks[pick] / d < first + n; ++pick) {
        marks[run->picks[pick] % d * kLanes + run->picks[pick] / d - first] = static_cast<float>(pick + 1);
      }
    }
    const float* u = run->ef_u;
    for (int i = 0; i < d; ++i) {
      const int channel = run->ef_order[i], g = channel / place.group;
      F w = load<F>(rest + i * kLanes);
      const I bad = (bits_as<I>(w) & 0x7F800000) == 0x7F800000;
      w = bad ? F{} : w;
      const F s = load<F>(scale + g * kLanes), z = load<F>(lo + g * kLanes), level = grid.level(w, s, z);
      F error = (w - grid.value(level, s, z)) / u[0];
      if (run->n_picks > 0) {
        const F mark = load<F>(marks + channel * kLanes);
        error = mark != 0.0f ? F{} : error;
        for (int l = 0; l < n; ++l) {
          if (mark[l] != 0.0f) run->rests[static_cast<int>(mark[l]) - 1] = w[l];
        }
      }
      for (int j = i + 1; j < d; ++j) store(rest + j * kLanes, load<F>(rest + j * kLanes) - error * u[j - i]);
      for (int l = 0; l < n; ++l) run->rows[static_cast<std::int64_t>(first + l) * d + channel] = level[l];
      u += d - i;
    }
  }
}

}  // namespace
}  // namespace kvrt

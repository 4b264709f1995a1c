#pragma once
// Formats whose codes lie on a grid (codec/grid_codec.h) and 16-bit floats on vector lanes. Internal linkage, like cpu/simd.h.

#include <type_traits>

#include "kernels/write/feedback_lanes.h"
#include "kernels/write/lane_run.h"

namespace kvrt {
namespace {

// One value on its grid: level() is the code as a number, value() what it decodes to. Templates over the vector, like cpu/rounding.h.

struct AffineGrid {
  float qmax;
  template <class V>
  V level(V x, V scale, V lo) const {
    return nearest_integer(minimum(maximum((x - lo) / scale, splat<V>(0.0f)), splat<V>(qmax)));
  }
  template <class V>
  V value(V level, V scale, V lo) const { return level * scale + lo; }
};

struct SymmetricGrid {
  float m;
  template <class V>
  V level(V x, V scale, V) const {
    return nearest_integer(minimum(maximum(x / scale, splat<V>(-m)), splat<V>(m))) + 0.0f;  // an integer has no -0
  }
  template <class V>
  V value(V level, V scale, V) const { return level * scale; }
};

/// result(i) of the entry i of the codebook that is nearest to y: nearest_entry() of codec/codebook.h.
template <class V, class Result>
KVRT_INLINE V of_nearest(const Codebook& book, V y, Result result) {
  V found = splat<V>(result(0));
  for (int i = 0; i + 1 < book.size; ++i) found = y > book.midpoints[i] ? splat<V>(result(i + 1)) : found;
  return found;
}
template <class V>
KVRT_INLINE V nearest_of(const Codebook& book, V y) {
  return of_nearest(book, y, [&](int i) { return book.entries[i]; });
}
struct CodebookGrid {
  const Codebook* book;
  template <class V>
  V level(V x, V scale, V lo) const { return nearest_of<V>(*book, (x - lo) / scale - 1.0f); }
  template <class V>
  V value(V level, V scale, V lo) const { return (level + 1.0f) * scale + lo; }
};
/// Under a norm of 0 the entry above the middle is taken, and decodes to 0.
struct NormGrid {
  const Codebook* book;
  template <class V>
  V level(V x, V scale, V) const {
    return scale == 0.0f ? splat<V>(book->entries[book->size / 2]) : nearest_of<V>(*book, x / scale);
  }
  template <class V>
  V value(V level, V scale, V) const { return level * scale; }
};

/// What a row holds in the end: the value of its level on the grid; the encoders of append (encode_lanes.h) keep the level.
template <class Grid, class V>
KVRT_INLINE V result_of(const Grid& grid, V level, V scale, V lo) { return grid.template value<V>(level, scale, lo); }

/// Range of every token group: minimum in lo, maximum in scale.
static void token_ranges(Run* run) {
  const FakeQuantJob& job = *run->job;
  const int n = job.group, per_row = run->d / n, n_groups = per_row * run->n;
  for (int g = 0; g < n_groups; ++g) {
    const Extent e = group_extent(run->ranged + static_cast<std::int64_t>(g) * n, n);
    run->lo[g] = e.min, run->scale[g] = e.max;
  }
  if (job.clip_alpha == 1.0f && !run->grids.partner) return;
  for (int t = 0; t < run->n; ++t) {
    const float* row = run->ranged + static_cast<std::int64_t>(t) * run->d;
    shape_ranges(*run, run->lo + t * per_row, run->scale + t * per_row, per_row, n, [&](int g) { return lane_sum(row + g * n, n, SameOp{}); });
  }
}

/// Largest magnitude in the range of every token group, in scale.
static void token_absmax(Run* run) {
  const int n = run->job->group, n_groups = run->d / n * run->n;
  if (run->job->clip_alpha == 1.0f) {
    for (int g = 0; g < n_groups; ++g) run->scale[g] = group_absmax(run->rows + static_cast<std::int64_t>(g) * n, n);
    return;
  }
  token_ranges(run);
  for (int g = 0; g < n_groups; ++g) run->scale[g] = maximum(-run->lo[g], run->scale[g]);
}

/// lo and scale of every token group. steps: 2^b - 1, codebooks 2.
static void affine_token_params(Run* run, float steps) {
  token_ranges(run);
  const int n_groups = run->d / run->job->group * run->n;
  for_lanes(n_groups, [&](auto tag, int g) {
    using V = decltype(tag);
    const Affine<V> p = affine_lanes<V>(load<V>(run->lo + g), load<V>(run->scale + g), steps, &run->counts);
    store(run->lo + g, p.lo);
    store(run->scale + g, p.scale);
  });
}

static void symmetric_token_params(Run* run, float m) {
  const int n_groups = run->d / run->job->group * run->n;
  token_absmax(run);
  for_lanes(n_groups, [&](auto tag, int g) {
    using V = decltype(tag);
    const V step = load<V>(run->scale + g) / m, raw = f16_up<V>(step);
    Tally::add_to(&run->counts.saturated, step > kF16Max);
    Tally::add_to(&run->counts.floored, raw < kScaleFloor);
    store(run->scale + g, maximum(raw, splat<V>(kScaleFloor)));
    store(run->lo + g, splat<V>(0.0f));
  });
}

/// Levels in the rows -> results.
template <class Grid>
static void decode_levels(Run* run, GridPlace place, Grid grid) {
  for (int t = 0; t < run->n; ++t) {
    float* x = run->rows + static_cast<std::int64_t>(t) * run->d;
    const float* lo = place.lo + static_cast<std::int64_t>(t) * place.row_stride;
    const float* scale = place.scale + static_cast<std::int64_t>(t) * place.row_stride;
    for (int c = 0; c < run->d; ++c) x[c] = result_of(grid, x[c], scale[c / place.group], lo[c / place.group]);
  }
}

/// run->ranged <- the rows, which become codes.
static void keep_rows(Run* run) {
  run->ranged = run->lanes + (run->ef_u ? 4 * kMaxLanes * run->d : 0);
  for_lanes(run->n * run->d, [&](auto tag, int i) { store(run->ranged + i, load<decltype(tag)>(run->rows + i)); });
}

/// refit_group() of codec/page_codec.h. Codes in the rows, what they stand for in run->ranged, which is lost.
static void refit_groups(Run* run) {
  const int n = run->job->group, n_groups = run->d / n * run->n;
  const float count = static_cast<float>(n);
  for (int g = 0; g < n_groups; ++g) {
    float* const x = run->ranged + static_cast<std::int64_t>(g) * n;
    const float* const codes = run->rows + static_cast<std::int64_t>(g) * n;
    const float mean = lane_sum(x, n, SameOp{}) / count, code_mean = lane_sum(codes, n, SameOp{}) / count;
    const float x2 = lane_sum(x, n, [&](auto v) { return (v - mean) * (v - mean); });
    const float code2 = lane_sum(codes, n, [&](auto v) { return (v - code_mean) * (v - code_mean); });
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, (load<V>(x + i) - mean) * (load<V>(codes + i) - code_mean));
    });
    const float along = lane_sum(x, n, SameOp{});
    if (!(along * along > 0.5f * x2 * code2 && along > 0.0f)) continue;
    const float scale = f16_nearest<float>(x2 / along), lo = f16_nearest<float>(mean - scale * code_mean);
    if (!(scale >= kScaleFloor && scale <= kF16Max) || !(magnitude(lo) <= kF16Max)) continue;
    run->scale[g] = scale, run->lo[g] = lo;
  }
}

/// Token groups whose lo and scale are in the run.
template <class Grid>
static void apply_to_token_groups(Run* run, Grid grid) {
  const int n = run->job->group, n_groups = run->d / n * run->n;
  if (run->ef_u) {
    const GridPlace place{run->lo, run->scale, run->d / n, n};
    const bool refits = std::is_base_of_v<AffineGrid, Grid> && run->job->scheme.outlier_per_mille == 0;
    if (refits) keep_rows(run);
    feed_back(run, place, grid);
    if (refits) refit_groups(run);
    return decode_levels(run, place, grid);
  }
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    const float lo = run->lo[g], scale = run->scale[g];
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      const V s = splat<V>(scale), z = splat<V>(lo);
      store(x + i, result_of(grid, grid.template level<V>(load<V>(x + i), s, z), s, z));
    });
  }
}

template <class Grid>
static void apply_static(Run* run, Grid grid) {
  const StaticGrids& g = run->grids;
  const bool by_channel = run->job->scheme.granularity == Granularity::kChannelStatic;
  const auto visit = [&](auto one) {  // one(v, scale, lo, min, max) of every value
    for (int t = 0; t < run->n; ++t) {
      float* x = run->rows + static_cast<std::int64_t>(t) * run->d;
      for_lanes(run->d, [&](auto tag, int i) {
        using V = decltype(tag);
        const auto at = [&](const float* p) { return by_channel ? load<V>(p + i) : splat<V>(*p); };
        store(x + i, one(load<V>(x + i), at(g.scale), at(g.lo), at(g.min), at(g.max)));
      });
    }
  };
  const auto count = [&](auto v, auto min, auto max) {
    Tally::add_to(&run->counts.saturated, v < min);
    Tally::add_to(&run->counts.saturated, v > max);
  };
  if (run->ef_u) {
    visit([&](auto v, auto, auto, auto min, auto max) {
      count(v, min, max);
      return v;
    });
    const GridPlace place{g.lo, g.scale, 0, by_channel ? 1 : run->d};
    feed_back(run, place, grid);
    return decode_levels(run, place, grid);
  }
  visit([&](auto v, auto scale, auto lo, auto min, auto max) {
    count(v, min, max);
    return result_of(grid, grid.level(v, scale, lo), scale, lo);
  });
}

/// Range of every channel over the run's N tokens: minimum in lo, maximum in scale.
static void channel_ranges(Run* run) {
  const FakeQuantJob& job = *run->job;
  const std::int64_t d = run->d;
  const bool clips = job.clip_alpha != 1.0f;
  float* const sums = run->lo + d;  // lo has room for n rows
  for_lanes(run->d, [&](auto tag, int c) {
    using V = decltype(tag);
    const float* column = run->ranged + c;
    V min = load<V>(column), max = min;
    for (int t = 1; t < run->n; ++t) {
      const V v = load<V>(column + t * d);
      min = minimum(v, min), max = maximum(v, max);
    }
    store(run->lo + c, min);
    store(run->scale + c, max);
    if (!clips) return;
    V lanes[32];  // the order of sum_of_lanes()
    for (int l = 0; l < 32; ++l) lanes[l] = load<V>(column + l * d);
    for (int t = 32; t < run->n; ++t) lanes[t % 32] += load<V>(column + t * d);
    for (int half = 16; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    store(sums + c, lanes[0]);
  });
  if (clips || run->grids.partner) shape_ranges(*run, run->lo, run->scale, run->d, run->n, [&](int c) { return sums[c]; });
}

template <class Grid>
static void int_channel(Run* run, Grid grid) {
  const std::int64_t d = run->d;
  channel_ranges(run);
  for_lanes(run->d, [&](auto tag, int c) {
    using V = decltype(tag);
    float* const column = run->rows + c;
    const Affine<V> p = affine_lanes<V>(load<V>(run->lo + c), load<V>(run->scale + c), grid.qmax, &run->counts);
    store(run->lo + c, p.lo);
    store(run->scale + c, p.scale);
    for (int t = 0; !run->ef_u && t < run->n; ++t) {
      store(column + t * d, result_of(grid, grid.template level<V>(load<V>(column + t * d), p.scale, p.lo), p.scale, p.lo));
    }
  });
  if (!run->ef_u) return;
  const GridPlace place{run->lo, run->scale, 0, 1};
  feed_back(run, place, grid);
  decode_levels(run, place, grid);
}

/// int, sint and nuq with token groups or static ranges.
template <class Grid>
static void affine_or_static(Run* run, float steps, Grid grid) {
  if (run->grids.lo) return apply_static(run, grid);
  affine_token_params(run, steps);
  apply_to_token_groups(run, grid);
}
template <class Grid>
static void symmetric(Run* run, Grid grid) {
  if (run->grids.lo) return apply_static(run, grid);
  symmetric_token_params(run, grid.m);
  apply_to_token_groups(run, grid);
}

KVRT_INLINE float stored_norm(float norm) { return minimum(f16_nearest<float>(norm), kF16Max); }

/// lm: entries in the rows, the stored norm of each group in scale: projecting_norm() of codec/page_codec.h.
static void norm_levels(Run* run) {
  const NormGrid grid{&run->job->codebook};
  const int n = run->job->group, n_groups = run->d / n * run->n;
  const float root = __builtin_sqrtf(static_cast<float>(n));
  keep_rows(run);
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    run->lo[g] = __builtin_sqrtf(sum_of_squares(x, n));
    const float n0 = run->scale[g] = stored_norm(run->lo[g] / root);
    for_lanes(run->ef_u ? 0 : n, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, grid.template level<V>(load<V>(x + i), splat<V>(n0), V{}));
    });
  }
  if (run->ef_u) feed_back(run, GridPlace{run->lo, run->scale, run->d / n, n}, grid);
  for_lanes(n_groups * n, [&](auto tag, int i) {
    using V = decltype(tag);
    store(run->ranged + i, load<V>(run->ranged + i) * load<V>(run->rows + i));
  });
  for (int g = 0; g < n_groups; ++g) {
    const float* const entries = run->rows + static_cast<std::int64_t>(g) * n;
    const float along = lane_sum(run->ranged + static_cast<std::int64_t>(g) * n, n, SameOp{}), c_norm2 = sum_of_squares(entries, n);
    const float y_norm = run->lo[g];
    const bool is_near = along * along > 0.5f * (y_norm * y_norm) * c_norm2 && along > 0.0f;
    const float norm = is_near ? y_norm * y_norm / along : y_norm / __builtin_sqrtf(c_norm2);
    const float n0 = run->scale[g];
    run->scale[g] = n0 == 0.0f ? 0.0f : stored_norm(norm);
    Tally::add_to(&run->counts.saturated, n0 != 0.0f && f16_nearest<float>(norm) > kF16Max);
  }
}
static void norm_codebook(Run* run) {
  norm_levels(run);
  const int n = run->job->group, n_groups = run->d / n * run->n;
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, load<V>(x + i) * run->scale[g]);
    });
  }
}

/// nvfp4 (block 16), mxfp4 (block 32).
static void fp4_blocks(Run* run) {
  const bool is_nv = run->job->scheme.format == Format::kNvfp4;
  const int n = run->job->group, n_groups = run->d / n * run->n;
  const float gamma = is_nv ? *run->grids.scale : 1.0f;
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    const float absmax = group_absmax(x, n);
    float scale;
    if (is_nv) {
      // E4M3 round trip of the block's scale; a block that is not zero keeps at least 2^-9.
      const float sigma = float_round_trip<3, 7, float>(absmax / (6.0f * gamma), 1.0f);
      scale = (sigma == 0.0f && absmax > 0.0f ? 0x1p-9f : sigma) * gamma;
      for_lanes(n, [&](auto tag, int i) {
        using V = decltype(tag);
        Tally::add_to(&run->counts.saturated, magnitude(load<V>(x + i)) > *run->grids.max);
      });
    } else {
      const std::int32_t exponent = bits_as<std::int32_t>(absmax) >> 23;
      scale = bits_as<float>(exponent > 2 ? (exponent - 2) << 23 : 0x00400000);
    }
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      const V v = load<V>(x + i), value = float_round_trip<1, 1>(v, splat<V>(scale));
      store(x + i, scale == 0.0f ? V{} : value);
    });
  }
}

/// result(x, scale): of one value.
template <class Result>
static void fp8_token(Run* run, Result result) {
  const float max = run->job->scheme.format == Format::kFp8E4m3 ? 448.0f : 57344.0f;
  const int n = run->job->group, n_groups = run->d / n * run->n;
  token_absmax(run);
  for_lanes(n_groups, [&](auto tag, int g) {
    using V = decltype(tag);
    const V absmax = load<V>(run->scale + g), step = absmax / max;
    Tally::add_to(&run->counts.saturated, step > kF16Max);
    const V scale = f16_up<V>(maximum(step, splat<V>(kFp8ScaleFloor)));
    store(run->scale + g, absmax == 0.0f ? splat<V>(1.0f) : scale);
  });
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    const float scale = run->scale[g];
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, result(load<V>(x + i), splat<V>(scale)));
    });
  }
}

/// One static grid for the whole unit or head.
template <class Result>
static void fp8_static(Run* run, Result result) {
  const float limit = run->grids.max[0], scale = run->grids.scale[0];
  for_lanes(run->d * run->n, [&](auto tag, int i) {
    using V = decltype(tag);
    const V v = load<V>(run->rows + i);
    Tally::add_to(&run->counts.saturated, magnitude(v) > limit);
    store(run->rows + i, result(v, splat<V>(scale)));
  });
}

static void exact16(Run* run) {
  const bool is_bf16 = run->job->scheme.format == Format::kBf16;
  for_lanes(run->d * run->n, [&](auto tag, int i) {
    using V = decltype(tag);
    V v = load<V>(run->rows + i);
    if (is_bf16) {
      v = bf16_nearest<V>(v);
    } else {
      v = f16_nearest<V>(v);
      Tally::add_to(&run->counts.saturated, magnitude(v) > kF16Max);
      v = minimum(maximum(v, splat<V>(-kF16Max)), splat<V>(kF16Max));
    }
    store(run->rows + i, v);
  });
}

}  // namespace
}  // namespace kvrt

#pragma once
// Formats whose codes lie on a grid (codec/grid_codec.h) and 16-bit floats on vector lanes. Internal linkage, like cpu/simd.h.

#include "kernels/write/lane_run.h"

namespace kvrt {
namespace {

// One value on its grid: x -> value of its code. Templates over the vector, like cpu/rounding.h.

struct AffineGrid {
  float qmax;
  template <class V>
  V operator()(V x, V scale, V lo) const { return affine_round_trip<V>(x, scale, lo, qmax); }
};

struct SymmetricGrid {
  float m;
  template <class V>
  V operator()(V x, V scale, V) const {
    const V y = minimum(maximum(x / scale, splat<V>(-m)), splat<V>(m));
    return (nearest_integer(y) + 0.0f) * scale;  // an integer has no -0
  }
};

/// Entry of the codebook nearest to y.
template <class V>
KVRT_INLINE V nearest_of(const Codebook& book, V y) {
  V entry = splat<V>(book.entries[0]);
  for (int i = 0; i + 1 < book.size; ++i) entry = y > book.midpoints[i] ? splat<V>(book.entries[i + 1]) : entry;
  return entry;
}
struct CodebookGrid {
  const Codebook* book;
  template <class V>
  V operator()(V x, V scale, V lo) const {
    const V entry = nearest_of<V>(*book, (x - lo) / scale - 1.0f);
    return (entry + 1.0f) * scale + lo;
  }
};

/// lo and scale of every token group. steps: 2^b - 1, codebooks 2.
static void affine_token_params(Run* run, float steps) {
  const int n = run->job->group, n_groups = run->d / n * run->n;
  for (int g = 0; g < n_groups; ++g) {
    const Extent e = group_extent(run->rows + static_cast<std::int64_t>(g) * n, n);
    run->lo[g] = e.min, run->scale[g] = e.max;
  }
  for_lanes(n_groups, [&](auto tag, int g) {
    using V = decltype(tag);
    const Affine<V> p = affine_lanes<V>(load<V>(run->lo + g), load<V>(run->scale + g), steps, &run->counts);
    store(run->lo + g, p.lo);
    store(run->scale + g, p.scale);
  });
}

static void symmetric_token_params(Run* run, float m) {
  const int n = run->job->group, n_groups = run->d / n * run->n;
  for (int g = 0; g < n_groups; ++g) run->scale[g] = group_absmax(run->rows + static_cast<std::int64_t>(g) * n, n);
  for_lanes(n_groups, [&](auto tag, int g) {
    using V = decltype(tag);
    const V step = load<V>(run->scale + g) / m, raw = f16_up<V>(step);
    Tally::add_to(&run->counts.saturated, step > kF16Max);
    Tally::add_to(&run->counts.floored, raw < kScaleFloor);
    store(run->scale + g, maximum(raw, splat<V>(kScaleFloor)));
    store(run->lo + g, splat<V>(0.0f));
  });
}

template <class Grid>
static void apply_to_token_groups(Run* run, Grid grid) {
  const int n = run->job->group, n_groups = run->d / n * run->n;
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    const float lo = run->lo[g], scale = run->scale[g];
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, grid(load<V>(x + i), splat<V>(scale), splat<V>(lo)));
    });
  }
}

template <class Grid>
static void apply_static(Run* run, Grid grid) {
  const StaticGrids& g = run->grids;
  const auto one = [&](auto v, auto scale, auto lo, auto min, auto max) {
    Tally::add_to(&run->counts.saturated, v < min);
    Tally::add_to(&run->counts.saturated, v > max);
    return grid(v, scale, lo);
  };
  if (run->job->scheme.granularity == Granularity::kChannelStatic) {
    for (int t = 0; t < run->n; ++t) {
      float* x = run->rows + static_cast<std::int64_t>(t) * run->d;
      for_lanes(run->d, [&](auto tag, int i) {
        using V = decltype(tag);
        store(x + i, one(load<V>(x + i), load<V>(g.scale + i), load<V>(g.lo + i), load<V>(g.min + i), load<V>(g.max + i)));
      });
    }
    return;
  }
  for_lanes(run->d * run->n, [&](auto tag, int i) {
    using V = decltype(tag);
    store(run->rows + i,
          one(load<V>(run->rows + i), splat<V>(*g.scale), splat<V>(*g.lo), splat<V>(*g.min), splat<V>(*g.max)));
  });
}

static void int_channel(Run* run) {
  const float qmax = static_cast<float>((1 << run->job->bits) - 1);
  const std::int64_t d = run->d;
  for_lanes(run->d, [&](auto tag, int c) {
    using V = decltype(tag);
    float* const column = run->rows + c;
    V min = load<V>(column), max = min;
    for (int t = 1; t < run->n; ++t) {
      const V v = load<V>(column + t * d);
      min = minimum(v, min), max = maximum(v, max);
    }
    const Affine<V> p = affine_lanes<V>(min, max, qmax, &run->counts);
    for (int t = 0; t < run->n; ++t) {
      store(column + t * d, affine_round_trip<V>(load<V>(column + t * d), p.scale, p.lo, qmax));
    }
  });
}

/// int, sint and nuq with token groups or static ranges.
template <class Grid>
static void affine_or_static(Run* run, float steps, Grid grid) {
  if (run->grids.lo) return apply_static(run, grid);
  affine_token_params(run, steps);
  apply_to_token_groups(run, grid);
}
static void symmetric(Run* run) {
  const SymmetricGrid grid{static_cast<float>((1 << (run->job->bits - 1)) - 1)};
  if (run->grids.lo) return apply_static(run, grid);
  symmetric_token_params(run, grid.m);
  apply_to_token_groups(run, grid);
}

KVRT_INLINE float stored_norm(float norm) { return minimum(f16_nearest<float>(norm), kF16Max); }

/// lm: entries times the norm of the group; at 3 and 4 bits the stored norm keeps the length (codec/page_codec.h).
static void norm_codebook(Run* run) {
  const Codebook& book = run->job->codebook;
  const int n = run->job->group, n_groups = run->d / n * run->n;
  const float root = __builtin_sqrtf(static_cast<float>(n));
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    const float length = __builtin_sqrtf(sum_of_squares(x, n)), n0 = stored_norm(length / root);
    if (n0 == 0.0f) {
      for (int i = 0; i < n; ++i) x[i] = 0.0f;
      continue;
    }
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, nearest_of<V>(book, load<V>(x + i) / n0));
    });
    const float norm = run->job->bits == 2 ? length / root : length / __builtin_sqrtf(sum_of_squares(x, n));
    const float stored = stored_norm(norm);
    Tally::add_to(&run->counts.saturated, f16_nearest<float>(norm) > kF16Max);
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, load<V>(x + i) * stored);
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

static void fp8_token(Run* run) {
  const Format format = run->job->scheme.format;
  const float max = format == Format::kFp8E4m3 ? 448.0f : 57344.0f;
  const int n = run->job->group, n_groups = run->d / n * run->n;
  for (int g = 0; g < n_groups; ++g) run->scale[g] = group_absmax(run->rows + static_cast<std::int64_t>(g) * n, n);
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
      store(x + i, fp8_round_trip<V>(format, load<V>(x + i), splat<V>(scale)));
    });
  }
}

/// One static grid for the whole unit or head.
static void fp8_static(Run* run) {
  const Format format = run->job->scheme.format;
  const float limit = run->grids.max[0], scale = run->grids.scale[0];
  for_lanes(run->d * run->n, [&](auto tag, int i) {
    using V = decltype(tag);
    const V v = load<V>(run->rows + i);
    Tally::add_to(&run->counts.saturated, magnitude(v) > limit);
    store(run->rows + i, fp8_round_trip<V>(format, v, splat<V>(scale)));
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

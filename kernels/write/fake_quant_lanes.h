#pragma once
// The vector path of fake_quant, compiled once per instruction set (fake_quant_cpu.cc, _avx2.cc, _avx512.cc). Values only: no code is
// packed, but every operation is the one of kernels/codec, in the same order, so that results equal the page codecs bit for bit.
// No std:: and no shared inline function may be called here: the linker could merge a copy compiled for a wider instruction set.

#include "kernels/cpu/simd.h"
#include "kernels/write/fake_quant_job.h"

namespace kvrt {
namespace {

// --- parameters as fp32 values of the fp16 grid ---

/// Largest fp16 value <= v, saturating at +-65504.
template <class V>
KVRT_INLINE V f16_down(V v) {
  using Int = IntOf<V>;
  const Int u = bits_as<Int>(v), rest = u & 0x1FFF, zero = u & 0;
  const Int away = v < 0.0f ? (rest != 0 ? zero + 0x2000 : zero) : zero;
  const V normal = bits_as<V>((u & ~0x1FFF) + away);
  const V steps = v * 0x1p24f;
  V whole = nearest_integer(steps);
  whole = whole > steps ? whole - 1.0f : whole;
  const V grid = magnitude(v) < kF16MinNormal ? whole * 0x1p-24f : normal;
  return minimum(maximum(grid, splat<V>(-kF16Max)), splat<V>(kF16Max));
}
template <class V>
KVRT_INLINE V f16_up(V v) { return -f16_down<V>(-v); }
/// Nearest fp16 value, ties to even; not saturated (the caller looks at values beyond 65504).
template <class V>
KVRT_INLINE V f16_nearest(V v) {
  using Int = IntOf<V>;
  const Int u = bits_as<Int>(v);
  const V normal = bits_as<V>((u + 0xFFF + ((u >> 13) & 1)) & ~0x1FFF);
  const V small = nearest_integer(v * 0x1p24f) * 0x1p-24f;
  const V grid = magnitude(v) < kF16MinNormal ? small : normal;
  return bits_as<V>(bits_as<Int>(grid) | (u & INT32_MIN));  // a value that rounds to zero keeps its sign
}
/// bf16 of a finite value, as an fp32 value; the top half step keeps the largest bf16.
template <class V>
KVRT_INLINE V bf16_nearest(V v) {
  using Int = IntOf<V>;
  const Int u = bits_as<Int>(v);
  const V rounded = bits_as<V>((u + 0x7FFF + ((u >> 16) & 1)) & ~0xFFFF);
  return minimum(maximum(rounded, splat<V>(-0x1.FEp127f)), splat<V>(0x1.FEp127f));
}

struct Counts {
  Tally non_finite, saturated, floored;
};

template <class V>
struct Affine {
  V scale, lo;
};
template <class V>
KVRT_INLINE Affine<V> affine_lanes(V min, V max, float qmax, Counts* c) {
  const V lo = f16_down<V>(min);
  const V step = (max - lo) / qmax;
  const V raw = f16_up<V>(step);
  Tally::add_to(&c->saturated, magnitude(min) > kF16Max);
  Tally::add_to(&c->saturated, step > kF16Max);
  Tally::add_to(&c->floored, raw < kScaleFloor);
  return {maximum(raw, splat<V>(kScaleFloor)), lo};
}
template <class V>
KVRT_INLINE V affine_round_trip(V x, V scale, V lo, float qmax) {
  V y = (x - lo) / scale;
  y = minimum(maximum(y, splat<V>(0.0f)), splat<V>(qmax));
  return nearest_integer(y) * scale + lo;  // the product is exact, see affine_value()
}
/// e4m3 round trip of x / scale, times scale.
template <class V>
KVRT_INLINE V e4m3_round_trip(V x, V scale) {
  using Int = IntOf<V>;
  const V y = x / scale;
  const V a = minimum(magnitude(y), splat<V>(448.0f));
  const Int u = bits_as<Int>(a);
  const V normal = bits_as<V>((u + 0x7FFFF + ((u >> 20) & 1)) & ~0xFFFFF);
  const V small = ((a * 0x1p9f + 0x1p23f) - 0x1p23f) * 0x1p-9f;
  const V value = a < 0x1p-6f ? small : normal;
  return bits_as<V>(bits_as<Int>(value) | (bits_as<Int>(y) & INT32_MIN)) * scale;
}

template <class V>
KVRT_INLINE V finite_or_zero_lanes(V v, Counts* c) {
  const auto bad = (bits_as<IntOf<V>>(v) & 0x7F800000) == 0x7F800000;
  Tally::add_to(&c->non_finite, bad);
  return bad ? V{} : v;
}

// --- rows in scratch: [n][D], dense ---

struct Run {
  const FakeQuantJob* job;
  float* rows;
  float* lo;     ///< per group: min, then the stored lo; fp8: absmax, then the scale
  float* scale;  ///< per group: max, then the stored scale
  int n, d;
  Counts counts;
};

KVRT_INLINE void rotate_run(const FakeQuantJob& job, float* run) {  // butterflies within job.had.power channels
  const int power = job.had.power;
  for (int step = 1; step < power; step *= 2) {
    if (step >= kLanes) {
      for (int i = 0; i < power; i += 2 * step) {
        for (int k = i; k < i + step; k += kLanes) {
          const F a = load<F>(run + k), b = load<F>(run + k + step);
          store(run + k, a + b);
          store(run + k + step, a - b);
        }
      }
    } else {
      for (int i = 0; i < power; ++i) {
        if (i & step) continue;
        const float a = run[i], b = run[i + step];
        run[i] = a + b, run[i + step] = a - b;
      }
    }
  }
}

/// The stages below the vector width, in registers. Requires: D a multiple of the vector width.
KVRT_INLINE void rotate_within_vectors(const FakeQuantJob& job, float* row, int d) {
  const int power = job.had.power;
  for (int i = 0; i < d; i += kLanes) {
    F v = load<F>(row + i);
    if (power > 1) v = butterfly<1>(v);
    if (power > 2) v = butterfly<2>(v);
    if constexpr (kLanes > 4) {
      if (power > 4) v = butterfly<4>(v);
    }
    if constexpr (kLanes > 8) {
      if (power > 8) v = butterfly<8>(v);
    }
    store(row + i, v);
  }
}

template <class V>
KVRT_INLINE void combine_columns(const FakeQuantJob& job, const std::uint64_t* signs, float* x, int c) {
  const int m = job.had.base, power = job.had.power;
  V column[kMaxPaley];
  for (int j = 0; j < m; ++j) column[j] = load<V>(x + j * power + c);
  using Int = IntOf<V>;
  for (int i = 0; i < m; ++i) {
    const std::uint64_t row = signs[i];
    const auto signed_entry = [&](int j) {
      const std::int32_t flip = static_cast<std::int32_t>(((row >> j) & 1u) << 31);
      return bits_as<V>(bits_as<Int>(column[j]) ^ flip);
    };
    V sum = signed_entry(0);
    for (int j = 1; j < m; ++j) sum += signed_entry(j);
    store(x + i * power + c, sum);
  }
}

static void rotate_row(const FakeQuantJob& job, const std::uint64_t* signs, float* row, int d) {
  const int power = job.had.power;
  if (d % kLanes == 0) {
    rotate_within_vectors(job, row, d);
    for (int begin = 0; begin < d && power > kLanes; begin += power) {
      for (int step = kLanes; step < power; step *= 2) {
        for (int i = begin; i < begin + power; i += 2 * step) {
          for (int k = i; k < i + step; k += kLanes) {
            const F a = load<F>(row + k), b = load<F>(row + k + step);
            store(row + k, a + b);
            store(row + k + step, a - b);
          }
        }
      }
    }
  } else {
    for (int begin = 0; begin < d; begin += power) rotate_run(job, row + begin);
  }
  for (int begin = 0; job.had.base > 1 && begin < d; begin += job.had.size) {
    int c = 0;
    for (; c + kLanes <= power; c += kLanes) combine_columns<F>(job, signs, row + begin, c);
    for (; c + 4 <= power; c += 4) combine_columns<Quad>(job, signs, row + begin, c);
    for (; c < power; ++c) combine_columns<float>(job, signs, row + begin, c);
  }
  const float scale = job.had_scale;
  for_lanes(d, [&](auto tag, int i) {
    using V = decltype(tag);
    store(row + i, load<V>(row + i) * scale);
  });
}

/// x of one token and head -> the encoder's input, in a scratch row.
static void to_frame(Run* run, int head, const float* x, float* row) {
  const FakeQuantJob& job = *run->job;
  const int d = run->d;
  const float* mean = job.mean ? job.mean + static_cast<std::int64_t>(head) * d : nullptr;
  if (job.block_order) {
    for (int p = 0; p < d; ++p) row[p] = x[job.block_order[p]];
    x = row;
  }
  for_lanes(d, [&](auto tag, int i) {
    using V = decltype(tag);
    V v = finite_or_zero_lanes<V>(load<V>(x + i), &run->counts);
    if (job.round_input_to_bf16) v = bf16_nearest<V>(v);
    if (mean) v = v - load<V>(mean + i);
    store(row + i, v);
  });
  if (job.had.size) rotate_row(job, job.paley, row, d);
  if (!mean && !job.had.size) return;
  for_lanes(d, [&](auto tag, int i) {  // sums may have left the range of fp32
    using V = decltype(tag);
    store(row + i, finite_or_zero_lanes<V>(load<V>(row + i), &run->counts));
  });
}

/// Decoded values in a scratch row -> the model's own coordinates.
static void from_frame(Run* run, int head, float* row, float* out) {
  const FakeQuantJob& job = *run->job;
  const int d = run->d;
  if (job.had.size) rotate_row(job, job.paley_transposed, row, d);
  const float* mean = job.mean ? job.mean + static_cast<std::int64_t>(head) * d : nullptr;
  float* const target = job.block_order ? row : out;
  for_lanes(d, [&](auto tag, int i) {
    using V = decltype(tag);
    const V v = load<V>(row + i);
    store(target + i, mean ? v + load<V>(mean + i) : v);
  });
  for (int p = 0; job.block_order && p < d; ++p) out[job.block_order[p]] = row[p];
}

struct MinOp {
  template <class V>
  KVRT_INLINE V call(V a, V b) { return minimum(a, b); }
  template <class V>
  V operator()(V a, V b) const { return call(a, b); }
};
struct MaxOp {
  template <class V>
  V operator()(V a, V b) const { return maximum(a, b); }
};

static void int_token(Run* run) {
  const FakeQuantJob& job = *run->job;
  const int n = job.group, n_groups = run->d / n * run->n;
  const float qmax = static_cast<float>((1 << job.bits) - 1);
  for (int g = 0; g < n_groups; ++g) {
    const float* x = run->rows + static_cast<std::int64_t>(g) * n;
    float min = x[0], max = x[0];
    int i = 0;
    if (n >= kLanes) {
      F lo = load<F>(x), hi = lo;
      for (i = kLanes; i + kLanes <= n; i += kLanes) {
        const F v = load<F>(x + i);
        lo = minimum(v, lo), hi = maximum(v, hi);
      }
      min = across(lo, MinOp{}), max = across(hi, MaxOp{});
    }
    for (; i < n; ++i) min = minimum(x[i], min), max = maximum(x[i], max);
    run->lo[g] = min, run->scale[g] = max;
  }
  for_lanes(n_groups, [&](auto tag, int g) {
    using V = decltype(tag);
    const Affine<V> p = affine_lanes<V>(load<V>(run->lo + g), load<V>(run->scale + g), qmax, &run->counts);
    store(run->lo + g, p.lo);
    store(run->scale + g, p.scale);
  });
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    const float lo = run->lo[g], scale = run->scale[g];
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, affine_round_trip<V>(load<V>(x + i), splat<V>(scale), splat<V>(lo), qmax));
    });
  }
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

KVRT_INLINE float group_absmax(const float* x, int n) {
  float absmax = 0;
  int i = 0;
  if (n >= kLanes) {
    F most = magnitude(load<F>(x));
    for (i = kLanes; i + kLanes <= n; i += kLanes) most = maximum(magnitude(load<F>(x + i)), most);
    absmax = across(most, MaxOp{});
  }
  for (; i < n; ++i) absmax = maximum(magnitude(x[i]), absmax);
  return absmax;
}

static void fp8_token(Run* run) {
  const int n = run->job->group, n_groups = run->d / n * run->n;
  for (int g = 0; g < n_groups; ++g) run->scale[g] = group_absmax(run->rows + static_cast<std::int64_t>(g) * n, n);
  for_lanes(n_groups, [&](auto tag, int g) {
    using V = decltype(tag);
    const V absmax = load<V>(run->scale + g), step = absmax / 448.0f;
    Tally::add_to(&run->counts.saturated, step > kF16Max);
    const V scale = f16_up<V>(maximum(step, splat<V>(kFp8ScaleFloor)));
    store(run->scale + g, absmax == 0.0f ? splat<V>(1.0f) : scale);
  });
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    const float scale = run->scale[g];
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      store(x + i, e4m3_round_trip<V>(load<V>(x + i), splat<V>(scale)));
    });
  }
}

static void fp8_static(Run* run, const StaticScale& s) {
  for_lanes(run->d * run->n, [&](auto tag, int i) {
    using V = decltype(tag);
    const V v = load<V>(run->rows + i);
    Tally::add_to(&run->counts.saturated, magnitude(v) > s.limit);
    store(run->rows + i, e4m3_round_trip<V>(v, splat<V>(s.scale)));
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

KVRT_INLINE float block_scale(Run* run, float d) {  // the stored fp16 of a llama.cpp block
  const float stored = f16_nearest<float>(d);
  Tally::add_to(&run->counts.saturated, magnitude(stored) > kF16Max);
  return minimum(maximum(stored, -kF16Max), kF16Max);
}
KVRT_INLINE float block_inverse(float d) {
  const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
  return magnitude(inverse) <= 0x1.FFFFFEp127f ? inverse : 0.0f;
}

static void q8_0_blocks(Run* run) {
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    const float d = group_absmax(x, 32) / 127.0f, inverse = block_inverse(d), stored = block_scale(run, d);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V y = load<V>(x + i) * inverse, a = magnitude(y), whole = truncated(a);
      const V code = a - whole >= 0.5f ? whole + 1.0f : whole;  // halves away from zero
      const V signed_code = bits_as<V>(bits_as<IntOf<V>>(code) | (bits_as<IntOf<V>>(y) & INT32_MIN)) + 0.0f;  // an integer has no -0
      store(x + i, signed_code * stored);
    });
  }
}

static void q4_0_blocks(Run* run) {
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    F lo = load<F>(x), hi = lo;
    for (int i = kLanes; i < 32; i += kLanes) lo = minimum(load<F>(x + i), lo), hi = maximum(load<F>(x + i), hi);
    const float min = across(lo, MinOp{}), max = across(hi, MaxOp{});
    float extreme = max > -min ? max : min;
    if (max == -min) {  // both signs reach it: the first one counts; a block of zeros has +0
      int i = 0;
      extreme = 0.0f;
      while (magnitude(x[i]) != max) ++i;
      if (max != 0.0f) extreme = x[i];
    }
    const float d = extreme / -8.0f, inverse = block_inverse(d), stored = block_scale(run, d);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V code = truncated(load<V>(x + i) * inverse + 8.5f);
      store(x + i, (minimum(code, splat<V>(15.0f)) - 8.0f) * stored);
    });
  }
}

static void round_trip(Run* run, const StaticScale& scale) {
  const Scheme& s = run->job->scheme;
  switch (s.format) {
    case Format::kBf16: case Format::kFp16: return exact16(run);
    case Format::kQ8_0: return q8_0_blocks(run);
    case Format::kQ4_0: return q4_0_blocks(run);
    case Format::kFp8E4m3: return s.granularity == Granularity::kToken ? fp8_token(run) : fp8_static(run, scale);
    default: return s.granularity == Granularity::kToken ? int_token(run) : int_channel(run);
  }
}

static void fake_quant_run(const FakeQuantJob& job, const StaticScale& scale, int head, std::int64_t first, int n, float* scratch,
                           EncodeCounters* counters) {
  Run run{};
  run.job = &job;
  run.n = n, run.d = job.head_dim;
  const std::int64_t d = job.head_dim, size = n * d;
  run.rows = scratch, run.lo = scratch + size, run.scale = scratch + 2 * size;
  for (int t = 0; t < n; ++t) to_frame(&run, head, job.x + (first + t) * job.x_stride + head * d, scratch + t * d);
  round_trip(&run, scale);
  for (int t = 0; t < n; ++t) from_frame(&run, head, scratch + t * d, job.out + (first + t) * job.out_stride + head * d);
  counters->non_finite += run.counts.non_finite.total();
  counters->saturated += run.counts.saturated.total();
  counters->floored += run.counts.floored.total();
}

}  // namespace
}  // namespace kvrt

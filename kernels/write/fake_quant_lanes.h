#pragma once
// The vector path of fake_quant, compiled once per instruction set (fake_quant_cpu.cc, _avx2.cc, _avx512.cc). Values only: no code is
// packed, but every operation is the one of kernels/codec, in the same order, so that results equal the page codecs bit for bit.
// No std:: and no shared inline function may be called here: the linker could merge a copy compiled for a wider instruction set.

#include "kernels/cpu/hadamard_rows.h"
#include "kernels/cpu/rounding.h"
#include "kernels/cpu/simd.h"
#include "kernels/write/fake_quant_job.h"

namespace kvrt {
namespace {

// --- rows in scratch: [n][D], dense ---

struct Run {
  const FakeQuantJob* job;
  float* rows;
  float* lo;     ///< per group: min, then the stored lo; fp8: absmax, then the scale
  float* scale;  ///< per group: max, then the stored scale
  int n, d;
  Counts counts;
};

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
  V operator()(V a, V b) const { return minimum(a, b); }
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

static void fp8_static(Run* run, const StaticScale& s) {
  const Format format = run->job->scheme.format;
  for_lanes(run->d * run->n, [&](auto tag, int i) {
    using V = decltype(tag);
    const V v = load<V>(run->rows + i);
    Tally::add_to(&run->counts.saturated, magnitude(v) > s.limit);
    store(run->rows + i, fp8_round_trip<V>(format, v, splat<V>(s.scale)));
  });
}

static void sint_token(Run* run) {
  const int n = run->job->group, n_groups = run->d / n * run->n;
  const float m = static_cast<float>((1 << (run->job->bits - 1)) - 1);
  for (int g = 0; g < n_groups; ++g) run->scale[g] = group_absmax(run->rows + static_cast<std::int64_t>(g) * n, n);
  for_lanes(n_groups, [&](auto tag, int g) {
    using V = decltype(tag);
    const V step = load<V>(run->scale + g) / m, raw = f16_up<V>(step);
    Tally::add_to(&run->counts.saturated, step > kF16Max);
    Tally::add_to(&run->counts.floored, raw < kScaleFloor);
    store(run->scale + g, maximum(raw, splat<V>(kScaleFloor)));
  });
  for (int g = 0; g < n_groups; ++g) {
    float* x = run->rows + static_cast<std::int64_t>(g) * n;
    const float scale = run->scale[g];
    for_lanes(n, [&](auto tag, int i) {
      using V = decltype(tag);
      const V y = minimum(maximum(load<V>(x + i) / scale, splat<V>(-m)), splat<V>(m));
      store(x + i, (nearest_integer(y) + 0.0f) * scale);  // an integer has no -0
    });
  }
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

/// q4_0 (half = 8) and q5_0 (half = 16).
static void signed_blocks(Run* run, float half) {
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
    const float d = extreme / -half, inverse = block_inverse(d), stored = block_scale(run, d);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V code = truncated(load<V>(x + i) * inverse + (half + 0.5f));
      store(x + i, (minimum(code, splat<V>(2.0f * half - 1.0f)) - half) * stored);
    });
  }
}

/// q4_1 (top = 15) and q5_1 (top = 31).
static void offset_blocks(Run* run, float top) {
  for (int begin = 0; begin < run->d * run->n; begin += 32) {
    float* x = run->rows + begin;
    F lo = load<F>(x), hi = lo;
    for (int i = kLanes; i < 32; i += kLanes) lo = minimum(load<F>(x + i), lo), hi = maximum(load<F>(x + i), hi);
    const float min = across(lo, MinOp{}), max = across(hi, MaxOp{});
    const float d = (max - min) / top, inverse = block_inverse(d);
    const float scale = block_scale(run, d), offset = block_scale(run, min);
    for_lanes(32, [&](auto tag, int i) {
      using V = decltype(tag);
      const V steps = maximum((load<V>(x + i) - min) * inverse, splat<V>(0.0f));
      const V code = minimum(truncated(steps + 0.5f), splat<V>(top));
      store(x + i, code * scale + offset);
    });
  }
}

static void round_trip(Run* run, const StaticScale& scale) {
  const Scheme& s = run->job->scheme;
  switch (s.format) {
    case Format::kBf16: case Format::kFp16: return exact16(run);
    case Format::kQ8_0: return q8_0_blocks(run);
    case Format::kQ4_0: return signed_blocks(run, 8.0f);
    case Format::kQ5_0: return signed_blocks(run, 16.0f);
    case Format::kQ4_1: return offset_blocks(run, 15.0f);
    case Format::kQ5_1: return offset_blocks(run, 31.0f);
    case Format::kSint8: case Format::kSint4: return sint_token(run);
    case Format::kFp8E4m3: case Format::kFp8E5m2:
      return s.granularity == Granularity::kToken ? fp8_token(run) : fp8_static(run, scale);
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

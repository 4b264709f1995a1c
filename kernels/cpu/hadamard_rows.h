#pragma once
// hadamard_rotate() of kernels/codec/hadamard.h on vector lanes: the same additions in the same order. Internal linkage, like simd.h.

#include "kernels/cpu/simd.h"
#include "kernels/write/fake_quant_job.h"

namespace kvrt {
namespace {

/// Butterflies within one run of job.had.power channels, for rows that vectors do not divide.
KVRT_INLINE void rotate_run(const FakeQuantJob& job, float* run) {
  for (int step = 1; step < job.had.power; step *= 2) {
    for (int i = 0; i < job.had.power; ++i) {
      if (i & step) continue;
      const float a = run[i], b = run[i + step];
      run[i] = a + b, run[i + step] = a - b;
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

/// In place, over the whole row; signs: job.paley, or job.paley_transposed for the inverse.
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

}  // namespace
}  // namespace kvrt

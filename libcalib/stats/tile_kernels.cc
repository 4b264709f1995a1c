#include "libcalib/stats/tile_kernels.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace calib::stats {
namespace {

// Vectors of the compiler (GCC and clang): wider ones than the CPU has are split by the compiler.
using F8 = float __attribute__((vector_size(32), aligned(4), may_alias));
using F16 = float __attribute__((vector_size(64), aligned(4), may_alias));
using I16 = std::int32_t __attribute__((vector_size(64), aligned(4), may_alias));
using D8 = double __attribute__((vector_size(64), aligned(8), may_alias));

#define CALIB_INLINE [[gnu::always_inline]] inline

CALIB_INLINE const F8& f8(const float* p) { return *reinterpret_cast<const F8*>(p); }
CALIB_INLINE const F16& f16(const float* p) { return *reinterpret_cast<const F16*>(p); }
CALIB_INLINE const I16& i16(const float* p) { return *reinterpret_cast<const I16*>(p); }
CALIB_INLINE const D8& d8(const double* p) { return *reinterpret_cast<const D8*>(p); }
CALIB_INLINE F16& f16(float* p) { return *reinterpret_cast<F16*>(p); }
CALIB_INLINE D8& d8(double* p) { return *reinterpret_cast<D8*>(p); }

CALIB_INLINE void sum_extrema(const float* x, int n, std::size_t stride, int dim, double* sum, float* min, float* max) {
  for (int c = 0; c < dim; c += kLanes) {
    D8 s0 = {}, s1 = {};
    F16 lo = f16(x + c), hi = lo;
    for (int r = 0; r < n; ++r) {
      const float* row = x + static_cast<std::size_t>(r) * stride + c;
      const F16 v = f16(row);
      lo = v < lo ? v : lo;
      hi = v > hi ? v : hi;
      s0 += __builtin_convertvector(f8(row), D8);
      s1 += __builtin_convertvector(f8(row + 8), D8);
    }
    d8(sum + c) = s0;
    d8(sum + c + 8) = s1;
    f16(min + c) = lo;
    f16(max + c) = hi;
  }
}

CALIB_INLINE void power_sums(const float* x, int n, std::size_t stride, int dim, const double* mean, double* o1, double* o2,
                             double* o3, double* o4) {
  for (int c = 0; c < dim; c += 8) {
    const D8 m = d8(mean + c);
    D8 s1 = {}, s2 = {}, s3 = {}, s4 = {};
    for (int r = 0; r < n; ++r) {
      const D8 d = __builtin_convertvector(f8(x + static_cast<std::size_t>(r) * stride + c), D8) - m;
      const D8 d2 = d * d;
      s1 += d;
      s2 += d2;
      s3 += d2 * d;
      s4 += d2 * d2;
    }
    d8(o1 + c) = s1;
    d8(o2 + c) = s2;
    d8(o3 + c) = s3;
    d8(o4 + c) = s4;
  }
}

// Blocks of 4 x 16 products: four broadcast rows of the left factor against one vector of the right one.
CALIB_INLINE void gram_upper(const float* x, int n, std::size_t stride, int dim, int padded_dim, double* sum) {
  for (int i = 0; i < dim; i += 4)
    for (int j = i / kLanes * kLanes; j < padded_dim; j += kLanes) {
      F16 a0 = {}, a1 = {}, a2 = {}, a3 = {};
      for (int r = 0; r < n; ++r) {
        const float* row = x + static_cast<std::size_t>(r) * stride;
        const F16 v = f16(row + j);
        a0 += row[i] * v;
        a1 += row[i + 1] * v;
        a2 += row[i + 2] * v;
        a3 += row[i + 3] * v;
      }
      const F16 block[4] = {a0, a1, a2, a3};
      for (int u = 0; u < 4 && i + u < dim; ++u) {
        double* out = sum + static_cast<std::size_t>(i + u) * static_cast<std::size_t>(dim);
        for (int w = std::max(0, i + u - j); w < kLanes && j + w < dim; ++w) out[j + w] += static_cast<double>(block[u][w]);
      }
    }
}

// ln m for m in [sqrt(1/2), sqrt 2) from 2 atanh((m - 1) / (m + 1)); the dropped term is below 3e-9 relative.
CALIB_INLINE void entropy_sums(const float* p, std::size_t n, double* entropy, double* sum_squares) {
  constexpr std::size_t kRun = 16 * kLanes;  // fp32 sums stay this short
  double h = 0, sq = 0;
  alignas(64) float tail[kRun];
  for (std::size_t first = 0; first < n; first += kRun) {
    const float* run = p + first;
    if (n - first < kRun) {
      std::memset(tail, 0, sizeof tail);
      std::memcpy(tail, run, (n - first) * sizeof(float));
      run = tail;
    }
    F16 hs = {}, qs = {};
    for (std::size_t i = 0; i < kRun; i += kLanes) {
      const F16 v = f16(run + i);
      const I16 bits = i16(run + i) - 0x3F3504F3;  // sqrt(1/2): exponent counted from there
      const I16 exponent = bits >> 23;
      const I16 mantissa_bits = (bits & 0x7FFFFF) + 0x3F3504F3;
      const F16 m = (F16)mantissa_bits;
      const F16 s = (m - 1.0f) / (m + 1.0f), z = s * s;
      const F16 series = 1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9))));
      const F16 ln = __builtin_convertvector(exponent, F16) * 0.693147180559945f + 2.0f * s * series;
      hs -= v * ln;
      qs += v * v;
    }
    for (int w = 0; w < kLanes; ++w) {
      h += static_cast<double>(hs[w]);
      sq += static_cast<double>(qs[w]);
    }
  }
  *entropy = h;
  *sum_squares = sq;
}

// e^x for x <= 0 from 2^k 2^f, |f| <= 1/2, f's series to the seventh power: 1e-7 relative; x below -87 gives 2^-126. NaN stays.
CALIB_INLINE void exp_of_negative(F16& x) {
  constexpr float kRound = 0x1.8p23f;  // added and taken off again: the nearest integer
  F16 t = x * 1.44269504088896341f;
  t = t < -126.0f ? (F16){} - 126.0f : t;
  const F16 k = (t + kRound) - kRound, f = (t - k) * 0.693147180559945f;
  const F16 series =
      1.0f + f * (1.0f + f * (1.0f / 2 + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720 + f * (1.0f / 5040)))))));
  const I16 exponent = (__builtin_convertvector(k, I16) + 127) << 23;
  x = series * (F16)exponent;
}

CALIB_INLINE void softmax(float* x, std::size_t n) {
  constexpr std::size_t kRun = 16 * kLanes;  // fp32 sums stay this short
  float largest = x[0];
  std::size_t i = 0;
  if (n >= kLanes) {
    F16 high = f16(x);
    for (i = kLanes; i + kLanes <= n; i += kLanes) high = f16(x + i) > high ? f16(x + i) : high;
    for (int w = 0; w < kLanes; ++w) largest = std::max(largest, high[w]);
  }
  for (; i < n; ++i) largest = std::max(largest, x[i]);
  double sum = 0;
  for (std::size_t first = 0; first < n; first += kRun) {
    const std::size_t end = std::min(n, first + kRun);
    F16 run = {};
    for (i = first; i + kLanes <= end; i += kLanes) {
      F16 p = f16(x + i) - largest;
      exp_of_negative(p);
      f16(x + i) = p;
      run += p;
    }
    if (i < end) {
      alignas(64) float tail[kLanes] = {};
      std::memcpy(tail, x + i, (end - i) * sizeof(float));
      F16 p = f16(tail) - largest;
      exp_of_negative(p);
      for (std::size_t w = 0; i < end; ++i, ++w) run[w] += x[i] = p[w];
    }
    for (int w = 0; w < kLanes; ++w) sum += static_cast<double>(run[w]);
  }
  const float scale = static_cast<float>(1.0 / sum);
  for (i = 0; i + kLanes <= n; i += kLanes) f16(x + i) = f16(x + i) * scale;
  for (; i < n; ++i) x[i] *= scale;
}

struct Kernels {
  void (*sum_extrema)(const float*, int, std::size_t, int, double*, float*, float*);
  void (*power_sums)(const float*, int, std::size_t, int, const double*, double*, double*, double*, double*);
  void (*gram_upper)(const float*, int, std::size_t, int, int, double*);
  void (*entropy_sums)(const float*, std::size_t, double*, double*);
  void (*softmax)(float*, std::size_t);
};

// One set of entry points per instruction set; the bodies above are inlined into each.
#define CALIB_KERNEL_SET(name, attribute)                                                                                      \
  attribute void sum_extrema_##name(const float* x, int n, std::size_t s, int d, double* sum, float* lo, float* hi) {          \
    sum_extrema(x, n, s, d, sum, lo, hi);                                                                                      \
  }                                                                                                                            \
  attribute void power_sums_##name(const float* x, int n, std::size_t s, int d, const double* m, double* a, double* b,         \
                                   double* c, double* e) {                                                                     \
    power_sums(x, n, s, d, m, a, b, c, e);                                                                                     \
  }                                                                                                                            \
  attribute void gram_upper_##name(const float* x, int n, std::size_t s, int d, int p, double* sum) {                          \
    gram_upper(x, n, s, d, p, sum);                                                                                            \
  }                                                                                                                            \
  attribute void entropy_sums_##name(const float* p, std::size_t n, double* h, double* q) { entropy_sums(p, n, h, q); }        \
  attribute void softmax_##name(float* x, std::size_t n) { softmax(x, n); }                                                    \
  constexpr Kernels k##name = {sum_extrema_##name, power_sums_##name, gram_upper_##name, entropy_sums_##name, softmax_##name};

CALIB_KERNEL_SET(Baseline, )
#if defined(__x86_64__)
CALIB_KERNEL_SET(Avx2, __attribute__((target("avx2"))))
CALIB_KERNEL_SET(Avx512, __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw"))))
#endif

const Kernels& kernels() {
#if defined(__x86_64__)
  static const Kernels& chosen = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                         __builtin_cpu_supports("avx512dq")
                                     ? kAvx512
                                 : __builtin_cpu_supports("avx2") ? kAvx2
                                                                  : kBaseline;
  return chosen;
#else
  return kBaseline;
#endif
}

}  // namespace

Tile::Tile(int dim)
    : dim_(dim), padded_dim_((dim + kLanes - 1) / kLanes * kLanes),
      // An odd number of cache lines a row: walking down one channel then uses all sets of the cache.
      row_stride_(static_cast<std::size_t>(padded_dim_ + (padded_dim_ / kLanes % 2 == 0 ? kLanes : 0))),
      storage_(row_stride_ * kTileRows + kLanes) {
  const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
  data_ = storage_.data() + (64 - address % 64) % 64 / sizeof(float);
}

void Tile::load(const float* x, int n_rows, std::int64_t row_stride, const float* shift) {
  n_rows_ = n_rows;
  for (int r = 0; r < n_rows; ++r) {
    const float* from = x + r * row_stride;
    float* to = data_ + static_cast<std::size_t>(r) * row_stride_;
    if (shift == nullptr)
      std::memcpy(to, from, static_cast<std::size_t>(dim_) * sizeof(float));
    else
      for (int c = 0; c < dim_; ++c) to[c] = from[c] - shift[c];
  }
}

void tile_sum_extrema(const Tile& tile, double* sum, float* min, float* max) {
  kernels().sum_extrema(tile.data(), tile.n_rows(), tile.row_stride(), tile.padded_dim(), sum, min, max);
}

void tile_power_sums(const Tile& tile, const double* mean, double* s1, double* s2, double* s3, double* s4) {
  kernels().power_sums(tile.data(), tile.n_rows(), tile.row_stride(), tile.padded_dim(), mean, s1, s2, s3, s4);
}

void tile_gram_upper(const Tile& tile, double* sum) {
  kernels().gram_upper(tile.data(), tile.n_rows(), tile.row_stride(), tile.dim(), tile.padded_dim(), sum);
}

void row_entropy(const float* p, std::size_t n, double* entropy, double* sum_squares) {
  kernels().entropy_sums(p, n, entropy, sum_squares);
}

void row_softmax(float* x, std::size_t n) { kernels().softmax(x, n); }

}  // namespace calib::stats

#pragma once
// Vectors of fp32 as wide as the instruction set the including file is compiled for, by compiler vector extensions (GCC 12, clang 14).
// Everything here has internal linkage: the same names are compiled once per instruction set, and must not be merged by the linker.
// Every operation is one IEEE operation per lane; the scalar type `float` has the same functions, for what is left over at the end
// of a row.

#include <cstdint>

namespace kvrt {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <int kN>
struct VectorOf;  // explicit specialisations: the attribute does not accept template arguments everywhere
template <>
struct VectorOf<16> {
  typedef float F __attribute__((vector_size(64)));
  typedef std::int32_t I __attribute__((vector_size(64)));
};
template <>
struct VectorOf<8> {
  typedef float F __attribute__((vector_size(32)));
  typedef std::int32_t I __attribute__((vector_size(32)));
};
template <>
struct VectorOf<4> {
  typedef float F __attribute__((vector_size(16)));
  typedef std::int32_t I __attribute__((vector_size(16)));
};
using F = VectorOf<kLanes>::F;
using I = VectorOf<kLanes>::I;
using Quad = VectorOf<4>::F;

/// Lanes and matching integer type of float, Quad, F.
template <int kBytes>
struct LanesOf {
  static constexpr int n = kBytes / 4;
  using Int = typename VectorOf<n>::I;
};
template <>
struct LanesOf<4> {
  static constexpr int n = 1;
  using Int = std::int32_t;
};
template <class V>
using IntOf = typename LanesOf<sizeof(V)>::Int;

#define KVRT_INLINE static inline __attribute__((always_inline))

template <class V>
KVRT_INLINE V load(const float* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
KVRT_INLINE void store(float* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}
template <class To, class From>
KVRT_INLINE To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From), "same width");
  To out;
  __builtin_memcpy(&out, &v, sizeof v);
  return out;
}
/// All lanes x.
template <class V>
KVRT_INLINE V splat(float x) {
  if constexpr (LanesOf<sizeof(V)>::n == 1) return x;
  else return x - V{};  // x - 0 keeps the sign of zero
}
template <class V>
KVRT_INLINE V minimum(V a, V b) { return a < b ? a : b; }
template <class V>
KVRT_INLINE V maximum(V a, V b) { return a > b ? a : b; }
template <class V>
KVRT_INLINE V magnitude(V v) { return bits_as<V>(bits_as<IntOf<V>>(v) & 0x7FFFFFFF); }
/// Nearest integer, ties to even. Requires |v| < 2^22.
template <class V>
KVRT_INLINE V nearest_integer(V v) { return (v + 0x1.8p23f) - 0x1.8p23f; }
/// Toward zero. Requires |v| < 2^31.
template <class V>
KVRT_INLINE V truncated(V v) {
  if constexpr (LanesOf<sizeof(V)>::n == 1) return static_cast<float>(static_cast<std::int32_t>(v));
  else return __builtin_convertvector(__builtin_convertvector(v, IntOf<V>), V);
}
/// Reduces all lanes with op, halving the vector.
template <class V, class Op>
KVRT_INLINE float across(V v, Op op) {
  if constexpr (LanesOf<sizeof(V)>::n == 4) {
    return op(op(v[0], v[2]), op(v[1], v[3]));
  } else {
    using Half = typename VectorOf<LanesOf<sizeof(V)>::n / 2>::F;
    Half low, high;
    __builtin_memcpy(&low, &v, sizeof low);
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
    return across(op(low, high), op);
  }
}

/// Counts lanes where a condition held.
struct Tally {
  I lanes = {};
  std::int64_t single = 0;
  KVRT_INLINE void add_to(Tally* t, I mask) { t->lanes -= mask; }
  KVRT_INLINE void add_to(Tally* t, bool condition) { t->single += condition; }
  std::int64_t total() const {
    std::int64_t sum = single;
    for (int i = 0; i < kLanes; ++i) sum += lanes[i];
    return sum;
  }
};

/// body(V{}, i) for whole vectors F of [0, n), then body(float{}, i) for the rest.
template <class Body>
KVRT_INLINE void for_lanes(int n, Body body) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) body(F{}, i);
  for (; i < n; ++i) body(float{}, i);
}

/// Butterfly at distance kStep inside one vector: lane i becomes v[i] + v[i ^ kStep], or v[i ^ kStep] - v[i] where i has that bit.
template <int kStep>
KVRT_INLINE F butterfly(F v) {
  I sign, partner;
  for (int i = 0; i < kLanes; ++i) sign[i] = (i & kStep) ? INT32_MIN : 0, partner[i] = i ^ kStep;
#if defined(__clang__)
  F swapped;
  for (int i = 0; i < kLanes; ++i) swapped[i] = v[i ^ kStep];
#else
  const F swapped = __builtin_shuffle(v, partner);
#endif
  return swapped + bits_as<F>(bits_as<I>(v) ^ sign);
}

}  // namespace
}  // namespace kvrt

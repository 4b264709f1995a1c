#pragma once
// Rotary position embedding of one row, the same bits on every backend at any position: cosine and sine come from two fp32 tables,
// each computed in double on the host - positions 64 r, with the attention factor in it, and 0 ... 127 - joined by one complex product
// whose operations round one by one (no contraction).
// Source: Su et al., arXiv 2104.09864; attention factor: Peng et al., arXiv 2309.00071 (YaRN).

#include <cstdint>

#include "kernels/core/host_device.h"

namespace kvrt {

inline constexpr std::int64_t kRopeCoarse = 64;  ///< distance of two positions of the coarse table
inline constexpr std::int64_t kRopeFine = 128;   ///< offsets of the fine table: those inside one page

/// Cosines, then sines: coarse [n_coarse, 2, n_pairs], fine [kRopeFine, 2, n_pairs]. n_pairs 0: no rotation.
struct RopeTables {
  const float* coarse = nullptr;
  const float* fine = nullptr;
  int n_pairs = 0;           ///< rotary_dim / 2; channels behind the rotated ones stay
  bool interleaved = false;  ///< pairs (2i, 2i + 1), else (i, i + n_pairs)
};

/// Attention factor times (cos, sin) of pair i. Requires: 0 <= position < kRopeCoarse * n_coarse.
KVRT_HOST_DEVICE inline void rope_factors(const RopeTables& t, std::int64_t position, int i, float* cos, float* sin) {
  const float* a = t.coarse + position / kRopeCoarse * 2 * t.n_pairs;
  const float* b = t.fine + position % kRopeCoarse * 2 * t.n_pairs;
  const float cc = a[i] * b[i], ss = a[t.n_pairs + i] * b[t.n_pairs + i], cs = a[i] * b[t.n_pairs + i], sc = a[t.n_pairs + i] * b[i];
  *cos = cc - ss;
  *sin = sc + cs;
}

KVRT_HOST_DEVICE inline int rope_first(const RopeTables& t, int i) { return t.interleaved ? 2 * i : i; }
KVRT_HOST_DEVICE inline int rope_second(const RopeTables& t, int i) { return t.interleaved ? 2 * i + 1 : i + t.n_pairs; }

/// Both channels of pair i of x <- R x.
KVRT_HOST_DEVICE inline void rope_rotate_pair(const RopeTables& t, std::int64_t position, int i, float* x) {
  float cos, sin;
  rope_factors(t, position, i, &cos, &sin);
  float* first = x + rope_first(t, i);
  float* second = x + rope_second(t, i);
  const float ac = *first * cos, bs = *second * sin, as = *first * sin, bc = *second * cos;
  *first = ac - bs;
  *second = as + bc;
}
/// x <- R x at a position, in place. x: [D], D >= 2 n_pairs.
KVRT_HOST_DEVICE inline void rope_rotate(const RopeTables& t, std::int64_t position, float* x) {
  for (int i = 0; i < t.n_pairs; ++i) rope_rotate_pair(t, position, i, x);
}

}  // namespace kvrt

#pragma once
// Rotary position embedding of one row, the same bits on every backend at any position: cosine and sine come from two fp32 tables,
// each computed in double on the host - positions 64 r, with the attention factor in it, and 0 ... 63 - joined by one complex product
// whose operations round one by one (no contraction).
// Source: Su et al., arXiv 2104.09864; attention factor: Peng et al., arXiv 2309.00071 (YaRN).

#include <cstdint>

#include "kernels/core/host_device.h"

namespace kvrt {

inline constexpr std::int64_t kRopeFine = 64;  ///< positions of the fine table

/// Tables hold pairs (cos, sin): coarse [n_coarse, n_pairs, 2], fine [kRopeFine, n_pairs, 2]. n_pairs 0: no rotation.
struct RopeTables {
  const float* coarse = nullptr;
  const float* fine = nullptr;
  int n_pairs = 0;           ///< rotary_dim / 2; channels behind the rotated ones stay
  bool interleaved = false;  ///< pairs (2i, 2i + 1), else (i, i + n_pairs)
};

/// Attention factor times (cos, sin) of pair i. Requires: 0 <= position < kRopeFine * n_coarse.
KVRT_HOST_DEVICE inline void rope_factors(const RopeTables& t, std::int64_t position, int i, float* cos, float* sin) {
  const float* a = t.coarse + (position / kRopeFine * t.n_pairs + i) * 2;
  const float* b = t.fine + (position % kRopeFine * t.n_pairs + i) * 2;
  const float cc = a[0] * b[0], ss = a[1] * b[1], cs = a[0] * b[1], sc = a[1] * b[0];
  *cos = cc - ss;
  *sin = sc + cs;
}

KVRT_HOST_DEVICE inline int rope_first(const RopeTables& t, int i) { return t.interleaved ? 2 * i : i; }
KVRT_HOST_DEVICE inline int rope_second(const RopeTables& t, int i) { return t.interleaved ? 2 * i + 1 : i + t.n_pairs; }

/// x <- R x at a position, in place. x: [D], D >= 2 n_pairs.
KVRT_HOST_DEVICE inline void rope_rotate(const RopeTables& t, std::int64_t position, float* x) {
  for (int i = 0; i < t.n_pairs; ++i) {
    float cos, sin;
    rope_factors(t, position, i, &cos, &sin);
    float* first = x + rope_first(t, i);
    float* second = x + rope_second(t, i);
    const float ac = *first * cos, bs = *second * sin, as = *first * sin, bc = *second * cos;
    *first = ac - bs;
    *second = as + bc;
  }
}

}  // namespace kvrt

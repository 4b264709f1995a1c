#pragma once
// Orthonormal Hadamard rotation of a row: H = (Paley matrix of order m) (x) (Sylvester matrix of order 2^k), scaled by 1/sqrt(m 2^k).
// Order of operations (fixed, so that all backends agree bit for bit): butterflies (a + b, a - b) at distance 1, 2, 4 ... within
// each run of 2^k channels; then for m > 1 the m runs are combined, adding run 0, 1, ... m - 1 in turn; then one multiplication.
// Paley I (m = 12, 20, 60; q = m - 1): row 0 is all ones, column 0 below is -1, the rest is I + chi(i - j).
// Paley II (m = 28, 36; q = m/2 - 1): the symmetric conference matrix C of order q + 1, C (x) [1 1; 1 -1] + I (x) [1 -1; -1 -1].

#include <cmath>
#include <cstdint>

#include "kernels/codec/hadamard_order.h"

namespace kvrt {

inline constexpr int kMaxPaley = 60;

/// Bit r set: r is a non-zero square modulo q.
KVRT_HOST_DEVICE constexpr std::uint64_t quadratic_residues(int q) {
  std::uint64_t mask = 0;
  for (int i = 1; i < q; ++i) mask |= std::uint64_t{1} << (i * i % q);
  return mask;
}

/// Entry (i, j) of the Paley matrix of order m: true for -1.
KVRT_HOST_DEVICE constexpr bool paley_negative(int m, int i, int j) {
  if (m == 28 || m == 36) {
    const int q = m / 2 - 1, a = i / 2, b = j / 2;
    const bool both_second = (i & 1) && (j & 1), any_second = (i & 1) || (j & 1);
    if (a == b) return any_second;  // C is 0 here: the identity's block [1 -1; -1 -1]
    const bool c_negative = a != 0 && b != 0 && !((quadratic_residues(q) >> ((a - b + q) % q)) & 1u);
    return c_negative != both_second;
  }
  const int q = m - 1;
  if (i == 0) return false;
  if (j == 0) return true;
  return i != j && !((quadratic_residues(q) >> ((i - j + q) % q)) & 1u);
}

/// Row i of the Paley matrix of order m (of its transpose), bit j set where the entry is -1.
KVRT_HOST_DEVICE inline std::uint64_t paley_row(int m, int i, bool transposed) {
  std::uint64_t row = 0;
  for (int j = 0; j < m; ++j) {
    if (transposed ? paley_negative(m, j, i) : paley_negative(m, i, j)) row |= std::uint64_t{1} << j;
  }
  return row;
}

KVRT_HOST_DEVICE inline float hadamard_scale(const HadamardOrder& order) {
  return static_cast<float>(1.0 / sqrt(static_cast<double>(order.size)));
}

/// x <- H x, or H^T x with `inverse`, in each run of order.size channels. Requires: order.size > 0 divides n.
KVRT_HOST_DEVICE inline void hadamard_rotate(const HadamardOrder& order, float* x, int n, bool inverse) {
  const float scale = hadamard_scale(order);
  for (int begin = 0; begin < n; begin += order.power) {
    float* run = x + begin;
    for (int step = 1; step < order.power; step *= 2) {
      for (int i = 0; i < order.power; ++i) {
        if (i & step) continue;
        const float a = run[i], b = run[i + step];
        run[i] = a + b, run[i + step] = a - b;
      }
    }
  }
  std::uint64_t rows[kMaxPaley];
  for (int i = 0; order.base > 1 && i < order.base; ++i) rows[i] = paley_row(order.base, i, inverse);
  for (int begin = 0; order.base > 1 && begin < n; begin += order.size) {
    for (int c = 0; c < order.power; ++c) {
      float column[kMaxPaley];
      for (int j = 0; j < order.base; ++j) column[j] = x[begin + j * order.power + c];
      for (int i = 0; i < order.base; ++i) {
        const std::uint64_t row = rows[i];
        float sum = (row & 1u) ? -column[0] : column[0];
        for (int j = 1; j < order.base; ++j) sum += ((row >> j) & 1u) ? -column[j] : column[j];
        x[begin + i * order.power + c] = sum;
      }
    }
  }
  for (int i = 0; i < n; ++i) x[i] *= scale;
}

}  // namespace kvrt

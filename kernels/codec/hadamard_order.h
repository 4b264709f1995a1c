#pragma once
// Which Hadamard matrix a row of D channels is rotated with: D = blocks * size, size = m * 2^k, m in {1, 12, 20, 28, 36, 60}.

#include "kernels/core/host_device.h"

namespace kvrt {

struct HadamardOrder {
  int base = 1;      ///< m: order of the Paley factor, 1 = none
  int power = 0;     ///< 2^k: order of the Sylvester factor; 0 = no matrix is offered
  int size = 0;      ///< m * 2^k channels turned together; 0 = no matrix is offered
};

/// One matrix over the whole row where its order exists, else blocks of the largest power of two (at least 8) that divides it.
KVRT_HOST_DEVICE constexpr HadamardOrder hadamard_order(int head_dim) {
  int power = 1;
  while (head_dim > 0 && head_dim % (power * 2) == 0) power *= 2;
  const int odd = head_dim > 0 ? head_dim / power : 0;
  if (odd == 1) return {1, power, head_dim};
  // m = 4 * odd: the Paley orders 12, 20, 28, 36, 60
  if (power >= 4 && (odd == 3 || odd == 5 || odd == 7 || odd == 9 || odd == 15)) return {4 * odd, power / 4, head_dim};
  if (power >= 8) return {1, power, power};
  return {};
}

/// Rotation of llama.cpp's quantised caches: V in blocks of 64, K in blocks of the largest 64 * 2^k that divides head_dim.
KVRT_HOST_DEVICE constexpr HadamardOrder llamacpp_hadamard_order(int head_dim, bool is_key) {
  if (head_dim <= 0 || head_dim % 64 != 0) return {};
  int size = 64;
  while (is_key && head_dim % (size * 2) == 0) size *= 2;
  return {1, size, size};
}

}  // namespace kvrt

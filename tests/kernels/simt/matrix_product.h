#pragma once
// m16n8k16 as the executor computes it, from the words of all 32 lanes. Layout of the fragments: kernels/cuda/mma.h.

#include <cstdint>

#include "tests/kernels/simt/executor.h"

namespace kvrt::simt {

enum class OperandType { kF16, kBf16 };

/// words: [32][stride], of each lane a0..a3 b0 b1. c: the four sums of `lane`, updated.
void multiply_fragments(const std::uint32_t* words, int stride, int lane, OperandType type, Accumulation accumulation, float c[4]);

/// c + Σ x y over 16 products in one of the two accumulation modes.
float accumulate_products(float c, const float x[16], const float y[16], Accumulation accumulation);

}  // namespace kvrt::simt

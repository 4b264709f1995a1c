#include "tests/kernels/simt/matrix_product.h"

#include <algorithm>
#include <cmath>

#include "kernels/codec/half.h"

namespace kvrt::simt {
namespace {

constexpr int kBlock = 8;        // products added at once
constexpr int kKeptBits = 24;    // of each term, counted from the top bit of the largest

float half_of(std::uint32_t pair, int index, OperandType type) {
  const auto bits = static_cast<std::uint16_t>(pair >> (16 * index));
  return type == OperandType::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

float add_truncated(float c, const float* x, const float* y) {
  double terms[kBlock + 1];
  terms[kBlock] = c;
  double largest = std::fabs(terms[kBlock]), plain_sum = terms[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    terms[i] = static_cast<double>(x[i]) * static_cast<double>(y[i]);
    largest = std::max(largest, std::fabs(terms[i]));
    plain_sum += terms[i];
  }
  if (!std::isfinite(plain_sum)) return static_cast<float>(plain_sum);
  if (largest == 0) return 0.0f;
  const int quantum = std::ilogb(largest) - (kKeptBits - 1);
  double sum = 0;
  for (const double t : terms) sum += std::ldexp(std::trunc(std::ldexp(t, -quantum)), quantum);
  if (sum == 0) return 0.0f;
  const int unit = std::ilogb(sum) - 23;
  return static_cast<float>(std::ldexp(std::trunc(std::ldexp(sum, -unit)), unit));
}

}  // namespace

float accumulate_products(float c, const float x[16], const float y[16], Accumulation accumulation) {
  if (accumulation == Accumulation::kTruncating) return add_truncated(add_truncated(c, x, y), x + kBlock, y + kBlock);
  double sum = c;
  for (int k = 0; k < 16; ++k) sum += static_cast<double>(x[k]) * static_cast<double>(y[k]);
  return static_cast<float>(sum);
}

void multiply_fragments(const std::uint32_t* words, int stride, int lane, OperandType type, Accumulation accumulation, float c[4]) {
  const int g = lane / 4, q = lane % 4;
  float a[2][16], b[2][16];
  for (int k = 0; k < 16; ++k) {
    const int quad_lane = (k % 8) / 2, upper = k / 8;
    for (int r = 0; r < 2; ++r) a[r][k] = half_of(words[(4 * g + quad_lane) * stride + r + 2 * upper], k % 2, type);
    for (int n = 0; n < 2; ++n) b[n][k] = half_of(words[(4 * (2 * q + n) + quad_lane) * stride + 4 + upper], k % 2, type);
  }
  for (int i = 0; i < 4; ++i) c[i] = accumulate_products(c[i], a[i / 2], b[i % 2], accumulation);
}

}  // namespace kvrt::simt

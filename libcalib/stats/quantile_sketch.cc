#include "libcalib/stats/quantile_sketch.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "libcalib/base/error.h"

namespace calib::stats {
namespace {

constexpr int kMinExponent = 127 - 24;    // biased exponent of 2^-24: the smallest with counters of its own
constexpr int kSignOctaves = 256;         // octaves of one sign
constexpr int kNegative = kSignOctaves;   // octave number of the first negative octave
constexpr std::uint64_t kMaxCount = 0xFFFFFFFFull;

// Rank of METHODS.md 3, 1-based. The small subtrahend keeps p n = 99.00000000000001 at rank 99.
std::uint64_t rank_of(double p, std::uint64_t n) {
  const double rank = std::ceil(p * static_cast<double>(n) - 1e-9);
  return std::clamp<std::uint64_t>(rank <= 1.0 ? 1 : static_cast<std::uint64_t>(rank), 1, n);
}

}  // namespace

QuantileSketch::QuantileSketch(int mantissa_bits) : mantissa_bits_(mantissa_bits) {
  CALIB_CHECK(mantissa_bits >= 0 && mantissa_bits <= kMaxMantissaBits);
}

std::size_t QuantileSketch::block_at(int octave) {
  if (block_of_octave_.empty()) {
    // Block 0 takes every value below 2^-24 of either sign.
    block_of_octave_.assign(kOctaves, -1);
    for (int sign = 0; sign < 2; ++sign)
      std::fill_n(block_of_octave_.begin() + sign * kSignOctaves, kMinExponent, std::int16_t{0});
    counters_.assign(counters_per_octave(), 0);
  }
  std::int16_t& block = block_of_octave_[static_cast<std::size_t>(octave)];
  if (block < 0) {
    block = static_cast<std::int16_t>(counters_.size() >> mantissa_bits_);
    counters_.resize(counters_.size() + counters_per_octave(), 0);
  }
  return static_cast<std::size_t>(block) << mantissa_bits_;
}

void QuantileSketch::count_more(std::uint64_t n) {
  if (n > kMaxCount || count_ > kMaxCount - n)
    fail(ErrorKind::kNumeric, "quantile sketch", "more than {} values in one channel; its 32-bit counters would overflow", kMaxCount);
  count_ += n;
}

bool QuantileSketch::is_octave(int octave) {
  const int exponent = octave % kSignOctaves;
  return octave >= 0 && octave < kOctaves && exponent >= kMinExponent && exponent < 255;
}

std::uint64_t QuantileSketch::zeros() const {
  std::uint64_t total = 0;
  if (!counters_.empty())
    for (std::uint32_t i = 0; i < counters_per_octave(); ++i) total += counters_[i];
  return total;
}

void QuantileSketch::add(float x) { add_strided(&x, 1, 1); }

void QuantileSketch::add_strided(const float* x, std::size_t n, std::size_t stride) {
  if (n == 0) return;
  count_more(n);
  block_at(0);
  const int shift = 23 - mantissa_bits_;
  const std::uint32_t mask = counters_per_octave() - 1;
  const std::int16_t* blocks = block_of_octave_.data();
  std::uint32_t* counters = counters_.data();
  for (std::size_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(x[i * stride]);
    std::int32_t block = blocks[bits >> 23];
    if (block < 0) [[unlikely]] {
      block = static_cast<std::int32_t>(block_at(static_cast<int>(bits >> 23)) >> mantissa_bits_);
      counters = counters_.data();
    }
    ++counters[(static_cast<std::uint32_t>(block) << mantissa_bits_) + ((bits >> shift) & mask)];
  }
}

void QuantileSketch::merge(const QuantileSketch& other) {
  CALIB_CHECK(mantissa_bits_ == other.mantissa_bits_);
  for (const Octave& octave : other.octaves()) add_octave(octave.octave, octave.counts);
  add_zeros(other.zeros());
}

void QuantileSketch::add_octave(int octave, std::span<const std::uint32_t> counts) {
  CALIB_CHECK(is_octave(octave) && counts.size() == counters_per_octave());
  std::uint64_t total = 0;
  for (const std::uint32_t c : counts) total += c;
  if (total == 0) return;
  count_more(total);
  const std::size_t first = block_at(octave);
  for (std::size_t i = 0; i < counts.size(); ++i) counters_[first + i] += counts[i];
}

void QuantileSketch::add_zeros(std::uint64_t n) {
  if (n == 0) return;
  count_more(n);
  const std::size_t first = block_at(0);
  counters_[first] += static_cast<std::uint32_t>(n);
}

std::vector<QuantileSketch::Octave> QuantileSketch::octaves() const {
  std::vector<Octave> out;
  for (int octave = 0; octave < static_cast<int>(block_of_octave_.size()); ++octave) {
    const std::int16_t block = block_of_octave_[static_cast<std::size_t>(octave)];
    if (block <= 0) continue;
    const std::size_t first = static_cast<std::size_t>(block) << mantissa_bits_;
    out.push_back({octave, std::span(counters_).subspan(first, counters_per_octave())});
  }
  return out;
}

double QuantileSketch::midpoint(int octave, std::uint32_t sub_bucket) const {
  const double fraction = (static_cast<double>(sub_bucket) + 0.5) / static_cast<double>(counters_per_octave());
  const double magnitude = std::ldexp(1.0 + fraction, octave % kSignOctaves - 127);
  return octave >= kNegative ? -magnitude : magnitude;
}

double QuantileSketch::quantile(double p) const {
  if (count_ == 0) return 0.0;
  std::uint64_t left = rank_of(p, count_);
  // Ascending order of x: negative octaves from the largest magnitude down, zeros, positive octaves up.
  for (int octave = kOctaves - 1; octave >= kNegative + kMinExponent; --octave) {
    const std::int16_t block = block_of_octave_[static_cast<std::size_t>(octave)];
    for (std::uint32_t i = counters_per_octave(); block > 0 && i-- > 0;) {
      const std::uint32_t here = counters_[(static_cast<std::size_t>(block) << mantissa_bits_) + i];
      if (left <= here) return midpoint(octave, i);
      left -= here;
    }
  }
  const std::uint64_t n_zeros = zeros();
  if (left <= n_zeros) return 0.0;
  left -= n_zeros;
  for (int octave = kMinExponent; octave < kNegative; ++octave) {
    const std::int16_t block = block_of_octave_[static_cast<std::size_t>(octave)];
    for (std::uint32_t i = 0; block > 0 && i < counters_per_octave(); ++i) {
      const std::uint32_t here = counters_[(static_cast<std::size_t>(block) << mantissa_bits_) + i];
      if (left <= here) return midpoint(octave, i);
      left -= here;
    }
  }
  fail(ErrorKind::kInternal, "quantile sketch", "rank {} lies past {} counted values", rank_of(p, count_), count_);
}

double QuantileSketch::abs_quantile(double p) const {
  if (count_ == 0) return 0.0;
  std::uint64_t left = rank_of(p, count_);
  const std::uint64_t n_zeros = zeros();
  if (left <= n_zeros) return 0.0;
  left -= n_zeros;
  for (int exponent = kMinExponent; exponent < 255; ++exponent) {
    const std::int16_t positive = block_of_octave_[static_cast<std::size_t>(exponent)];
    const std::int16_t negative = block_of_octave_[static_cast<std::size_t>(kNegative + exponent)];
    for (std::uint32_t i = 0; i < counters_per_octave(); ++i) {
      std::uint64_t here = 0;
      if (positive > 0) here += counters_[(static_cast<std::size_t>(positive) << mantissa_bits_) + i];
      if (negative > 0) here += counters_[(static_cast<std::size_t>(negative) << mantissa_bits_) + i];
      if (left <= here) return midpoint(exponent, i);
      left -= here;
    }
  }
  fail(ErrorKind::kInternal, "quantile sketch", "rank {} lies past {} counted values", rank_of(p, count_), count_);
}

bool QuantileSketch::operator==(const QuantileSketch& other) const {
  if (mantissa_bits_ != other.mantissa_bits_ || count_ != other.count_ || zeros() != other.zeros()) return false;
  const auto a = octaves(), b = other.octaves();
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Octave& x, const Octave& y) {
    return x.octave == y.octave && std::equal(x.counts.begin(), x.counts.end(), y.counts.begin(), y.counts.end());
  });
}

}  // namespace calib::stats

#include "libcalib/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace calib::model {
namespace {

double llama3_frequency(double omega, const RopeConfig& rope) {
  const double wavelength = 2.0 * std::numbers::pi / omega;
  const double turns = rope.original_max_positions / wavelength;  // full turns within the original context
  if (turns < rope.low_freq_factor) return omega / rope.factor;
  if (turns > rope.high_freq_factor) return omega;
  const double smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1.0 - smooth) * omega / rope.factor + smooth * omega;
}

}  // namespace

std::vector<double> rope_inv_freq(const RopeConfig& rope, std::int64_t rotary_dim) {
  const std::int64_t n_pairs = rotary_dim / 2;
  CALIB_CHECK(rope.freq_factors.empty() || static_cast<std::int64_t>(rope.freq_factors.size()) == n_pairs);
  std::vector<double> inv_freq(static_cast<std::size_t>(n_pairs));
  for (std::int64_t i = 0; i < n_pairs; ++i) {
    double omega = std::pow(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
    if (rope.scaling == RopeScaling::kLinear) omega /= rope.factor;
    if (rope.scaling == RopeScaling::kLlama3) omega = llama3_frequency(omega, rope);
    if (!rope.freq_factors.empty()) omega /= rope.freq_factors[static_cast<std::size_t>(i)];
    inv_freq[static_cast<std::size_t>(i)] = omega;
  }
  return inv_freq;
}

std::shared_ptr<const RopeTable> RopeCache::table(std::int64_t n_positions) const {
  const std::lock_guard lock(mutex_);
  if (table_ && table_->n_positions >= n_positions) return table_;
  auto grown = std::make_shared<RopeTable>();
  // Doubling keeps the total work linear when documents come in growing lengths.
  grown->n_positions = std::max<std::int64_t>(n_positions, table_ ? 2 * table_->n_positions : 256);
  grown->n_pairs = static_cast<std::int64_t>(inv_freq_.size());
  grown->cos.resize(static_cast<std::size_t>(grown->n_positions * grown->n_pairs));
  grown->sin.resize(grown->cos.size());
  std::size_t at = 0;
  for (std::int64_t t = 0; t < grown->n_positions; ++t)
    for (const double omega : inv_freq_) {
      const double angle = static_cast<double>(t) * omega;
      grown->cos[at] = static_cast<float>(attention_factor_ * std::cos(angle));
      grown->sin[at++] = static_cast<float>(attention_factor_ * std::sin(angle));
    }
  table_ = grown;
  return table_;
}

}  // namespace calib::model

#pragma once
// Seeded random numbers with the same values on every platform and in the Python helpers (scripts/make_golden.py).

#include <cmath>
#include <cstdint>
#include <numbers>

namespace calib {

/// SplitMix64 (Steele, Lea, Flood 2014): state += 0x9E3779B97F4A7C15, then two xor-shift-multiply rounds.
class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}
  /// Independent stream for one (seed, a, b), e.g. (seed, document, layer): results do not depend on call order.
  static Rng for_item(std::uint64_t seed, std::uint64_t a, std::uint64_t b = 0) {
    Rng r(seed);
    r.state_ = Rng(r.next() ^ (a * 0xD1342543DE82EF95ull)).next() ^ (b * 0xAF251AF3B0F025B5ull);
    r.next();
    return r;
  }
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  /// Uniform in [0, 1) with 53 bits.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  /// Uniform integer in [0, n). Requires: n > 0.
  std::uint64_t below(std::uint64_t n) { return static_cast<std::uint64_t>(uniform() * static_cast<double>(n)); }
  /// Standard normal, Box-Muller, one value per two uniforms (no carried state).
  double normal() {
    const double u = 1.0 - uniform(), v = uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
  }

 private:
  std::uint64_t state_;
};

}  // namespace calib

#pragma once
// A histogram over logarithmic buckets from which quantiles are read with bounded relative error; merging is exact.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace calib::stats {

/// Bucket key = sign, exponent and the top `mantissa_bits` of the fp32 value; |x| < 2^-24 goes to the zero bucket.
/// Counters are allocated an octave (one sign and exponent) at a time, so memory follows the data's dynamic range.
/// Source: METHODS.md 3, "Quantile sketch"; the bucketing is the one of HDR histograms applied to the float's own bits.
class QuantileSketch {
 public:
  static constexpr int kMaxMantissaBits = 6;
  static constexpr int kOctaves = 512;  ///< 9 bits: sign * 256 + biased exponent

  explicit QuantileSketch(int mantissa_bits = kMaxMantissaBits);

  int mantissa_bits() const { return mantissa_bits_; }
  std::uint32_t counters_per_octave() const { return 1u << mantissa_bits_; }
  std::uint64_t count() const { return count_; }
  std::uint64_t zeros() const;  ///< values with |x| < 2^-24

  /// Requires: x is finite.
  void add(float x);
  /// Adds x[0], x[stride], … (n values). Requires: finite. Throws kNumeric past 2^32 - 1 values (counters are 32 bits).
  void add_strided(const float* x, std::size_t n, std::size_t stride);
  /// Exact, commutative, associative. Requires: equal mantissa_bits.
  void merge(const QuantileSketch& other);

  /// Midpoint of the bucket that holds the element of rank ceil(p n) in ascending order of x.
  /// Range: p in [0, 1]; relative error <= 2^-(mantissa_bits + 1). Callers clamp to [min, max]. 0 if empty.
  double quantile(double p) const;
  /// The same for |x|.
  double abs_quantile(double p) const;

  /// Octaves with counters, ascending by octave number; the canonical form that files hold.
  struct Octave {
    int octave = 0;
    std::span<const std::uint32_t> counts;  ///< [counters_per_octave]
  };
  std::vector<Octave> octaves() const;
  /// True for the octaves that have counters of their own: exponents of 2^-24 and up, both signs.
  static bool is_octave(int octave);
  /// Adds stored counters (for readers of files). Requires: is_octave(octave), counts.size() == counters_per_octave().
  void add_octave(int octave, std::span<const std::uint32_t> counts);
  void add_zeros(std::uint64_t n);

  /// True if both hold the same counts.
  bool operator==(const QuantileSketch& other) const;

 private:
  /// First counter of an octave's block, allocating it if need be.
  std::size_t block_at(int octave);
  void count_more(std::uint64_t n);
  double midpoint(int octave, std::uint32_t sub_bucket) const;

  int mantissa_bits_;
  std::uint64_t count_ = 0;
  std::vector<std::int16_t> block_of_octave_;  ///< block number, -1 = none; all octaves below 2^-24 share block 0
  std::vector<std::uint32_t> counters_;        ///< [blocks, counters_per_octave], in order of first use
};

}  // namespace calib::stats

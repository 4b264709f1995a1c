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
  /// Adds column c of x [n_rows, sketches.size()], rows `stride` floats apart, to sketch c. Requires: finite values, equal
  /// mantissa_bits. Throws kNumeric past 2^32 - 1 values in one sketch (counters are 32 bits).
  static void add_rows(std::span<QuantileSketch> sketches, const float* x, std::size_t n_rows, std::size_t stride);
  /// Exact, commutative, associative. Requires: equal mantissa_bits.
  void merge(const QuantileSketch& other);

  /// Midpoint of the bucket that holds the element of rank ceil(p n) in ascending order of x, for each p; p ascends.
  /// Range: p in [0, 1]; relative error <= 2^-(mantissa_bits + 1). Callers clamp to [min, max]. 0 if empty.
  std::vector<double> quantiles(std::span<const double> p) const;
  double quantile(double p) const;
  /// The same for |x|.
  std::vector<double> abs_quantiles(std::span<const double> p) const;
  double abs_quantile(double p) const;

  /// Every counter that holds something: the midpoint of its values (0 for the zero bucket), and how many.
  struct Bucket {
    double midpoint = 0;
    std::uint64_t count = 0;
  };
  std::vector<Bucket> buckets() const;

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
  template <int kSide>
  static void add_side_by_side(QuantileSketch* sketches, const float* x, std::size_t n_rows, std::size_t stride);
  /// [counters_per_octave], null where the octave has none of its own. Requires: not empty.
  const std::uint32_t* counts_of(int octave) const;
  double midpoint(int octave, std::uint32_t sub_bucket) const;

  int mantissa_bits_;
  std::uint64_t count_ = 0;
  std::vector<std::int16_t> block_of_octave_;  ///< block number, -1 = none; all octaves below 2^-24 share block 0
  std::vector<std::uint32_t> counters_;        ///< [blocks, counters_per_octave], in order of first use
};

}  // namespace calib::stats

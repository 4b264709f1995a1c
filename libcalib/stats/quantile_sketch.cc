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

// Buckets go by in ascending order of value; each requested rank takes the value of the bucket that holds it.
class RankWalk {
 public:
  RankWalk(std::span<const double> p, std::uint64_t n) : p_(p), n_(n), out_(p.size(), 0.0) {
    CALIB_CHECK(std::is_sorted(p.begin(), p.end()));
    rank_ = done() ? 0 : rank_of(p_[0], n_);
  }
  bool done() const { return n_ == 0 || next_ == p_.size(); }
  bool reaches(std::uint64_t here) {
    seen_ += here;
    return !done() && seen_ >= rank_;
  }
  void take(double value) {
    for (; !done() && rank_ <= seen_; rank_ = done() ? 0 : rank_of(p_[next_], n_)) out_[next_++] = value;
  }
  std::vector<double> result() {
    if (!done()) fail(ErrorKind::kInternal, "quantile sketch", "rank {} lies past {} counted values", rank_, n_);
    return std::move(out_);
  }

 private:
  std::span<const double> p_;
  std::uint64_t n_, seen_ = 0, rank_ = 0;
  std::size_t next_ = 0;
  std::vector<double> out_;
};

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

void QuantileSketch::add(float x) { add_rows({this, 1}, &x, 1, 1); }

// kSide sketches at a time: their counters lie apart, so that the additions do not wait for each other.
template <int kSide>
void QuantileSketch::add_side_by_side(QuantileSketch* sketches, const float* x, std::size_t n_rows, std::size_t stride) {
  const int mantissa_bits = sketches[0].mantissa_bits_, shift = 23 - mantissa_bits;
  const std::uint32_t mask = sketches[0].counters_per_octave() - 1;
  const std::int16_t* blocks[kSide];
  std::uint32_t* counters[kSide];
  for (int j = 0; j < kSide; ++j) {
    sketches[j].count_more(n_rows);
    sketches[j].block_at(0);
    blocks[j] = sketches[j].block_of_octave_.data();
    counters[j] = sketches[j].counters_.data();
  }
  for (std::size_t i = 0; i < n_rows; ++i)
    for (int j = 0; j < kSide; ++j) {
      const auto bits = std::bit_cast<std::uint32_t>(x[i * stride + static_cast<std::size_t>(j)]);
      std::int32_t block = blocks[j][bits >> 23];
      if (block < 0) [[unlikely]] {
        block = static_cast<std::int32_t>(sketches[j].block_at(static_cast<int>(bits >> 23)) >> mantissa_bits);
        counters[j] = sketches[j].counters_.data();
      }
      ++counters[j][(static_cast<std::uint32_t>(block) << mantissa_bits) + ((bits >> shift) & mask)];
    }
}

void QuantileSketch::add_rows(std::span<QuantileSketch> sketches, const float* x, std::size_t n_rows, std::size_t stride) {
  if (n_rows == 0) return;
  constexpr std::size_t kSide = 8;
  std::size_t c = 0;
  for (; c + kSide <= sketches.size(); c += kSide) add_side_by_side<kSide>(&sketches[c], x + c, n_rows, stride);
  for (; c < sketches.size(); ++c) add_side_by_side<1>(&sketches[c], x + c, n_rows, stride);
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

const std::uint32_t* QuantileSketch::counts_of(int octave) const {
  const std::int16_t block = block_of_octave_[static_cast<std::size_t>(octave)];
  return block > 0 ? counters_.data() + (static_cast<std::size_t>(block) << mantissa_bits_) : nullptr;
}

double QuantileSketch::midpoint(int octave, std::uint32_t sub_bucket) const {
  const double fraction = (static_cast<double>(sub_bucket) + 0.5) / static_cast<double>(counters_per_octave());
  const double magnitude = std::ldexp(1.0 + fraction, octave % kSignOctaves - 127);
  return octave >= kNegative ? -magnitude : magnitude;
}

std::vector<QuantileSketch::Bucket> QuantileSketch::buckets() const {
  std::vector<Bucket> out;
  if (const std::uint64_t n = zeros(); n > 0) out.push_back({0.0, n});
  for (const Octave& o : octaves())
    for (std::uint32_t i = 0; i < counters_per_octave(); ++i)
      if (o.counts[i] > 0) out.push_back({midpoint(o.octave, i), o.counts[i]});
  return out;
}

std::vector<double> QuantileSketch::quantiles(std::span<const double> p) const {
  RankWalk walk(p, count_);
  // Ascending order of x: negative octaves from the largest magnitude down, zeros, positive octaves up.
  for (int octave = kOctaves - 1; !walk.done() && octave >= kNegative + kMinExponent; --octave) {
    const std::uint32_t* counts = counts_of(octave);
    for (std::uint32_t i = counters_per_octave(); counts != nullptr && i-- > 0;)
      if (walk.reaches(counts[i])) walk.take(midpoint(octave, i));
  }
  if (!walk.done() && walk.reaches(zeros())) walk.take(0.0);
  for (int octave = kMinExponent; !walk.done() && octave < kNegative; ++octave) {
    const std::uint32_t* counts = counts_of(octave);
    for (std::uint32_t i = 0; counts != nullptr && i < counters_per_octave(); ++i)
      if (walk.reaches(counts[i])) walk.take(midpoint(octave, i));
  }
  return walk.result();
}

std::vector<double> QuantileSketch::abs_quantiles(std::span<const double> p) const {
  RankWalk walk(p, count_);
  if (!walk.done() && walk.reaches(zeros())) walk.take(0.0);
  for (int exponent = kMinExponent; !walk.done() && exponent < 255; ++exponent) {
    const std::uint32_t *positive = counts_of(exponent), *negative = counts_of(kNegative + exponent);
    if (positive == nullptr && negative == nullptr) continue;
    for (std::uint32_t i = 0; i < counters_per_octave(); ++i) {
      const std::uint64_t here = std::uint64_t{positive ? positive[i] : 0} + (negative ? negative[i] : 0);
      if (walk.reaches(here)) walk.take(midpoint(exponent, i));
    }
  }
  return walk.result();
}

double QuantileSketch::quantile(double p) const { return quantiles({&p, 1})[0]; }
double QuantileSketch::abs_quantile(double p) const { return abs_quantiles({&p, 1})[0]; }

bool QuantileSketch::operator==(const QuantileSketch& other) const {
  if (mantissa_bits_ != other.mantissa_bits_ || count_ != other.count_ || zeros() != other.zeros()) return false;
  const auto a = octaves(), b = other.octaves();
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Octave& x, const Octave& y) {
    return x.octave == y.octave && std::equal(x.counts.begin(), x.counts.end(), y.counts.begin(), y.counts.end());
  });
}

}  // namespace calib::stats

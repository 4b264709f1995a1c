#include "libcalib/stats/quantile_sketch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "libcalib/base/rng.h"
#include "tests/stats/random_floats.h"

namespace calib::stats {
namespace {

QuantileSketch sketch_of(const std::vector<float>& x, int mantissa_bits = 6) {
  QuantileSketch out(mantissa_bits);
  QuantileSketch::add_rows({&out, 1}, x.data(), x.size(), 1);
  return out;
}

double exact(std::vector<float> x, double p) {
  std::sort(x.begin(), x.end());
  const auto rank = static_cast<std::size_t>(std::max(1.0, std::ceil(p * static_cast<double>(x.size()) - 1e-9)));
  return x[rank - 1];
}

std::vector<float> log_normals(std::size_t n, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> out(n);
  for (float& x : out) x = static_cast<float>(std::exp(rng.normal()));
  return out;
}

TEST(QuantileSketch, RelativeErrorOnLogNormalValues) {  // METHODS.md G10
  const std::vector<float> x = log_normals(100000, 1);
  const QuantileSketch six = sketch_of(x), four = sketch_of(x, 4);
  for (const double p : {0.0025, 0.005, 0.01, 0.1, 0.5, 0.9, 0.99, 0.995, 0.999}) {
    const double q = exact(x, p);
    EXPECT_NEAR(six.quantile(p), q, q / 128) << p;
    EXPECT_NEAR(four.quantile(p), q, q / 32) << p;
  }
}

TEST(QuantileSketch, SignedAndAbsoluteQuantiles) {
  const std::vector<float> x = test::normal_floats(50001, 2);
  std::vector<float> magnitude = x;
  for (float& v : magnitude) v = std::fabs(v);
  const QuantileSketch s = sketch_of(x);
  for (const double p : {0.0, 0.0025, 0.01, 0.3, 0.7, 0.99, 0.9975, 1.0}) {
    EXPECT_NEAR(s.quantile(p), exact(x, p), std::fabs(exact(x, p)) / 128) << p;
    EXPECT_NEAR(s.abs_quantile(p), exact(magnitude, p), exact(magnitude, p) / 128) << p;
  }
}

TEST(QuantileSketch, MergeGivesTheCountsOfOnePassInAnyOrder) {
  const std::vector<float> a = log_normals(1000, 3), b = test::normal_floats(777, 4), c = test::normal_floats(10, 5, 1e-9, 1e-9);
  std::vector<float> all = a;
  all.insert(all.end(), b.begin(), b.end());
  all.insert(all.end(), c.begin(), c.end());
  const QuantileSketch once = sketch_of(all);

  QuantileSketch abc = sketch_of(a), bc = sketch_of(b), cab = sketch_of(c);
  bc.merge(sketch_of(c));
  abc.merge(bc);
  cab.merge(sketch_of(a));
  cab.merge(sketch_of(b));
  EXPECT_TRUE(abc == once);
  EXPECT_TRUE(cab == once);
  std::reverse(all.begin(), all.end());
  EXPECT_TRUE(sketch_of(all) == once);

  QuantileSketch neutral;
  neutral.merge(once);
  EXPECT_TRUE(neutral == once);
  neutral.merge(QuantileSketch());
  EXPECT_TRUE(neutral == once);
  EXPECT_FALSE(sketch_of(a) == once);
}

TEST(QuantileSketch, ExtremesOfTheFloatRange) {
  const float tiny = 0x1.0p-24f, below = std::nextafter(tiny, 0.0f), largest = std::numeric_limits<float>::max();
  const QuantileSketch s = sketch_of({0.0f, -0.0f, below, -below, std::numeric_limits<float>::denorm_min(), tiny, -tiny, largest, -largest});
  EXPECT_EQ(s.count(), 9u);
  EXPECT_EQ(s.zeros(), 5u);
  EXPECT_NEAR(s.quantile(0.0) / -static_cast<double>(largest), 1.0, 1.0 / 128);
  EXPECT_NEAR(s.quantile(1.0) / static_cast<double>(largest), 1.0, 1.0 / 128);
  EXPECT_EQ(s.quantile(0.5), 0.0);
  EXPECT_NEAR(s.abs_quantile(6.0 / 9), tiny, tiny / 128);
}

TEST(QuantileSketch, RankIsTheCeilingOfPTimesN) {
  std::vector<float> x;
  for (int i = 1; i <= 100; ++i) x.push_back(static_cast<float>(i));
  const QuantileSketch s = sketch_of(x);
  // Integers up to 100 lie at least one bucket (1/64) apart below 64, so the bucket tells the rank there.
  EXPECT_NEAR(s.quantile(0.01), 1, 1.0 / 128);
  EXPECT_NEAR(s.quantile(0.29), 29, 29.0 / 128);   // 0.29 * 100 = 28.999999999999996
  EXPECT_NEAR(s.quantile(0.07), 7, 7.0 / 128);     // 0.07 * 100 = 7.000000000000001
  EXPECT_NEAR(s.quantile(0.501), 51, 51.0 / 128);
}

TEST(QuantileSketch, OctavesRebuildTheSketch) {
  const QuantileSketch s = sketch_of(test::normal_floats(5000, 6), 4);
  QuantileSketch again(4);
  again.add_zeros(s.zeros());
  int last = -1;
  for (const QuantileSketch::Octave& octave : s.octaves()) {
    EXPECT_GT(octave.octave, last);
    EXPECT_TRUE(QuantileSketch::is_octave(octave.octave));
    last = octave.octave;
    again.add_octave(octave.octave, octave.counts);
  }
  EXPECT_TRUE(again == s);
  EXPECT_FALSE(QuantileSketch::is_octave(102));
  EXPECT_FALSE(QuantileSketch::is_octave(255));
  EXPECT_FALSE(QuantileSketch::is_octave(512));
  EXPECT_FALSE(QuantileSketch::is_octave(-1));
}

TEST(QuantileSketch, BucketsHoldEveryValueOnce) {
  QuantileSketch sketch;
  double sum = 0;
  for (int i = -50; i <= 50; ++i) {
    sketch.add(static_cast<float>(i) * 0.37f);
    sum += std::fabs(i * 0.37);
  }
  std::uint64_t count = 0, zeros = 0;
  double of_buckets = 0;
  for (const QuantileSketch::Bucket& b : sketch.buckets()) {
    count += b.count, of_buckets += std::fabs(b.midpoint) * static_cast<double>(b.count);
    if (b.midpoint == 0) zeros += b.count;
  }
  EXPECT_EQ(count, 101u);
  EXPECT_EQ(zeros, 1u);
  EXPECT_NEAR(of_buckets, sum, sum / 128);
}

TEST(QuantileSketch, EveryColumnGoesToItsOwnSketch) {
  constexpr std::size_t kColumns = 19, kStride = 23, kRows = 100;  // two blocks of eight, and a rest
  const std::vector<float> x = test::normal_floats(kRows * kStride, 7);
  std::vector<QuantileSketch> sketches(kColumns, QuantileSketch(6));
  QuantileSketch::add_rows(sketches, x.data() + 1, kRows, kStride);
  for (std::size_t c = 0; c < kColumns; ++c) {
    std::vector<float> column;
    for (std::size_t r = 0; r < kRows; ++r) column.push_back(x[r * kStride + c + 1]);
    EXPECT_TRUE(sketches[c] == sketch_of(column)) << c;
  }
}

TEST(QuantileSketch, EmptyReadsAsZero) {
  EXPECT_EQ(QuantileSketch().quantile(0.5), 0.0);
  EXPECT_EQ(QuantileSketch().abs_quantile(0.999), 0.0);
  EXPECT_TRUE(QuantileSketch().octaves().empty());
}

}  // namespace
}  // namespace calib::stats

#include "kernels/codec/codebook.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/fake_quant_fixture.h"

namespace kvrt {
namespace {

using testing::Call;

constexpr Format kLloydMax[] = {Format::kLm2, Format::kLm3, Format::kLm4};

double phi(double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); }
double cumulative(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

/// Mean square error of coding N(0,1) with the book's own midpoints, in closed form.
double normal_mse(const Codebook& book) {
  double sum = 0;
  for (int i = 0; i < book.size; ++i) {
    const double lo = i ? book.midpoints[i - 1] : -40, hi = i + 1 < book.size ? book.midpoints[i] : 40, c = book.entries[i];
    const double mass = cumulative(hi) - cumulative(lo), first = phi(lo) - phi(hi), second = mass + lo * phi(lo) - hi * phi(hi);
    sum += second - 2 * c * first + c * c * mass;
  }
  return sum;
}

// G21: the stored entries are the centroids, rounded to 1/127 of the largest; that costs less than 0.15 % of the error.
TEST(Codebook, LloydMaxEntriesAreTheCentroidsOnTheStoredGrid) {
  const std::vector<double> half[] = {{0.452780, 1.510418},
                                      {0.245094, 0.756005, 1.343909, 2.151946},
                                      {0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590}};
  const double error[] = {0.117482, 0.034548, 0.009501};
  for (int b = 0; b < 3; ++b) {
    const Codebook book = lloyd_max_codebook(kLloydMax[b]);
    ASSERT_EQ(book.size, 4 << b);
    const double step = half[b].back() / 127;
    for (std::size_t i = 0; i < half[b].size(); ++i) {
      EXPECT_NEAR(book.entries[static_cast<std::size_t>(book.size) / 2 + i], half[b][i], 0.5 * step + 1e-6);
      EXPECT_EQ(book.entries[static_cast<std::size_t>(book.size) / 2 - 1 - i], -book.entries[static_cast<std::size_t>(book.size) / 2 + i]);
    }
    EXPECT_NEAR(normal_mse(book), error[b], 0.0015 * error[b]);
  }
}

/// Coordinates of a random unit vector times sqrt(d): points and probabilities of a fine grid.
struct SphereLaw {
  std::vector<double> x, p;
  explicit SphereLaw(int d) {
    const double end = std::min(std::sqrt(static_cast<double>(d)), 7.0);
    double total = 0;
    for (int i = 0; i < 8000; ++i) {
      x.push_back(-end + (i + 0.5) * end / 4000);
      p.push_back(std::pow(1 - x.back() * x.back() / d, 0.5 * (d - 3)));
      total += p.back();
    }
    for (double& v : p) v /= total;
  }
  /// Mean square error with the nearest of `entries` (ascending); moves each entry to the mean of what it got.
  double code(std::vector<double>* entries) const {
    std::vector<double> mass(entries->size()), first(entries->size());
    double error = 0;
    std::size_t k = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      while (k + 1 < entries->size() && x[i] > ((*entries)[k] + (*entries)[k + 1]) / 2) ++k;
      error += p[i] * (x[i] - (*entries)[k]) * (x[i] - (*entries)[k]);
      mass[k] += p[i], first[k] += p[i] * x[i];
    }
    for (std::size_t i = 0; i < mass.size(); ++i) (*entries)[i] = first[i] / mass[i];
    return error;
  }
};

// G22: the stored books on the law they meet after rotation, against the best book for it.
TEST(Codebook, ErrorOnTheSphereIsNearItsOptimum) {
  struct Row { int d; double optimum[3], loss; };
  for (const Row& r : {Row{128, {0.11600, 0.03397, 0.00931}, 0.021}, Row{64, {0.11453, 0.03339, 0.00913}, 0.041}}) {
    const SphereLaw law(r.d);
    for (int b = 0; b < 3; ++b) {
      const Codebook book = lloyd_max_codebook(kLloydMax[b]);
      std::vector<double> entries(book.entries, book.entries + book.size);
      double error = law.code(&entries);
      EXPECT_LT(error, r.optimum[b] * (1 + r.loss + 0.0015)) << r.d;
      for (int i = 0; i < 400; ++i) error = law.code(&entries);
      EXPECT_NEAR(error, r.optimum[b], 1e-5) << r.d;
    }
  }
}

TEST(Codebook, NearestEntryIsTheNearestAndTiesGoDown) {
  for (const Format f : kLloydMax) {
    const Codebook book = lloyd_max_codebook(f);
    for (double y = -4; y <= 4; y += 1.0 / 512) {
      const int code = nearest_entry(book, static_cast<float>(y));
      for (int i = 0; i < book.size; ++i) {
        ASSERT_LE(std::abs(y - book.entries[code]), std::abs(y - book.entries[i]) + 1e-6) << y;
      }
    }
    for (int i = 0; i < book.size; ++i) {
      EXPECT_EQ(nearest_entry(book, book.entries[i]), i);
      if (i + 1 == book.size) continue;
      EXPECT_EQ(nearest_entry(book, book.midpoints[i]), i);
      EXPECT_EQ(nearest_entry(book, std::nextafter(book.midpoints[i], 10.0f)), i + 1);
    }
  }
}

TEST(Codebook, EveryThreeBitCodeSitsInItsPlaces) {
  for (int c = 0; c < 70; ++c) {
    for (int code = 0; code < 8; ++code) {
      std::vector<std::uint8_t> row(24, 0xFF), plane_b(12, 0xFF);
      pack_codebook_row3(70, [&](int i) { return static_cast<std::uint8_t>(i == c ? code : 0); }, row.data(), plane_b.data());
      for (int i = 0; i < 70; ++i) ASSERT_EQ(unpack_codebook_code3(row.data(), plane_b.data(), i), i == c ? code : 0);
      // KERNELS.md 3.3: low bits like 2-bit codes; the high bit where a byte-permute selector wants it.
      const int cell = c / 32, r = c % 32;
      ASSERT_EQ(load_le32(&row[static_cast<std::size_t>(8 * cell + 4 * (r / 16))]), static_cast<std::uint32_t>(code & 3) << 2 * (r % 16));
      ASSERT_EQ(load_le32(&plane_b[static_cast<std::size_t>(4 * cell)]), static_cast<std::uint32_t>(code >> 2) << (4 * (r % 16 / 2) + 2 * (r / 16) + r % 2));
    }
  }
}

TEST(Codebook, SumsFollowTheTreeOfThirtyTwoLanes) {
  float x[100];
  for (int i = 0; i < 100; ++i) x[i] = std::ldexp(1.0f + 0.001f * static_cast<float>(i), i % 13 - 6);
  float lanes[32];
  for (int l = 0; l < 32; ++l) lanes[l] = x[l];
  for (int i = 32; i < 100; ++i) lanes[i % 32] += x[i];
  for (int step : {16, 8, 4, 2, 1}) {  // as shuffles do it: every lane adds its partner
    float next[32];
    for (int l = 0; l < 32; ++l) next[l] = lanes[l] + lanes[l ^ step];
    for (int l = 0; l < 32; ++l) lanes[l] = next[l];
  }
  EXPECT_EQ(sum_of_lanes(100, [&](int i) { return x[i]; }), lanes[0]);
  EXPECT_EQ(sum_of_lanes(3, [&](int i) { return x[i]; }), (x[0] + x[2]) + x[1]);
}

// <y, decoded> = <y, y> but for the fp16 norm: centroids alone are shorter, by 12 % at 2 bits.
TEST(Codebook, StoredNormsKeepTheProjection) {
  for (const char* scheme : {"lm2.token.g", "lm3.token.g", "lm4.token.g.had", "lm4.token.g32"}) {
    Call call(scheme, 256, 1, 128);
    call.fill_normal(3, 7);
    const std::vector<float> out = call.run();
    for (std::size_t t = 0; t < 256; ++t) {
      double square = 0, along = 0;
      for (std::size_t i = t * 128; i < (t + 1) * 128; ++i) square += call.x[i] * static_cast<double>(call.x[i]), along += out[i] * static_cast<double>(call.x[i]);
      EXPECT_NEAR(along / square, 1.0, 5e-4) << scheme;
    }
  }
}

// What attention does where it is flat: noise averages out, a common shrinking would stay (by 7 % at 2 bits; what is left here is 1 %).
TEST(Codebook, AveragesOverManyTokensKeepTheirLength) {
  constexpr std::size_t kDim = 64, kTokens = 4096;
  for (const char* scheme : {"lm2.token.g.had", "lm3.token.g.had"}) {
    Call call(scheme, kTokens, 1, kDim);
    call.fill_normal(3, 7);
    for (std::size_t i = 0; i < call.x.size(); ++i) call.x[i] += std::cos(static_cast<float>(i % kDim));
    const std::vector<float> out = call.run();
    double square = 0, along = 0;
    for (std::size_t d = 0; d < kDim; ++d) {
      double before = 0, after = 0;
      for (std::size_t t = 0; t < kTokens; ++t) before += call.x[t * kDim + d], after += out[t * kDim + d];
      square += before * before, along += before * after;
    }
    EXPECT_NEAR(along / square, 1.0, 0.02) << scheme;
  }
}

// Error feedback chooses codes for what comes before them; scale and lo then keep the group's mean and projection.
TEST(ErrorFeedback, TokenGroupsKeepMeanAndProjection) {
  for (const char* scheme : {"int2.token.g64.ef", "int3.token.g32.ef", "int4.token.g.had.ef"}) {
    Call call(scheme, 256, 1, 128);
    call.fill_normal(3, 7);
    const std::vector<float> out = call.run();
    const std::size_t n = call.scheme.had ? 128 : static_cast<std::size_t>(call.scheme.group);  // a rotation keeps products, not means
    for (std::size_t first = 0; first < out.size(); first += n) {
      double mean = 0, decoded = 0, square = 0, along = 0;
      for (std::size_t i = first; i < first + n; ++i) mean += call.x[i] / static_cast<double>(n), decoded += out[i] / static_cast<double>(n);
      for (std::size_t i = first; i < first + n; ++i) square += (call.x[i] - mean) * (call.x[i] - mean), along += (call.x[i] - mean) * (out[i] - mean);
      EXPECT_NEAR(along / square, 1.0, call.scheme.had ? 0.02 : 6e-4) << scheme;
      if (!call.scheme.had) {
        EXPECT_NEAR(decoded, mean, 0.02) << scheme;  // lo in fp16, of values up to 20
      }
    }
  }
}

// One value among zeros is coded with noise around it, 64 degrees away: the projection would take three times its length.
TEST(Codebook, ASpikeKeepsItsLength) {
  Call call("lm2.token.g", 1, 1, 64);
  call.x[5] = 10;
  const std::vector<float> out = call.run();
  double square = 0;
  for (const float v : out) square += v * static_cast<double>(v);
  EXPECT_NEAR(std::sqrt(square), 10, 0.01);
}

}  // namespace
}  // namespace kvrt

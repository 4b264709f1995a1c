#include "libcalib/quant/row_rotation.h"

#include <algorithm>
#include <cmath>

#include <Eigen/Core>
#include <Eigen/QR>
#include <gtest/gtest.h>

#include "layer_stats.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/scheme.h"
#include "tests/support/expect_error.h"

namespace calib::quant {
namespace {

using Eigen::MatrixXd;
using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Positive definite, eigenvalues over four decades.
std::vector<double> anisotropic(int d, Rng& rng) {
  MatrixXd normal(d, d);
  for (int j = 0; j < d; ++j)
    for (int i = 0; i < d; ++i) normal(i, j) = rng.normal();
  const MatrixXd q = Eigen::HouseholderQR<MatrixXd>(normal).householderQ();
  Eigen::VectorXd values(d);
  for (int i = 0; i < d; ++i) values(i) = std::pow(10.0, -4.0 * i / d);
  const RowMajor m = q * values.asDiagonal() * q.transpose();
  return {m.data(), m.data() + m.size()};
}

MatrixXd matrix_of(const float* values, int n) {
  return Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(values, n, n).cast<double>();
}

/// Every entry is a float's rounding off: a sum of n products of entries of about 1 / sqrt(n).
void expect_orthogonal(const MatrixXd& r) {
  EXPECT_LT((r.transpose() * r - MatrixXd::Identity(r.rows(), r.cols())).cwiseAbs().maxCoeff(), 1e-6);
}

/// Keys whose channels have means of their own; queries are isotropic.
stats::LayerStats layer_with_means(const LayerGeometry& g) {
  Rng rng(3);
  const auto any = [&](std::int64_t, int, int c) { return static_cast<float>(rng.normal() * (c == 5 ? 9 : 1)); };
  return quant_test::layer_stats(
      g, 2, 60, [&](std::int64_t, int h, int c) { return static_cast<float>((h * 37 + c * 11) % 64) + 0.01f * static_cast<float>(rng.normal()); }, any, any);
}

TEST(GoldenG33, EveryRotatedChannelCostsTheSame) {
  Rng rng(2);
  for (const int d : {8, 64, 256}) {
    const std::vector<double> m = anisotropic(d, rng);
    const MatrixXd moment = Eigen::Map<const RowMajor>(m.data(), d, d), r = matrix_of(eigen_rotation(m, d).data(), d), turned = r.transpose() * moment * r;
    expect_orthogonal(r);
    for (int i = 0; i < d; ++i) EXPECT_NEAR(turned(i, i) / (moment.trace() / d), 1, 1e-6) << d << " " << i;
    EXPECT_GT(moment.diagonal().maxCoeff(), 1.1 * moment.diagonal().minCoeff()) << "which the moment's own channels do not";
  }
}

// A diagonal moment has the axes as eigenvectors: U H P by hand. diag(1, 8, 4, 2) puts channels 1, 2, 3, 0 in front of H's rows 0 ... 3,
// and P takes H's columns 0, 2, 1, 3.
TEST(RowRotation, EigenvectorsDescendAndColumnsAreBitReversed) {
  std::vector<double> m(16, 0.0);
  m[0] = 1, m[5] = 8, m[10] = 4, m[15] = 2;
  const std::vector<float> expected = {.5f, -.5f, -.5f, .5f,  // channel 0: row 3 of H, + - - +, its columns 0, 2, 1, 3
                                       .5f, .5f, .5f, .5f, .5f, .5f, -.5f, -.5f, .5f, -.5f, .5f, -.5f};
  EXPECT_EQ(eigen_rotation(m, 4), expected);
}

TEST(RowRotation, EachSideByItsOwnMoment) {
  const LayerGeometry g = quant_test::geometry();
  const stats::LayerStats layer = layer_with_means(g);
  for (const Side side : {Side::kK, Side::kV}) {
    const RowRotation rotation = row_rotation(RotationKind::kQuery, layer, side);
    ASSERT_EQ(rotation.heads, 1);
    ASSERT_EQ(rotation.r.size(), 2u * 64 * 64);
    for (int h = 0; h < 2; ++h) {
      const std::vector<double> m = (side == Side::kK ? layer.query_moment : layer.value_cov).matrix(h);
      const MatrixXd moment = Eigen::Map<const RowMajor>(m.data(), 64, 64), r = matrix_of(rotation.r.data() + h * 64 * 64, 64), turned = r.transpose() * moment * r;
      for (int i = 0; i < 64; ++i) EXPECT_NEAR(turned(i, i) / (moment.trace() / 64), 1, 1e-5) << side_name(side) << h;
    }
  }
}

// Row i of the Hadamard matrix's columns belongs to the channel of i-th smallest mean among those of the group.
TEST(RowRotation, GroupedHeadsStandByTheirMeans) {
  const LayerGeometry g = quant_test::geometry(4, 16);
  const stats::LayerStats layer = layer_with_means(g);
  const RowRotation rotation = row_rotation(RotationKind::kGrouped2, layer, Side::kK);
  ASSERT_EQ(rotation.heads, 2);
  ASSERT_EQ(rotation.r.size(), 2u * 32 * 32);
  for (int group = 0; group < 2; ++group) {
    const MatrixXd r = matrix_of(rotation.r.data() + group * 32 * 32, 32);
    expect_orthogonal(r);
    std::vector<std::pair<double, int>> by_mean;
    for (int i = 0; i < 32; ++i) by_mean.push_back({layer.k_pre.body.mean(2 * group + i / 16, i % 16), i});
    std::sort(by_mean.begin(), by_mean.end());
    for (int i = 0; i < 32; ++i)
      for (int k = 0; k < 32; ++k) {
        int parity = 0;
        for (int bits = i & k; bits; bits /= 2) parity ^= bits & 1;
        EXPECT_NEAR(r(by_mean[static_cast<std::size_t>(i)].second, k), (parity ? -1 : 1) / std::sqrt(32.0), 1e-7) << i << " " << k;
      }
  }
  expect_orthogonal(matrix_of(row_rotation(RotationKind::kGrouped4, layer, Side::kK).r.data(), 64));
}

TEST(RowRotation, RowsComeBack) {
  const LayerGeometry g = quant_test::geometry(4, 16);
  const stats::LayerStats layer = layer_with_means(g);
  constexpr std::int64_t kTokens = 300;  // more than a tile
  Rng rng(9);
  const std::vector<float> x = quant_test::fill(kTokens, 4, 16, [&](std::int64_t, int, int) { return static_cast<float>(rng.normal()); });
  for (const RotationKind kind : {RotationKind::kQuery, RotationKind::kGrouped2, RotationKind::kGrouped4}) {
    const RowRotation rotation = row_rotation(kind, layer, Side::kK);
    ThreadPool one(1), two(2);
    std::vector<float> turned(x.size()), other(x.size()), back(x.size()), in_place = x;
    rotate_rows(rotation, g, false, kTokens, x.data(), turned.data(), one);
    rotate_rows(rotation, g, false, kTokens, x.data(), other.data(), two);
    rotate_rows(rotation, g, false, kTokens, in_place.data(), in_place.data(), one);
    EXPECT_EQ(turned, other);
    EXPECT_EQ(turned, in_place);
    // Token 290 of the last group, by hand.
    const int n = rotation.heads * 16, first = 64 - n;
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int i = 0; i < n; ++i)
        sum +=
            static_cast<double>(x[static_cast<std::size_t>(290 * 64 + first + i)]) * rotation.r[rotation.r.size() - static_cast<std::size_t>(n * (n - i) - j)];
      EXPECT_NEAR(turned[static_cast<std::size_t>(290 * 64 + first + j)], sum, 1e-5) << j;
    }
    rotate_rows(rotation, g, true, kTokens, turned.data(), back.data(), one);
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(back[i], x[i], 1e-5);
  }
}

// Axes as eigenvectors in the channels' order: what is left is the rotation of `had`, in another order of the columns.
TEST(RowRotation, InFrontOfTheCodecItIsHad) {
  const LayerGeometry g = quant_test::geometry(1, 64);
  std::vector<double> m(64 * 64, 0.0);
  for (std::size_t i = 0; i < 64; ++i) m[i * 65] = 100 - static_cast<double>(i);
  const RowRotation rotation{1, eigen_rotation(m, 64)};
  ThreadPool pool(1);
  Rng rng(4);
  const std::vector<float> x = quant_test::fill(200, 1, 64, [&](std::int64_t, int, int c) { return static_cast<float>(rng.normal() * (c == 9 ? 20 : 1)); });
  const auto error = [&](const std::vector<float>& y) {
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += std::pow(static_cast<double>(x[i]) - y[i], 2);
    return sum;
  };
  std::vector<float> had(x.size()), plain(x.size()), turned(x.size());
  fake_quant_document(parse_scheme("int4.token.g.had"), Side::kK, g, {}, 0, false, 200, x.data(), had.data(), pool);
  fake_quant_document(parse_scheme("int4.token.g"), Side::kK, g, {}, 0, false, 200, x.data(), plain.data(), pool);
  rotate_rows(rotation, g, false, 200, x.data(), turned.data(), pool);
  fake_quant_document(parse_scheme("int4.token.g"), Side::kK, g, {}, 0, false, 200, turned.data(), turned.data(), pool);
  rotate_rows(rotation, g, true, 200, turned.data(), turned.data(), pool);
  EXPECT_NEAR(error(turned) / error(had), 1, 1e-3) << "codes differ where rounding puts a value on the other side of a border";
  EXPECT_GT(error(plain), 1.5 * error(had));
}

TEST(RowRotation, WhatCannotBeTurnedIsNamed) {
  test::expect_error([] { parse_rotation("--rotate", "grouped8"); }, ErrorKind::kUsage, {"--rotate", "grouped8", "query, grouped2 or grouped4"});
  EXPECT_EQ(parse_rotation("--rotate", "grouped4"), RotationKind::kGrouped4);
  test::expect_error([] { check_rotation(RotationKind::kQuery, quant_test::geometry(2, 80)); }, ErrorKind::kUsage, {"layer 3", "head_dim is 80", "powers of two"});
  test::expect_error([] { check_rotation(RotationKind::kGrouped4, quant_test::geometry(3, 64)); }, ErrorKind::kUsage, {"layer 3", "3 KV heads, no multiple of 4"});
  test::expect_error([] { check_rotation(RotationKind::kGrouped2, quant_test::geometry(1, 256)); }, ErrorKind::kUsage, {"1 KV head, no multiple of 2"});
  test::expect_error([] { check_rotation(RotationKind::kGrouped2, quant_test::geometry(2, 88)); }, ErrorKind::kUsage, {"order 176"});
  check_rotation(RotationKind::kGrouped4, quant_test::geometry(8, 80));
}

}  // namespace
}  // namespace calib::quant

#include "libcalib/quant/low_rank.h"

#include <algorithm>
#include <cmath>

#include <Eigen/Eigenvalues>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/write/write_path.h"
#include "layer_stats.h"
#include "libcalib/base/error.h"
#include "libcalib/quant/calibrated_params.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/quant/unit_moments.h"

namespace calib::quant {
namespace {

using testing::HasSubstr;
using Eigen::MatrixXd;
using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

MatrixXd normal(int rows, int columns, Rng& rng) {
  MatrixXd m(rows, columns);
  for (int j = 0; j < columns; ++j)
    for (int i = 0; i < rows; ++i) m(i, j) = rng.normal();
  return m;
}
/// Positive definite, eigenvalues over `decades`.
MatrixXd spread(int d, double decades, Rng& rng) {
  const MatrixXd q = Eigen::HouseholderQR<MatrixXd>(normal(d, d, rng)).householderQ();
  Eigen::VectorXd values(d);
  for (int i = 0; i < d; ++i) values(i) = std::pow(10.0, -decades * i / d);
  return q * values.asDiagonal() * q.transpose();
}
std::vector<double> values_of(const MatrixXd& m) {
  const RowMajor rows = m;
  return {rows.data(), rows.data() + rows.size()};
}
MatrixXd matrix_of(const std::vector<float>& values, int rows, int columns) {
  return Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(values.data(), rows, columns).cast<double>();
}
MatrixXd ridged(const MatrixXd& m) { return m + 1e-4 * m.trace() / static_cast<double>(m.rows()) * MatrixXd::Identity(m.rows(), m.rows()); }
/// E[(x - x P) M (x - x P)^T] of centred rows x with covariance c.
double cost(const MatrixXd& projection, const MatrixXd& m, const MatrixXd& c) {
  const MatrixXd left = MatrixXd::Identity(m.rows(), m.rows()) - projection;
  return (left.transpose() * c * left * m).trace();
}

TEST(GoldenG34, RelativeErrorOfARank) {
  const std::vector<double> eigenvalues = {8, 4, 2, 1, .5, .5};
  const double expected[] = {1, .707107, .5, .353553, .25};
  for (int r = 0; r <= 4; ++r) EXPECT_NEAR(low_rank_error(eigenvalues, r), expected[r], 1e-6) << r;
  EXPECT_EQ(low_rank_error(eigenvalues, 6), 0);
  EXPECT_EQ(low_rank_error(std::vector<double>(4, 0.0), 2), 0);
  // The same of a fit: a moment without directions, and this covariance.
  MatrixXd c = MatrixXd::Zero(6, 6);
  for (int i = 0; i < 6; ++i) c(i, i) = eigenvalues[static_cast<std::size_t>(5 - i)];
  for (int r = 1; r <= 4; ++r) EXPECT_NEAR(low_rank_basis(values_of(3 * MatrixXd::Identity(6, 6)), values_of(c), 6, r).relative_error, expected[r], 1e-6) << r;
}

TEST(LowRank, NoOtherBasisCostsLess) {
  constexpr int d = 12;
  Rng rng(11);
  for (const int r : {1, 3, 4, 8, 11}) {
    const MatrixXd m = spread(d, 3, rng), c = spread(d, 2, rng), weight = ridged(m);
    const LowRankBasis fitted = low_rank_basis(values_of(m), values_of(c), d, r);
    const MatrixXd in = matrix_of(fitted.in, d, r), out = matrix_of(fitted.out, r, d);
    EXPECT_LT((out * in - MatrixXd::Identity(r, r)).cwiseAbs().maxCoeff(), 1e-4);
    const double least = cost(in * out, weight, c);
    // The optimum is the sum of the eigenvalues that are left out, found here without the root of the moment.
    std::vector<double> eigenvalues;
    const Eigen::VectorXcd general = Eigen::EigenSolver<MatrixXd>(c * weight).eigenvalues();
    for (int i = 0; i < d; ++i) eigenvalues.push_back(general(i).real());
    std::sort(eigenvalues.rbegin(), eigenvalues.rend());
    double rest = 0, all = 0;
    for (int i = 0; i < d; ++i) all += eigenvalues[static_cast<std::size_t>(i)], rest += i < r ? 0.0 : eigenvalues[static_cast<std::size_t>(i)];
    EXPECT_NEAR(least, rest, 1e-4 * rest + 1e-6 * all) << r;
    EXPECT_NEAR(fitted.relative_error, std::sqrt(rest / all), 1e-6) << r;
    // Other spaces, each with its best coefficients under the same weight.
    double nearest = INFINITY;
    for (int trial = 0; trial < 300; ++trial) {
      const MatrixXd b = trial % 2 == 0 ? normal(r, d, rng) : MatrixXd(out + 0.05 * normal(r, d, rng));
      nearest = std::min(nearest, cost(weight * b.transpose() * (b * weight * b.transpose()).inverse() * b, weight, c));
    }
    EXPECT_GT(nearest, least) << r;
    // Principal components know nothing of the moment.
    const MatrixXd u = Eigen::SelfAdjointEigenSolver<MatrixXd>(c).eigenvectors().rightCols(r);
    EXPECT_GT(cost(u * u.transpose(), weight, c), least) << r;
  }
}

// Ranges of a group are those of its largest value: the coefficients share the variance of the rows.
TEST(LowRank, CoefficientsAreAllOfOneSize) {
  constexpr int d = 64;
  Rng rng(12);
  const MatrixXd m = spread(d, 2, rng), c = spread(d, 4, rng);
  for (const int r : {16, 20, 48, 24}) {
    const MatrixXd in = matrix_of(low_rank_basis(values_of(m), values_of(c), d, r).in, d, r), coefficients = in.transpose() * c * in;
    EXPECT_NEAR(coefficients.diagonal().minCoeff() / coefficients.diagonal().maxCoeff(), 1, 1e-4) << r;
  }
  // 7 has no Hadamard matrix: eigenvalues stand by size.
  const MatrixXd in = matrix_of(low_rank_basis(values_of(m), values_of(c), d, 7).in, d, 7), coefficients = in.transpose() * c * in;
  for (int i = 0; i + 1 < 7; ++i) EXPECT_GT(coefficients(i, i), coefficients(i + 1, i + 1));
  EXPECT_LT((coefficients - MatrixXd(coefficients.diagonal().asDiagonal())).cwiseAbs().maxCoeff(), 1e-4 * coefficients(0, 0));
}

// What varies most is the same in all coefficients, and lo of int* takes it out; at 48 (a Paley order) as at 64.
TEST(LowRank, TheFirstDirectionIsNoPartOfARange) {
  constexpr int d = 64, n = 400;
  Rng rng(14);
  const MatrixXd q = Eigen::HouseholderQR<MatrixXd>(normal(d, d, rng)).householderQ();
  Eigen::VectorXd deviations = Eigen::VectorXd::Ones(d);
  deviations(0) = 100;
  const MatrixXd c = q * deviations.cwiseAbs2().asDiagonal() * q.transpose(), x = normal(n, d, rng) * deviations.asDiagonal() * q.transpose();
  for (const int r : {64, 48, 20, 32}) {
    const MatrixXd in = matrix_of(low_rank_basis(values_of(MatrixXd::Identity(d, d)), values_of(c), d, r).in, d, r), coefficients = in.transpose() * c * in;
    EXPECT_GT(coefficients.minCoeff(), 0) << r;
    const MatrixXd y = x * in;
    const Eigen::VectorXd ranges = y.rowwise().maxCoeff() - y.rowwise().minCoeff();
    // The range of r normal values is 4.7 deviations at 64.
    EXPECT_LT(ranges.mean(), 5) << r;
  }
}

TEST(LowRank, AMomentOfZerosIsNone) {
  Rng rng(13);
  const MatrixXd c = spread(8, 2, rng);
  const LowRankBasis without = low_rank_basis(std::vector<double>(64, 0.0), values_of(c), 8, 4),
                     with = low_rank_basis(values_of(MatrixXd::Identity(8, 8)), values_of(c), 8, 4);
  EXPECT_EQ(without.in, with.in);
  // Scales of the moment cancel.
  EXPECT_EQ(low_rank_basis(values_of(1024 * MatrixXd::Identity(8, 8)), values_of(c), 8, 4).out, with.out);
}

TEST(LowRank, WhatIsNoCovarianceIsNamed) {
  const std::vector<double> identity = {1, 0, 0, 1}, indefinite = {3, 0, 0, -1}, broken = {1, 0, 0, NAN};
  const auto refused = [&](const std::vector<double>& moment, const std::vector<double>& covariance, const char* name) {
    try {
      low_rank_basis(moment, covariance, 2, 1);
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kNumeric);
      EXPECT_THAT(e.what(), HasSubstr(name));
    }
  };
  refused(indefinite, identity, "moment");
  refused(broken, identity, "moment");
  refused({-1, 0, 0, -1}, identity, "moment");
  refused(identity, indefinite, "covariance");
  refused(identity, broken, "covariance");
}

struct Rows {
  std::vector<float> x;             ///< [T, D]
  std::vector<float> mean, in, out; ///< of one head
};

/// Rows whose coefficients lie on the grid that int8 takes for them: lo -2, scale 1/64. The ends lie inside of it by what fp32 may add to
/// them on the way, so that directed rounding of the range finds the same grid.
Rows rows_on_the_grid(const LowRankBasis& basis, int d, int r, int n, Rng& rng) {
  Rows rows;
  rows.in = basis.in, rows.out = basis.out;
  for (int c = 0; c < d; ++c) rows.mean.push_back(static_cast<float>(rng.normal()));
  for (int t = 0; t < n; ++t) {
    std::vector<double> row(rows.mean.begin(), rows.mean.end());
    for (int i = 0; i < r; ++i) {
      const double inside = 5e-6, coefficient = i == t % r         ? -2 + inside
                                                : i == (t + 1) % r ? -2 + 255.0 / 64 - inside
                                                                   : -2 + static_cast<double>(1 + rng.below(254)) / 64;
      for (int c = 0; c < d; ++c) row[static_cast<std::size_t>(c)] += coefficient * basis.out[static_cast<std::size_t>(i * d + c)];
    }
    rows.x.insert(rows.x.end(), row.begin(), row.end());
  }
  return rows;
}

// Full rank, and any rank for rows that it holds: with a quantiser that changes nothing, no score changes.
TEST(GoldenG31, ScoresThroughABasisAreThoseOfThePlainKeys) {
  constexpr int d = 64, n = 200;
  Rng rng(31);
  const MatrixXd m = spread(d, 4, rng), c = spread(d, 3, rng);
  for (const int r : {64, 48, 20, 7}) {
    const LowRankBasis basis = low_rank_basis(values_of(m), values_of(c), d, r);
    const Rows rows = rows_on_the_grid(basis, d, r, n, rng);
    std::vector<std::vector<float>> results;
    kvrt::FakeQuantArgs args;
    args.scheme = parse_scheme("int8.token.g.pre.lowrank" + std::to_string(r));
    args.n_tokens = n, args.n_heads = 1, args.head_dim = d;
    args.x = rows.x.data();
    args.basis_mean = rows.mean.data(), args.basis_in = rows.in.data(), args.basis = rows.out.data();
    for (const kvrt::WritePath& path : kvrt::write_paths()) {
      args.out = results.emplace_back(rows.x.size()).data();
      ASSERT_TRUE(kvrt::fake_quant_on(args, path, nullptr).ok());
    }
    args.out = results.emplace_back(rows.x.size()).data();
    ASSERT_TRUE(kvrt::fake_quant_reference(args).ok());
    const MatrixXd q = normal(d, 20, rng);
    for (const std::vector<float>& out : results)
      for (int t = 0; t < n; ++t)
        for (int j = 0; j < 20; ++j) {
          double score = 0, other = 0, size = 0;
          for (int k = 0; k < d; ++k) {
            const auto at = static_cast<std::size_t>(t * d + k);
            score += q(k, j) * rows.x[at], other += q(k, j) * out[at], size += std::fabs(q(k, j) * rows.x[at]);
          }
          ASSERT_NEAR(other, score, 1e-5 * size) << "rank " << r << " token " << t;
        }
  }
}

constexpr std::int64_t kSinks = 4, kTokens = 600;

/// Keys and values of a body in three directions per head, with a mean; sinks of 100 in every channel. `noise` beside them.
stats::LayerStats three_directions(double noise, std::vector<float>* keys = nullptr) {
  Rng rng(21);
  const LayerGeometry g = quant_test::geometry();
  std::vector<double> coefficients;
  const auto value = [&](std::int64_t t, int h, int c) {
    if (t < kSinks) return 100.0f;
    if (c == 0) coefficients = {rng.normal(), rng.normal(), rng.normal()};
    double x = 0.5 * (c % 5);
    for (int i = 0; i < 3; ++i) x += (3 - i) * coefficients[static_cast<std::size_t>(i)] * std::cos((i + 1) * (c + 1 + 7 * h));
    x += noise * rng.normal();
    if (keys) keys->push_back(static_cast<float>(x));
    return static_cast<float>(x);
  };
  stats::LayerStats stats = quant_test::layer_stats(g, kSinks, kTokens, value, [](std::int64_t, int, int) { return 1.0f; }, value);
  stats.output_moment.assign(2 * 64 * 64, 0.0);
  for (std::size_t h = 0; h < 2; ++h)
    for (std::size_t c = 0; c < 64; ++c) stats.output_moment[(h * 64 + c) * 64 + c] = c < 32 ? 1.0 : 0.25;
  return stats;
}

TEST(LowRank, ThreeDirectionsAreHeldByRankThree) {
  std::vector<float> keys;
  const stats::LayerStats stats = three_directions(0, &keys);
  keys.resize((kTokens - kSinks) * 128);  // values come after them
  std::vector<std::string> why;
  for (const Side side : {Side::kK, Side::kV}) {
    for (const int r : {3, 2}) {
      kvrt::Scheme scheme = parse_scheme(fmt::format("int8.token.g{}.lowrank{}", side == Side::kK ? ".pre" : "", r));
      const SchemeParams p = fit_params(scheme, side, stats, kSinks, &why, 512);
      ASSERT_EQ(p.basis_mean.size(), 128u);
      ASSERT_EQ(p.basis_in.size(), 128u * static_cast<std::size_t>(r));
      ASSERT_EQ(p.basis.size(), p.basis_in.size());
      for (int c = 0; c < 64; ++c) EXPECT_NEAR(p.basis_mean[static_cast<std::size_t>(64 + c)], 0.5 * (c % 5), 0.5) << c;
      if (side == Side::kV) continue;
      std::vector<float> out(keys.size());
      ThreadPool pool(1);
      fake_quant_document(scheme, side, stats.geometry(), p, 0, false, kTokens - kSinks, keys.data(), out.data(), pool);
      double error = 0, size = 0;
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const double centred = keys[i] - p.basis_mean[i % 128];
        error += (out[i] - keys[i]) * (out[i] - keys[i]), size += centred * centred;
      }
      EXPECT_LT(std::sqrt(error / size), r == 3 ? 0.01 : 0.5);
      EXPECT_GT(std::sqrt(error / size), r == 3 ? 0.0 : 0.1);
    }
  }
  ASSERT_EQ(why.size(), 4u);
  EXPECT_THAT(why[0], HasSubstr("lowrank: 3 of 64 directions leave a relative error of up to 0.00"));
  EXPECT_THAT(why[1], HasSubstr("lowrank: 2 of 64"));
}

// What fit_params stores is the best basis under the moment of the unit, of each head and side.
TEST(LowRank, TheFitMeetsTheMomentOfTheUnit) {
  const stats::LayerStats stats = three_directions(0.7);
  for (const Side side : {Side::kK, Side::kV}) {
    const kvrt::Scheme scheme = parse_scheme(side == Side::kK ? "int4.token.g8.pre.lowrank24" : "int4.token.g8.lowrank24");
    const SchemeParams p = fit_params(scheme, side, stats, kSinks, nullptr, 512);
    for (int h = 0; h < 2; ++h) {
      const std::vector<double> moment = error_moment(stats, side, h, scheme, nullptr, 512),
                                covariance = (side == Side::kK ? stats.key_cov : stats.value_cov).matrix(h);
      const MatrixXd weight = ridged(Eigen::Map<const RowMajor>(moment.data(), 64, 64)), c = Eigen::Map<const RowMajor>(covariance.data(), 64, 64);
      const std::ptrdiff_t size = 64 * 24;
      const MatrixXd in = matrix_of({p.basis_in.begin() + h * size, p.basis_in.begin() + (h + 1) * size}, 64, 24),
                     out = matrix_of({p.basis.begin() + h * size, p.basis.begin() + (h + 1) * size}, 24, 64);
      std::vector<double> eigenvalues;
      const Eigen::VectorXcd general = Eigen::EigenSolver<MatrixXd>(c * weight).eigenvalues();
      for (int i = 0; i < 64; ++i) eigenvalues.push_back(general(i).real());
      std::sort(eigenvalues.rbegin(), eigenvalues.rend());
      double rest = 0;
      for (std::size_t i = 24; i < 64; ++i) rest += eigenvalues[i];
      EXPECT_NEAR(cost(in * out, weight, c), rest, 1e-3 * rest) << side_name(side) << h;
    }
  }
}

TEST(LowRank, SinksAreInNoCovariance) {
  try {
    fit_params(parse_scheme("int4.token.g.pre.lowrank24"), Side::kK, three_directions(0.5), 0);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(e.what(), HasSubstr("keep 4 sinks"));
  }
}

}  // namespace
}  // namespace calib::quant

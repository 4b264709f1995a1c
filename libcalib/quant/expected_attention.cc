#include "libcalib/quant/expected_attention.h"

#include <algorithm>
#include <cmath>

#include <Eigen/Eigenvalues>

#include "libcalib/base/error.h"
#include "libcalib/base/rng.h"

namespace calib::quant {
namespace {

constexpr std::int64_t kFuturePositions = 32, kFutureSpan = 512;

using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

}  // namespace

RopeTurn::RopeTurn(const LayerGeometry& layer, std::int64_t position, double factor) : interleaved_(layer.rope_style == RopeStyle::kInterleaved) {
  if (layer.rope_style == RopeStyle::kNone) return;
  for (int i = 0; i < layer.rotary_dim / 2; ++i) {
    const double angle = static_cast<double>(position) * layer.inv_freq[static_cast<std::size_t>(i)];
    cos_.push_back(factor * std::cos(angle)), sin_.push_back(factor * std::sin(angle));
  }
}

void RopeTurn::apply(double* x) const {
  const std::size_t half = cos_.size();
  for (std::size_t i = 0; i < half; ++i) {
    double &a = x[interleaved_ ? 2 * i : i], &b = x[interleaved_ ? 2 * i + 1 : i + half];
    const double x0 = a, x1 = b;
    a = x0 * cos_[i] - x1 * sin_[i], b = x0 * sin_[i] + x1 * cos_[i];
  }
}

std::vector<std::int64_t> future_distances(std::uint64_t seed) {
  constexpr std::int64_t kStratum = kFutureSpan / kFuturePositions;
  Rng rng = Rng::for_item(seed, 0x66757475);
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < kFuturePositions; ++i) out.push_back(i * kStratum + static_cast<std::int64_t>(rng.below(kStratum)));
  return out;
}

FutureQuery future_query(const LayerGeometry& layer, std::span<const double> mean, std::span<const double> covariance, std::span<const std::int64_t> positions) {
  const auto d = static_cast<std::size_t>(layer.head_dim);
  CALIB_CHECK(mean.size() == d && covariance.size() == d * d && !positions.empty());
  const double m = static_cast<double>(positions.size()), tau = layer.softmax_scale;
  FutureQuery out{std::vector<double>(d, 0.0), std::vector<double>(d * d, 0.0)};
  std::vector<std::vector<double>> means;
  std::vector<double> rotated(d * d), transposed(d * d);
  for (const std::int64_t t : positions) {
    const RopeTurn turn(layer, t, layer.attention_factor);
    means.emplace_back(mean.begin(), mean.end());
    turn.apply(means.back().data());
    for (std::size_t c = 0; c < d; ++c) out.linear[c] += means.back()[c] / m;
    // R Sigma R' by turning the rows twice, with a transposition between.
    rotated.assign(covariance.begin(), covariance.end());
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t r = 0; r < d; ++r) turn.apply(&rotated[r * d]);
      for (std::size_t r = 0; r < d; ++r)
        for (std::size_t c = 0; c < d; ++c) transposed[c * d + r] = rotated[r * d + c];
      rotated.swap(transposed);
    }
    for (std::size_t i = 0; i < d * d; ++i) out.quadratic[i] += rotated[i] / m;
  }
  for (const std::vector<double>& x : means)
    for (std::size_t r = 0; r < d; ++r)
      for (std::size_t c = 0; c < d; ++c) out.quadratic[r * d + c] += (x[r] - out.linear[r]) * (x[c] - out.linear[c]) / m;
  for (double& x : out.linear) x *= tau;
  for (double& x : out.quadratic) x *= 0.5 * tau * tau;
  return out;
}

SaliencyFactors saliency_factors(std::span<const FutureQuery> queries) {
  CALIB_CHECK(!queries.empty());
  const auto d = static_cast<Eigen::Index>(queries.front().linear.size());
  SaliencyFactors out;
  out.rank = static_cast<int>(std::min<Eigen::Index>(d, SaliencyFactors::kMostRank));
  for (const FutureQuery& q : queries) {
    const Eigen::SelfAdjointEigenSolver<RowMajor> solver(2 * Eigen::Map<const RowMajor>(q.quadratic.data(), d, d));
    if (solver.info() != Eigen::Success) fail(ErrorKind::kNumeric, "token saliency", "the queries' second moment has no eigenvalues: is it finite?");
    for (const double x : q.linear) out.a.push_back(static_cast<float>(x));
    for (Eigen::Index c = 0; c < d; ++c)
      for (Eigen::Index r = 0; r < out.rank; ++r) {
        const Eigen::Index e = d - 1 - r;  // eigenvalues ascend
        out.m.push_back(static_cast<float>(solver.eigenvectors()(c, e) * std::sqrt(std::max(0.0, solver.eigenvalues()(e)))));
      }
  }
  return out;
}

SaliencyFactors saliency_factors(const stats::LayerStats& layer, std::uint64_t seed) {
  const LayerGeometry& g = layer.geometry();
  const std::vector<std::int64_t> distances = future_distances(seed);
  std::vector<FutureQuery> queries;
  for (int q = 0; q < g.n_q_heads; ++q) {
    std::vector<double> mean;
    for (int c = 0; c < g.head_dim; ++c) mean.push_back(layer.q_pre.body.mean(q, c));
    queries.push_back(future_query(g, mean, layer.query_cov.matrix(q), distances));
  }
  return saliency_factors(queries);
}

std::vector<double> exit_block_scores(const LayerGeometry& layer, const SaliencyFactors& factors, int head, std::int64_t length, const float* k, const float* v,
                                      std::int64_t stride, std::int64_t n_tokens) {
  const auto d = static_cast<std::size_t>(layer.head_dim), rank = static_cast<std::size_t>(factors.rank), n = static_cast<std::size_t>(n_tokens);
  const int group = layer.n_q_heads / layer.n_kv_heads;
  CALIB_CHECK(factors.a.size() == static_cast<std::size_t>(layer.n_q_heads) * d && factors.m.size() == factors.a.size() * rank);
  const RopeTurn back(layer, -length, 1.0);
  std::vector<double> keys(n * d), out(n, 0.0), z(n), along(rank);
  for (std::size_t j = 0; j < n; ++j) {
    std::copy(k + static_cast<std::int64_t>(j) * stride, k + static_cast<std::int64_t>(j) * stride + layer.head_dim,
              keys.begin() + static_cast<std::ptrdiff_t>(j * d));
    back.apply(&keys[j * d]);
  }
  for (int q = head * group; q < (head + 1) * group; ++q) {
    const float* const a = factors.a.data() + static_cast<std::size_t>(q) * d;
    const float* const m = factors.m.data() + static_cast<std::size_t>(q) * d * rank;
    for (std::size_t j = 0; j < n; ++j) {
      const double* const key = &keys[j * d];
      std::fill(along.begin(), along.end(), 0.0);
      z[j] = 0;
      for (std::size_t c = 0; c < d; ++c) {
        z[j] += static_cast<double>(a[c]) * key[c];
        for (std::size_t r = 0; r < rank; ++r) along[r] += static_cast<double>(m[c * rank + r]) * key[c];
      }
      for (const double x : along) z[j] += 0.5 * x * x;
    }
    const double largest = n > 0 ? *std::max_element(z.begin(), z.end()) : 0.0;
    double sum = 0;
    for (double& x : z) sum += x = std::exp(x - largest);
    for (std::size_t j = 0; j < n; ++j) out[j] += z[j] / sum / group;
  }
  for (std::size_t j = 0; j < n; ++j) {
    double norm2 = 0;
    for (std::size_t c = 0; c < d; ++c) norm2 += std::pow(static_cast<double>(v[static_cast<std::int64_t>(j) * stride + static_cast<std::int64_t>(c)]), 2);
    out[j] *= std::sqrt(norm2);
  }
  return out;
}

}  // namespace calib::quant

#include "libcalib/quant/unit_moments.h"

#include <algorithm>
#include <cmath>

#include "kernels/codec/hadamard.h"
#include "libcalib/base/error.h"

namespace calib::quant {
namespace {

constexpr int kDistances = 64;

using Matrix = std::vector<double>;

double& at(Matrix& m, int dim, int i, int j) { return m[static_cast<std::size_t>(i) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(j)]; }
double at(const Matrix& m, int dim, int i, int j) { return m[static_cast<std::size_t>(i) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(j)]; }

/// Sum over the query heads of one KV head of E[q q^T], before RoPE.
Matrix query_second_moment(const stats::LayerStats& layer, int head) {
  const LayerGeometry& g = layer.geometry();
  const int group = g.n_q_heads / g.n_kv_heads, d = g.head_dim;
  Matrix sum(static_cast<std::size_t>(d) * static_cast<std::size_t>(d), 0.0);
  for (int q = head * group; q < (head + 1) * group; ++q) {
    const Matrix covariance = layer.query_cov.matrix(q);
    const double* mean = layer.query_cov.mean(q);
    for (int i = 0; i < d; ++i)
      for (int j = 0; j < d; ++j) at(sum, d, i, j) += at(covariance, d, i, j) + mean[i] * mean[j];
  }
  return sum;
}

/// R s R^T, where R turns every RoPE pair by distance * frequency and scales it by the attention factor of both sides.
Matrix turned(const LayerGeometry& g, const Matrix& s, double distance) {
  const int d = g.head_dim, half = g.rotary_dim / 2;
  const double factor = g.attention_factor * g.attention_factor;
  Matrix out = s;
  for (const bool rows : {true, false})
    for (int p = 0; p < half; ++p) {
      const int a = g.rope_style == RopeStyle::kInterleaved ? 2 * p : p, b = g.rope_style == RopeStyle::kInterleaved ? 2 * p + 1 : p + half;
      const double angle = distance * g.inv_freq[static_cast<std::size_t>(p)], c = factor * std::cos(angle), sn = factor * std::sin(angle);
      for (int k = 0; k < d; ++k) {
        double& x = rows ? at(out, d, a, k) : at(out, d, k, a);
        double& y = rows ? at(out, d, b, k) : at(out, d, k, b);
        const double turned_x = c * x - sn * y;
        y = sn * x + c * y;
        x = turned_x;
      }
    }
  return out;
}

/// Mean of R s R^T over 64 distances, log-uniform on 1..max_distance.
Matrix moment_before_rope(const stats::LayerStats& layer, int head, std::int64_t max_distance) {
  const Matrix s = query_second_moment(layer, head);
  Matrix mean(s.size(), 0.0);
  for (int i = 0; i < kDistances; ++i) {
    const double distance = std::round(std::pow(static_cast<double>(max_distance), static_cast<double>(i) / (kDistances - 1)));
    const Matrix one = turned(layer.geometry(), s, distance);
    for (std::size_t k = 0; k < mean.size(); ++k) mean[k] += one[k] / kDistances;
  }
  return mean;
}

/// H m H^T for the rotation H of the stored row.
Matrix rotated(const Matrix& m, int d) {
  const kvrt::HadamardOrder order = kvrt::hadamard_order(d);
  Matrix h(m.size()), left(m.size(), 0.0), out(m.size(), 0.0);
  for (int j = 0; j < d; ++j) {
    std::vector<float> column(static_cast<std::size_t>(d), 0.0f);
    column[static_cast<std::size_t>(j)] = 1.0f;
    kvrt::hadamard_rotate(order, column.data(), d, false);
    for (int i = 0; i < d; ++i) at(h, d, i, j) = column[static_cast<std::size_t>(i)];
  }
  for (int i = 0; i < d; ++i)
    for (int k = 0; k < d; ++k)
      for (int j = 0; j < d; ++j) at(left, d, i, j) += at(h, d, i, k) * at(m, d, k, j);
  for (int i = 0; i < d; ++i)
    for (int j = 0; j < d; ++j)
      for (int k = 0; k < d; ++k) at(out, d, i, j) += at(left, d, i, k) * at(h, d, j, k);
  return out;
}

Matrix output_moment(const stats::LayerStats& layer, int head) {
  const LayerGeometry& g = layer.geometry();
  if (layer.output_moment.empty())
    fail(ErrorKind::kVersion, fmt::format("layer {} V", g.index),
         "the statistics hold no moment of the output projection (`output_moment`), which this scheme of values is fitted with: they were made by an "
         "older kvcalib; run kvcalib again");
  const std::ptrdiff_t size = static_cast<std::ptrdiff_t>(g.head_dim) * g.head_dim;
  return {layer.output_moment.begin() + head * size, layer.output_moment.begin() + (head + 1) * size};
}

/// In the coordinates of the stored row, from those of the model: x / smooth divides by `power` -1, a moment of errors multiplies by 1.
Matrix in_stored_coordinates(Matrix m, int d, const kvrt::Scheme& scheme, const float* smooth, int power) {
  for (int i = 0; smooth && i < d; ++i)
    for (int j = 0; j < d; ++j) {
      const double factor = static_cast<double>(smooth[i]) * smooth[j];
      at(m, d, i, j) = power > 0 ? at(m, d, i, j) * factor : at(m, d, i, j) / factor;
    }
  return scheme.had ? rotated(m, d) : m;
}

}  // namespace

std::vector<double> error_moment(const stats::LayerStats& layer, Side side, int head, const kvrt::Scheme& scheme, const float* smooth,
                                 std::int64_t max_distance) {
  Matrix m = side == Side::kV ? output_moment(layer, head) : scheme.pre ? moment_before_rope(layer, head, max_distance) : layer.query_moment.matrix(head);
  return in_stored_coordinates(std::move(m), layer.geometry().head_dim, scheme, smooth, 1);
}

std::vector<double> channel_weights(const stats::LayerStats& layer, Side side, const kvrt::Scheme& scheme, std::int64_t max_distance) {
  const int d = layer.geometry().head_dim;
  kvrt::Scheme plain;
  plain.pre = scheme.pre;
  std::vector<double> weights;
  for (int h = 0; h < layer.geometry().n_kv_heads; ++h) {
    const Matrix m = error_moment(layer, side, h, plain, nullptr, max_distance);
    for (int c = 0; c < d; ++c) weights.push_back(std::max(0.0, at(m, d, c, c)));
  }
  if (std::all_of(weights.begin(), weights.end(), [](double w) { return w == 0; })) std::fill(weights.begin(), weights.end(), 1.0);
  return weights;
}

std::vector<double> stored_covariance(const stats::LayerStats& layer, Side side, int head, const kvrt::Scheme& scheme, const float* smooth,
                                      std::int64_t max_distance) {
  const LayerGeometry& g = layer.geometry();
  const int d = g.head_dim;
  Matrix m = side == Side::kV ? layer.value_cov.matrix(head) : layer.key_cov.matrix(head);
  if (side == Side::kK && !scheme.pre && g.rotary_dim > 0) {
    const double* mean = layer.key_cov.mean(head);
    for (int i = 0; i < d; ++i)
      for (int j = 0; j < d; ++j) at(m, d, i, j) += mean[i] * mean[j];
    Matrix over_positions(m.size(), 0.0);
    for (int i = 0; i < kDistances; ++i) {
      const Matrix one = turned(g, m, std::floor(static_cast<double>(i) * static_cast<double>(max_distance) / kDistances));
      for (std::size_t k = 0; k < m.size(); ++k) over_positions[k] += one[k] / kDistances;
    }
    for (int i = 0; i < d; ++i)
      for (int j = 0; j < d; ++j) at(m, d, i, j) = at(over_positions, d, i, j) - layer.k_post.body.mean(head, i) * layer.k_post.body.mean(head, j);
  }
  return in_stored_coordinates(std::move(m), d, scheme, smooth, -1);
}

}  // namespace calib::quant

#include "libcalib/quant/row_rotation.h"

#include <algorithm>
#include <numeric>

#include <Eigen/Core>

#include "kernels/codec/hadamard_order.h"
#include "libcalib/base/error.h"
#include "libcalib/base/plural.h"
#include "libcalib/quant/orthogonal_basis.h"

namespace calib::quant {
namespace {

constexpr std::int64_t kTileTokens = 256;

template <typename T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Rows = Eigen::Map<Matrix<float>, 0, Eigen::OuterStride<>>;
using ConstRows = Eigen::Map<const Matrix<float>, 0, Eigen::OuterStride<>>;

int heads_of(RotationKind kind) { return static_cast<int>(kind); }

std::vector<float> to_floats(const Eigen::MatrixXd& m) {
  const Matrix<float> rows = m.cast<float>();
  return {rows.data(), rows.data() + rows.size()};
}

int bits_reversed(int i, int dim) {
  int out = 0;
  for (int bit = 1; bit < dim; bit *= 2) out = 2 * out + ((i & bit) ? 1 : 0);
  return out;
}

/// Of the heads first ... first + g - 1.
std::vector<float> grouped_rotation(const stats::TensorStats& keys, int first, int g) {
  const int n = g * keys.head_dim;
  const auto mean = [&](int i) { return keys.mean(first + i / keys.head_dim, i % keys.head_dim); };
  std::vector<int> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return mean(a) < mean(b); });
  const Eigen::MatrixXd h = hadamard_matrix(n);
  Eigen::MatrixXd r(n, n);
  for (int i = 0; i < n; ++i) r.row(order[static_cast<std::size_t>(i)]) = h.col(i).transpose();
  return to_floats(r);
}

}  // namespace

RotationKind parse_rotation(const std::string& option, const std::string& text) {
  if (text == "query") return RotationKind::kQuery;
  if (text == "grouped2") return RotationKind::kGrouped2;
  if (text == "grouped4") return RotationKind::kGrouped4;
  fail(ErrorKind::kUsage, option, "is \"{}\", expected query, grouped2 or grouped4", text);
}

void check_rotation(RotationKind kind, const LayerGeometry& layer) {
  const std::string where = fmt::format("layer {}", layer.index);
  const int g = heads_of(kind), d = layer.head_dim;
  if (kind == RotationKind::kQuery && (d & (d - 1)) != 0)
    fail(ErrorKind::kUsage, where, "head_dim is {}, and the rotation by the queries' moment takes powers of two (bit reversal)", d);
  if (layer.n_kv_heads % g != 0)
    fail(ErrorKind::kUsage, where, "has {}, no multiple of {}; grouped{} turns as many together", counted(layer.n_kv_heads, "KV head"), g, g);
  if (kvrt::hadamard_order(g * d).size != g * d)
    fail(ErrorKind::kUsage, where, "there is no Hadamard matrix of order {} ({} of {} channels)", g * d, counted(g, "KV head"), d);
}

RowRotation row_rotation(RotationKind kind, const stats::LayerStats& layer, Side side) {
  check_rotation(kind, layer.geometry());
  CALIB_CHECK(kind == RotationKind::kQuery || side == Side::kK);
  RowRotation out{heads_of(kind), {}};
  for (int h = 0; h < layer.geometry().n_kv_heads; h += out.heads) {
    const std::vector<float> r = kind == RotationKind::kQuery
        ? eigen_rotation((side == Side::kK ? layer.query_moment : layer.value_cov).matrix(h), layer.geometry().head_dim)
        : grouped_rotation(layer.k_pre.body, h, out.heads);
    out.r.insert(out.r.end(), r.begin(), r.end());
  }
  return out;
}

std::vector<float> eigen_rotation(const std::vector<double>& moment, int dim) {
  CALIB_CHECK(dim >= 1 && (dim & (dim - 1)) == 0 && moment.size() == static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim));
  const EigenBasis basis = eigen_basis(Eigen::Map<const Matrix<double>>(moment.data(), dim, dim), "--rotate query", "moment");
  const Eigen::MatrixXd spread = basis.vectors * hadamard_matrix(dim);
  Eigen::MatrixXd r(dim, dim);
  for (int j = 0; j < dim; ++j) r.col(j) = spread.col(bits_reversed(j, dim));
  return to_floats(r);
}

void rotate_rows(const RowRotation& rotation, const LayerGeometry& layer, bool inverse, std::int64_t n_tokens, const float* x, float* out, ThreadPool& pool) {
  const std::int64_t n = std::int64_t{rotation.heads} * layer.head_dim, row = std::int64_t{layer.n_kv_heads} * layer.head_dim, groups = row / n;
  CALIB_CHECK(static_cast<std::int64_t>(rotation.r.size()) == groups * n * n);
  const std::int64_t tiles = (n_tokens + kTileTokens - 1) / kTileTokens;
  pool.parallel_for(tiles * groups, [&](std::int64_t i) {
    const std::int64_t first = i / groups * kTileTokens, group = i % groups, count = std::min(kTileTokens, n_tokens - first), at = first * row + group * n;
    const Eigen::Map<const Matrix<float>> r(rotation.r.data() + group * n * n, n, n);
    const ConstRows from(x + at, count, n, Eigen::OuterStride<>(row));
    Rows to(out + at, count, n, Eigen::OuterStride<>(row));
    if (inverse) to = from * r.transpose();  // through a temporary: x may be out
    else to = from * r;
  });
}

}  // namespace calib::quant

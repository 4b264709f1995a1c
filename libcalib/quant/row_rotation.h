#pragma once
// Orthogonal matrices that `kvsens evaluate --rotate` puts in front of the codec, in the place of `had` (METHODS.md 5.4, 5.5).
// Legend: T tokens, H KV heads, D head_dim, g KV heads turned together.

#include <cstdint>
#include <string>
#include <vector>

#include "libcalib/base/model_geometry.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::quant {

/// What is turned, and by what; the value is g.
enum class RotationKind {
  kQuery = 1,     ///< OSCAR: each head by the moment of its queries (keys after RoPE), or by its covariance (values)
  kGrouped2 = 2,  ///< RotateKV: a fast transform over the keys of g heads before RoPE
  kGrouped4 = 4,
};

/// "query", "grouped2", "grouped4". Throws kUsage naming `option`.
RotationKind parse_rotation(const std::string& option, const std::string& text);

/// Stored row = row R, where a row holds the channels of g consecutive heads.
struct RowRotation {
  int heads = 1;            ///< g
  std::vector<float> r;     ///< [H / g, g D, g D] row-major, each R orthogonal
};

/// Throws kUsage naming the layer, where its heads cannot be turned so: head_dim of `query` must be a power of two (bit reversal), KV heads
/// of `grouped` must divide into groups with a Hadamard matrix.
void check_rotation(RotationKind kind, const LayerGeometry& layer);

/// Of one layer. `query`: eigen_rotation() of query_moment (K) or value_cov (V). `grouped` (keys): the Hadamard matrix of order g D over
/// channels in ascending order of their mean before RoPE. Throws: as check_rotation(), kNumeric. Requires: K where `grouped`.
/// Source: OSCAR; RotateKV (its order is that of all heads of a layer, here that of the g heads).
RowRotation row_rotation(RotationKind kind, const stats::LayerStats& layer, Side side);

/// [dim, dim] U H P: U the eigenvectors of `moment` by descending eigenvalue, H Sylvester's matrix, P the reversal of a column number's
/// bits. R^T moment R has the same value everywhere on its diagonal, tr(moment) / dim. Requires: dim a power of two. Throws kNumeric.
std::vector<float> eigen_rotation(const std::vector<double>& moment, int dim);

/// out = x R, or x R^T with `inverse`, in fp32. x, out: [T, H, D]; may be the same. Independent of the pool's size.
void rotate_rows(const RowRotation& rotation, const LayerGeometry& layer, bool inverse, std::int64_t n_tokens, const float* x, float* out, ThreadPool& pool);

}  // namespace calib::quant

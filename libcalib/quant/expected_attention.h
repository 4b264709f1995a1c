#pragma once
// Expected Attention: how much later queries, known by their statistics alone, will attend to a key (METHODS.md 6; arXiv 2510.00636).
// Legend: Q query heads, H KV heads, G = Q/H, D head_dim, R rank.

#include <cstdint>
#include <span>
#include <vector>

#include "libcalib/base/model_geometry.h"
#include "libcalib/quant/saliency_factors.h"
#include "libcalib/stats/kv_stats.h"

namespace calib::quant {

/// RoPE of one position, times `factor` on the rotated channels.
class RopeTurn {
 public:
  RopeTurn(const LayerGeometry& layer, std::int64_t position, double factor);
  /// In place; x: [D].
  void apply(double* x) const;

 private:
  bool interleaved_;
  std::vector<double> cos_, sin_;
};

/// 32 distances ahead, one drawn from each span of 16 tokens of [0, 512).
std::vector<std::int64_t> future_distances(std::uint64_t seed);

/// A query head's scores at future positions t_i as a quadratic form of the post-RoPE key: z = linear . k + k' quadratic k.
/// linear = tau mean R_i mu, quadratic = tau^2/2 (mean R_i Sigma R_i' + cov R_i mu), so that z = mean a + (mean b + var a)/2 exactly.
/// Source: arXiv 2510.00636, with the variance of a over positions that the averaged rotation drops (METHODS.md 6, G36).
struct FutureQuery {
  std::vector<double> linear, quadratic;  ///< [D], [D, D] row-major
};
/// mean [D], covariance [D, D] of the queries before RoPE.
FutureQuery future_query(const LayerGeometry& layer, std::span<const double> mean, std::span<const double> covariance, std::span<const std::int64_t> positions);

/// What a plan keeps of the future queries of a layer: a = linear, m m' = the largest eigenpairs of 2 quadratic.
SaliencyFactors saliency_factors(std::span<const FutureQuery> queries);
/// From the statistics of a layer, over future_distances(seed).
SaliencyFactors saliency_factors(const stats::LayerStats& layer, std::uint64_t seed = 0);

/// Scores of tokens that leave the window together when the sequence has `length` tokens: softmax of z over them, mean over the query
/// heads of KV head `head`, times |v|. k (post-RoPE) and v: rows of D, `stride` floats apart. Shape: [n_tokens].
/// Requires: factors of this layer.
std::vector<double> exit_block_scores(const LayerGeometry& layer, const SaliencyFactors& factors, int head, std::int64_t length, const float* k, const float* v,
                                      std::int64_t stride, std::int64_t n_tokens);

}  // namespace calib::quant

#pragma once
// INTERNAL to sens/: attn_kl, attn_out and the softmax's gain of one document and layer on sampled rows (METHODS.md 7). Runs on the CPU in fp32.
// Legend: T tokens, Q query heads, H KV heads, G = Q/H, D head_dim, C hidden size, R sampled rows.

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "kernels/core/tiers.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/model/torch_block.h"
#include "libcalib/sens/metrics.h"

namespace calib::sens {

/// Rows on which attention is compared: equal numbers from every position bucket past the sinks, ascending. A row's weight is the
/// number of rows of its bucket over the number sampled there. Depends on (seed, document, layer) alone.
struct SampledPositions {
  std::vector<std::int64_t> rows;
  std::vector<double> weight;
};
SampledPositions sample_positions(std::uint64_t seed, std::uint64_t document, std::uint64_t layer, std::int64_t n_tokens,
                                  std::int64_t n_sinks, std::int64_t n_rows);

/// Reference attention of the sampled rows, kept in tiles, against which every scheme of the layer is compared.
class AttentionProbe {
 public:
  /// q_post: [T, Q, D], k_post, v: [T, H, D], w_o: [C, Q*D], fp32 on the CPU.
  AttentionProbe(const at::Tensor& q_post, const at::Tensor& k_post, const at::Tensor& v, const at::Tensor& w_o, const LayerGeometry& layer,
                 const std::vector<std::int64_t>& rows, ThreadPool& pool);

  std::size_t n_rows() const { return rows_.size(); }
  /// |W_o o|^2 of every row: the denominators of attn_out.
  const std::vector<double>& output_norm2() const { return output_norm2_; }

  /// q . error for every sampled row and key: scores moved by an error of the keys (post-RoPE), [H, G*r, n] per tile.
  std::vector<at::Tensor> score_changes(const at::Tensor& k_error_THD) const;
  /// One key scheme: coded tokens move by `coded`, the others by `exact` (both from score_changes()). Writes R values each:
  /// attn_kl (mean over query heads, nats), |W_o (o^ - o)|^2 and the change of the probabilities (summed over query heads).
  void compare_keys(const std::vector<at::Tensor>& coded, const std::vector<at::Tensor>& exact, const kvrt::Tiers& tiers, float* kl,
                    float* out, ProbabilityChange* change) const;

  /// Splits the probabilities by what a row reads, once per class of tiers.
  struct ValueClass {
    std::vector<at::Tensor> coded_p;  ///< [H, G*r, n] per tile, 0 where the row reads the value exact
    std::vector<at::Tensor> exact_o;  ///< [H, G*r, D] per tile: change of o by the exact segments' rounding
  };
  ValueClass split_values(const at::Tensor& exact_error_THD, const kvrt::Tiers& tiers) const;
  void compare_values(const at::Tensor& coded_error_THD, const ValueClass& values, float* out) const;

 private:
  struct Tile {
    std::size_t first = 0, end = 0;  // index into rows_
    std::int64_t n_keys = 0;
    at::Tensor q;                    // [H, G*r, D], scaled
    at::Tensor p;                    // [H, G*r, n]
  };
  std::int64_t first_key(std::int64_t row) const;
  /// |W_o x|^2 of rows given per tile as [H, G*r, D].
  void project_norm2(const std::vector<at::Tensor>& o_tiles, float* out) const;
  at::Tensor row_major(const std::vector<at::Tensor>& o_tiles) const;

  LayerGeometry layer_;
  std::int64_t group_ = 1;
  std::vector<std::int64_t> rows_;
  std::vector<Tile> tiles_;
  at::Tensor v_HTD_, w_o_;
  std::vector<double> output_norm2_;
  ThreadPool& pool_;
};

}  // namespace calib::sens

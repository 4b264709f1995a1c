#include "libcalib/sens/attention_objective.h"

#include <algorithm>
#include <limits>

#include <c10/core/GradMode.h>

namespace calib::sens {
namespace {

constexpr std::size_t kRowsPerTile = 32;

at::Tensor head_first(const at::Tensor& x, std::int64_t n) { return x.slice(0, 0, n).to(at::kCPU, at::kDouble).permute({1, 0, 2}); }

}  // namespace

AttentionLoss attention_loss(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MixedCache& cache, const LayerGeometry& layer,
                             const SampledPositions& sampled) {
  const c10::NoGradGuard no_grad;
  const std::int64_t heads = layer.n_kv_heads, group = layer.n_q_heads / heads, d = layer.head_dim;
  AttentionLoss out;
  for (std::size_t first = 0; first < sampled.rows.size(); first += kRowsPerTile) {
    const std::size_t end = std::min(sampled.rows.size(), first + kRowsPerTile);
    const std::int64_t n_rows = static_cast<std::int64_t>(end - first), n = sampled.rows[end - 1] + 1;
    const at::Tensor rows = at::tensor(
        std::vector<std::int64_t>(sampled.rows.begin() + static_cast<std::ptrdiff_t>(first), sampled.rows.begin() + static_cast<std::ptrdiff_t>(end)));
    at::Tensor coded = at::zeros({n_rows, n}, at::kBool);
    for (std::int64_t r = 0; r < n_rows; ++r) {
      const std::int64_t seen = sampled.rows[first + static_cast<std::size_t>(r)] + 1, coded_end = std::min(seen, kvrt::coded_end(cache.tiers, seen));
      if (coded_end > cache.tiers.n_sinks) coded[r].slice(0, cache.tiers.n_sinks, coded_end).fill_(true);
    }
    const at::Tensor keys = at::arange(n, at::kLong).unsqueeze(0), at_row = rows.unsqueeze(1);
    at::Tensor unseen = keys > at_row;
    if (layer.sliding_window > 0) unseen = unseen.logical_or(keys <= at_row - layer.sliding_window);
    // [H, G * rows, n]: rows innermost, so that one mask of [rows, n] serves all heads.
    const at::Tensor queries = (q.to(at::kCPU, at::kDouble).index_select(0, rows) * layer.softmax_scale)
                                   .view({n_rows, heads, group, d})
                                   .permute({1, 2, 0, 3})
                                   .reshape({heads, group * n_rows, d});
    const auto scores = [&](const at::Tensor& of) { return at::bmm(queries, head_first(of, n).transpose(1, 2)).view({heads, group, n_rows, n}); };
    constexpr double kUnseen = -std::numeric_limits<double>::infinity();
    const at::Tensor s = scores(k).masked_fill(unseen, kUnseen), s_hat = at::where(coded, scores(cache.k_coded), scores(cache.k_exact)).masked_fill(unseen, kUnseen);
    const at::Tensor mass = at::logsumexp(s, {-1}), mass_hat = at::logsumexp(s_hat, {-1});
    const at::Tensor p = at::exp(s - mass.unsqueeze(-1)), p_hat = at::exp(s_hat - mass_hat.unsqueeze(-1));
    const at::Tensor kl = (p * (s - s_hat).masked_fill(unseen, 0.0)).sum(-1) - mass + mass_hat;
    const auto read = [&](const at::Tensor& weights, const at::Tensor& values) {
      return at::bmm(weights.reshape({heads, group * n_rows, n}), head_first(values, n));
    };
    const at::Tensor o = read(p, v), o_hat = read(p_hat * coded, cache.v_coded) + read(p_hat * coded.logical_not(), cache.v_exact);
    const at::Tensor weight =
        at::tensor(std::vector<double>(sampled.weight.begin() + static_cast<std::ptrdiff_t>(first), sampled.weight.begin() + static_cast<std::ptrdiff_t>(end)),
                   at::kDouble);
    const auto sum = [&](const at::Tensor& per_row) { return (per_row.view({heads, group, n_rows}) * weight).sum().item<double>(); };
    AttentionMatch match;
    match.n_rows = weight.sum().item<double>() * static_cast<double>(heads * group);
    match.mass = sum((mass - mass_hat).square());
    match.error = sum((o - o_hat).square().sum(-1)), match.norm = sum(o.square().sum(-1));
    out += {match, sum(kl)};
  }
  return out;
}

}  // namespace calib::sens

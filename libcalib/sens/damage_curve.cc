#include "libcalib/sens/damage_curve.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <c10/core/GradMode.h>

#include "libcalib/sens/attention_backward.h"
#include "libcalib/sens/forward_metrics.h"
#include "libcalib/sens/joint_run.h"

namespace calib::sens {
namespace {

/// A point of the curve in (x, ln ratio), made monotone.
struct Knot {
  double x = 0, ln_ratio = 0;
};
std::vector<Knot> knots_of(std::span<const DamagePoint> points) {
  std::vector<DamagePoint> sorted(points.begin(), points.end());
  std::sort(sorted.begin(), sorted.end(), [](const DamagePoint& a, const DamagePoint& b) { return a.x < b.x; });
  std::vector<Knot> knots = {{}};
  for (const DamagePoint& p : sorted) knots.push_back({std::max(p.x, 0.0), std::max(knots.back().ln_ratio, std::log(p.ppl_ratio))});
  return knots;
}

/// Exact attention scores of one layer's sampled rows, and how well those over another cache keep to them. fp32 on the CPU; sums are double.
/// Legend: H KV heads, G query heads of each, D head_dim, R rows, T tokens.
class ScoreRows {
 public:
  /// q: [T, Q, D], k: [T, H, D] post-RoPE.
  ScoreRows(const at::Tensor& q, const at::Tensor& k, const LayerGeometry& layer, const SampledPositions& sampled)
      : layer_(layer), sampled_(sampled), group_(layer.n_q_heads / layer.n_kv_heads) {
    const auto n_rows = static_cast<std::int64_t>(sampled.rows.size());
    // [H, G * R, D], rows innermost.
    q_ = on_cpu(q)
             .index_select(0, at::tensor(sampled.rows))
             .view({n_rows, layer.n_kv_heads, group_, layer.head_dim})
             .permute({1, 2, 0, 3})
             .reshape({layer.n_kv_heads, group_ * n_rows, layer.head_dim})
             .contiguous();
    exact_ = scores(k);
  }

  /// Sum over rows of weight * mean over heads, and the sum of the weights that had anything to correlate.
  struct Sum {
    double correlation = 0, weight = 0;
  };
  Sum correlate(const ChangedCache& cache, const kvrt::Tiers& tiers, ThreadPool& pool) const {
    const at::Tensor coded = scores(cache.k_coded), exact = cache.k_exact.is_same(cache.k_coded) ? coded : scores(cache.k_exact);
    const float* const reference_data = exact_.data_ptr<float>();
    const float* const coded_data = coded.data_ptr<float>();
    const float* const exact_data = exact.data_ptr<float>();
    const auto n_rows = static_cast<std::int64_t>(sampled_.rows.size());
    const std::int64_t n = exact_.size(2), heads = layer_.n_q_heads;
    std::vector<std::optional<double>> of_line(static_cast<std::size_t>(heads * n_rows));
    pool.parallel_for(heads * n_rows, [&](std::int64_t line) {
      const std::int64_t seen = sampled_.rows[static_cast<std::size_t>(line % n_rows)] + 1;
      const std::int64_t first = layer_.sliding_window > 0 ? std::max<std::int64_t>(0, seen - layer_.sliding_window) : 0;
      const std::int64_t coded_end = std::min(seen, kvrt::coded_end(tiers, seen));
      std::vector<float> read(exact_data + line * n + first, exact_data + line * n + seen);
      for (std::int64_t j = std::max(first, tiers.n_sinks); j < coded_end; ++j) read[static_cast<std::size_t>(j - first)] = coded_data[line * n + j];
      of_line[static_cast<std::size_t>(line)] = pearson({reference_data + line * n + first, read.size()}, read);
    });
    Sum sum;
    for (std::int64_t r = 0; r < n_rows; ++r)
      for (std::int64_t h = 0; h < heads; ++h)
        if (const std::optional<double>& c = of_line[static_cast<std::size_t>(h * n_rows + r)]) {
          sum.correlation += sampled_.weight[static_cast<std::size_t>(r)] * *c;
          sum.weight += sampled_.weight[static_cast<std::size_t>(r)];
        }
    return sum;
  }

 private:
  /// [H, G * R, n], n the keys that the last row sees.
  at::Tensor scores(const at::Tensor& k) const { return at::bmm(q_, on_cpu(k).slice(0, 0, sampled_.rows.back() + 1).permute({1, 2, 0})).contiguous(); }

  const LayerGeometry& layer_;
  const SampledPositions& sampled_;
  std::int64_t group_ = 1;
  at::Tensor q_, exact_;
};

}  // namespace

std::optional<double> pearson(std::span<const float> x, std::span<const float> y) {
  CALIB_CHECK(x.size() == y.size());
  double mean_x = 0, mean_y = 0;
  for (std::size_t i = 0; i < x.size(); ++i) mean_x += x[i], mean_y += y[i];
  mean_x /= static_cast<double>(x.size()), mean_y /= static_cast<double>(x.size());
  double xx = 0, yy = 0, xy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double dx = x[i] - mean_x, dy = y[i] - mean_y;
    xx += dx * dx, yy += dy * dy, xy += dx * dy;
  }
  if (!(xx > 0)) return std::nullopt;
  return yy > 0 ? xy / std::sqrt(xx * yy) : 0.0;
}

double predicted_ppl_ratio(std::span<const DamagePoint> points, double x) {
  const std::vector<Knot> knots = knots_of(points);
  for (std::size_t i = 1; i < knots.size(); ++i)
    if (const Knot &a = knots[i - 1], &b = knots[i]; x < b.x) return std::exp(a.ln_ratio + (b.ln_ratio - a.ln_ratio) * (std::max(x, a.x) - a.x) / (b.x - a.x));
  return std::exp(knots.back().ln_ratio);
}

std::optional<double> damage_at_ratio(std::span<const DamagePoint> points, double ratio) {
  CALIB_CHECK(ratio > 1);
  const std::vector<Knot> knots = knots_of(points);
  const double wanted = std::log(ratio);
  for (std::size_t i = 1; i < knots.size(); ++i)
    if (const Knot &a = knots[i - 1], &b = knots[i]; b.ln_ratio >= wanted) return a.x + (b.x - a.x) * (wanted - a.ln_ratio) / (b.ln_ratio - a.ln_ratio);
  return std::nullopt;
}

std::vector<text::Document> damage_documents(const std::vector<text::Document>& documents, std::int64_t n_sinks) {
  std::vector<text::Document> out;
  for (const text::Document& d : documents)
    if (out.size() < kDamageDocuments && static_cast<std::int64_t>(d.ids.size()) >= std::max(kLeastScores, n_sinks + 2)) out.push_back(d);
  return out;
}

DamageGate::DamageGate(const model::StreamingModel& model, std::vector<text::Document> documents, const DamageOptions& options, ThreadPool& pool,
                       const EvaluateProgressFn& progress)
    : model_(model), documents_(std::move(documents)), options_(options), pool_(pool) {
  CALIB_CHECK(!documents_.empty());
  std::vector<Contender> noise;
  for (const double sigma : kDamageSigmas) noise.push_back(noise_contender(model.identity(), sigma, options.seed, options.n_sinks));
  EvaluateOptions settings;
  settings.second_half = options.second_half;
  settings.hidden_memory_bytes = options.hidden_memory_bytes;
  EvalResult measured;
  evaluate(model, documents_, noise, settings, pool, &measured, {}, progress);
  const std::vector<EvalDamage> damage = correlate(noise, {});
  curve_.n_documents = static_cast<std::int64_t>(documents_.size());
  for (const text::Document& d : documents_) curve_.n_tokens += static_cast<std::int64_t>(d.ids.size());
  for (std::size_t i = 0; i < noise.size(); ++i) curve_.points.push_back({kDamageSigmas[i], damage[i].x, measured.contenders[i].total.ppl_ratio.mean});
  curve_.rejects_from = damage_at_ratio(curve_.points, kRuinedPplRatio);
}

std::vector<EvalDamage> DamageGate::judge(const std::vector<Contender>& contenders, const EvaluateProgressFn& progress) const {
  std::vector<EvalDamage> out = correlate(contenders, progress);
  for (EvalDamage& d : out) {
    d.predicted_ppl_ratio = predicted_ppl_ratio(curve_.points, d.x);
    d.rejected = curve_.rejects_from && d.x >= *curve_.rejects_from;
  }
  return out;
}

std::vector<EvalDamage> DamageGate::correlate(const std::vector<Contender>& contenders, const EvaluateProgressFn& progress) const {
  const c10::NoGradGuard no_grad;
  DocumentStates states(documents_, 1, model_.identity().hidden_size, model::tensor_options(model_.device(), model_.dtype()), options_.hidden_memory_bytes);
  const auto embedding = model_.load_embedding();
  for (std::size_t d = 0; d < documents_.size(); ++d) states.put(0, d, embedding->lookup(documents_[d].ids));
  std::vector<EvalDamage> out(contenders.size());
  EvaluateProgress done;
  for (const text::Document& d : documents_) done.total += static_cast<std::int64_t>(d.ids.size()) * model_.n_layers();
  for (std::int64_t l = 0; l < model_.n_layers(); ++l) {
    const auto block = model_.load_block(l);
    const LayerGeometry& layer = block->geometry();
    std::vector<ScoreRows::Sum> sums(contenders.size());
    for (std::size_t d = 0; d < documents_.size(); ++d) {
      const at::Tensor x = states.get(0, d);
      const model::Projected p = block->project(x);
      const at::Tensor q = block->rotate(p.q_pre), k = block->rotate(p.k_pre);
      const SampledPositions sampled = sample_positions(options_.seed, d, static_cast<std::uint64_t>(l), q.size(0), kLeastScores - 1, options_.rows);
      const ScoreRows rows(q, k, layer, sampled);
      for (std::size_t c = 0; c < contenders.size(); ++c) {
        LayerChange keys = contenders[c].layers[static_cast<std::size_t>(l)];
        keys.v.reset();
        const ScoreRows::Sum sum = rows.correlate(change_cache(*block, p.k_pre, k, p.v, keys, pool_), keys.tiers, pool_);
        sums[c].correlation += sum.correlation, sums[c].weight += sum.weight;
      }
      const AttentionShape shape{layer.softmax_scale, layer.sliding_window, kQueryTile};
      states.put(0, d, block->finish(x, tiled_attention(q, k, p.v, shape).to(x.scalar_type())));
      done.done += static_cast<std::int64_t>(documents_[d].ids.size());
      if (progress) progress(done);
    }
    for (std::size_t c = 0; c < contenders.size(); ++c) {
      const double damage = sums[c].weight > 0 ? 1 - sums[c].correlation / sums[c].weight : 0;
      if (l == 0 || damage > out[c].x) out[c].x = damage, out[c].worst_layer = layer.index;
    }
  }
  return out;
}

}  // namespace calib::sens

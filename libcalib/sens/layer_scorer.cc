#include "libcalib/sens/layer_scorer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <c10/core/GradMode.h>

#include "libcalib/quant/expected_attention.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/sens/joint_run.h"

namespace calib::sens {
namespace {

constexpr std::uint64_t kBootstrapSeed = 20240607;  // fixed: standard errors do not depend on --seed

// bf16(x) - x: what exact segments add.
at::Tensor rounding_error(const at::Tensor& x) {
  at::Tensor out = at::empty_like(x);
  quant::round_bf16(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
  return out.sub_(x);
}

bool same(const kvrt::Tiers& a, const kvrt::Tiers& b) {
  return a.n_sinks == b.n_sinks && a.window == b.window && a.block_base == b.block_base && a.block_salient == b.block_salient;
}

Spread scaled(Spread x, double factor) {
  for (double* part : {&x.mean, &x.se, &x.p99, &x.max, &x.worst_decile}) *part *= factor;
  for (double& bucket : x.by_bucket) bucket *= factor;
  return x;
}

}  // namespace

LayerScorer::LayerScorer(const model::Block& block, std::vector<UnitCandidate> keys, std::vector<UnitCandidate> values,
                         const ScoreSettings& settings, ThreadPool& pool, std::shared_ptr<const quant::SalientTier> salient)
    : block_(block), settings_(settings), pool_(pool), w_o_(on_cpu(block.output_projection())), salient_(std::move(salient)) {
  keys_ = make_unit(Side::kK, std::move(keys));
  values_ = make_unit(Side::kV, std::move(values));
}

LayerScorer::UnitState LayerScorer::make_unit(Side side, std::vector<UnitCandidate> candidates) const {
  UnitState unit;
  unit.side = side;
  unit.candidates = std::move(candidates);
  for (const UnitCandidate& c : unit.candidates)
    for (std::size_t w = 0; w < settings_.windows.size(); ++w) {
      const kvrt::Tiers tiers = isolated_tiers(c.scheme, settings_.n_sinks, settings_.windows[w], settings_.salient_fractions[w]);
      CALIB_CHECK(tiers.block_salient == 0 || salient_);
      const auto at = std::find_if(unit.classes.begin(), unit.classes.end(), [&](const kvrt::Tiers& t) { return same(t, tiers); });
      unit.class_of.push_back(static_cast<std::size_t>(at - unit.classes.begin()));
      if (at == unit.classes.end()) unit.classes.push_back(tiers);
    }
  unit.rows.resize(unit.class_of.size());
  return unit;
}

at::Tensor LayerScorer::error_of(const UnitCandidate& candidate, Side side, const at::Tensor& x, bool bf16_input) const {
  at::Tensor out = at::empty_like(x);
  quantisation_error(candidate, side, block_.geometry(), settings_.n_sinks, bf16_input, x.size(0), x.data_ptr<float>(), out.data_ptr<float>(), pool_);
  return out;
}

const quant::TierMap& LayerScorer::placement(const kvrt::Tiers& tiers) {
  for (const auto& [known, map] : placements_)
    if (same(known, tiers)) return map;
  placements_.emplace_back(
      tiers, quant::place_tokens(block_.geometry(), salient_->factors, tiers, k_post_.size(0), k_post_.data_ptr<float>(), v_.data_ptr<float>(), pool_));
  return placements_.back().second;
}

at::Tensor LayerScorer::tier_error(const UnitCandidate& candidate, Side side, const kvrt::Tiers& tiers, const at::Tensor& x, const at::Tensor& x_post) {
  const LayerGeometry& g = block_.geometry();
  const quant::TierMap& map = placement(tiers);
  at::Tensor base = x.clone(), salient = x_post.clone();
  quant::fake_quant_tier(candidate.scheme, side, g, candidate.params, map, false, x.data_ptr<float>(), base.data_ptr<float>(), pool_);
  quant::fake_quant_tier(salient_->scheme, side, g, {}, map, true, x_post.data_ptr<float>(), salient.data_ptr<float>(), pool_);
  base.sub_(x), salient.sub_(x_post);
  if (candidate.scheme.pre) {  // the salient tokens' error, turned back to their positions' frame
    float* const data = salient.data_ptr<float>();
    pool_.parallel_for(map.n_tokens, [&](std::int64_t i) {
      const quant::RopeTurn back(g, -(map.first + i), 1 / g.attention_factor);
      std::vector<double> row(static_cast<std::size_t>(g.head_dim));
      for (std::int64_t h = 0; h < g.n_kv_heads; ++h) {
        if (map.salient[static_cast<std::size_t>(i * g.n_kv_heads + h)] == 0) continue;
        float* const at = data + ((map.first + i) * g.n_kv_heads + h) * g.head_dim;
        row.assign(at, at + g.head_dim);
        back.apply(row.data());
        for (std::size_t c = 0; c < row.size(); ++c) at[c] = static_cast<float>(row[c]);
      }
    });
  }
  return base.add_(salient);
}

bool LayerScorer::renew(SharedError& shared, const UnitCandidate& candidate, Side side, const kvrt::Tiers& tiers, const at::Tensor& x, const at::Tensor& x_post) {
  const bool tiered = tiers.block_salient > 0;
  if (shared.error.defined() && !shared.tiered && !tiered) return false;
  shared = {tiered ? tier_error(candidate, side, tiers, x, x_post) : error_of(candidate, side, x, kvrt::encodes_bf16(tiers)), tiered};
  return true;
}

LayerScorer::FrameGradients LayerScorer::split_gradients(const UnitState& unit, const at::Tensor& full, const std::vector<at::Tensor>& exact,
                                                         const at::Tensor& rounding, bool pre) const {
  const std::int64_t t = full.size(0), r = full.size(1), h = full.size(2), d = full.size(3);
  const auto to_frame = [&](const at::Tensor& g) {
    return on_cpu(pre ? block_.unrotate(g.view({t, r * h, d})).view({t, r, h, d}) : g);
  };
  FrameGradients out;
  for (std::size_t c = 0; c < unit.classes.size(); ++c) {
    out.coded.push_back(to_frame(coded_gradient(full, exact[c], unit.classes[c])));
    const at::Tensor g_exact = to_frame(exact[c]);
    out.exact.emplace_back(FisherShape{t, r, h, d});
    add_fisher_rows({t, r, h, d}, g_exact.data_ptr<float>(), rounding.data_ptr<float>(), &out.exact.back(), pool_);
  }
  return out;
}

void LayerScorer::add_fisher(const at::Tensor& error, const FrameGradients& g, std::size_t class_idx, Rows* rows) const {
  FisherRows sum = g.exact[class_idx];
  const at::Tensor& coded = g.coded[class_idx];
  add_fisher_rows({coded.size(0), coded.size(1), coded.size(2), coded.size(3)}, coded.data_ptr<float>(), error.data_ptr<float>(), &sum, pool_);
  rows->vec.insert(rows->vec.end(), sum.vec.begin(), sum.vec.end());
  rows->diagonal.insert(rows->diagonal.end(), sum.diagonal.begin(), sum.diagonal.end());
  double squares = 0;
  for (const double along : sum.direction) squares += along * along;
  rows->direction.push_back(static_cast<float>(0.5 * squares / static_cast<double>(sum.direction.size())));
  rows->n_squares += static_cast<std::int64_t>(sum.direction.size());
}

void LayerScorer::score_keys(const DocumentAttention& x, const AttentionGradients* gradients, const AttentionProbe* probe) {
  // [0] post, [1] pre; filled for the frames that candidates use.
  const at::Tensor k[2] = {on_cpu(x.k_post), on_cpu(x.k_pre)};
  std::optional<FrameGradients> g[2];
  std::vector<at::Tensor> exact_scores[2];
  const auto to_post = [&](const at::Tensor& error, bool pre) { return pre ? on_cpu(block_.rotate(error.to(x.k_post.device()))) : error; };
  const std::size_t n_windows = settings_.windows.size();
  for (std::size_t i = 0; i < keys_.candidates.size(); ++i) {
    const UnitCandidate& candidate = keys_.candidates[i];
    const bool pre = candidate.scheme.pre;
    if (gradients != nullptr && !g[pre]) g[pre] = split_gradients(keys_, gradients->d_k, gradients->exact_k, rounding_error(k[pre]), pre);
    if (probe != nullptr && exact_scores[pre].empty()) exact_scores[pre] = probe->score_changes(to_post(rounding_error(k[pre]), pre));
    for (const bool bf16_input : {false, true}) {
      SharedError shared;
      std::vector<at::Tensor> coded_scores;
      for (std::size_t w = 0; w < n_windows; ++w) {
        const std::size_t class_idx = keys_.class_of[i * n_windows + w];
        if (kvrt::encodes_bf16(keys_.classes[class_idx]) != bf16_input) continue;
        Rows& rows = keys_.rows[i * n_windows + w];
        if (renew(shared, candidate, Side::kK, keys_.classes[class_idx], k[pre], k[0])) coded_scores.clear();
        if (gradients != nullptr) add_fisher(shared.error, *g[pre], class_idx, &rows);
        if (probe == nullptr) continue;
        if (coded_scores.empty()) coded_scores = probe->score_changes(to_post(shared.error, pre));
        const std::size_t begin = rows.kl.size();
        rows.kl.resize(begin + probe->n_rows());
        rows.out.resize(begin + probe->n_rows());
        rows.change.resize(begin + probe->n_rows());
        probe->compare_keys(coded_scores, exact_scores[pre], keys_.classes[class_idx], rows.kl.data() + begin, rows.out.data() + begin,
                            rows.change.data() + begin);
      }
    }
  }
}

void LayerScorer::score_values(const DocumentAttention& x, const AttentionGradients* gradients, const AttentionProbe* probe) {
  if (values_.candidates.empty()) return;
  const at::Tensor v = on_cpu(x.v), rounding = rounding_error(v);
  std::optional<FrameGradients> g;
  if (gradients != nullptr) g = split_gradients(values_, gradients->d_v, gradients->exact_v, rounding, false);
  std::vector<AttentionProbe::ValueClass> split;
  if (probe != nullptr)
    for (const kvrt::Tiers& tiers : values_.classes) split.push_back(probe->split_values(rounding, tiers));
  const std::size_t n_windows = settings_.windows.size();
  for (std::size_t i = 0; i < values_.candidates.size(); ++i)
    for (const bool bf16_input : {false, true}) {
      SharedError shared;
      for (std::size_t w = 0; w < n_windows; ++w) {
        const std::size_t class_idx = values_.class_of[i * n_windows + w];
        if (kvrt::encodes_bf16(values_.classes[class_idx]) != bf16_input) continue;
        Rows& rows = values_.rows[i * n_windows + w];
        renew(shared, values_.candidates[i], Side::kV, values_.classes[class_idx], v, v);
        if (g) add_fisher(shared.error, *g, class_idx, &rows);
        if (probe == nullptr) continue;
        const std::size_t begin = rows.out.size();
        rows.kl.resize(begin + probe->n_rows(), 0.0f);  // values do not enter the scores: exactly 0
        rows.out.resize(begin + probe->n_rows());
        probe->compare_values(shared.error, split[class_idx], rows.out.data() + begin);
      }
    }
}

void LayerScorer::add_document(std::int32_t document, const DocumentAttention& x, const AttentionGradients* gradients) {
  const c10::NoGradGuard no_grad;
  const std::int64_t n_tokens = x.q_post.size(0);
  longest_ = std::max(longest_, n_tokens);
  placements_.clear();
  if (salient_) k_post_ = on_cpu(x.k_post), v_ = on_cpu(x.v);
  if (settings_.fisher) {
    CALIB_CHECK(gradients != nullptr);
    for (std::int64_t j = 0; j < n_tokens; ++j) {
      token_rows_.document.push_back(document);
      token_rows_.position.push_back(j);
      token_rows_.weight.push_back(1);
      token_rows_.denominator.push_back(j >= settings_.n_sinks ? 1 : 0);  // n = loss rows; a sink key has a cost but no loss row
    }
    document_rows_.document.push_back(document);
    document_rows_.position.push_back(0);
    document_rows_.weight.push_back(1);
    document_rows_.denominator.push_back(static_cast<double>(n_tokens - settings_.n_sinks));
  }
  std::optional<AttentionProbe> probe;
  const bool attention = settings_.attn_kl || settings_.attn_out;
  if (attention || settings_.fisher_softmax) {
    const SampledPositions sampled = sample_positions(settings_.seed, static_cast<std::uint64_t>(document),
                                                      static_cast<std::uint64_t>(block_.geometry().index), n_tokens, settings_.n_sinks,
                                                      settings_.rows_per_document);
    if (!sampled.rows.empty()) {
      probe.emplace(on_cpu(x.q_post), on_cpu(x.k_post), on_cpu(x.v), w_o_, block_.geometry(), sampled.rows, pool_);
      for (std::size_t r = 0; r < sampled.rows.size(); ++r) {
        sampled_rows_.document.push_back(document);
        sampled_rows_.position.push_back(sampled.rows[r]);
        sampled_rows_.weight.push_back(sampled.weight[r]);
        sampled_rows_.denominator.push_back(probe->output_norm2()[r]);
      }
    }
  }
  const AttentionGradients* used = settings_.fisher ? gradients : nullptr;
  score_keys(x, used, probe ? &*probe : nullptr);
  score_values(x, used, probe && attention ? &*probe : nullptr);
}

double LayerScorer::softmax_gain(const Rows& rows) const {
  double exact = 0, linear = 0;
  for (std::size_t r = 0; r < rows.change.size(); ++r) {
    exact += sampled_rows_.weight[r] * rows.change[r].exact;
    linear += sampled_rows_.weight[r] * rows.change[r].linear;
  }
  return linear > 0 ? exact / linear : 1.0;
}

void LayerScorer::settle_alternatives(UnitState& unit) {
  const std::size_t n_windows = settings_.windows.size();
  const auto loss = [&](std::size_t candidate) {  // over the same rows and denominators
    double sum = 0;
    for (std::size_t w = 0; w < n_windows; ++w) {
      const Rows& rows = unit.rows[candidate * n_windows + w];
      const std::vector<float>& values = unit.side == Side::kK ? rows.kl : rows.out;
      for (std::size_t r = 0; r < values.size(); ++r) sum += sampled_rows_.weight[r] * values[r];
    }
    return sum;
  };
  for (std::size_t i = unit.candidates.size(); i-- > 0;) {
    if (!unit.candidates[i].is_alternative) continue;
    std::size_t first = 0;
    while (unit.candidates[first].scheme_idx != unit.candidates[i].scheme_idx) ++first;
    ++n_alternatives_;
    if (loss(i) < loss(first)) {
      ++n_alternatives_kept_;
      unit.candidates[first] = std::move(unit.candidates[i]);
      unit.candidates[first].is_alternative = false;
      for (std::size_t w = 0; w < n_windows; ++w) unit.rows[first * n_windows + w] = std::move(unit.rows[i * n_windows + w]);
    }
    unit.candidates.erase(unit.candidates.begin() + static_cast<std::ptrdiff_t>(i));
    unit.rows.erase(unit.rows.begin() + static_cast<std::ptrdiff_t>(i * n_windows), unit.rows.begin() + static_cast<std::ptrdiff_t>((i + 1) * n_windows));
  }
}

void LayerScorer::finish_unit(const UnitState& unit, std::size_t unit_idx, const Resampling& resampling, SensResult* result) const {
  RowIndex plain = sampled_rows_;  // attn_kl is a mean, not a ratio
  std::fill(plain.denominator.begin(), plain.denominator.end(), 1.0);
  const std::size_t n_windows = settings_.windows.size();
  const std::int64_t n = static_cast<std::int64_t>(unit.rows.size());
  pool_.parallel_for(n, [&](std::int64_t k) {
    const auto i = static_cast<std::size_t>(k) / n_windows, w = static_cast<std::size_t>(k) % n_windows;
    const Rows& rows = unit.rows[static_cast<std::size_t>(k)];
    const std::size_t scheme = unit.candidates[i].scheme_idx;
    const auto store = [&](const RowIndex& index, const std::vector<float>& values, const Bootstrap& bootstrap, const char* metric) {
      store_spread(summarise(index, values, bootstrap, result->n_buckets), unit_idx, scheme, w, metric, result);
    };
    if (settings_.fisher) {
      const Spread vec = summarise(token_rows_, rows.vec, resampling.tokens, result->n_buckets);
      store_spread(vec, unit_idx, scheme, w, "fisher_vec", result);
      store(token_rows_, rows.diagonal, resampling.tokens, "fisher");
      Spread direction = summarise(document_rows_, rows.direction, resampling.documents, result->n_buckets);
      if (settings_.fisher_softmax) {
        const double together = coherence(vec.mean, direction.mean, rows.n_squares);
        Spread score = scaled(vec, softmax_gain(rows) * together);
        if (together > 1) score.se = std::hypot(score.se, score.mean * direction.se / direction.mean);
        store_spread(score, unit_idx, scheme, w, "fisher_softmax", result);
      }
      std::fill(direction.by_bucket.begin(), direction.by_bucket.end(), std::numeric_limits<double>::quiet_NaN());  // of no position
      store_spread(direction, unit_idx, scheme, w, "fisher_dir", result);
    }
    if (settings_.attn_kl) store(plain, rows.kl, resampling.sampled, "attn_kl");
    if (settings_.attn_out) store(sampled_rows_, rows.out, resampling.sampled, "attn_out");
  });
}

void LayerScorer::finish(std::size_t key_unit, std::size_t value_unit, SensResult* result) {
  for (UnitState* unit : {&keys_, &values_}) settle_alternatives(*unit);
  const Resampling resampling{Bootstrap(token_rows_, kBootstrapSeed), Bootstrap(document_rows_, kBootstrapSeed), Bootstrap(sampled_rows_, kBootstrapSeed)};
  finish_unit(keys_, key_unit, resampling, result);
  finish_unit(values_, value_unit, resampling, result);
  for (const UnitCandidate& c : keys_.candidates) store_params(c, key_unit, result);
  for (const UnitCandidate& c : values_.candidates) store_params(c, value_unit, result);
}

void prepare_tables(const ScoreSettings& settings, std::int64_t seq_len, SensResult* result) {
  result->windows = settings.windows;
  result->salient_fractions = settings.salient_fractions;
  result->n_buckets = n_position_buckets(seq_len);
  std::vector<std::string> metrics;
  if (settings.fisher) metrics.insert(metrics.end(), {"fisher_vec", "fisher", "fisher_dir"});
  if (settings.fisher_softmax) metrics.push_back("fisher_softmax");
  if (settings.attn_kl) metrics.push_back("attn_kl");
  if (settings.attn_out) metrics.push_back("attn_out");
  for (const std::string& name : metrics) add_empty_table(name, result);
}

void add_empty_table(const std::string& metric, SensResult* result) {
  const std::size_t n = result->units.size() * result->schemes.size() * result->windows.size();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  ScoreTable& table = result->scores[metric];
  for (std::vector<double>* column : {&table.mean, &table.se, &table.p99, &table.max, &table.worst_decile}) column->assign(n, kNaN);
  table.by_bucket.assign(n * static_cast<std::size_t>(result->n_buckets), kNaN);
}

void store_spread(const Spread& spread, std::size_t unit, std::size_t scheme, std::size_t window, const std::string& metric, SensResult* result) {
  ScoreTable& table = result->scores.at(metric);
  const std::size_t i = result->index(unit, scheme, window), n_buckets = static_cast<std::size_t>(result->n_buckets);
  table.mean[i] = spread.mean;
  table.se[i] = spread.se;
  table.p99[i] = spread.p99;
  table.max[i] = spread.max;
  table.worst_decile[i] = spread.worst_decile;
  std::copy(spread.by_bucket.begin(), spread.by_bucket.end(), table.by_bucket.begin() + static_cast<std::ptrdiff_t>(i * n_buckets));
}

}  // namespace calib::sens

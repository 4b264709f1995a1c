#include "libcalib/sens/saliency_head.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "libcalib/base/error.h"
#include "libcalib/model/torch_block.h"
#include "libcalib/stats/attention_stats.h"
#include "libcalib/stats/tile_kernels.h"

namespace calib::sens {
namespace {

constexpr std::int64_t kTile = 256;

/// One head of [T, heads, D], dense.
at::Tensor head_of(const float* x, std::int64_t n_tokens, int heads, int width, int head) {
  return at::from_blob(const_cast<float*>(x), {n_tokens, heads, width}, at::kFloat).select(1, head).contiguous();
}

/// Mean squared error per coordinate over tokens past the sinks.
double error_variance(const at::Tensor& exact, const at::Tensor& coded, std::int64_t n_sinks) {
  const std::int64_t n = exact.size(0);
  if (n <= n_sinks) return 0;
  return (exact.slice(0, n_sinks) - coded.slice(0, n_sinks)).to(at::kDouble).pow(2).mean().item<double>();
}

std::span<const double> first_n(const std::vector<double>& x, std::int64_t n) { return std::span(x).first(static_cast<std::size_t>(n)); }

std::vector<double> widened(const std::vector<float>& x, std::int64_t n) { return {x.begin(), x.begin() + n}; }

}  // namespace

/// Tensors of this head on the CPU: [T, D], queries as [G] of them, unscaled.
struct HeadSaliency::Torch {
  at::Tensor k, v, base_k, base_v, salient_k, salient_v;
  std::vector<at::Tensor> q;
};

HeadSaliency::HeadSaliency(const HeadInputs& in) : map_(in.tensors->n_tokens, in.layer->sliding_window), matches_(in.fractions.size()) {
  const c10::NoGradGuard no_grad;
  const LayerGeometry& g = *in.layer;
  const stats::DocumentTensors& x = *in.tensors;
  const auto kv = [&](const float* data) { return head_of(data, x.n_tokens, g.n_kv_heads, g.head_dim, in.head); };
  const int group = g.n_q_heads / g.n_kv_heads;
  Torch t{kv(x.k_post), kv(x.v), kv(in.tiers->base_k.data()), kv(in.tiers->base_v.data()), kv(in.tiers->salient_k.data()), kv(in.tiers->salient_v.data()), {}};
  at::Tensor norm = at::zeros({x.n_tokens}, at::kDouble);
  for (int q = in.head * group; q < (in.head + 1) * group; ++q) {
    t.q.push_back(head_of(x.q_post, x.n_tokens, g.n_q_heads, g.head_dim, q));
    const std::int64_t size = std::int64_t{g.head_dim} * g.head_dim;
    const at::Tensor moment = at::from_blob(const_cast<double*>(in.output_moments.data() + q * size), {g.head_dim, g.head_dim}, at::kDouble);
    const at::Tensor v = t.v.to(at::kDouble);
    norm += (at::matmul(v, moment) * v).sum(1).clamp_min(0).sqrt() / group;
  }
  value_norm_.assign(norm.data_ptr<double>(), norm.data_ptr<double>() + x.n_tokens);
  for (std::int64_t j = 0; j < x.n_tokens; ++j)
    if (!std::isfinite(value_norm_[static_cast<std::size_t>(j)]))
      fail(ErrorKind::kNumeric, fmt::format("layer {}", g.index), "the value of document {}, KV head {}, token position {} is not finite", in.document, in.head, j);
  measure_attention(in, t);
  score_tokens(in);
  compare_tiers(in, t);
}

void HeadSaliency::measure_attention(const HeadInputs& in, const Torch& t) {
  const LayerGeometry& g = *in.layer;
  const std::int64_t n = t.k.size(0);
  const auto group = static_cast<float>(t.q.size());
  std::vector<std::vector<double>> key_part, value_part;
  for (const JudgedRows& b : in.buckets) {
    evidence_.push_back({b, {}, {}});
    key_part.emplace_back(static_cast<std::size_t>(b.first), 0.0), value_part.emplace_back(static_cast<std::size_t>(b.first), 0.0);
  }
  const at::Tensor v_norm2_tensor = t.v.to(at::kDouble).pow(2).sum(1).contiguous();
  const double* const v_norm2 = v_norm2_tensor.data_ptr<double>();
  const std::int64_t first_judged = in.buckets.empty() ? n : in.buckets.front().first;
  for (const at::Tensor& q : t.q) {
    for (std::int64_t r0 = 0; r0 < n; r0 += kTile) {
      const std::int64_t r1 = std::min(n, r0 + kTile);
      at::Tensor p = model::linear_map(q.slice(0, r0, r1) * g.softmax_scale, t.k.slice(0, 0, r1)).contiguous();
      for (std::int64_t row = r0; row < r1; ++row) {
        float* const x = p.data_ptr<float>() + (row - r0) * r1;
        const std::int64_t first = map_.first_key(row), n_vis = row + 1 - first;
        std::fill(x, x + first, 0.0f), std::fill(x + row + 1, x + r1, 0.0f);
        stats::row_softmax(x + first, static_cast<std::size_t>(n_vis));
        if (!std::isfinite(x[row]))
          fail(ErrorKind::kNumeric, fmt::format("layer {}", g.index), "the attention of document {}, KV head {}, token position {} is not finite", in.document,
               in.head, row);
        float* const mean = map_.row(row);
        for (std::int64_t j = first; j <= row; ++j) mean[j] += x[j] / group;
        if (n_vis < stats::kMinVisibleKeys) continue;
        double entropy = 0, squares = 0;
        stats::row_entropy(x + first, static_cast<std::size_t>(n_vis), &entropy, &squares);
        entropy_sum_ += entropy / std::log(static_cast<double>(n_vis)), ++n_entropy_rows_;
      }
      if (r1 <= first_judged) continue;
      const at::Tensor o = at::matmul(p, t.v.slice(0, 0, r1)), v_dot_o = model::linear_map(o, t.v.slice(0, 0, r1)).contiguous();
      const at::Tensor o_norm2 = o.to(at::kDouble).pow(2).sum(1).contiguous(), q_norm2 = q.slice(0, r0, r1).to(at::kDouble).pow(2).sum(1).contiguous();
      for (std::size_t b = 0; b < evidence_.size(); ++b)
        for (std::int64_t row = std::max(r0, evidence_[b].rows.first); row < std::min(r1, evidence_[b].rows.end); ++row)
          add_gain_row(p.data_ptr<float>() + (row - r0) * r1, v_dot_o.data_ptr<float>() + (row - r0) * r1, v_norm2, o_norm2.data_ptr<double>()[row - r0],
                       q_norm2.data_ptr<double>()[row - r0], evidence_[b].rows.first, key_part[b].data(), value_part[b].data());
    }
  }
  const SavedVariance saved{error_variance(t.k, t.base_k, in.n_sinks) - error_variance(t.k, t.salient_k, in.n_sinks),
                            error_variance(t.v, t.base_v, in.n_sinks) - error_variance(t.v, t.salient_v, in.n_sinks)};
  for (std::size_t b = 0; b < evidence_.size(); ++b) {
    const JudgedRows& rows = evidence_[b].rows;
    std::vector<double> mass(static_cast<std::size_t>(rows.first), 0.0);
    for (std::int64_t t0 = rows.first; t0 < rows.end; ++t0)
      for (std::int64_t j = in.n_sinks; j < rows.first; ++j) mass[static_cast<std::size_t>(j)] += static_cast<double>(map_.row(t0)[j]);
    const std::vector<double> gain = oracle_gain(key_part[b], value_part[b], g.softmax_scale, g.head_dim, saved);
    evidence_[b].mass.assign(mass.begin() + in.n_sinks, mass.end());
    evidence_[b].gain.assign(gain.begin() + in.n_sinks, gain.end());
  }
}

/// A ranking of the prompt knows all keys, the layer's full moments and output projection; one of an exit block what a plan tells its runtime.
std::vector<double> HeadSaliency::expected_scores(const HeadInputs& in, bool by_block, std::int64_t length, std::int64_t first, std::int64_t end) const {
  const LayerGeometry& g = *in.layer;
  const std::int64_t stride = std::int64_t{g.n_kv_heads} * g.head_dim, at = first * stride + in.head * g.head_dim, n_keys = end - first;
  if (by_block) return quant::exit_block_scores(g, *in.factors, in.head, length, in.tensors->k_post + at, in.tensors->v + at, stride, n_keys);
  const int group = g.n_q_heads / g.n_kv_heads;
  std::vector<std::vector<double>> logits;
  for (int q = in.head * group; q < (in.head + 1) * group; ++q)
    logits.push_back(expected_logits(in.future[static_cast<std::size_t>(q)], g, length, in.tensors->k_post + at, stride, n_keys));
  return expected_attention(logits, std::span(value_norm_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(n_keys)));
}

std::array<std::vector<double>, kPlanScores> HeadSaliency::scores_at(const HeadInputs& in, bool by_block, std::int64_t length, std::int64_t first,
                                                                     std::int64_t end) const {
  const LayerGeometry& g = *in.layer;
  std::array<std::vector<double>, kPlanScores> out;
  out[0] = expected_scores(in, by_block, length, first, end);
  out[1] = probe_scores(map_, probe_rows(length, Rng::for_item(in.seed, in.document, static_cast<std::uint64_t>(length))), first, end);
  out[2] = accumulated_scores(map_, length, first, end);
  for (std::int64_t j = first; j < end; ++j) out[3].push_back(static_cast<double>(j));
  Rng rng = Rng::for_item(in.seed, in.document * 4096 + static_cast<std::uint64_t>(in.head),
                          static_cast<std::uint64_t>(first) * 65536 + static_cast<std::uint64_t>(g.index));
  for (std::int64_t j = first; j < end; ++j) out[4].push_back(rng.uniform());
  return out;
}

void HeadSaliency::score_tokens(const HeadInputs& in) {
  const std::int64_t last = in.buckets.empty() ? 0 : in.buckets.back().first;
  for (const kvrt::Tiers& tiers : in.fractions) {
    std::array<std::vector<double>, kPlanScores> all;
    const std::int64_t block = tiers.exit_block();
    for (std::int64_t x = 0; x < kvrt::blocks_out(tiers, last); ++x) {
      const std::int64_t first = in.n_sinks + x * block;
      const auto scores = scores_at(in, true, first + block + tiers.window, first, first + block);
      for (std::size_t s = 0; s < kPlanScores; ++s) all[s].insert(all[s].end(), scores[s].begin(), scores[s].end());
    }
    scores_.by_block.push_back(std::move(all));
  }
  for (const JudgedRows& b : in.buckets) scores_.by_prompt.push_back(scores_at(in, false, b.first, in.n_sinks, b.first));
}

void HeadSaliency::compare_tiers(const HeadInputs& in, const Torch& t) {
  const double minus_infinity = -std::numeric_limits<double>::infinity();
  for (std::size_t b = 0; b < evidence_.size() && in.match_rows > 0; ++b) {
    const JudgedRows& rows = evidence_[b].rows;
    const std::int64_t end = rows.end, n_rows = std::min(in.match_rows, rows.end - rows.first);
    std::vector<std::int64_t> row_idx;
    for (std::int64_t i = 0; i < n_rows; ++i) row_idx.push_back(rows.first + (2 * i + 1) * (rows.end - rows.first) / (2 * n_rows));
    at::Tensor hidden = at::zeros({n_rows, end}, at::kBool);
    for (std::int64_t i = 0; i < n_rows; ++i) {
      bool* const x = hidden.data_ptr<bool>() + i * end;
      const std::int64_t row = row_idx[static_cast<std::size_t>(i)];
      std::fill(x, x + map_.first_key(row), true), std::fill(x + row + 1, x + end, true);
    }
    // Which tokens stand in the salient tier under each choice; the same for all query heads.
    std::vector<std::array<at::Tensor, SaliencyTally::kChoices>> salient;
    std::vector<at::Tensor> coded;
    for (std::size_t f = 0; f < in.fractions.size(); ++f) {
      const std::int64_t n = n_coded(in.fractions[f], rows.first);
      coded.push_back(at::zeros({end}, at::kBool));
      coded.back().slice(0, in.n_sinks, in.n_sinks + n).fill_(true);
      salient.emplace_back();
      for (std::size_t c = 0; c < SaliencyTally::kChoices; ++c) {
        salient.back()[c] = c == kOwnScores + 1 ? coded.back() : at::zeros({end}, at::kBool);
        if (c >= kOwnScores) continue;
        const Choice choice = c == static_cast<std::size_t>(TokenScore::kOracle) ? choose_oracle(evidence_[b], in.fractions[f])
                                                                                 : choose(scores_, f, b, c, in.fractions[f], rows.first);
        for (const std::int32_t j : choice.by_block) salient.back()[c].data_ptr<bool>()[in.n_sinks + j] = true;
      }
    }
    const at::Tensor row_tensor = at::tensor(row_idx, at::kLong);
    for (const at::Tensor& q_head : t.q) {
      const at::Tensor q = at::index_select(q_head, 0, row_tensor) * in.layer->softmax_scale;
      const auto scores_of = [&](const at::Tensor& k) { return model::linear_map(q, k.slice(0, 0, end)).masked_fill(hidden, minus_infinity); };
      const at::Tensor exact = scores_of(t.k), base = scores_of(t.base_k), better = scores_of(t.salient_k);
      const at::Tensor o = at::matmul(at::softmax(exact, 1), t.v.slice(0, 0, end)), log_mass = at::logsumexp(exact, 1);
      const double norm = o.to(at::kDouble).pow(2).sum().item<double>();
      for (std::size_t f = 0; f < in.fractions.size(); ++f)
        for (std::size_t c = 0; c < SaliencyTally::kChoices; ++c) {
          const at::Tensor& in_tier = salient[f][c];
          const at::Tensor s = at::where(in_tier, better, at::where(coded[f], base, exact));
          const at::Tensor v =
              at::where(in_tier.unsqueeze(1), t.salient_v.slice(0, 0, end), at::where(coded[f].unsqueeze(1), t.base_v.slice(0, 0, end), t.v.slice(0, 0, end)));
          const at::Tensor o_hat = at::matmul(at::softmax(s, 1), v);
          AttentionMatch match;
          match.error = (o - o_hat).to(at::kDouble).pow(2).sum().item<double>(), match.norm = norm;
          match.mass = (log_mass - at::logsumexp(s, 1)).to(at::kDouble).pow(2).sum().item<double>(), match.n_rows = static_cast<double>(n_rows);
          matches_[f][c] += match;
        }
    }
  }
}

PlacementScores mean_over_heads(std::span<const PlacementScores> heads) {
  CALIB_CHECK(!heads.empty());
  PlacementScores out = heads.front();
  const double n = static_cast<double>(heads.size());
  const auto combine = [&](auto member) {
    for (std::size_t i = 0; i < (out.*member).size(); ++i)
      for (std::size_t s = 0; s < kAttentionScores; ++s)
        for (std::size_t j = 0; j < (out.*member)[i][s].size(); ++j) {
          double sum = 0;
          for (const PlacementScores& head : heads) sum += (head.*member)[i][s][j];
          (out.*member)[i][s][j] = sum / n;
        }
  };
  combine(&PlacementScores::by_block), combine(&PlacementScores::by_prompt);
  return out;
}

std::int64_t n_coded(const kvrt::Tiers& tiers, std::int64_t first_row) { return kvrt::coded_end(tiers, first_row) - tiers.n_sinks; }

Choice choose(const PlacementScores& scores, std::size_t fraction, std::size_t bucket_idx, std::size_t score, const kvrt::Tiers& tiers, std::int64_t first_row) {
  const std::int64_t n = n_coded(tiers, first_row);
  return {top_set_by_block(first_n(scores.by_block[fraction][score], n), tiers.exit_block(), tiers.block_salient),
          top_set(first_n(scores.by_prompt[bucket_idx][score], n), n / tiers.exit_block() * tiers.block_salient)};
}

Choice choose_oracle(const BucketEvidence& evidence, const kvrt::Tiers& tiers) {
  const std::int64_t n = n_coded(tiers, evidence.rows.first);
  const std::vector<double> gain = widened(evidence.gain, n);
  return {top_set_by_block(gain, tiers.exit_block(), tiers.block_salient), top_set(gain, n / tiers.exit_block() * tiers.block_salient)};
}

SaliencyCell judge(const BucketEvidence& evidence, const Choice& choice, const kvrt::Tiers& tiers) {
  const std::int64_t n = n_coded(tiers, evidence.rows.first);
  return judge_choice(widened(evidence.mass, n), widened(evidence.gain, n), choice.by_block, choice.by_prompt, evidence.rows.end - evidence.rows.first);
}

}  // namespace calib::sens

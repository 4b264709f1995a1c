#include "libcalib/sens/saliency_walk.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "kernels/core/layout.h"
#include "libcalib/base/error.h"
#include "libcalib/base/plural.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/sens/metrics.h"
#include "libcalib/sens/saliency_head.h"

namespace calib::sens {
namespace {

std::size_t longest(const std::vector<text::Document>& documents) {
  std::size_t n = 0;
  for (const text::Document& d : documents) n = std::max(n, d.ids.size());
  return n;
}

/// Position buckets from 256 on.
int n_buckets(std::size_t n_tokens) { return std::max(0, n_position_buckets(static_cast<std::int64_t>(n_tokens)) - 1); }

class SaliencyTap final : public model::LayerTap {
 public:
  SaliencyTap(const ModelIdentity& model, const std::vector<text::Document>& documents, const ReferenceLayer& reference, const ParamsProvider& params,
              const SaliencyOptions& options, ThreadPool& pool)
      : model_(model), documents_(documents), reference_(reference), params_(params), options_(options), pool_(pool), fractions_(saliency_tiers(options)),
        tally_(fractions_.size(), kv_heads(model), n_buckets(longest(documents)), documents.size()), lent_(documents.size()) {}

  void begin_layer(const LayerGeometry& layer) override {
    geometry_ = layer;
    const stats::LayerStats statistics = reference_(position_);
    facts_.push_back({layer.index, 0, 0, statistics.q_pre.body.n_tokens()});
    future_.clear(), query_mean_.clear(), query_cov_.clear(), fresh_query_.assign(static_cast<std::size_t>(layer.n_q_heads * layer.head_dim), 0.0);
    n_fresh_ = n_entropy_rows_ = 0, entropy_sum_ = 0;
    const std::vector<std::int64_t> distances = future_distances(options_.seed);
    for (int q = 0; q < layer.n_q_heads; ++q) {
      std::vector<double> mean;
      for (int c = 0; c < layer.head_dim; ++c) mean.push_back(statistics.q_pre.body.mean(q, c));
      query_cov_.push_back(statistics.query_cov.matrix(q));
      future_.push_back(future_query(layer, mean, query_cov_.back(), distances));
      query_mean_.push_back(std::move(mean));
    }
    factors_ = quant::saliency_factors(future_);
  }
  void on_head_output_moments(const std::vector<double>& moments) override { output_moments_ = moments; }

  void on_document(const model::LayerCapture& capture) override {
    const auto document = static_cast<std::size_t>(capture.document_idx);
    add_queries(capture.tensors);
    const std::vector<JudgedRows> buckets = judged_buckets(capture.tensors.n_tokens, fractions_);
    if (buckets.empty()) return;
    code_tiers(capture.tensors);
    std::vector<std::unique_ptr<HeadSaliency>> heads(static_cast<std::size_t>(geometry_.n_kv_heads));
    pool_.parallel_for(geometry_.n_kv_heads, [&](std::int64_t h) {
      HeadInputs in{&geometry_,          static_cast<int>(h), options_.n_sinks, options_.seed,   static_cast<std::uint64_t>(document),
                    options_.match_rows, &capture.tensors,    &tiers_,          output_moments_, future_,
                    &factors_,           fractions_,          buckets};
      heads[static_cast<std::size_t>(h)] = std::make_unique<HeadSaliency>(in);
      judge_own(*heads[static_cast<std::size_t>(h)], static_cast<int>(h), document);
    });
    for (std::size_t h = 0; h < heads.size(); ++h) {
      entropy_sum_ += heads[h]->entropy_sum(), n_entropy_rows_ += heads[h]->n_entropy_rows();
      for (const BucketEvidence& e : heads[h]->evidence()) evidence_.push_back({position_, static_cast<int>(h), document, e});
    }
    if (position_ + 1 == model_.layers.size()) {
      std::vector<PlacementScores> scores;
      for (const auto& head : heads) scores.push_back(head->scores());
      lent_[document] = mean_over_heads(scores);
    }
  }

  void end_layer(const LayerGeometry&) override {
    stats_of_layer();
    ++position_;
  }

  void finish(SaliencyResult* result) {
    judge_lent();
    result->layers = facts_;
    result->fractions.resize(fractions_.size());
    for (std::size_t f = 0; f < fractions_.size(); ++f) {
      SaliencyFraction& out = result->fractions[f];
      out.requested = options_.fractions[f], out.block_base = fractions_[f].block_base, out.block_salient = fractions_[f].block_salient;
      out.achieved = static_cast<double>(fractions_[f].block_salient) / static_cast<double>(fractions_[f].exit_block());
    }
    tally_.finish(result);
  }

 private:
  struct Evidence {
    std::size_t layer = 0;
    int head = 0;
    std::size_t document = 0;
    BucketEvidence of;
  };
  static std::vector<int> kv_heads(const ModelIdentity& model) {
    std::vector<int> out;
    for (const LayerGeometry& g : model.layers) out.push_back(g.n_kv_heads);
    return out;
  }

  void add_queries(const stats::DocumentTensors& x) {
    const std::int64_t width = std::int64_t{geometry_.n_q_heads} * geometry_.head_dim;
    for (std::int64_t t = std::min(options_.n_sinks, x.n_tokens); t < x.n_tokens; ++t, ++n_fresh_)
      for (std::int64_t c = 0; c < width; ++c) fresh_query_[static_cast<std::size_t>(c)] += static_cast<double>(x.q_pre[t * width + c]);
  }

  void stats_of_layer() {
    SaliencyLayerFacts& facts = facts_.back();
    if (n_entropy_rows_ > 0) facts.normalised_entropy = entropy_sum_ / static_cast<double>(n_entropy_rows_);
    const auto d = static_cast<std::size_t>(geometry_.head_dim);
    for (double& x : fresh_query_) x /= static_cast<double>(std::max<std::int64_t>(1, n_fresh_));
    for (std::size_t q = 0; q < query_mean_.size() && n_fresh_ > 0; ++q)
      facts.query_shift = std::max(facts.query_shift, stats::mean_shift(query_mean_[q], std::span(fresh_query_).subspan(q * d, d), query_cov_[q]));
  }

  /// The document's keys (post-RoPE) and values under both schemes.
  void code_tiers(const stats::DocumentTensors& x) {
    code_side(options_.base_k, Side::kK, x, tiers_.base_k), code_side(options_.base_v, Side::kV, x, tiers_.base_v);
    code_side(options_.salient, Side::kK, x, tiers_.salient_k), code_side(options_.salient, Side::kV, x, tiers_.salient_v);
  }
  void code_side(const kvrt::Scheme& scheme, Side side, const stats::DocumentTensors& x, std::vector<float>& out) {
    const std::int64_t heads = geometry_.n_kv_heads, d = geometry_.head_dim;
    const bool pre = side == Side::kK && scheme.pre;
    out.resize(static_cast<std::size_t>(x.n_tokens * heads * d));
    quant::SchemeParams constants;
    if (kvrt::needs_calibration(scheme)) constants = params_(position_, side, scheme, options_.n_sinks);
    quant::fake_quant_document(scheme, side, geometry_, constants, options_.n_sinks, kvrt::encodes_bf16(fractions_.front()), x.n_tokens,
                               side == Side::kV ? x.v
                               : pre            ? x.k_pre
                                                : x.k_post,
                               out.data(), pool_);
    if (!pre) return;
    pool_.parallel_for(x.n_tokens, [&](std::int64_t t) {
      std::vector<double> row(static_cast<std::size_t>(d));
      for (std::int64_t h = 0; h < heads; ++h) {
        float* const y = out.data() + (t * heads + h) * d;
        row.assign(y, y + d);
        rotate_row(geometry_, t, row.data());
        for (std::int64_t c = 0; c < d; ++c) y[c] = static_cast<float>(row[static_cast<std::size_t>(c)]);
      }
    });
  }

  void judge_own(const HeadSaliency& head, int h, std::size_t document) {
    for (std::size_t f = 0; f < fractions_.size(); ++f) {
      for (std::size_t b = 0; b < head.evidence().size(); ++b) {
        const BucketEvidence& e = head.evidence()[b];
        for (std::size_t s = 0; s < kOwnScores; ++s) {
          const Choice choice = s == static_cast<std::size_t>(TokenScore::kOracle) ? choose_oracle(e, fractions_[f])
                                                                                   : choose(head.scores(), f, b, s, fractions_[f], e.rows.first);
          tally_.cell(f, s, position_, h, e.rows.bucket, document) = judge(e, choice, fractions_[f]);
        }
      }
      for (std::size_t c = 0; c < SaliencyTally::kChoices; ++c) tally_.match(f, c, position_, h, document) = head.matches()[f][c];
    }
  }

  void judge_lent() {
    pool_.parallel_for(static_cast<std::int64_t>(evidence_.size()), [&](std::int64_t i) {
      const Evidence& e = evidence_[static_cast<std::size_t>(i)];
      const std::vector<JudgedRows> buckets = judged_buckets(static_cast<std::int64_t>(documents_[e.document].ids.size()), fractions_);
      std::size_t b = 0;
      while (buckets[b].bucket != e.of.rows.bucket) ++b;
      for (std::size_t f = 0; f < fractions_.size(); ++f)
        for (std::size_t s = 0; s < kAttentionScores; ++s)
          tally_.cell(f, kOwnScores + s, e.layer, e.head, e.of.rows.bucket, e.document) =
              judge(e.of, choose(lent_[e.document], f, b, s, fractions_[f], e.of.rows.first), fractions_[f]);
    });
  }

  const ModelIdentity& model_;
  const std::vector<text::Document>& documents_;
  const ReferenceLayer& reference_;
  const ParamsProvider& params_;
  const SaliencyOptions& options_;
  ThreadPool& pool_;
  std::vector<kvrt::Tiers> fractions_;
  SaliencyTally tally_;
  std::vector<PlacementScores> lent_;  ///< by document, from the last layer
  std::vector<Evidence> evidence_;
  std::vector<SaliencyLayerFacts> facts_;

  LayerGeometry geometry_;
  std::size_t position_ = 0;
  std::vector<FutureQuery> future_;
  quant::SaliencyFactors factors_;
  std::vector<std::vector<double>> query_mean_, query_cov_;
  std::vector<double> fresh_query_, output_moments_;
  std::int64_t n_fresh_ = 0, n_entropy_rows_ = 0;
  double entropy_sum_ = 0;
  TierTensors tiers_;
};

}  // namespace

std::vector<kvrt::Tiers> saliency_tiers(const SaliencyOptions& options) {
  std::vector<kvrt::Tiers> out;
  for (const double fraction : options.fractions) {
    out.push_back(kvrt::finish_tiers(options.base_k, options.base_v, options.n_sinks, options.window, fraction));
    if (out.back().block_salient == 0)
      fail(ErrorKind::kUsage, "--fraction", "{} of an exit block of {} rounds to no token; give a larger share", fraction, counted(out.back().block_base, "token"));
  }
  return out;
}

void check_saliency(const SaliencyOptions& options, const ModelIdentity& model, const std::vector<text::Document>& documents) {
  const std::vector<kvrt::Tiers> tiers = saliency_tiers(options);
  for (const LayerGeometry& layer : model.layers) {
    quant::check_scheme(options.base_k, layer, Side::kK), quant::check_scheme(options.base_v, layer, Side::kV);
    quant::check_scheme(options.salient, layer, Side::kK), quant::check_scheme(options.salient, layer, Side::kV);
  }
  const std::size_t n = longest(documents);
  if (judged_buckets(static_cast<std::int64_t>(n), tiers).empty())
    fail(ErrorKind::kInfeasible, "--data",
         "the longest document has {}: ranked at position 256, or the next power of two that finds an exit block of {} past {} sinks and a window of {}, "
         "tokens need {} later rows to be judged by; give longer text or a larger --seq-len",
         counted(n, "token"), tiers.back().exit_block(), options.n_sinks, options.window, kLeastJudgedRows);
}

std::int64_t saliency_bytes(const ModelIdentity& model, const std::vector<text::Document>& documents, int n_threads) {
  const auto n = static_cast<std::int64_t>(longest(documents));
  std::int64_t tokens = 0, kv_heads = 0, widest = 0;
  for (const text::Document& d : documents) tokens += static_cast<std::int64_t>(d.ids.size());
  for (const LayerGeometry& g : model.layers) kv_heads += g.n_kv_heads, widest = std::max<std::int64_t>(widest, g.n_kv_heads);
  // Maps of one document and layer; two fp32 numbers a token, KV head and layer in each bucket, which add up to about its length.
  return widest * n * (n + 1) / 2 * 4 + n_threads * 3 * 256 * n * 4 + 2 * 4 * tokens * kv_heads;
}

void measure_saliency(const model::StreamingModel& model, const std::vector<text::Document>& documents, const ReferenceLayer& reference,
                      const ParamsProvider& params, const SaliencyOptions& options, ThreadPool& pool, SaliencyResult* result,
                      const model::ProgressFn& progress) {
  check_saliency(options, model.identity(), documents);
  SaliencyTap tap(model.identity(), documents, reference, params, options, pool);
  model::RunnerOptions walk;
  walk.hidden_memory_bytes = options.hidden_memory_bytes, walk.seed = options.seed;
  walk.attention_rows = 0, walk.reference_nll = false;
  model::run_streaming(model, documents, walk, &tap, progress);
  tap.finish(result);
  SaliencySettings& s = result->settings;
  s.n_documents = static_cast<std::int64_t>(documents.size()), s.seq_len = static_cast<std::int64_t>(longest(documents));
  s.n_sinks = options.n_sinks, s.window = options.window, s.match_rows = options.match_rows;
  s.base_k = kvrt::to_string(options.base_k), s.base_v = kvrt::to_string(options.base_v), s.salient = kvrt::to_string(options.salient);
}

}  // namespace calib::sens

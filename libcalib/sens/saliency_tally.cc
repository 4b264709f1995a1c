#include "libcalib/sens/saliency_tally.h"

#include <algorithm>
#include <cmath>

#include "libcalib/base/error.h"
#include "libcalib/sens/metrics.h"
#include "libcalib/sens/saliency.h"

namespace calib::sens {
namespace {

/// Ratio of sums over documents. Nothing to catch: 1, as for uniform attention, where no choice loses anything.
MeanSe ratio(const std::vector<SaliencyCell>& documents, double SaliencyCell::*numerator, double SaliencyCell::*denominator, double if_empty = 1.0) {
  std::vector<double> sum, weight;
  double total = 0;
  for (const SaliencyCell& c : documents)
    if (c.*denominator > 0) sum.push_back(c.*numerator), weight.push_back(c.*denominator), total += c.*denominator;
  if (!(total > 0)) return {if_empty, 0};
  const ClusterMean m = cluster_mean(sum, weight);
  return {m.mean, std::isfinite(m.se) ? m.se : 0.0};
}

SaliencyRates rates_of(const std::vector<SaliencyCell>& documents) {
  SaliencyRates out;
  out.hit = ratio(documents, &SaliencyCell::caught, &SaliencyCell::catchable);
  out.prompt_hit = ratio(documents, &SaliencyCell::prompt_caught, &SaliencyCell::catchable);
  out.overlap = ratio(documents, &SaliencyCell::common, &SaliencyCell::chosen);
  out.gain = ratio(documents, &SaliencyCell::gain, &SaliencyCell::best_gain);
  out.catchable = ratio(documents, &SaliencyCell::catchable, &SaliencyCell::rows, 0.0).mean;
  return out;
}

/// a - b over the same documents.
MeanSe paired_lead(const std::vector<SaliencyCell>& a, const std::vector<SaliencyCell>& b) {
  std::vector<SaliencyCell> difference = a;
  for (std::size_t d = 0; d < a.size(); ++d) difference[d].caught -= b[d].caught;
  return ratio(difference, &SaliencyCell::caught, &SaliencyCell::catchable, 0.0);
}

}  // namespace

SaliencyCell& SaliencyCell::operator+=(const SaliencyCell& o) {
  caught += o.caught, prompt_caught += o.prompt_caught, catchable += o.catchable, gain += o.gain, best_gain += o.best_gain;
  common += o.common, chosen += o.chosen, rows += o.rows;
  return *this;
}

SaliencyCell judge_choice(std::span<const double> mass, std::span<const double> gain, std::span<const std::int32_t> block_choice,
                          std::span<const std::int32_t> prompt_choice, std::int64_t n_rows) {
  CALIB_CHECK(block_choice.size() == prompt_choice.size() && mass.size() == gain.size());
  const auto count = static_cast<std::int64_t>(block_choice.size());
  const std::vector<std::int32_t> best = top_set(mass, count), best_gain = top_set(gain, count);
  SaliencyCell out;
  out.caught = caught(mass, block_choice), out.prompt_caught = caught(mass, prompt_choice), out.catchable = caught(mass, best);
  out.gain = caught(gain, block_choice), out.best_gain = caught(gain, best_gain);
  out.common = static_cast<double>(n_common(block_choice, best)), out.chosen = static_cast<double>(count), out.rows = static_cast<double>(n_rows);
  return out;
}

std::vector<JudgedRows> judged_buckets(std::int64_t n_tokens, std::span<const kvrt::Tiers> tiers) {
  std::vector<JudgedRows> out;
  int bucket = 0;
  for (std::int64_t first = 256; first + kLeastJudgedRows <= n_tokens; first *= 2, ++bucket)
    if (std::all_of(tiers.begin(), tiers.end(), [&](const kvrt::Tiers& t) { return kvrt::blocks_out(t, first) > 0; }))
      out.push_back({bucket, first, std::min(n_tokens, 2 * first)});
  return out;
}

SaliencyTally::SaliencyTally(std::size_t n_fractions, std::vector<int> kv_heads_by_layer, int n_buckets, std::size_t n_documents)
    : heads_(std::move(kv_heads_by_layer)), first_head_{0}, n_fractions_(n_fractions), n_documents_(n_documents), n_buckets_(n_buckets) {
  for (const int h : heads_) first_head_.push_back(first_head_.back() + static_cast<std::size_t>(h));
  cells_.resize(n_fractions * kTokenScores * first_head_.back() * static_cast<std::size_t>(n_buckets) * n_documents);
  matches_.resize(n_fractions * kChoices * first_head_.back() * n_documents);
}

std::size_t SaliencyTally::index(std::size_t fraction, std::size_t score, std::size_t layer, int head, int bucket, std::size_t document) const {
  const std::size_t row = (fraction * kTokenScores + score) * first_head_.back() + first_head_[layer] + static_cast<std::size_t>(head);
  return (row * static_cast<std::size_t>(n_buckets_) + static_cast<std::size_t>(bucket)) * n_documents_ + document;
}
SaliencyCell& SaliencyTally::cell(std::size_t fraction, std::size_t score, std::size_t layer, int head, int bucket, std::size_t document) {
  return cells_[index(fraction, score, layer, head, bucket, document)];
}
AttentionMatch& SaliencyTally::match(std::size_t fraction, std::size_t choice, std::size_t layer, int head, std::size_t document) {
  return matches_[((fraction * kChoices + choice) * first_head_.back() + first_head_[layer] + static_cast<std::size_t>(head)) * n_documents_ + document];
}

std::vector<SaliencyCell> SaliencyTally::by_document(std::size_t fraction, std::size_t score, std::size_t l0, std::size_t l1, int h0, int h1, int b0, int b1) const {
  std::vector<SaliencyCell> out(n_documents_);
  for (std::size_t l = l0; l < l1; ++l)
    for (int h = h0; h < (h1 < 0 ? heads_[l] : h1); ++h)
      for (int b = b0; b < b1; ++b)
        for (std::size_t d = 0; d < n_documents_; ++d) out[d] += at(fraction, score, l, h, b, d);
  return out;
}

AttentionMatch SaliencyTally::layer_match(std::size_t fraction, std::size_t choice, std::size_t layer) const {
  AttentionMatch sum;
  const std::size_t row = (fraction * kChoices + choice) * first_head_.back();
  for (std::size_t i = (row + first_head_[layer]) * n_documents_; i < (row + first_head_[layer + 1]) * n_documents_; ++i) sum += matches_[i];
  return sum;
}

void SaliencyTally::finish_score(std::size_t fraction, std::size_t score, const SaliencyResult& facts, SaliencyFraction* out) const {
  SaliencyScore& to = out->scores[score];
  to.total = rates_of(by_document(fraction, score, 0, heads_.size(), 0, -1, 0, n_buckets_));
  for (int b = 0; b < n_buckets_; ++b) {
    const std::vector<SaliencyCell> documents = by_document(fraction, score, 0, heads_.size(), 0, -1, b, b + 1);
    SaliencyBucket bucket{std::int64_t{256} << b, std::int64_t{512} << b, 0, {}};
    for (const SaliencyCell& c : documents) bucket.n_documents += c.rows > 0;
    if (bucket.n_documents == 0) continue;
    bucket.rates = rates_of(documents);
    to.buckets.push_back(bucket);
  }
  for (std::size_t l = 0; l < heads_.size(); ++l) {
    SaliencyLayer layer;
    layer.rates = rates_of(by_document(fraction, score, l, l + 1, 0, -1, 0, n_buckets_));
    layer.worst_head_hit = 2;
    for (int h = 0; h < heads_[l]; ++h) {
      const double hit = rates_of(by_document(fraction, score, l, l + 1, h, h + 1, 0, n_buckets_)).hit.mean;
      if (hit < layer.worst_head_hit) layer.worst_head = h, layer.worst_head_hit = hit;
    }
    if (score < kOwnScores) {
      const AttentionMatch match = layer_match(fraction, score, l);
      layer.e_out = match.e_out(), layer.e_mass = match.e_mass();
    }
    const SaliencyLayerFacts& f = facts.layers[l];
    const auto id = static_cast<TokenScore>(score);
    const bool fitted = id == TokenScore::kExpectedAttention || id == TokenScore::kLastExpectedAttention;
    layer.abstain = abstain_reasons({layer.rates.hit.mean, layer.rates.catchable, f.normalised_entropy, fitted, f.n_statistics_rows, f.query_shift});
    to.layers.push_back(std::move(layer));
  }
}

void SaliencyTally::finish(SaliencyResult* result) const {
  CALIB_CHECK(result->layers.size() == heads_.size() && result->fractions.size() == n_fractions_);
  for (std::size_t f = 0; f < n_fractions_; ++f) {
    SaliencyFraction& out = result->fractions[f];
    for (std::size_t s = 0; s < kTokenScores; ++s) finish_score(f, s, *result, &out);
    for (std::size_t l = 0; l < heads_.size(); ++l) {
      const AttentionMatch base = layer_match(f, kOwnScores, l), salient = layer_match(f, kOwnScores + 1, l);
      out.e_out_base.push_back(base.e_out()), out.e_mass_base.push_back(base.e_mass());
      out.e_out_salient.push_back(salient.e_out()), out.e_mass_salient.push_back(salient.e_mass());
    }
    std::array<std::size_t, kPlanScores> order{};
    for (std::size_t s = 0; s < kPlanScores; ++s) order[s] = s;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return out.scores[a].total.hit.mean > out.scores[b].total.hit.mean; });
    out.best = order[0], out.runner_up = order[1];
    out.lead = paired_lead(by_document(f, out.best, 0, heads_.size(), 0, -1, 0, n_buckets_), by_document(f, out.runner_up, 0, heads_.size(), 0, -1, 0, n_buckets_));
  }
}

}  // namespace calib::sens

#include "libcalib/quant/calibrated_params.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/codec/page_codec.h"
#include "libcalib/base/error.h"
#include "libcalib/base/plural.h"
#include "libcalib/quant/channel_summary.h"
#include "libcalib/quant/codebook_fit.h"
#include "libcalib/quant/drawn_tokens.h"
#include "libcalib/quant/error_feedback.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/low_rank.h"
#include "libcalib/quant/static_thresholds.h"
#include "libcalib/quant/unit_moments.h"

namespace calib::quant {
namespace {

/// Tokens that groups are drawn from: whole groups of every channel.g<N>.
constexpr std::int64_t kDrawnTokens = 512;

bool is_nuq(const kvrt::Scheme& s) { return kvrt::is_nuq(s.format); }

bool has_groups(const kvrt::Scheme& s) { return s.granularity == kvrt::Granularity::kToken || s.granularity == kvrt::Granularity::kChannel; }

/// One scheme on one unit.
class Fit {
 public:
  Fit(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, bool with_sinks, std::int64_t max_distance, std::string where,
      std::vector<std::string>* why)
      : scheme_(scheme), side_(side), layer_(layer), geometry_(layer.geometry()), max_distance_(max_distance), where_(std::move(where)), why_(why),
        tensor_(coded_tensor(scheme, side, layer, with_sinks)) {
    if (tensor_.n_tokens() == 0) fail(ErrorKind::kNumeric, where_, "the statistics of this layer hold no token to be quantised");
    if (scheme.lowrank && with_sinks && layer.n_sinks() > 0)
      fail(ErrorKind::kUnsupported, where_, "the covariance that a basis is fitted on holds no sinks; run kvcalib with --sinks 0, or keep {}",
           counted(layer.n_sinks(), "sink"));
    summary_ = summarise(scheme, side, layer, tensor_, with_sinks, max_distance, where_, params_);
    if (scheme.clip || is_nuq(scheme)) weights_ = channel_weights(layer, side, scheme, max_distance);
    if (scheme.clip || (is_nuq(scheme) && has_groups(scheme))) {
      tokens_ = draw_tokens(tensor_, kDrawnTokens, static_cast<std::uint64_t>(geometry_.index) * 2 + (side == Side::kV));
    }
  }

  SchemeParams run() {
    if (scheme_.clip) fit_clip();
    else set_share(1.0);
    if (scheme_.ef) fit_feedback();
    if (scheme_.lowrank) fit_basis();
    return std::move(params_);
  }

 private:
  std::size_t index(int h, int c) const { return static_cast<std::size_t>(h) * static_cast<std::size_t>(geometry_.head_dim) + static_cast<std::size_t>(c); }

  /// Everything that depends on the share of their ranges that groups or thresholds keep.
  void set_share(double alpha) {
    fit_static_thresholds(scheme_, geometry_, summary_, alpha, where_, params_, alpha == 1.0 ? why_ : nullptr);
    if (scheme_.clip && has_groups(scheme_)) params_.clip_alpha = {static_cast<float>(alpha)};
    if (is_nuq(scheme_)) fit_codebook(static_cast<float>(alpha));
  }

  /// One share a unit, of 1.00, 0.95 ... 0.40: least error, weighted by what an error of a channel costs. Without error feedback.
  void fit_clip() {
    kvrt::Scheme plain = scheme_;
    plain.ef = false;
    ThreadPool alone(1);
    std::vector<float> out(tokens_.size());
    double least = std::numeric_limits<double>::infinity(), best = 1.0;
    for (int percent = 100; percent >= 40; percent -= 5) {
      set_share(percent / 100.0);
      fake_quant_document(plain, side_, geometry_, params_, 0, false, kDrawnTokens, tokens_.data(), out.data(), alone);
      double cost = 0;
      for (std::size_t i = 0; i < out.size(); ++i) {
        const double error = static_cast<double>(out[i]) - tokens_[i];
        cost += weights_[i % weights_.size()] * error * error;
      }
      if (cost < least) least = cost, best = percent / 100.0;
    }
    if (why_) why_->push_back(fmt::format("clip: {:.2f} of each range about its mean", best));
    set_share(best);
  }

  void fit_codebook(float alpha) {
    NormalisedHistogram histogram;
    if (has_groups(scheme_)) add_drawn_tokens(alpha, histogram);
    else add_channels(histogram);
    const std::vector<double> means = optimal_means(histogram.weight(), histogram.weighted_sum(), std::size_t{1} << kvrt::code_bits(scheme_.format));
    params_.codebook = stored_codebook(means);
    if (kvrt::code_bits(scheme_.format) == 2) params_.codebook_qnorm = stored_codebook(match_spread(means, histogram.weight(), histogram.weighted_sum()));
  }

  float smooth(std::size_t i) const { return params_.smooth.empty() ? 1.0f : params_.smooth[i]; }

  /// channel.static: the recorded distribution of each channel between its thresholds. With outliers, what lies beyond leaves.
  void add_channels(NormalisedHistogram& histogram) const {
    for (int h = 0; h < geometry_.n_kv_heads; ++h)
      for (int c = 0; c < geometry_.head_dim; ++c) {
        const std::size_t i = index(h, c);
        const double mean = params_.mean.empty() ? 0.0 : params_.mean[i];
        const kvrt::StaticRange range = kvrt::static_range(scheme_.format, params_.clip_lo[i], params_.clip_hi[i]);
        const double weight = weights_[i] * smooth(i) * smooth(i) * range.scale * range.scale;
        for (const stats::QuantileSketch::Bucket& bucket : tensor_.sketches[i].buckets()) {
          const double seen = std::clamp<double>(bucket.midpoint, tensor_.min(h, c), tensor_.max(h, c));
          const double x = ((seen - mean) / smooth(i) - range.lo) / range.scale - 1;
          if (scheme_.outlier_per_mille > 0 && std::fabs(x) > 1) continue;
          histogram.add(x, weight * static_cast<double>(bucket.count));
        }
      }
  }

  /// token.g: drawn tokens under their own ranges, as the encoder makes them.
  void add_drawn_tokens(float alpha, NormalisedHistogram& histogram) const {
    const int d = geometry_.head_dim;
    const std::size_t row = weights_.size();
    std::vector<float> y(static_cast<std::size_t>(d)), kept;
    kvrt::EncodeCounters ignored;
    for (std::size_t t = 0; t < static_cast<std::size_t>(kDrawnTokens); ++t)
      for (int h = 0; h < geometry_.n_kv_heads; ++h) {
        for (int c = 0; c < d; ++c) {
          const std::size_t i = index(h, c);
          y[static_cast<std::size_t>(c)] = (tokens_[t * row + i] - (params_.mean.empty() ? 0.0f : params_.mean[i])) / smooth(i);
        }
        std::uint16_t picks[kvrt::kMaxTokenOutliers];
        int n_picks = 0;
        kept = y;
        if (scheme_.outlier_per_mille > 0) {
          float median = 0;
          n_picks = kvrt::pick_vector_outliers(y.data(), d, kvrt::token_outliers(scheme_.outlier_per_mille, d), picks, &median);
          kvrt::fill_vector_outliers(kept.data(), d, d, picks, n_picks, median);
        }
        const kvrt::GroupRange r = kvrt::clipped(kvrt::group_range(d, true, [&](int i) { return kept[static_cast<std::size_t>(i)]; }), d, alpha);
        const kvrt::AffineParams p = kvrt::affine_params(r.min, r.max, 2, &ignored);
        const double lo = kvrt::f16_to_f32(p.lo), scale = kvrt::f16_to_f32(p.scale);
        for (int c = 0; c < d; ++c) {
          if (std::find(picks, picks + n_picks, c) != picks + n_picks) continue;
          const std::size_t i = index(h, c);
          histogram.add((y[static_cast<std::size_t>(c)] - lo) / scale - 1, weights_[i] * smooth(i) * smooth(i) * scale * scale);
        }
      }
  }

  /// Tokens between a query and a key that it reads.
  std::int64_t reach() const {
    return std::max<std::int64_t>(1, geometry_.sliding_window > 0 ? std::min(max_distance_, geometry_.sliding_window) : max_distance_);
  }

  void fit_basis() {
    double worst = 0;
    for (int h = 0; h < geometry_.n_kv_heads; ++h) {
      const LowRankBasis b = low_rank_basis(error_moment(layer_, side_, h, scheme_, nullptr, reach()),
                                            stored_covariance(layer_, side_, h, scheme_, nullptr, max_distance_), geometry_.head_dim, scheme_.lowrank);
      for (int c = 0; c < geometry_.head_dim; ++c) params_.basis_mean.push_back(static_cast<float>(summary_.mean[index(h, c)]));
      params_.basis_in.insert(params_.basis_in.end(), b.in.begin(), b.in.end());
      params_.basis.insert(params_.basis.end(), b.out.begin(), b.out.end());
      worst = std::max(worst, b.relative_error);
    }
    if (why_) why_->push_back(fmt::format("lowrank: {} of {} directions leave a relative error of up to {:.3f}", scheme_.lowrank, geometry_.head_dim, worst));
  }

  void fit_feedback() {
    for (int h = 0; h < geometry_.n_kv_heads; ++h) {
      const float* factors = params_.smooth.empty() ? nullptr : &params_.smooth[index(h, 0)];
      const FeedbackTriangle t = feedback_triangle(error_moment(layer_, side_, h, scheme_, factors, reach()), geometry_.head_dim);
      params_.ef_u.insert(params_.ef_u.end(), t.u.begin(), t.u.end());
      params_.ef_order.insert(params_.ef_order.end(), t.order.begin(), t.order.end());
    }
  }

  const kvrt::Scheme scheme_;
  const Side side_;
  const stats::LayerStats& layer_;
  const LayerGeometry& geometry_;
  const std::int64_t max_distance_;
  const std::string where_;
  std::vector<std::string>* const why_;
  const stats::TensorStats tensor_;
  ChannelSummary summary_;
  std::vector<double> weights_;  ///< [H, D] cost of an error in each channel
  std::vector<float> tokens_;    ///< [kDrawnTokens, H, D]
  SchemeParams params_;
};

}  // namespace

SchemeParams fit_params(const kvrt::Scheme& scheme, Side side, const stats::LayerStats& layer, std::int64_t plan_sinks,
                        std::vector<std::string>* why, std::int64_t max_distance) {
  if (!kvrt::needs_calibration(scheme)) return {};
  const std::string where = fmt::format("layer {} {} {}", layer.geometry().index, side_name(side), kvrt::to_string(scheme));
  if (plan_sinks != 0 && plan_sinks != layer.n_sinks())
    fail(ErrorKind::kUsage, where,
         "{} asked, but the statistics keep {} apart; ask for that many or none, or run kvcalib with --sinks {}", counted(plan_sinks, "sink token"),
         layer.n_sinks(), plan_sinks);
  return Fit(scheme, side, layer, plan_sinks == 0, max_distance, where, why).run();
}

}  // namespace calib::quant

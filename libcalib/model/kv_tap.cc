#include "libcalib/model/kv_tap.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

namespace calib::model {
namespace {

constexpr double kMassiveRatio = 1000.0;
constexpr float kMassiveValue = 100.0f;

class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total), start_(Clock::now()) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  double& total_;
  Clock::time_point start_;
};

/// True if more than half of |h| lie below `bound`; a counting pass that vectorises, where a median would sort.
bool median_is_below(const float* h, std::int64_t n, float bound) {
  std::int64_t below = 0;
  for (std::int64_t c = 0; c < n; ++c) below += std::fabs(h[c]) < bound ? 1 : 0;
  return 2 * below > n;
}

float median_of_abs(const float* h, std::int64_t n, std::vector<float>& scratch) {
  scratch.resize(static_cast<std::size_t>(n));
  std::transform(h, h + n, scratch.begin(), [](float x) { return std::fabs(x); });
  const auto middle = scratch.begin() + static_cast<std::ptrdiff_t>((n - 1) / 2);
  std::nth_element(scratch.begin(), middle, scratch.end());
  return *middle;
}

}  // namespace

KvTap::KvTap(std::int64_t n_sinks, ThreadPool& pool, std::function<void(const stats::LayerStats&)> on_layer, const LogSink& log)
    : n_sinks_(n_sinks), pool_(pool), on_layer_(std::move(on_layer)), log_(log) {}

void KvTap::begin_layer(const LayerGeometry& layer) { layer_ = stats::LayerStats(layer, n_sinks_); }

void KvTap::on_document(const LayerCapture& capture) {
  const Stopwatch watch(seconds_);
  try {
    layer_.add_document(capture.tensors, pool_);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("layer {}, document {}, {}", capture.layer_idx, capture.document_idx, e.where()), e.message(),
                e.details());
  }
  if (!capture.attention.rows.empty()) layer_.add_attention(capture.attention, capture.tensors.n_tokens, pool_);
  find_massive(capture);
}

void KvTap::find_massive(const LayerCapture& capture) {
  std::vector<float> scratch;
  const std::int64_t n_tokens = capture.tensors.n_tokens, c = capture.hidden_size;
  for (std::int64_t t = 0; t < n_tokens; ++t) {
    if (capture.hidden_absmax[t] <= kMassiveValue) continue;
    const float* h = capture.hidden + t * c;
    if (!median_is_below(h, c, capture.hidden_absmax[t] / static_cast<float>(kMassiveRatio) * 1.001f)) continue;
    const double median = median_of_abs(h, c, scratch);
    if (static_cast<double>(capture.hidden_absmax[t]) <= kMassiveRatio * median) continue;
    MassiveToken token;
    token.layer = capture.layer_idx;
    token.document = capture.document_idx;
    token.token = t;
    token.channel = std::max_element(h, h + c, [](float a, float b) { return std::fabs(a) < std::fabs(b); }) - h;
    token.value = static_cast<double>(h[token.channel]);
    token.ratio = median > 0 ? std::fabs(token.value) / median : HUGE_VAL;
    if (!std::isfinite(token.ratio)) token.ratio = static_cast<double>(std::numeric_limits<float>::max());
    if (!capture.attention.rows.empty())
      token.functional_sink = stats::is_functional_sink(
          stats::column_mass(capture.attention, layer_.geometry().n_q_heads, n_tokens, t));
    massive_.push_back(token);
  }
}

void KvTap::end_layer(const LayerGeometry& layer) {
  const Stopwatch watch(seconds_);
  const auto silent = [](const stats::LayerStats::Split& split) {
    return split.body.n_tokens() + split.sink.n_tokens() > 0 && split.body.absmax() == 0.0f && split.sink.absmax() == 0.0f;
  };
  if (silent(layer_.k_pre)) log_.warning(fmt::format("layer {}: K is zero everywhere (absmax 0)", layer.index));
  if (silent(layer_.v)) log_.warning(fmt::format("layer {}: V is zero everywhere (absmax 0)", layer.index));
  on_layer_(layer_);
  layer_ = {};
}

}  // namespace calib::model

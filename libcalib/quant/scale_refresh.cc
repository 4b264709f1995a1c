#include "libcalib/quant/scale_refresh.h"

#include <algorithm>
#include <cmath>

#include "libcalib/base/error.h"

namespace calib::quant {

bool can_refresh(const kvrt::Scheme& scheme) {
  using kvrt::Granularity;
  return (scheme.granularity == Granularity::kTensor || scheme.granularity == Granularity::kHead) && !scheme.center && !scheme.smooth && !scheme.had;
}

void fake_quant_refreshed(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer, const SchemeParams& params, std::int64_t interval,
                          std::int64_t n_sinks, bool bf16_input, std::int64_t n_tokens, const float* x, float* out, ThreadPool& pool,
                          std::int64_t* n_raised) {
  CALIB_CHECK(can_refresh(scheme) && interval >= 1 && !params.clip_hi.empty());
  const std::int64_t row = static_cast<std::int64_t>(layer.n_kv_heads) * layer.head_dim;
  const auto per_head = static_cast<std::int64_t>(params.clip_hi.size()) == layer.n_kv_heads && params.clip_hi.size() > 1;
  SchemeParams now = params;
  std::int64_t raised = 0;
  std::copy(x, x + std::min(n_sinks, n_tokens) * row, out);
  for (std::int64_t first = n_sinks; first < n_tokens;) {
    const std::int64_t end = std::min(n_tokens, (first / interval + 1) * interval);
    for (std::size_t i = 0; i < now.clip_hi.size(); ++i)
      raised += now.clip_hi[i] != params.clip_hi[i] || (!now.clip_lo.empty() && now.clip_lo[i] != params.clip_lo[i]);
    fake_quant_document(scheme, side, layer, now, 0, bf16_input, end - first, x + first * row, out + first * row, pool);
    for (std::int64_t t = first; t < end; ++t)
      for (std::int64_t c = 0; c < row; ++c) {
        const float value = x[t * row + c];
        const auto i = static_cast<std::size_t>(per_head ? c / layer.head_dim : 0);
        if (now.clip_lo.empty()) {
          now.clip_hi[i] = std::max(now.clip_hi[i], std::fabs(value));
        } else {
          now.clip_lo[i] = std::min(now.clip_lo[i], value);
          now.clip_hi[i] = std::max(now.clip_hi[i], value);
        }
      }
    first = end;
  }
  if (n_raised) *n_raised = raised;
}

}  // namespace calib::quant

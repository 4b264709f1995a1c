#include "libcalib/quant/carried_error.h"

#include <algorithm>
#include <vector>

#include "libcalib/base/error.h"

namespace calib::quant {

bool can_carry_error(const kvrt::Scheme& scheme) { return scheme.granularity == kvrt::Granularity::kToken && !scheme.ef && scheme.lowrank == 0; }

void fake_quant_carried(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer, const SchemeParams& params, float share,
                        std::int64_t n_sinks, bool bf16_input, std::int64_t n_tokens, const float* x, float* out) {
  CALIB_CHECK(can_carry_error(scheme) && share >= 0 && share <= 1);
  const std::int64_t row = std::int64_t{layer.n_kv_heads} * layer.head_dim, begin = std::min(n_sinks, n_tokens);
  std::copy(x, x + begin * row, out);
  ThreadPool alone(1);
  std::vector<float> given(static_cast<std::size_t>(row)), error(static_cast<std::size_t>(row), 0.0f);
  for (std::int64_t t = begin; t < n_tokens; ++t) {
    if (bf16_input) round_bf16(x + t * row, given.data(), row);
    else std::copy(x + t * row, x + (t + 1) * row, given.begin());
    for (std::size_t c = 0; c < given.size(); ++c) given[c] += share * error[c];
    float* coded = out + t * row;
    fake_quant_document(scheme, side, layer, params, 0, false, 1, given.data(), coded, alone);
    for (std::size_t c = 0; c < given.size(); ++c) error[c] = given[c] - coded[c];
  }
}

}  // namespace calib::quant

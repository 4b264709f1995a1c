#include "libcalib/plan/cost_model.h"

#include <algorithm>

#include "kernels/core/plan_constants.h"
#include "libcalib/quant/saliency_factors.h"

namespace calib::plan {

kvrt::LayerLayout make_layout(const LayerGeometry& layer, const kvrt::Scheme& k, const kvrt::Scheme& v, const TierClass& tiers,
                              const Accounting& accounting) {
  kvrt::LayerLayout layout;
  layout.n_kv_heads = layer.n_kv_heads;
  layout.head_dim = layer.head_dim;
  layout.k = k;
  layout.v = v;
  layout.tiers = kvrt::finish_tiers(k, v, accounting.sink_tokens, tiers.window, tiers.salient_fraction);
  layout.salient = tiers.salient;
  layout.page_tokens = accounting.page_tokens;
  layout.sliding_window = layer.sliding_window;
  layout.refresh_tokens = accounting.scale_refresh_tokens;
  return layout;
}

std::int64_t layer_bytes(const LayerGeometry& layer, const kvrt::Scheme& k, const kvrt::Scheme& v, const TierClass& tiers,
                         const Accounting& accounting) {
  const kvrt::LayerLayout layout = make_layout(layer, k, v, tiers, accounting);
  return accounting.batch * (kvrt::cache_bytes(layout, kvrt::CacheSide::kK, accounting.context_tokens) +
                             kvrt::cache_bytes(layout, kvrt::CacheSide::kV, accounting.context_tokens));
}

std::int64_t side_bytes(const LayerGeometry& layer, const kvrt::Scheme& scheme, Side side, std::int64_t partner_group, const TierClass& tiers,
                        const Accounting& accounting) {
  kvrt::Scheme partner;
  if (partner_group > 1) partner.format = kvrt::Format::kInt8, partner.granularity = kvrt::Granularity::kChannel, partner.group = static_cast<int>(partner_group);
  const bool key = side == Side::kK;
  const kvrt::LayerLayout layout = make_layout(layer, key ? scheme : partner, key ? partner : scheme, tiers, accounting);
  return accounting.batch * kvrt::cache_bytes(layout, key ? kvrt::CacheSide::kK : kvrt::CacheSide::kV, accounting.context_tokens);
}

bool countable(const std::vector<LayerGeometry>& layers, std::int64_t window, const Accounting& accounting) {
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 33;
  constexpr double kMostBytes = 0x1p60, kPageSlack = 4096;  // tokens that padding may add to a segment
  for (const std::int64_t count : {window, accounting.context_tokens, accounting.sink_tokens})
    if (count < 0 || count > kMostTokens) return false;
  double row_bytes = 0;
  for (const LayerGeometry& layer : layers) row_bytes += 8.0 * layer.n_kv_heads * layer.head_dim + 1024;
  const double tokens = static_cast<double>(accounting.context_tokens) + static_cast<double>(accounting.sink_tokens) + static_cast<double>(window) + kPageSlack;
  return row_bytes * tokens * static_cast<double>(accounting.batch) < kMostBytes;
}

std::int64_t cache_elements(const std::vector<LayerGeometry>& layers, const Accounting& accounting) {
  std::int64_t sum = 0;
  for (const LayerGeometry& layer : layers) {
    const std::int64_t tokens = layer.sliding_window > 0 ? std::min(layer.sliding_window, accounting.context_tokens) : accounting.context_tokens;
    sum += 2 * tokens * layer.n_kv_heads * layer.head_dim * accounting.batch;
  }
  return sum;
}

std::int64_t constants_bytes(const kvrt::Scheme& scheme, const LayerGeometry& layer) {
  std::int64_t values = 0;
  for (const kvrt::PlanConstant& c : kvrt::plan_constants(scheme, layer.n_kv_heads, layer.head_dim)) values += c.count();
  return values * static_cast<std::int64_t>(sizeof(float));
}

std::int64_t saliency_bytes(const LayerGeometry& layer) {
  const std::int64_t rank = std::min(layer.head_dim, quant::SaliencyFactors::kMostRank);
  return std::int64_t{layer.n_q_heads} * layer.head_dim * (1 + rank) * static_cast<std::int64_t>(sizeof(float));
}

double channel_bits(const kvrt::Scheme& scheme, int head_dim) {
  const int bits = kvrt::code_bits(scheme.format);
  return scheme.lowrank > 0 ? bits * static_cast<double>(scheme.lowrank) / head_dim : bits;
}

double effective_bits(std::int64_t bytes, std::int64_t elements) {
  return elements > 0 ? 8.0 * static_cast<double>(bytes) / static_cast<double>(elements) : 0.0;
}

double unpadded_bytes(const kvrt::LayerLayout& layout, std::int64_t n_tokens) {
  const kvrt::Tiers& t = layout.tiers;
  const std::int64_t length = layout.sliding_window > 0 ? std::min(n_tokens, layout.sliding_window) : n_tokens;
  const std::int64_t blocks = kvrt::blocks_out(t, length), exact = length - blocks * t.exit_block();
  const auto per_token = [&](kvrt::CacheSide side, bool salient) {
    const kvrt::BlockLayout b = kvrt::block_layout(layout, side, salient);
    return static_cast<double>(b.codes + b.params + b.outliers) / b.page_tokens;
  };
  double sum = 0;
  for (const kvrt::CacheSide side : {kvrt::CacheSide::kK, kvrt::CacheSide::kV}) {
    sum += static_cast<double>(blocks * t.block_base) * per_token(side, false);
    if (t.block_salient > 0) sum += static_cast<double>(blocks * t.block_salient) * per_token(side, true);
    sum += static_cast<double>(exact) * 2.0 * layout.head_dim;
  }
  return sum * layout.n_kv_heads;
}

}  // namespace calib::plan

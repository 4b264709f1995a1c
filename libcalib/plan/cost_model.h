#pragma once
// What a choice of schemes costs: bytes from the runtime's own layout, effective bits over all of them.

#include <cstdint>
#include <vector>

#include "kernels/core/layout.h"
#include "libcalib/base/model_geometry.h"

namespace calib::plan {

/// Setting under which bytes are counted.
struct Accounting {
  std::int64_t context_tokens = 8192, batch = 1, sink_tokens = 4;
  int page_tokens = 64, scale_refresh_tokens = 0;
};

/// A layer's tiers beside its sinks: newest tokens kept exact, and the share of the coded ones that stands in the salient tier.
struct TierClass {
  TierClass(std::int64_t window, double salient_fraction = 0, const kvrt::Scheme& salient = {})
      : window(window), salient_fraction(salient_fraction), salient(salient) {}
  std::int64_t window = 0;
  double salient_fraction = 0;
  kvrt::Scheme salient;  ///< used if the fraction is above 0
};

/// One layer's byte-count description for a pair of schemes and its tiers.
kvrt::LayerLayout make_layout(const LayerGeometry& layer, const kvrt::Scheme& k, const kvrt::Scheme& v, const TierClass& tiers,
                              const Accounting& accounting);

/// Bytes of K and V of one layer for batch sequences of context_tokens. Exact: kvrt::cache_bytes.
std::int64_t layer_bytes(const LayerGeometry& layer, const kvrt::Scheme& k, const kvrt::Scheme& v, const TierClass& tiers,
                         const Accounting& accounting);

/// The same for one side beside a partner with channel groups of `partner_group` tokens (1: none; at least the scheme's own).
std::int64_t side_bytes(const LayerGeometry& layer, const kvrt::Scheme& scheme, Side side, std::int64_t partner_group, const TierClass& tiers,
                        const Accounting& accounting);

/// False where byte counts could leave 63 bits: sizes, counts or windows beyond any device. Check before counting what came from a file
/// or a user.
bool countable(const std::vector<LayerGeometry>& layers, std::int64_t window, const Accounting& accounting);

/// K and V elements of the context: sum over layers of 2 * min(T, sliding window) * KV heads * head_dim * batch.
std::int64_t cache_elements(const std::vector<LayerGeometry>& layers, const Accounting& accounting);

/// Bytes of one unit's plan constants (means, static scales; fp32): shared by all sequences, no part of effective bits.
std::int64_t constants_bytes(const kvrt::Scheme& scheme, const LayerGeometry& layer);

/// Bytes of what a layer with a salient tier ranks tokens by (fp32 factors; quant/saliency_factors.h), likewise shared.
std::int64_t saliency_bytes(const LayerGeometry& layer);

/// Bits of codes a channel: those of a code, and less where low rank stores fewer coefficients than channels.
double channel_bits(const kvrt::Scheme& scheme, int head_dim);

double effective_bits(std::int64_t bytes, std::int64_t elements);

/// Bytes without page padding and ring rounding, both sides (METHODS.md 8): layer_bytes is never below it.
/// X * N* * b_base + X * n_s * b_salient + (sinks + body - X * E) * 2 d, per KV head and side.
double unpadded_bytes(const kvrt::LayerLayout& layout, std::int64_t n_tokens);

}  // namespace calib::plan

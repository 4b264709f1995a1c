#pragma once
// The salient tier of a layer: which tokens of an exit block stand in it, KV head by KV head, and fake quantisation tier by tier
// (METHODS.md 4.9, 6). Legend: T tokens, H KV heads, D head_dim, E = N* + n_s tokens of an exit block.

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/core/scheme.h"
#include "kernels/core/tiers.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/quant/saliency_factors.h"
#include "libcalib/quant/scheme_params.h"

namespace calib::quant {

/// The score that this version ranks tokens by.
inline constexpr const char* kTierScore = "expected_attention";
inline constexpr double kMostSalient = 0.5;

struct SalientTier {
  kvrt::Scheme scheme;  ///< of keys and values alike
  SaliencyFactors factors;
};

/// 8 bits in token groups, without calibrated constants. Throws kUsage naming `where`, the part and what would do.
kvrt::Scheme parse_salient_scheme(const std::string& text, const std::string& where);

/// A tier is worth a choice only where the base is narrower than its 8 bits.
bool takes_tier(const kvrt::Scheme& base);

/// Tokens of whole exit blocks, from token `first` on. Every head has n_s of each block in the salient tier.
struct TierMap {
  std::int64_t first = 0, n_tokens = 0;
  std::vector<std::uint8_t> salient;  ///< [n_tokens, H] 1 = salient, 0 = base
};

/// The exit block of tokens [first, first + E), first = S + x E: per head the n_s tokens of highest score when the block leaves, at length
/// first + E + W; ties go to the older token. k_post and v: the block's rows, [E, H, D].
TierMap place_block(const LayerGeometry& layer, const SaliencyFactors& factors, const kvrt::Tiers& tiers, std::int64_t first, const float* k_post, const float* v);
/// All blocks that have left the window of a document. k_post, v: [T, H, D]. Independent of the pool's size.
TierMap place_tokens(const LayerGeometry& layer, const SaliencyFactors& factors, const kvrt::Tiers& tiers, std::int64_t n_tokens, const float* k_post,
                     const float* v, ThreadPool& pool);

/// decode(encode(x)) of the tokens that stand in one tier, each head's in their order, so that channel groups run over consecutive tokens
/// of that tier and head. The input is rounded to BF16, as it comes from the ring. x, out: [T, H, D] in the scheme's frame, T reaching to
/// the map's end; other places of out stay as they are. Throws as fake_quant_document().
void fake_quant_tier(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer, const SchemeParams& params, const TierMap& map, bool salient,
                     const float* x, float* out, ThreadPool& pool);

}  // namespace calib::quant

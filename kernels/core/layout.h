#pragma once
// Stored bytes of pages and caches (KERNELS.md 3.2): the only byte count in the project.

#include <cstdint>

#include "kernels/core/scheme.h"
#include "kernels/core/tiers.h"

namespace kvrt {

enum class CacheSide : std::uint8_t { kK, kV };

/// What the bytes of one layer depend on.
struct LayerLayout {
  int n_kv_heads = 0, head_dim = 0;
  Scheme k, v;
  Tiers tiers;                     ///< block_base is set by finish_tiers() from the two schemes
  int page_tokens = 64;
  Scheme salient;                  ///< 8-bit scheme of the salient tier; used if block_salient > 0
  std::int64_t sliding_window = 0; ///< keys a row sees; 0 = all
  int refresh_tokens = 0;
};

/// N* = the largest channel.g<N> of the two sides (1 if none; at least 64 with a salient tier), n_s = round(N*·f/(1−f)).
Tiers finish_tiers(const Scheme& k, const Scheme& v, std::int64_t n_sinks, std::int64_t window, double salient_fraction);

/// Bytes of one head block's parts and of a page. P = max(page_tokens, N*).
struct BlockLayout {
  std::int64_t codes = 0, params = 0, outliers = 0, positions = 0, refresh = 0;
  std::int64_t block = 0;   ///< rounded up to 128
  std::int64_t header = 0;  ///< of the page
  std::int64_t page = 0;    ///< header + n_kv_heads * block
  int page_tokens = 0;      ///< P
};
BlockLayout block_layout(const LayerLayout& layer, CacheSide side, bool salient = false);

/// Tokens of a page of the exact pool, which holds sinks and window of a layer in bf16.
inline constexpr std::int64_t kExactPageTokens = 16;
/// The exact pool's pages: `codes` and `block` of one head; keys before RoPE have a header with each slot's position.
BlockLayout exact_layout(const LayerLayout& layer, CacheSide side);

/// Bytes of one coded row's codes (row(b) of KERNELS.md 3.2).
std::int64_t row_bytes(const Scheme& scheme, int head_dim);

/// All bytes that the runtime allocates for one sequence of n_tokens on one layer and side: sink and window pages (BF16),
/// base and salient pages, padding, headers. Sliding-window layers hold min(n_tokens, window) tokens.
std::int64_t cache_bytes(const LayerLayout& layer, CacheSide side, std::int64_t n_tokens);

/// Bytes of one base page divided by its tokens, without sinks and window.
double page_bytes_per_token(const LayerLayout& layer, CacheSide side);

}  // namespace kvrt

#include "kernels/core/layout.h"

#include <algorithm>
#include <cmath>

namespace kvrt {
namespace {

constexpr std::int64_t kAlign = 128;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

std::int64_t stored_width(const Scheme& s, int head_dim) { return s.lowrank ? s.lowrank : head_dim; }

std::int64_t channel_group(const Scheme& s) { return s.granularity == Granularity::kChannel ? s.group : 1; }

/// Bytes of one group's parameters: a pair (scale, min) of fp16, or one fp16 scale or norm.
std::int64_t group_param_bytes(Format f) {
  switch (f) {
    case Format::kInt8: case Format::kInt4: case Format::kInt3: case Format::kInt2:
    case Format::kNuq4: case Format::kNuq3: case Format::kNuq2: return 4;
    default: return 2;
  }
}

std::int64_t param_bytes(const Scheme& s, std::int64_t width, std::int64_t page_tokens) {
  switch (s.granularity) {
    case Granularity::kToken: return page_tokens * (width / (s.group ? s.group : width)) * group_param_bytes(s.format);
    case Granularity::kChannel: return page_tokens / s.group * width * group_param_bytes(s.format);
    case Granularity::kBuiltIn:
      return s.format == Format::kNvfp4 ? page_tokens * width / 16 : s.format == Format::kMxfp4 ? page_tokens * width / 32 : 0;
    default: return 0;  // thresholds and scales are constants of the plan
  }
}

std::int64_t outlier_bytes(const Scheme& s, std::int64_t width, std::int64_t page_tokens) {
  if (s.outlier_per_mille == 0) return 0;
  if (s.granularity == Granularity::kChannel) {
    return 16 + 4 * round_up(ceil_div(s.outlier_per_mille * page_tokens * width, 1000), 4);
  }
  return page_tokens * 4 * ceil_div(s.outlier_per_mille * width, 1000);
}

/// One coded row can be read without its neighbours' positions unless RoPE, a sliding window or a salient tier asks for them.
bool page_has_header(const LayerLayout& layer, CacheSide side) {
  return side == CacheSide::kK && layer.tiers.block_salient == 0 && (layer.k.pre || layer.sliding_window > 0);
}

}  // namespace

Tiers finish_tiers(const Scheme& k, const Scheme& v, std::int64_t n_sinks, std::int64_t window, double salient_fraction) {
  Tiers t;
  t.n_sinks = n_sinks;
  t.window = window;
  t.block_base = std::max(channel_group(k), channel_group(v));
  if (salient_fraction > 0) {
    t.block_base = std::max<std::int64_t>(t.block_base, 64);
    t.block_salient = std::llround(static_cast<double>(t.block_base) * salient_fraction / (1.0 - salient_fraction));
  }
  return t;
}

std::int64_t row_bytes(const Scheme& scheme, int head_dim) {
  const std::int64_t d = stored_width(scheme, head_dim);
  switch (scheme.format) {
    case Format::kQ8_0: return d / 32 * 34;
    case Format::kQ4_0: case Format::kIq4Nl: return d / 32 * 18;
    case Format::kQ4_1: return d / 32 * 20;
    case Format::kQ5_0: return d / 32 * 22;
    case Format::kQ5_1: return d / 32 * 24;
    default: break;
  }
  switch (code_bits(scheme.format)) {
    case 16: return 2 * d;
    case 8: return 4 * ceil_div(d, 4);
    case 4: return 4 * ceil_div(d, 8);
    case 3: return 12 * ceil_div(d, 32);
    default: return 4 * ceil_div(d, 16);
  }
}

BlockLayout block_layout(const LayerLayout& layer, CacheSide side, bool salient) {
  const Scheme& base = side == CacheSide::kK ? layer.k : layer.v;
  const Scheme& scheme = salient ? layer.salient : base;
  const std::int64_t p = std::max<std::int64_t>({layer.page_tokens, channel_group(layer.k), channel_group(layer.v)});
  const std::int64_t width = stored_width(scheme, layer.head_dim);
  const bool is_static = scheme.granularity == Granularity::kTensor || scheme.granularity == Granularity::kHead;
  BlockLayout b;
  b.page_tokens = static_cast<int>(p);
  b.codes = p * row_bytes(scheme, layer.head_dim);
  b.params = param_bytes(scheme, width, p);
  b.outliers = outlier_bytes(scheme, width, p);
  b.positions = side == CacheSide::kK && layer.tiers.block_salient > 0 ? 8 + p * (salient ? 2 : 1) : 0;
  b.refresh = layer.refresh_tokens > 0 && is_static ? 16 : 0;
  b.block = round_up(b.codes + b.params + b.outliers + b.positions + b.refresh, kAlign);
  b.header = page_has_header(layer, side) ? round_up(8 + p, kAlign) : 0;
  b.page = b.header + layer.n_kv_heads * b.block;
  return b;
}

BlockLayout exact_layout(const LayerLayout& layer, CacheSide side) {
  BlockLayout b;
  b.page_tokens = static_cast<int>(kExactPageTokens);
  b.codes = b.block = kExactPageTokens * 2 * layer.head_dim;
  // An int64 and a uint16 offset a slot.
  b.header = side == CacheSide::kK && layer.k.pre ? round_up(8 + 2 * kExactPageTokens, kAlign) : 0;
  b.page = b.header + layer.n_kv_heads * b.block;
  return b;
}

std::int64_t cache_bytes(const LayerLayout& layer, CacheSide side, std::int64_t n_tokens) {
  const std::int64_t length = layer.sliding_window > 0 ? std::min(n_tokens, layer.sliding_window) : n_tokens;
  const Tiers& t = layer.tiers;
  const std::int64_t exact_pages = (sink_slots(t) + ring_slots(t)) / kExactPageTokens;
  const std::int64_t blocks = blocks_out(t, length);
  std::int64_t bytes = exact_pages * exact_layout(layer, side).page;
  const BlockLayout base = block_layout(layer, side);
  bytes += ceil_div(blocks * t.block_base, base.page_tokens) * base.page;
  if (t.block_salient > 0) {
    const BlockLayout salient = block_layout(layer, side, true);
    bytes += ceil_div(blocks * t.block_salient, salient.page_tokens) * salient.page;
  }
  return bytes;
}

double page_bytes_per_token(const LayerLayout& layer, CacheSide side) {
  const BlockLayout b = block_layout(layer, side);
  return static_cast<double>(b.page) / b.page_tokens;
}

}  // namespace kvrt

// Choice of the vector path, checks and the merge of partials.

#include "kernels/read/decode_cpu.h"

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>

#include "kernels/codec/page_codec.h"
#include "kernels/core/isa.h"

namespace kvrt {
namespace {

constexpr float kNothing = -1e30f;  ///< maximum of no token

}  // namespace

void decode_rows_scalar(const PageCodec& codec, const std::uint8_t* block, int slot, int begin, int end, std::int64_t stride, float* out) {
  for (int t = begin; t < end; ++t) {
    float* const row = out + t * stride;
    for (int c = 0; c < codec.head_dim; ++c) row[stored_position(codec.spread, codec.head_dim, c)] = decode_code(codec, block, slot + t, c);
    for (std::int64_t c = codec.head_dim; c < stride; ++c) row[c] = 0.0f;
  }
  add_outliers(codec, block, slot, begin, end, stride, 1, out);
}

void add_outliers(const PageCodec& codec, const std::uint8_t* block, int slot, int begin, int end, std::int64_t per_row, std::int64_t per_channel, float* out) {
  visit_outliers(codec, block, slot + begin, slot + end,
                 [&](int at, int position, float delta) { out[(at - slot) * per_row + position * per_channel] += delta; });
}

std::vector<DecodeBackend> decode_backends() {
  std::vector<DecodeBackend> backends = {{kBaselineName, attend_head_baseline}};
#if defined(KVRT_X86_PATHS)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2) backends.push_back({"avx2", attend_head_avx2});
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    backends.push_back({"avx512", attend_head_avx512});
  }
#endif
  return backends;
}

Status choose_decode_backend(DecodeBackend* out) {
  const std::vector<DecodeBackend> backends = decode_backends();
  const char* forced = std::getenv("KVRT_FORCE_ISA");
  std::string names;
  for (const DecodeBackend& b : backends) {
    if (!forced || !*forced || std::string_view(forced) == b.name) *out = b;
    if (forced && std::string_view(forced) == b.name) return {};
    names += std::string(names.empty() ? "" : " ") + b.name;
  }
  if (!forced || !*forced) return {};
  return Status(Code::kUnsupported, "KVRT_FORCE_ISA is '" + std::string(forced) + "'; this CPU and build offer " + names);
}

Status check_head_attention(const HeadAttention& job) {
  const auto bad = [](const std::string& text) { return Status(Code::kArgument, "decode: " + text); };
  const Segment& s = job.segment;
  const PageCodec &k = s.k.codec, &v = s.v.codec;
  if (job.n_queries < 1) return bad("n_queries is " + std::to_string(job.n_queries) + "; expected >= 1");
  if (!job.q || !job.out.m || !job.out.l || !job.out.o) return bad("q or a part of out is null");
  if (k.head_dim < 1 || k.head_dim != v.head_dim) {
    return bad("head_dim of K is " + std::to_string(k.head_dim) + ", of V " + std::to_string(v.head_dim) + "; expected one width");
  }
  if (k.page_tokens != v.page_tokens || k.page_tokens < 16 || k.page_tokens % 16 != 0) {
    return bad("pages of " + std::to_string(k.page_tokens) + " (K) and " + std::to_string(v.page_tokens) + " tokens (V); expected one multiple of 16");
  }
  if (s.n_tokens < 0 || s.n_slots < s.n_tokens || s.n_slots % k.page_tokens != 0 || s.first_slot < 0 || (s.n_slots > 0 && s.first_slot >= s.n_slots)) {
    return bad(std::to_string(s.n_tokens) + " tokens from slot " + std::to_string(s.first_slot) + " do not fit " + std::to_string(s.n_slots) +
               " slots in pages of " + std::to_string(k.page_tokens));
  }
  if (s.n_tokens > 0 && (!s.pages || !s.k.pool || !s.v.pool)) return bad("the page list or a pool is null");
  if (!s.pre) return {};
  if (!job.rope || job.rope->n_pairs < 1 || !job.rope_tile) return bad("keys before RoPE need both rotary tables");
  if (2 * job.rope->n_pairs > k.head_dim) {
    return bad("the rotary tables turn " + std::to_string(2 * job.rope->n_pairs) + " channels; head_dim is " + std::to_string(k.head_dim));
  }
  if (s.first_position < 0) return bad("first_position is " + std::to_string(s.first_position) + "; expected >= 0");
  return {};
}

void rope_tile_table(const RopeTables& rope, float* out) {
  for (int i = 0; i < rope.n_pairs; ++i) {
    for (int part = 0; part < 2; ++part) {
      for (int b = 0; b < kRopeTile; ++b) *out++ = rope.fine[(b * 2 + part) * rope.n_pairs + i];
    }
  }
}

void clear_partial(const Partial& partial, int n_queries, int head_dim) {
  for (int g = 0; g < n_queries; ++g) partial.m[g] = kNothing, partial.l[g] = 0.0f;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(n_queries) * head_dim; ++i) partial.o[i] = 0.0f;
}

void combine_partials(const Partial* parts, int n_parts, int n_queries, int head_dim, float* out, float* lse) {
  constexpr float kLn2 = 0.6931471805599453f;
  for (int g = 0; g < n_queries; ++g) {
    float* const target = out + static_cast<std::int64_t>(g) * head_dim;
    float top = kNothing, sum = 0;
    for (int i = 0; i < n_parts; ++i) {
      if (parts[i].l[g] > 0 && parts[i].m[g] > top) top = parts[i].m[g];
    }
    for (int c = 0; c < head_dim; ++c) target[c] = 0.0f;
    for (int i = 0; i < n_parts; ++i) {
      if (!(parts[i].l[g] > 0)) continue;  // nothing was attended; its o may hold anything
      const float factor = std::exp2(parts[i].m[g] - top);
      const float* o = parts[i].o + static_cast<std::int64_t>(g) * head_dim;
      sum += parts[i].l[g] * factor;
      for (int c = 0; c < head_dim; ++c) target[c] += o[c] * factor;
    }
    for (int c = 0; sum > 0 && c < head_dim; ++c) target[c] /= sum;
    if (lse) lse[g] = sum > 0 ? (top + std::log2(sum)) * kLn2 : -std::numeric_limits<float>::infinity();
  }
}

}  // namespace kvrt

#include "kernels/read/decode_sequence.h"

#include <algorithm>
#include <cmath>

#include "kernels/reference/reference.h"
#include "kernels/write/frame.h"

namespace kvrt {
namespace {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
/// Partials of one sequence and head: sink, window, base ranges, and last the learned logit.
constexpr int kFirstRange = KVRT_BASE, kParts = kFirstRange + kMaxRanges + 1;

struct Scratch {
  float *q, *q_base;          ///< [G, D] in the model's coordinates, and in those of stored base keys
  float *out, *lse;           ///< [G, D], [G]
  float* attend;
};

/// Hands out parts that start at multiples of 64 bytes.
struct Carver {
  std::uintptr_t begin, at;
  explicit Carver(void* base) : begin(reinterpret_cast<std::uintptr_t>(base)), at(begin) {}
  float* take(std::int64_t floats) {
    const std::uintptr_t here = at;
    at += static_cast<std::uintptr_t>((floats * 4 + 63) / 64 * 64);
    return reinterpret_cast<float*>(here);
  }
  std::int64_t used() const { return static_cast<std::int64_t>(at - begin); }
};

std::int64_t lay_out(const LayerContext& layer, void* base, Scratch* s) {
  const std::int64_t g = layer.group, d = layer.layout.head_dim;
  Carver c(base);
  s->q = c.take(g * d), s->q_base = c.take(g * d), s->out = c.take(g * d), s->lse = c.take(g);
  s->attend = c.take(decode_workspace_floats(static_cast<int>(d), static_cast<int>(g)));
  return c.used();
}
std::int64_t lay_out(const LayerContext& layer, void* base, Partial parts[kParts]) {
  const std::int64_t g = layer.group, d = layer.layout.head_dim;
  Carver c(base);
  for (int i = 0; i < kParts; ++i) parts[i].m = c.take(g), parts[i].l = c.take(g), parts[i].o = c.take(g * d);
  return c.used();
}

/// q.k of a key in the model's coordinates = result.y of the stored row y, plus result.stored_mean: see UnitContext.
/// scratch: [D].
void query_to_stored(const UnitContext& unit, int head, const float* q, float* scratch, float* out) {
  const FakeQuantJob& job = unit.job;
  for (int p = 0; p < job.head_dim; ++p) {
    const int d = job.block_order ? job.block_order[p] : p;
    scratch[p] = job.smooth ? q[d] * job.smooth[head * job.head_dim + d] : q[d];
  }
  if (job.had.size) hadamard_rotate(job.had, scratch, job.head_dim, false);
  for (int p = 0; p < job.head_dim; ++p) out[stored_position(unit.codecs[0].spread, job.head_dim, p)] = scratch[p];
}

void load_queries(const LayerContext& layer, const Sequence& sequence, int head, const kvrt_attn& attn, const Scratch& s) {
  const int width = layer.layout.head_dim, group = layer.group;
  const double scale = attn.softmax_scale > 0 ? attn.softmax_scale : layer.plan->softmax_scale;
  const float factor = static_cast<float>(scale * static_cast<double>(kLog2E));
  for (int g = 0; g < group; ++g) {
    float* const q = s.q + std::int64_t{g} * width;
    load_row(attn.q, std::int64_t{layer.layout.n_kv_heads} * group, width, sequence.first_row, std::int64_t{head} * group + g, q);
    if (attn.q_frame == KVRT_PRE_ROPE) rope_rotate(layer.rope, sequence.first_position + sequence.before, q);
    for (int d = 0; d < width; ++d) q[d] *= factor;
    query_to_stored(layer.units[KVRT_K], head, q, s.out, s.q_base + std::int64_t{g} * width);
  }
}

/// range: of the base segment.
void attend_segment(const LayerContext& layer, AttendHead attend, const Sequence& sequence, int head, kvrt_segment which, int range,
                    const kvrt_attn& attn, const kvrt_pools& pools, const Scratch& s, const Partial& out) {
  const int width = layer.layout.head_dim;
  clear_partial(out, layer.group, width);
  HeadAttention job;
  job.segment = segment_of(layer, pools, sequence, head, which);
  const bool base = which == KVRT_BASE;
  if (base) {
    const std::int64_t page_tokens = job.segment.k.codec.page_tokens;
    const std::int64_t pages = ranges_of(job.segment.n_tokens, static_cast<int>(page_tokens)).pages, first = range * pages;
    job.segment.n_tokens = std::min(job.segment.n_tokens - first * page_tokens, pages * page_tokens);
    job.segment.pages += first;
    job.segment.n_slots -= first * page_tokens;
    job.segment.first_position += first * page_tokens;
  }
  if (job.segment.n_tokens == 0) return;
  const auto mean = [&](kvrt_side side) {
    const std::vector<float>& m = layer.units[side].stored_mean;
    return base && !m.empty() ? m.data() + std::int64_t{head} * width : nullptr;
  };
  job.q = base ? s.q_base : s.q;
  job.n_queries = layer.group;
  job.rope = &layer.rope;
  job.rope_tile = layer.rope_tile.data();
  if (base && !layer.pair_places.empty()) job.pair_places = layer.pair_places.data();
  job.soft_cap = static_cast<float>(attn.soft_cap * static_cast<double>(kLog2E));
  job.k_mean = mean(KVRT_K), job.v_mean = mean(KVRT_V);
  job.out = out;
  attend(job, s.attend);
  const HadamardOrder& had = layer.units[KVRT_V].job.had;
  for (int g = 0; base && had.size && g < layer.group; ++g) hadamard_rotate(had, out.o + std::int64_t{g} * width, width, true);
}

}  // namespace

Ranges ranges_of(std::int64_t n_base_tokens, int page_tokens) {
  const std::int64_t n_pages = (n_base_tokens + page_tokens - 1) / page_tokens;
  if (n_pages == 0) return {};
  const std::int64_t wished = std::clamp<std::int64_t>(n_base_tokens / kRangeTokens, 1, kMaxRanges);
  const std::int64_t pages = (n_pages + wished - 1) / wished;
  return {static_cast<int>((n_pages + pages - 1) / pages), pages};
}
Ranges ranges_of(const LayerContext& layer, const Sequence& sequence) {
  const Tiers& t = layer.tiers();
  return ranges_of(coded_end(t, sequence.length()) - t.n_sinks, layer.units[KVRT_K].base_page.page_tokens);
}

std::int64_t decode_scratch_bytes(const LayerContext& layer) {
  Scratch s;
  return lay_out(layer, nullptr, &s);
}
std::int64_t decode_partials_bytes(const LayerContext& layer) {
  Partial parts[kParts];
  return lay_out(layer, nullptr, parts);
}

void attend_ranges(const LayerContext& layer, AttendHead attend, const Sequence& sequence, int head, int first, int last, const kvrt_attn& attn,
                   const kvrt_pools& pools, void* partials, void* scratch) {
  Scratch s;
  Partial parts[kParts];
  lay_out(layer, scratch, &s);
  lay_out(layer, partials, parts);
  load_queries(layer, sequence, head, attn, s);
  for (const kvrt_segment which : {KVRT_SINK, KVRT_WINDOW}) {
    if (first == 0) attend_segment(layer, attend, sequence, head, which, 0, attn, pools, s, parts[which]);
  }
  for (int r = first; r < last; ++r) attend_segment(layer, attend, sequence, head, KVRT_BASE, r, attn, pools, s, parts[kFirstRange + r]);
}

void merge_ranges(const LayerContext& layer, const Sequence& sequence, int head, const kvrt_attn& attn, void* partials, void* scratch) {
  Scratch s;
  Partial parts[kParts];
  lay_out(layer, scratch, &s);
  lay_out(layer, partials, parts);
  const int width = layer.layout.head_dim, group = layer.group, learned = kFirstRange + ranges_of(layer, sequence).n;
  const std::int64_t n_q_heads = std::int64_t{layer.layout.n_kv_heads} * group;
  clear_partial(parts[learned], group, width);
  for (int g = 0; attn.sink_logit && g < group; ++g) {
    parts[learned].m[g] = attn.sink_logit[std::int64_t{head} * group + g] * kLog2E, parts[learned].l[g] = 1.0f;
  }
  combine_partials(parts, learned + 1, group, width, s.out, s.lse);
  for (int g = 0; g < group; ++g) {
    const std::int64_t q_head = std::int64_t{head} * group + g, row = sequence.first_row * n_q_heads + q_head;
    store_row(attn.out, n_q_heads, width, sequence.first_row, q_head, s.out + std::int64_t{g} * width);
    if (attn.lse) attn.lse[row] = s.lse[g];
    if (!attn.mass) continue;
    float* const mass = attn.mass + row * KVRT_SEGMENTS;
    for (int i = 0; i < KVRT_SEGMENTS; ++i) mass[i] = 0.0f;
    for (int i = 0; i < learned; ++i) {
      if (parts[i].l[g] > 0) mass[std::min(i, kFirstRange)] += parts[i].l[g] * std::exp(parts[i].m[g] * kLn2 - s.lse[g]);
    }
  }
}

}  // namespace kvrt

#include "kernels/read/decode_sequence.h"

#include <cmath>

#include "kernels/reference/reference.h"
#include "kernels/write/frame.h"

namespace kvrt {
namespace {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kParts = 4;  ///< sink, window, base, and the learned logit

struct Scratch {
  float *q, *q_base;          ///< [G, D] in the model's coordinates, and in those of stored base keys
  float *out, *lse;           ///< [G, D], [G]
  Partial parts[kParts];
  float* attend;
};

/// Every part starts at a multiple of 64 bytes. Returns the bytes used.
std::int64_t lay_out(const LayerContext& layer, void* base, Scratch* s) {
  const std::int64_t g = layer.group, d = layer.layout.head_dim;
  std::uintptr_t at = reinterpret_cast<std::uintptr_t>(base);
  const auto take = [&](std::int64_t floats) {
    const std::uintptr_t here = at;
    at += static_cast<std::uintptr_t>((floats * 4 + 63) / 64 * 64);
    return reinterpret_cast<float*>(here);
  };
  s->q = take(g * d), s->q_base = take(g * d), s->out = take(g * d), s->lse = take(g);
  for (Partial& p : s->parts) p.m = take(g), p.l = take(g), p.o = take(g * d);
  s->attend = take(decode_workspace_floats(static_cast<int>(d), static_cast<int>(g)));
  return static_cast<std::int64_t>(at - reinterpret_cast<std::uintptr_t>(base));
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

void attend_segment(const LayerContext& layer, AttendHead attend, const Sequence& sequence, int head, kvrt_segment which, const kvrt_attn& attn,
                    const kvrt_pools& pools, const Scratch& s) {
  const int width = layer.layout.head_dim;
  const Partial& out = s.parts[which];
  clear_partial(out, layer.group, width);
  HeadAttention job;
  job.segment = segment_of(layer, pools, sequence, head, which);
  if (job.segment.n_tokens == 0) return;
  const bool base = which == KVRT_BASE;
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

std::int64_t decode_sequence_bytes(const LayerContext& layer) {
  Scratch s;
  return lay_out(layer, nullptr, &s);
}

void decode_sequence(const LayerContext& layer, AttendHead attend, const Sequence& sequence, int head, const kvrt_attn& attn, const kvrt_pools& pools,
                     void* scratch) {
  Scratch s;
  lay_out(layer, scratch, &s);
  const int width = layer.layout.head_dim, group = layer.group;
  const std::int64_t n_q_heads = std::int64_t{layer.layout.n_kv_heads} * group;
  load_queries(layer, sequence, head, attn, s);
  for (const kvrt_segment which : {KVRT_SINK, KVRT_WINDOW, KVRT_BASE}) attend_segment(layer, attend, sequence, head, which, attn, pools, s);
  const Partial& learned = s.parts[kParts - 1];
  clear_partial(learned, group, width);
  for (int g = 0; attn.sink_logit && g < group; ++g) {
    learned.m[g] = attn.sink_logit[std::int64_t{head} * group + g] * kLog2E, learned.l[g] = 1.0f;
  }
  combine_partials(s.parts, kParts, group, width, s.out, s.lse);
  for (int g = 0; g < group; ++g) {
    const std::int64_t q_head = std::int64_t{head} * group + g, row = sequence.first_row * n_q_heads + q_head;
    store_row(attn.out, n_q_heads, width, sequence.first_row, q_head, s.out + std::int64_t{g} * width);
    if (attn.lse) attn.lse[row] = s.lse[g];
    for (int i = 0; attn.mass && i < KVRT_SEGMENTS; ++i) {
      const Partial& p = s.parts[i];
      const bool any = i < kParts - 1 && p.l[g] > 0;
      attn.mass[row * KVRT_SEGMENTS + i] = any ? p.l[g] * std::exp(p.m[g] * kLn2 - s.lse[g]) : 0.0f;
    }
  }
}

}  // namespace kvrt

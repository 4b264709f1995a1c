// decode: one pass over sink, window and base pages of a sequence with a running softmax in double.

#include <cmath>
#include <limits>

#include "kernels/reference/reference.h"
#include "kernels/write/frame.h"

namespace kvrt {
namespace {

/// Softmax state of one query head.
struct Running {
  double max = -std::numeric_limits<double>::infinity();
  double sum[KVRT_SEGMENTS] = {};  ///< of exp(score - max)
  double* out = nullptr;           ///< [D], not divided

  void rescale(double new_max, int width) {
    const double factor = std::exp(max - new_max);
    for (double& s : sum) s *= factor;
    for (int d = 0; d < width; ++d) out[d] *= factor;
    max = new_max;
  }
};

/// One stored row in the unit's frame: [D].
void read_row(const UnitContext& unit, const SegmentSide& side, bool exact, int head, TokenPlace place, float* out, float* scratch) {
  const std::uint8_t* const block = page_start(side, place.page) + side.block_offset;
  if (exact) return decode_row(side.codec, block, place.slot, out);
  decode_row(side.codec, block, place.slot, scratch);
  from_frame(unit.job, head, scratch, out);
}

/// R_t k in double, from the frequencies themselves.
void rotate_double(const LayerContext& layer, std::int64_t position, double* x) {
  for (int i = 0; i < layer.rope.n_pairs; ++i) {
    const double angle = static_cast<double>(position) * layer.plan->inv_freq[static_cast<std::size_t>(i)];
    const double c = layer.plan->attention_factor * std::cos(angle), s = layer.plan->attention_factor * std::sin(angle);
    double* const a = x + rope_first(layer.rope, i);
    double* const b = x + rope_second(layer.rope, i);
    const double first = *a * c - *b * s, second = *a * s + *b * c;
    *a = first, *b = second;
  }
}

struct Scratch {
  Running* heads;  ///< [G]
  double *q, *o, *k;  ///< [G, D], [G, D], [D]
  float *row, *values, *spare;  ///< [D] each
};

std::int64_t lay_out(const LayerContext& layer, void* base, Scratch* s) {
  const std::int64_t g = layer.group, d = layer.layout.head_dim;
  std::uintptr_t at = reinterpret_cast<std::uintptr_t>(base);
  const auto take = [&](std::int64_t bytes) {
    const std::uintptr_t here = at;
    at += static_cast<std::uintptr_t>((bytes + 15) / 16 * 16);
    return here;
  };
  s->heads = reinterpret_cast<Running*>(take(g * static_cast<std::int64_t>(sizeof(Running))));
  s->q = reinterpret_cast<double*>(take(g * d * 8)), s->o = reinterpret_cast<double*>(take(g * d * 8)), s->k = reinterpret_cast<double*>(take(d * 8));
  s->row = reinterpret_cast<float*>(take(d * 4)), s->values = reinterpret_cast<float*>(take(d * 4)), s->spare = reinterpret_cast<float*>(take(d * 4));
  return static_cast<std::int64_t>(at - reinterpret_cast<std::uintptr_t>(base));
}

double score_of(const kvrt_attn& attn, double scale, const double* q, const double* k, int width) {
  double dot = 0;
  for (int d = 0; d < width; ++d) dot += q[d] * k[d];
  const double score = dot * scale;
  return attn.soft_cap > 0 ? attn.soft_cap * std::tanh(score / attn.soft_cap) : score;
}

}  // namespace

std::int64_t reference_workspace_bytes(const LayerContext& layer) {
  Scratch s;
  const std::int64_t append = (layer.tiers().exit_block() + 2) * layer.layout.head_dim * 4;
  return std::max(append, lay_out(layer, nullptr, &s));
}

void read_token(const LayerContext& layer, const kvrt_pools& pools, const Sequence& sequence, int head, kvrt_side side, std::int64_t t, float* out,
                float* scratch) {
  const TokenIndex token = find_token(layer.tiers(), sequence.length(), t);
  const Segment segment = segment_of(layer, pools, sequence, head, token.segment);
  read_row(layer.units[side], side == KVRT_K ? segment.k : segment.v, token.segment != KVRT_BASE, head, place_of(segment, token.index), out, scratch);
}

void decode_reference(const LayerContext& layer, const Sequence& sequence, int head, const kvrt_attn& attn, const kvrt_pools& pools, void* scratch) {
  Scratch s;
  lay_out(layer, scratch, &s);
  const int width = layer.layout.head_dim, group = layer.group;
  const std::int64_t n_q_heads = std::int64_t{layer.layout.n_kv_heads} * group, row = sequence.first_row;
  const double scale = attn.softmax_scale > 0 ? attn.softmax_scale : layer.plan->softmax_scale;
  for (int g = 0; g < group; ++g) {
    load_row(attn.q, n_q_heads, width, row, std::int64_t{head} * group + g, s.row);
    if (attn.q_frame == KVRT_PRE_ROPE) rope_rotate(layer.rope, sequence.first_position + sequence.before, s.row);
    s.heads[g] = Running();
    s.heads[g].out = s.o + std::int64_t{g} * width;
    for (int d = 0; d < width; ++d) s.q[std::int64_t{g} * width + d] = s.row[d], s.heads[g].out[d] = 0;
  }
  for (const kvrt_segment which : {KVRT_SINK, KVRT_BASE, KVRT_WINDOW}) {
    const Segment segment = segment_of(layer, pools, sequence, head, which);
    for (std::int64_t i = 0; i < segment.n_tokens; ++i) {
      const TokenPlace place = place_of(segment, i);
      read_row(layer.units[KVRT_K], segment.k, which != KVRT_BASE, head, place, s.row, s.spare);
      read_row(layer.units[KVRT_V], segment.v, which != KVRT_BASE, head, place, s.values, s.spare);
      for (int d = 0; d < width; ++d) s.k[d] = s.row[d];
      if (segment.pre) rotate_double(layer, segment.first_position + i, s.k);
      for (int g = 0; g < group; ++g) {
        Running& r = s.heads[g];
        const double score = score_of(attn, scale, s.q + std::int64_t{g} * width, s.k, width);
        if (!(score <= r.max)) r.rescale(score, width);
        const double p = std::exp(score - r.max);
        r.sum[which] += p;
        for (int d = 0; d < width; ++d) r.out[d] += p * s.values[d];
      }
    }
  }
  for (int g = 0; g < group; ++g) {
    Running& r = s.heads[g];
    const std::int64_t q_head = std::int64_t{head} * group + g, out_row = row * n_q_heads + q_head;
    double learned = 0;
    if (attn.sink_logit) {
      if (attn.sink_logit[q_head] > r.max) r.rescale(attn.sink_logit[q_head], width);
      learned = std::exp(attn.sink_logit[q_head] - r.max);
    }
    const double total = r.sum[KVRT_SINK] + r.sum[KVRT_WINDOW] + r.sum[KVRT_BASE] + learned;
    for (int d = 0; d < width; ++d) s.row[d] = static_cast<float>(r.out[d] / total);
    store_row(attn.out, n_q_heads, width, row, q_head, s.row);
    if (attn.lse) attn.lse[out_row] = static_cast<float>(r.max + std::log(total));
    for (int i = 0; attn.mass && i < KVRT_SEGMENTS; ++i) attn.mass[out_row * KVRT_SEGMENTS + i] = static_cast<float>(r.sum[i] / total);
  }
}

}  // namespace kvrt

#include "kernels/core/sequence.h"

#include <algorithm>
#include <string>

namespace kvrt {
namespace {

constexpr const char* kSegmentNames[KVRT_SEGMENTS] = {"sink", "window", "base", "salient"};

std::string seq_name(std::int64_t seq) { return "sequence " + std::to_string(seq); }

Status check_sequence(const Context& context, const kvrt_batch& batch, std::int64_t seq) {
  const std::int64_t begin = batch.row_offsets[seq], end = batch.row_offsets[seq + 1], before = batch.seq_len[seq];
  if (begin < 0 || end < begin) return Status(Code::kArgument, seq_name(seq) + ": row_offsets fall from " + std::to_string(begin) + " to " + std::to_string(end));
  if (before < 0) return Status(Code::kArgument, seq_name(seq) + ": seq_len is " + std::to_string(before));
  const std::int64_t limit = context.limits().max_length;
  if (before > limit || end - begin > limit - before) {
    return Status(Code::kCapacity,
                  seq_name(seq) + ": " + std::to_string(before) + " + " + std::to_string(end - begin) + " tokens, max_length is " + std::to_string(limit));
  }
  if (end > begin && !batch.positions) return Status(Code::kArgument, "positions is null");
  const std::int64_t first = end > begin ? batch.positions[begin] : -1;
  if (first >= 0 && first < before) {
    return Status(Code::kArgument, seq_name(seq) + ": token " + std::to_string(before) + " at position " + std::to_string(first) + ", expected at least its number");
  }
  if (first >= 0 && first - before > limit - (before + end - begin)) {
    return Status(Code::kCapacity, seq_name(seq) + ": position " + std::to_string(first) + " and its successors go beyond max_length " + std::to_string(limit));
  }
  bool ended = false;
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t position = batch.positions[row];
    if (position >= 0 && (ended || position != first + (row - begin))) {
      return Status(Code::kArgument, seq_name(seq) + ": position " + std::to_string(position) + " in row " + std::to_string(row) +
                                         (ended ? " behind a row without token" : ", expected " + std::to_string(first + (row - begin))));
    }
    ended = ended || position < 0;
  }
  return {};
}

// Two places of a sequence in one page would overwrite each other. Exact pages: sinks and ring together; base pages: those that this
// step writes against all before them.
Status check_shared_pages(const LayerContext& layer, const Sequence& sequence, std::int64_t seq, const std::int64_t needed[KVRT_SEGMENTS]) {
  const auto refuse = [&](const char* segment, std::int64_t id) {
    return Status(Code::kArgument, "layer " + std::to_string(layer.plan->index) + " " + seq_name(seq) + ": page " + std::to_string(id) +
                                       " stands twice among its " + segment + " pages; give each place a page of its own");
  };
  const std::int64_t n_sink = needed[KVRT_SINK], n_exact = n_sink + needed[KVRT_WINDOW];
  const auto exact = [&](std::int64_t i) { return i < n_sink ? sequence.pages[KVRT_SINK][i] : sequence.pages[KVRT_WINDOW][i - n_sink]; };
  for (std::int64_t i = 0; i < n_exact; ++i) {
    for (std::int64_t j = 0; j < i; ++j) {
      if (exact(i) == exact(j)) return refuse("sink and window", exact(i));
    }
  }
  std::int64_t before[KVRT_SEGMENTS];
  pages_needed(layer, sequence.before, before);
  const std::int32_t* const base = sequence.pages[KVRT_BASE];
  for (std::int64_t p = std::max<std::int64_t>(0, before[KVRT_BASE] - 1); p < needed[KVRT_BASE]; ++p) {
    if (std::find(base, base + p, base[p]) != base + p) return refuse("base", base[p]);
  }
  return {};
}

}  // namespace

Sequence sequence_of(const kvrt_batch& batch, std::int64_t seq) {
  Sequence s;
  s.first_row = batch.row_offsets[seq];
  s.before = batch.seq_len[seq];
  const std::int64_t end = batch.row_offsets[seq + 1];
  while (s.first_row + s.n_rows < end && batch.positions[s.first_row + s.n_rows] >= 0) ++s.n_rows;
  if (s.n_rows > 0) s.first_position = batch.positions[s.first_row] - s.before;
  for (int i = 0; i < KVRT_SEGMENTS; ++i) {
    const kvrt_page_list& list = batch.pages[i];
    if (!list.pages || !list.offsets) continue;
    s.pages[i] = list.pages + list.offsets[seq];
    s.n_pages[i] = list.offsets[seq + 1] - list.offsets[seq];
  }
  return s;
}

Status check_batch(const Context& context, const LayerContext& layer, const kvrt_batch& batch) {
  if (batch.n_seqs < 0) return Status(Code::kArgument, "n_seqs is " + std::to_string(batch.n_seqs));
  if (batch.n_seqs > context.limits().max_batch) {
    return Status(Code::kCapacity, "n_seqs is " + std::to_string(batch.n_seqs) + ", max_batch is " + std::to_string(context.limits().max_batch));
  }
  if (batch.sink_flags) return Status(Code::kUnsupported, "sink_flags is not offered by this build");
  if (batch.pages[KVRT_SALIENT].pages) return Status(Code::kUnsupported, "salient pages are not offered by this build");
  if (batch.n_seqs == 0) return {};
  if (!batch.seq_len || !batch.row_offsets) return Status(Code::kArgument, "seq_len or row_offsets is null");
  for (std::int64_t s = 0; s < batch.n_seqs; ++s) {
    if (Status status = check_sequence(context, batch, s); !status.ok()) return status;
    std::int64_t needed[KVRT_SEGMENTS];
    pages_needed(layer, sequence_of(batch, s).length(), needed);
    for (int i = 0; i < KVRT_SALIENT; ++i) {
      const kvrt_page_list& list = batch.pages[i];
      const std::int64_t given = list.pages && list.offsets ? list.offsets[s + 1] - list.offsets[s] : 0;
      if (given < 0 || (given > 0 && list.offsets[s] < 0)) return Status(Code::kArgument, seq_name(s) + ": offsets of " + kSegmentNames[i] + " pages fall");
      if (given < needed[i]) {
        return Status(Code::kCapacity, "layer " + std::to_string(layer.plan->index) + " " + seq_name(s) + ": " + std::to_string(given) + " " + kSegmentNames[i] +
                                           " pages, needs " + std::to_string(needed[i]));
      }
    }
  }
  return {};
}

Status check_pool(const UnitContext& unit, const kvrt_pool& pool, const BlockLayout& page, const char* name) {
  const std::int64_t stride = page_stride(pool, page);
  std::int64_t total = 0;
  if (!pool.base) return Status(Code::kArgument, unit.name + ": the " + name + " pool is null");
  if (stride < page.page) {
    return Status(Code::kCapacity,
                  unit.name + ": page_stride " + std::to_string(stride) + " of the " + name + " pool, expected at least " + std::to_string(page.page));
  }
  if (pool.n_pages < 0 || __builtin_mul_overflow(pool.n_pages, stride, &total)) {
    return Status(Code::kArgument, unit.name + ": n_pages " + std::to_string(pool.n_pages) + " of the " + name + " pool is out of range");
  }
  return {};
}

Status check_pages(const LayerContext& layer, const kvrt_batch& batch, const kvrt_pools& pools) {
  std::int64_t any[KVRT_SEGMENTS] = {}, limit[KVRT_SEGMENTS] = {};
  for (std::int64_t s = 0; s < batch.n_seqs; ++s) {
    std::int64_t needed[KVRT_SEGMENTS];
    pages_needed(layer, sequence_of(batch, s).length(), needed);
    for (int i = 0; i < KVRT_SEGMENTS; ++i) any[i] += needed[i];
  }
  for (int side = 0; side < KVRT_SIDES; ++side) {
    const UnitContext& unit = layer.units[side];
    if (any[KVRT_SINK] + any[KVRT_WINDOW] > 0) {
      if (Status status = check_pool(unit, pools.exact[side], unit.exact_page, "exact"); !status.ok()) return status;
    }
    if (any[KVRT_BASE] > 0) {
      if (Status status = check_pool(unit, pools.base[side], unit.base_page, "base"); !status.ok()) return status;
    }
  }
  limit[KVRT_SINK] = limit[KVRT_WINDOW] = std::min(pools.exact[KVRT_K].n_pages, pools.exact[KVRT_V].n_pages);
  limit[KVRT_BASE] = std::min(pools.base[KVRT_K].n_pages, pools.base[KVRT_V].n_pages);
  for (std::int64_t s = 0; s < batch.n_seqs; ++s) {
    const Sequence sequence = sequence_of(batch, s);
    std::int64_t needed[KVRT_SEGMENTS];
    pages_needed(layer, sequence.length(), needed);
    for (int i = 0; i < KVRT_SALIENT; ++i) {
      for (std::int64_t p = 0; p < needed[i]; ++p) {
        const std::int64_t id = sequence.pages[i][p];
        if (id >= 0 && id < limit[i]) continue;
        return Status(Code::kArgument, "layer " + std::to_string(layer.plan->index) + " " + seq_name(s) + ": " + kSegmentNames[i] + " page " + std::to_string(p) +
                                           " has id " + std::to_string(id) + ", the pool has " + std::to_string(limit[i]) + " pages");
      }
    }
    if (Status status = check_shared_pages(layer, sequence, s, needed); !status.ok()) return status;
  }
  return {};
}

void pages_needed(const LayerContext& layer, std::int64_t n_tokens, std::int64_t n_pages[KVRT_SEGMENTS]) {
  const Tiers& t = layer.tiers();
  const std::int64_t base = blocks_out(t, n_tokens) * t.block_base, page_tokens = layer.units[KVRT_K].base_page.page_tokens;
  n_pages[KVRT_SINK] = n_tokens > 0 ? sink_slots(t) / kExactPageTokens : 0;
  n_pages[KVRT_WINDOW] = n_tokens > t.n_sinks ? ring_slots(t) / kExactPageTokens : 0;
  n_pages[KVRT_BASE] = (base + page_tokens - 1) / page_tokens;
  n_pages[KVRT_SALIENT] = 0;
}

Segment segment_of(const LayerContext& layer, const kvrt_pools& pools, const Sequence& sequence, int head, kvrt_segment which) {
  const bool exact = which != KVRT_BASE;
  Segment s = {};
  for (int side = 0; side < KVRT_SIDES; ++side) {
    const UnitContext& unit = layer.units[side];
    const BlockLayout& page = exact ? unit.exact_page : unit.base_page;
    const kvrt_pool& pool = exact ? pools.exact[side] : pools.base[side];
    SegmentSide& out = side == KVRT_K ? s.k : s.v;
    out.codec = exact ? unit.exact : unit.codecs[static_cast<std::size_t>(head)];
    out.pool = static_cast<const std::uint8_t*>(pool.base);
    out.page_bytes = page_stride(pool, page);
    out.block_offset = page.header + head * page.block;
  }
  s.pre = layer.units[KVRT_K].pre;
  place_segment(layer.tiers(), sequence, which, s.k.codec.page_tokens, &s);
  return s;
}

}  // namespace kvrt

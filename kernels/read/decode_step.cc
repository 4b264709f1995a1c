#include "kernels/read/decode_step.h"

#include <algorithm>

#include "kernels/read/decode_sequence.h"

namespace kvrt {
namespace {

constexpr std::int64_t kSharesPerWorker = 2;  ///< a piece is split if it is more than one of so many equal shares of a worker

std::int64_t aligned(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

/// Pairs of sequence and head that can be split in one call: each has more than its share of the work.
std::int64_t max_split(const LayerContext& layer, const kvrt_limits& limits) {
  if (!limits.parallel_for || limits.n_workers < 2) return 0;
  return std::min(kSharesPerWorker * limits.n_workers, std::int64_t{limits.max_batch} * layer.layout.n_kv_heads);
}

/// In shared memory.
struct Pieces {
  std::int64_t* first;     ///< [sequences + 1] number of each sequence's first piece
  std::int64_t* slot;      ///< [sequences] partials of its head 0; -1: its workers have their own
  std::uint8_t* partials;  ///< [max_split]
};
std::int64_t lay_out(const LayerContext& layer, const kvrt_limits& limits, std::uint8_t* base, Pieces* p) {
  const std::int64_t n = limits.max_batch;
  p->first = reinterpret_cast<std::int64_t*>(base);
  std::int64_t used = aligned((n + 1) * 8);
  p->slot = reinterpret_cast<std::int64_t*>(base + used);
  used += aligned(n * 8);
  p->partials = base + used;
  return used + max_split(layer, limits) * decode_partials_bytes(layer);
}

/// Returns the pairs of sequence and head that are split.
std::int64_t cut(const Call& call, const kvrt_batch& batch, const Pieces& p) {
  const LayerContext& layer = *call.layer;
  const std::int64_t heads = call.n_heads(), limit = max_split(layer, call.context->limits()), shares = kSharesPerWorker * call.context->limits().n_workers;
  std::int64_t total = 0, n_split = 0;
  for (int s = 0; s < batch.n_seqs; ++s) {
    const Sequence sequence = sequence_of(batch, s);
    total += sequence.n_rows ? heads * sequence.length() : 0;
  }
  p.first[0] = 0;
  for (int s = 0; s < batch.n_seqs; ++s) {
    const Sequence sequence = sequence_of(batch, s);
    const int n = sequence.n_rows ? ranges_of(layer, sequence).n : 0;
    const bool split = n > 1 && n_split + heads <= limit && sequence.length() * shares > total;
    p.slot[s] = split ? n_split : -1;
    n_split += split ? heads : 0;
    p.first[s + 1] = p.first[s] + (n == 0 ? 0 : split ? heads * n : heads);
  }
  return n_split;
}

}  // namespace

std::int64_t decode_worker_bytes(const LayerContext& layer) { return aligned(decode_scratch_bytes(layer)) + decode_partials_bytes(layer); }
std::int64_t decode_shared_bytes(const LayerContext& layer, const kvrt_limits& limits) {
  Pieces p;
  return lay_out(layer, limits, nullptr, &p);
}

void decode_step(const Call& call, const kvrt_batch& batch, const kvrt_attn& attn, const kvrt_pools& pools) {
  const LayerContext& layer = *call.layer;
  const AttendHead attend = call.context->attend();
  const std::int64_t heads = call.n_heads(), partials_bytes = decode_partials_bytes(layer);
  Pieces p;
  lay_out(layer, call.context->limits(), static_cast<std::uint8_t*>(call.shared()), &p);
  const std::int64_t n_split = cut(call, batch, p);
  for_each(call.context->limits(), p.first[batch.n_seqs], [&](std::int64_t i, std::int32_t worker) {
    const std::int64_t seq = std::upper_bound(p.first, p.first + batch.n_seqs, i) - p.first - 1, piece = i - p.first[seq];
    const Sequence sequence = sequence_of(batch, seq);
    void* const scratch = call.scratch(worker);
    const int n = ranges_of(layer, sequence).n;
    if (p.slot[seq] >= 0) {
      const int head = static_cast<int>(piece / n), range = static_cast<int>(piece % n);
      void* const partials = p.partials + (p.slot[seq] + head) * partials_bytes;
      return attend_ranges(layer, attend, sequence, head, range, range + 1, attn, pools, partials, scratch);
    }
    void* const partials = static_cast<std::uint8_t*>(scratch) + aligned(decode_scratch_bytes(layer));
    const int head = static_cast<int>(piece);
    attend_ranges(layer, attend, sequence, head, 0, n, attn, pools, partials, scratch);
    merge_ranges(layer, sequence, head, attn, partials, scratch);
  });
  for_each(call.context->limits(), n_split, [&](std::int64_t i, std::int32_t worker) {
    const std::int64_t seq = std::find_if(p.slot, p.slot + batch.n_seqs, [&](std::int64_t slot) { return slot >= 0 && i < slot + heads; }) - p.slot;
    merge_ranges(layer, sequence_of(batch, seq), static_cast<int>(i - p.slot[seq]), attn, p.partials + i * partials_bytes, call.scratch(worker));
  });
}

}  // namespace kvrt

#include "kernels/read/decode_launch.h"

#include "kernels/read/prepare_cuda.h"

namespace kvrt {
namespace {

constexpr double kLog2E = 1.4426950408889634074;
constexpr std::int64_t kChunksAProcessor = 16;  ///< about, of a call: partial results cost 4 D + 8 bytes a query head and chunk

struct CallPlan {
  UnitBytes unit_bytes;
  std::int64_t chunk_bytes, n_chunks;
};

UnitBytes bytes_a_unit(const LayerContext& layer) {
  const std::int64_t tokens = kScheduleTile * kScheduleUnit, k = layer.units[KVRT_K].base_page.block, v = layer.units[KVRT_V].base_page.block;
  return {tokens * 4 * layer.layout.head_dim, (k + v) * tokens / layer.units[KVRT_K].base_page.page_tokens};
}

struct Arrays {
  Segment* segments;
  DecodeChunk* chunks;
  std::int64_t* first_chunk;
  float* queries;
  Partial partials;
  float* scores;  ///< of two_pass
};
/// Tiles of the longest chunk.
std::int64_t longest_chunk(const UnitBytes& bytes, std::int64_t bytes_a_chunk) {
  const std::int64_t least = bytes.exact < bytes.base ? bytes.exact : bytes.base;
  return (bytes_a_chunk + least - 1) / least * kScheduleUnit;
}

Arrays take_arrays(const LayerContext& layer, std::int64_t n_rows, std::int64_t n_chunks, std::int64_t chunk_tiles, DeviceRoom* room) {
  const std::int64_t g = layer.group, d = layer.layout.head_dim;
  Arrays a;
  a.segments = room->take<Segment>(n_rows * KVRT_SALIENT);
  a.chunks = room->take<DecodeChunk>(n_chunks);
  a.first_chunk = room->take<std::int64_t>(n_rows + 1);
  a.queries = room->take<float>(n_rows * kQueryFrames * g * d);
  a.partials.m = room->take<float>(n_chunks * g), a.partials.l = room->take<float>(n_chunks * g), a.partials.o = room->take<float>(n_chunks * g * d);
  DecodeArgs scored = {};
  scored.n_chunks = n_chunks, scored.n_query_heads = layer.group, scored.max_chunk_tiles = static_cast<std::int32_t>(chunk_tiles);
  a.scores = layer.cuda.path == KVRT_PATH_TWO_PASS ? room->take<float>(score_floats(scored)) : nullptr;
  return a;
}

}  // namespace

std::int64_t decode_device_bytes(const LayerContext& layer, const kvrt_limits& limits, int n_processors) {
  DeviceRoom room(nullptr);
  take_control(layer, limits, &room);
  const std::int64_t n_rows = std::int64_t{limits.max_batch} * layer.layout.n_kv_heads;
  // The longest chunks are those of the fullest batch. Each of the three segments of a row ends with a chunk that may be short.
  const UnitBytes bytes = bytes_a_unit(layer);
  Sequence longest;
  longest.n_rows = 1, longest.before = limits.max_length - 1;
  const std::int64_t most = n_rows * sequence_bytes(layer.tiers(), longest, layer.units[KVRT_K].base_page.page_tokens, bytes);
  take_arrays(layer, n_rows, kChunksAProcessor * n_processors + KVRT_SALIENT * n_rows,
              longest_chunk(bytes, chunk_bytes(most, kChunksAProcessor * n_processors)), &room);
  return room.used();
}

Status decode_on_device(const Call& call, const kvrt_batch& batch, const kvrt_attn& attn, const kvrt_pools& pools, void* stream) {
  const LayerContext& layer = *call.layer;
  if (layer.cuda.path == KVRT_PATH_MISSING) return Status(Code::kUnsupported, layer.units[layer.cuda.side].name + ": " + layer.cuda.reason);
  const std::int64_t heads = layer.layout.n_kv_heads;
  const int page_tokens = layer.units[KVRT_K].base_page.page_tokens;
  CallPlan plan = {bytes_a_unit(layer), 0, 0};
  std::int64_t total = 0;
  for (std::int64_t s = 0; s < batch.n_seqs; ++s) {
    const Sequence sequence = sequence_of(batch, s);
    if (sequence.n_rows > 0) total += heads * sequence_bytes(layer.tiers(), sequence, page_tokens, plan.unit_bytes);
  }
  plan.chunk_bytes = chunk_bytes(total, kChunksAProcessor * call.context->n_processors());
  const auto fill = [&](std::int64_t, DeviceSequence* d) {
    d->first_chunk = plan.n_chunks;
    if (d->sequence.n_rows > 0) d->n_chunks = sequence_chunks(layer.tiers(), d->sequence, page_tokens, plan.unit_bytes, plan.chunk_bytes);
    plan.n_chunks += heads * d->n_chunks;
  };
  DeviceRoom room(call.workspace);
  PrepareArgs prepare = {};
  if (Status status = send_sequences(call, batch, 0, batch.n_seqs, Touches::kLive, stream, fill, &room, &prepare.sequences); !status.ok()) return status;
  const std::int64_t n_rows = batch.n_seqs * heads;
  const Arrays arrays = take_arrays(layer, n_rows, plan.n_chunks, longest_chunk(plan.unit_bytes, plan.chunk_bytes), &room);

  prepare.layer = layer.on_device;
  prepare.n_rows = n_rows, prepare.n_heads = static_cast<int>(heads), prepare.group = layer.group;
  resolve_pools(layer, pools, prepare.pools);
  prepare.unit_bytes = plan.unit_bytes, prepare.chunk_bytes = plan.chunk_bytes;
  prepare.q = attn.q;
  prepare.rotates = attn.q_frame == KVRT_PRE_ROPE;
  prepare.factor = static_cast<float>((attn.softmax_scale > 0 ? attn.softmax_scale : layer.plan->softmax_scale) * kLog2E);
  prepare.segments = arrays.segments, prepare.chunks = arrays.chunks, prepare.first_chunk = arrays.first_chunk, prepare.queries = arrays.queries;
  if (Status status = prepare_cuda(prepare, stream); !status.ok()) return status;

  DecodeArgs decode = {};
  decode.segments = arrays.segments, decode.chunks = arrays.chunks, decode.n_chunks = plan.n_chunks;
  decode.q = arrays.queries, decode.n_query_heads = layer.group, decode.head_dim = layer.layout.head_dim;
  decode.partials = arrays.partials;
  if (layer.units[KVRT_K].pre) decode.rope = &layer.on_device->rope, decode.rope_offsets = page_tokens;  // pages of this build have no gaps
  decode.soft_cap = static_cast<float>(attn.soft_cap * kLog2E);
  decode.scores = arrays.scores, decode.max_chunk_tiles = static_cast<std::int32_t>(longest_chunk(plan.unit_bytes, plan.chunk_bytes));
  if (Status status = decode_cuda(decode, layer.cuda.unit, layer.cuda.decode, stream); !status.ok()) return status;

  CombineArgs combine = {};
  combine.partials = arrays.partials, combine.first_chunk = arrays.first_chunk, combine.n_rows = n_rows;
  combine.n_query_heads = layer.group, combine.head_dim = layer.layout.head_dim, combine.n_kv_heads = static_cast<int>(heads);
  combine.sink_logit = attn.sink_logit;
  combine.out = attn.out, combine.log_sum_exp = attn.lse, combine.mass = attn.mass;
  combine.chunks = arrays.chunks, combine.layer = layer.on_device, combine.sequences = prepare.sequences;
  return combine_cuda(combine, stream);
}

}  // namespace kvrt

// append: exact pages first; an exit block is encoded once, when the token that completes it arrives.

#include "kernels/codec/page_header.h"
#include "kernels/reference/reference.h"
#include "kernels/write/frame.h"

namespace kvrt {
namespace {

/// One side of one sequence and head while its rows are written.
struct Writer {
  const LayerContext& layer;
  const UnitContext& unit;
  const Sequence& sequence;
  int head;
  std::uint8_t *exact_pool, *base_pool;
  std::int64_t exact_stride, base_stride;
  float* rows;  ///< scratch [E, D]
  EncodeCounters* counters;
  std::int64_t n_coded = 0;

  std::int64_t position(std::int64_t token) const { return sequence.first_position + token; }

  std::uint8_t* exact_page(kvrt_segment segment, std::int64_t slot) const {
    return exact_pool + std::int64_t{sequence.pages[segment][slot / kExactPageTokens]} * exact_stride;
  }
  std::uint8_t* exact_block(std::uint8_t* page) const { return page + unit.exact_page.header + head * unit.exact_page.block; }

  void write_exact(kvrt_segment segment, std::int64_t slot, std::int64_t token, const float* x) {
    std::uint8_t* const page = exact_page(segment, slot);
    const int in_page = static_cast<int>(slot % kExactPageTokens);
    // Every head's worker writes headers only once.
    if (unit.exact_page.header > 0 && head == 0) store_slot_position(page, 2, in_page, position(token));
    encode_row(unit.exact, x, in_page, exact_block(page), counters);
  }

  /// Encodes body tokens [first, first + n) of the base tier, rows [n, D] in the unit's frame.
  void write_base(std::int64_t first, std::int64_t n) {
    const PageCodec& codec = unit.codecs[static_cast<std::size_t>(head)];
    const std::int64_t per_page = codec.page_tokens, width = codec.head_dim;
    const int step = codec.granularity == Granularity::kChannel ? codec.group : 1;
    for (std::int64_t i = 0; i < n; i += step) {
      std::uint8_t* const page = base_pool + std::int64_t{sequence.pages[KVRT_BASE][(first + i) / per_page]} * base_stride;
      const int slot = static_cast<int>((first + i) % per_page);
      std::uint8_t* const block = page + unit.base_page.header + head * unit.base_page.block;
      for (int j = 0; j < step && unit.base_page.header > 0 && head == 0; ++j) {
        store_slot_position(page, 1, slot + j, position(layer.tiers().n_sinks + first + i + j));
      }
      if (step > 1) encode_channel_group(codec, rows + i * width, width, slot / step, block, counters);
      else encode_row(codec, rows + i * width, slot, block, counters);
    }
    n_coded += n;
  }

  /// The exit block that body tokens [first, first + E) form leaves the ring.
  void flush(std::int64_t first) {
    const std::int64_t n = layer.tiers().exit_block(), ring = ring_slots(layer.tiers()), width = unit.exact.head_dim;
    float* const y = rows + n * width;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t slot = (first + i) % ring;
      decode_row(unit.exact, exact_block(exact_page(KVRT_WINDOW, slot)), static_cast<int>(slot % kExactPageTokens), y);
      to_frame(unit.job, head, y, rows + i * width, counters);
    }
    write_base(first, n);
  }

  /// Token number `token` of the sequence, x [D] finite and in the unit's frame.
  void write(std::int64_t token, const float* x) {
    const Tiers& t = layer.tiers();
    if (token < t.n_sinks) return write_exact(KVRT_SINK, token, token, x);
    const std::int64_t body = token - t.n_sinks, ring = ring_slots(t);
    if (ring == 0) {
      to_frame(unit.job, head, x, rows, counters);
      return write_base(body, 1);
    }
    write_exact(KVRT_WINDOW, body % ring, token, x);
    const std::int64_t out = blocks_out(t, token + 1);
    if (out > blocks_out(t, token)) flush((out - 1) * t.exit_block());
  }
};

}  // namespace

void append_reference(const LayerContext& layer, const Sequence& sequence, int head, const kvrt_qkv& qkv, const kvrt_pools& pools, void* scratch,
                      EncodeCounters counters[KVRT_SIDES], std::int64_t* n_coded) {
  const int width = layer.layout.head_dim;
  float* const x = static_cast<float*>(scratch);
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    const UnitContext& unit = layer.units[side];
    const kvrt_rows& rows = side == KVRT_K ? qkv.k : qkv.v;
    const bool rotates = side == KVRT_K && qkv.k_frame == KVRT_PRE_ROPE && !unit.pre;
    Writer writer{layer, unit, sequence, head, static_cast<std::uint8_t*>(pools.exact[side].base), static_cast<std::uint8_t*>(pools.base[side].base),
                  page_stride(pools.exact[side], unit.exact_page), page_stride(pools.base[side], unit.base_page), x + width, &counters[side]};
    for (std::int64_t i = 0; i < sequence.n_rows; ++i) {
      load_row(rows, layer.layout.n_kv_heads, width, sequence.first_row + i, head, x);
      for (int d = 0; d < width; ++d) x[d] = finite_or_zero(x[d], &counters[side]);
      if (rotates) rope_rotate(layer.rope, writer.position(sequence.before + i), x);
      writer.write(sequence.before + i, x);
    }
    if (side == KVRT_K) *n_coded = writer.n_coded;
  }
}

}  // namespace kvrt

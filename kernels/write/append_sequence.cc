#include "kernels/write/append_sequence.h"

#include <algorithm>

#include "kernels/codec/page_header.h"
#include "kernels/write/frame.h"

namespace kvrt {
namespace {

struct Scratch {
  float *rows;    ///< [run, D] in the unit's frame
  float *framed;  ///< [run, D] of the scalar encoder
  float *angles;  ///< [D]
  float *encode;  ///< of the vector encoder
  std::uint8_t* bytes;
};

int run_rows(const LayerContext& layer) {
  return std::max(rows_per_run(layer.units[KVRT_K].job), rows_per_run(layer.units[KVRT_V].job));
}

std::int64_t lay_out(const LayerContext& layer, void* base, Scratch* s) {
  const std::int64_t width = layer.layout.head_dim, rows = run_rows(layer);
  std::uintptr_t at = reinterpret_cast<std::uintptr_t>(base);
  const auto take = [&](std::int64_t floats) {
    const std::uintptr_t here = at;
    at += static_cast<std::uintptr_t>((floats * 4 + 63) / 64 * 64);
    return reinterpret_cast<float*>(here);
  };
  s->rows = take(rows * width), s->framed = take(rows * width), s->angles = take(width);
  s->encode = take(std::max(scratch_floats(layer.units[KVRT_K].job), scratch_floats(layer.units[KVRT_V].job)));
  s->bytes = reinterpret_cast<std::uint8_t*>(take(encode_scratch_bytes(layer.layout.head_dim) / 4));
  return static_cast<std::int64_t>(at - reinterpret_cast<std::uintptr_t>(base));
}

/// One side of one sequence and head while its rows are written. Body tokens are counted from the first one behind the sinks.
struct Writer {
  const LayerContext& layer;
  const UnitContext& unit;
  const WritePath& path;
  const Sequence& sequence;
  int head;
  IntakeRows in;
  std::uint8_t *exact_pool, *base_pool;
  std::int64_t exact_stride, base_stride;
  const Scratch& s;
  EncodeCounters* counters;

  std::uint8_t* exact_row(kvrt_segment segment, std::int64_t slot) const {
    std::uint8_t* const page = exact_pool + std::int64_t{sequence.pages[segment][slot / kExactPageTokens]} * exact_stride;
    return page + unit.exact_page.header + head * unit.exact_page.block + slot % kExactPageTokens * unit.exact.row_bytes;
  }

  /// Tokens [first, first + n) of the step to slots of sink or window pages. count: their values were not looked at before.
  void write_exact(kvrt_segment segment, std::int64_t slot, std::int64_t n_slots, std::int64_t token, std::int64_t n, bool count) {
    EncodeCounters counted_before;
    const std::int64_t width = in.head_dim, most = run_rows(layer);
    for (std::int64_t done = 0; done < n; done += most) {
      const int rows = static_cast<int>(std::min(most, n - done));
      path.take_rows(in, token + done - sequence.before, rows, s.rows, s.angles, count ? counters : &counted_before);
      for (int i = 0; i < rows; ++i) {
        const std::int64_t at = (slot + done + i) % n_slots;
        if (unit.exact_page.header > 0 && head == 0) {  // every head's worker writes headers only once
          std::uint8_t* const page = exact_pool + std::int64_t{sequence.pages[segment][at / kExactPageTokens]} * exact_stride;
          store_slot_position(page, 2, static_cast<int>(at % kExactPageTokens), sequence.first_position + token + done + i);
        }
        path.store_bf16(s.rows + i * width, in.head_dim, exact_row(segment, at));
      }
    }
  }

  /// Body tokens [first, first + n) to s.rows: old ones from the ring, new ones from the caller.
  void load_body(std::int64_t first, int n) {
    const std::int64_t old = sequence.before - layer.tiers().n_sinks, width = in.head_dim, ring = ring_slots(layer.tiers());
    int i = 0;
    for (; i < n && first + i < old; ++i) path.load_bf16(exact_row(KVRT_WINDOW, (first + i) % ring), in.head_dim, s.rows + i * width);
    if (i < n) path.take_rows(in, first + i - old, n - i, s.rows + i * width, s.angles, counters);
  }

  /// Encodes s.rows into slots [slot, slot + n) of a base page.
  void encode(std::uint8_t* block, int slot, int n) {
    const PageCodec& codec = unit.codecs[static_cast<std::size_t>(head)];
    const std::int64_t width = in.head_dim;
    if (has_vector_encoder(unit.job)) return path.encode(unit.job, static_grids(unit.job, head), codec, head, s.rows, n, slot, block, s.encode, s.bytes, counters);
    for (int i = 0; i < n; ++i) to_frame(unit.job, head, s.rows + i * width, s.framed + i * width, counters);
    if (codec.granularity == Granularity::kChannel) return encode_channel_group(codec, s.framed, width, slot / codec.group, block, counters);
    for (int i = 0; i < n; ++i) encode_row(codec, s.framed + i * width, slot + i, block, counters);
  }

  /// Body tokens [first, last) leave the window.
  void write_base(std::int64_t first, std::int64_t last) {
    const PageCodec& codec = unit.codecs[static_cast<std::size_t>(head)];
    const std::int64_t per_page = codec.page_tokens, most = rows_per_run(unit.job);
    for (std::int64_t t = first; t < last;) {
      const int slot = static_cast<int>(t % per_page), n = static_cast<int>(std::min({most, last - t, per_page - slot}));
      std::uint8_t* const page = base_pool + std::int64_t{sequence.pages[KVRT_BASE][t / per_page]} * base_stride;
      for (int j = 0; j < n && unit.base_page.header > 0 && head == 0; ++j) {
        store_slot_position(page, 1, slot + j, sequence.first_position + layer.tiers().n_sinks + t + j);
      }
      load_body(t, n);
      encode(page + unit.base_page.header + head * unit.base_page.block, slot, n);
      t += n;
    }
  }

  /// Returns the tokens coded.
  std::int64_t run() {
    const Tiers& t = layer.tiers();
    const std::int64_t before = sequence.before, after = sequence.length(), sinks = t.n_sinks, ring = ring_slots(t);
    if (before < sinks) write_exact(KVRT_SINK, before, sink_slots(t), before, std::min(after, sinks) - before, true);
    const std::int64_t coded = coded_end(t, before) - sinks, to_code = coded_end(t, after) - sinks;
    write_base(coded, to_code);
    if (ring == 0 || after <= sinks) return to_code - coded;
    // What the ring holds in the end: its last tokens, of which those that were coded just now have been counted.
    const std::int64_t end = after - sinks, first = std::max({before - sinks, std::int64_t{0}, end - ring}), counted = std::clamp(to_code, first, end);
    write_exact(KVRT_WINDOW, first % ring, ring, first + sinks, counted - first, false);
    write_exact(KVRT_WINDOW, counted % ring, ring, counted + sinks, end - counted, true);
    return to_code - coded;
  }
};

}  // namespace

std::int64_t append_scratch_bytes(const LayerContext& layer) {
  Scratch s;
  return lay_out(layer, nullptr, &s);
}

void append_sequence(const LayerContext& layer, const WritePath& path, const Sequence& sequence, int head, const kvrt_qkv& qkv, const kvrt_pools& pools,
                     void* scratch, EncodeCounters counters[KVRT_SIDES], std::int64_t* n_coded) {
  if (sequence.n_rows == 0) return;
  Scratch s;
  lay_out(layer, scratch, &s);
  const std::int64_t width = layer.layout.head_dim, n_heads = layer.layout.n_kv_heads;
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    const UnitContext& unit = layer.units[side];
    const kvrt_rows& rows = side == KVRT_K ? qkv.k : qkv.v;
    const std::int64_t bytes = width * (rows.dtype == KVRT_F32 ? 4 : 2);
    IntakeRows in;
    in.row_bytes = rows.row_stride ? rows.row_stride : n_heads * bytes;
    in.data = static_cast<const std::uint8_t*>(rows.data) + sequence.first_row * in.row_bytes + head * (rows.head_stride ? rows.head_stride : bytes);
    in.dtype = rows.dtype == KVRT_F32 ? IntakeType::kF32 : rows.dtype == KVRT_F16 ? IntakeType::kF16 : IntakeType::kBf16;
    in.head_dim = static_cast<int>(width);
    in.rope = side == KVRT_K && qkv.k_frame == KVRT_PRE_ROPE && !unit.pre && layer.rope.n_pairs > 0 ? &layer.rope : nullptr;
    in.first_position = sequence.first_position + sequence.before;
    in.round_to_bf16 = encodes_bf16(layer.tiers());
    Writer writer{layer, unit, path, sequence, head, in, static_cast<std::uint8_t*>(pools.exact[side].base), static_cast<std::uint8_t*>(pools.base[side].base),
                  page_stride(pools.exact[side], unit.exact_page), page_stride(pools.base[side], unit.base_page), s, &counters[side]};
    const std::int64_t n = writer.run();
    if (side == KVRT_K) *n_coded = n;
  }
}

}  // namespace kvrt

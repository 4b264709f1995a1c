// kvrt_page_verify: every live byte of one sequence through the codecs.

#include <cstring>

#include "kernels/codec/page_header.h"
#include "kernels/core/call.h"
#include "kernels/reference/reference.h"

namespace kvrt {
namespace {

/// FNV-1a over the bits of decoded values.
void add_to_checksum(const float* x, int n, std::uint64_t* sum) {
  for (int i = 0; i < n; ++i) {
    *sum = (*sum ^ f32_bits(x[i])) * 0x100000001B3ull;
  }
}

/// Grids that an encoder writes: finite, and steps above zero but for rows of zeros in formats whose scale says so.
bool good_scales(const PageCodec& c, const std::uint8_t* block, int slot) {
  if (is_exact(c.format) || is_llamacpp_block(c.format)) return true;
  for (int d = 0; d < c.head_dim; ++d) {
    const Grid g = detail::grid_at(c, block, slot, d);
    if (!f32_is_finite(g.scale) || !f32_is_finite(g.lo) || g.scale < 0 || (g.scale == 0 && !is_lm(c.format) && !is_fp4(c.format))) return false;
  }
  return true;
}

/// The header's position of live token i. A slot of the ring may still hold the token of the last turn.
bool good_position(const Segment& s, kvrt_segment which, std::int64_t i) {
  const TokenPlace place = place_of(s, i);
  const std::int64_t stored = load_slot_position(page_start(s.k, place.page), which == KVRT_BASE ? 1 : 2, place.slot), expected = s.first_position + i;
  return stored == expected || (which == KVRT_WINDOW && stored == expected + s.n_slots);
}

struct Verifier {
  const Call& call;
  const kvrt_pools& pools;
  Sequence sequence;
  bool knows_position;
  kvrt_verify_report* report;
  std::string first_fault;

  void fault(kvrt_side side, std::int64_t token, std::int64_t head, const char* what) {
    if (first_fault.empty()) {
      first_fault = call.layer->units[side].name + ": token " + std::to_string(token) + " head " + std::to_string(head) + " has " + what;
    }
  }

  void visit(kvrt_side side, std::int64_t token, int head, float* row) {
    const UnitContext& unit = call.layer->units[side];
    const TokenIndex at = find_token(call.layer->tiers(), sequence.length(), token);
    const Segment segment = segment_of(*call.layer, pools, sequence, head, at.segment);
    const SegmentSide& bytes = side == KVRT_K ? segment.k : segment.v;
    const TokenPlace place = place_of(segment, at.index);
    if (side == KVRT_K && unit.pre && head == 0 && knows_position && !good_position(segment, at.segment, at.index)) {
      ++report->bad_positions;
      fault(side, token, head, "another position in its page header");
    }
    if (!good_scales(bytes.codec, page_start(bytes, place.page) + bytes.block_offset, place.slot)) {
      ++report->bad_scales;
      fault(side, token, head, "a scale that no encoder writes");
    }
    const int width = bytes.codec.head_dim;
    read_token(*call.layer, pools, sequence, head, side, token, row, row + width);
    for (int d = 0; d < width; ++d) {
      if (f32_is_finite(row[d])) continue;
      ++report->bad_values;
      fault(side, token, head, "a value that is not finite");
    }
    add_to_checksum(row, width, &report->checksum);
  }
};

Status verify(const Call& call, const kvrt_batch& batch, int32_t seq, const kvrt_pools& pools, kvrt_verify_report* out) {
  if (!out) return Status(Code::kArgument, "out is null");
  if (seq < 0 || seq >= batch.n_seqs) return Status(Code::kArgument, "seq " + std::to_string(seq) + " is not in a batch of " + std::to_string(batch.n_seqs));
  *out = {};
  out->checksum = 0xCBF29CE484222325ull;
  Verifier verifier{call, pools, sequence_of(batch, seq), false, out, {}};
  Sequence& sequence = verifier.sequence;
  verifier.knows_position = call.layer->units[KVRT_K].pre && sequence.length() > 0;
  if (verifier.knows_position && sequence.n_rows == 0) sequence.first_position = stored_first_position(*call.layer, pools, sequence);
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    for (std::int64_t t = 0; t < sequence.length(); ++t) {
      for (int head = 0; head < call.n_heads(); ++head) verifier.visit(side, t, head, static_cast<float*>(call.scratch(0)));
      ++out->n_tokens;
    }
  }
  return verifier.first_fault.empty() ? Status() : Status(Code::kNumeric, verifier.first_fault);
}

}  // namespace
}  // namespace kvrt

extern "C" kvrt_status kvrt_page_verify(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, int32_t seq, const kvrt_pools* pools,
                                        const kvrt_workspace* workspace, kvrt_verify_report* out, void* stream, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> kvrt::Status {
    kvrt::Call call;
    if (kvrt::Status status = kvrt::begin_call(context, layer, batch, pools, workspace, stream, &call); !status.ok()) return status;
    return kvrt::verify(call, *batch, seq, *pools, out);
  });
}

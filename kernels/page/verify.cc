// kvrt_page_verify: every live byte of one sequence through the codecs.

#include "kernels/page/row_faults.h"
#include "kernels/page/verify_launch.h"
#include "kernels/reference/reference.h"

namespace kvrt {
namespace {

/// FNV-1a over the bits of decoded values.
void add_to_checksum(const float* x, int n, std::uint64_t* sum) {
  for (int i = 0; i < n; ++i) {
    *sum = (*sum ^ f32_bits(x[i])) * 0x100000001B3ull;
  }
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

  /// Decodes one row; returns its RowFaults.
  std::uint8_t read(kvrt_side side, std::int64_t token, int head, bool checks_position, float* row) const {
    const TokenIndex at = find_token(call.layer->tiers(), sequence.length(), token);
    const Segment segment = segment_of(*call.layer, pools, sequence, head, at.segment);
    const SegmentSide& bytes = side == KVRT_K ? segment.k : segment.v;
    const TokenPlace place = place_of(segment, at.index);
    const std::uint8_t* const page = page_start(bytes, place.page);
    std::uint8_t faults = good_scales(bytes.codec, page + bytes.block_offset, place.slot) ? 0 : kBadScale;
    if (checks_position && head == 0 && !good_position(page, at.segment, place.slot, segment.first_position + at.index, segment.n_slots)) faults |= kBadPosition;
    read_token(*call.layer, pools, sequence, head, side, token, row, row + bytes.codec.head_dim);
    return faults;
  }

  void add(kvrt_side side, std::int64_t token, int head, const float* row, std::uint8_t faults) {
    if (faults & kBadPosition) {
      ++report->bad_positions;
      fault(side, token, head, "another position in its page header");
    }
    if (faults & kBadScale) {
      ++report->bad_scales;
      fault(side, token, head, "a scale that no encoder writes");
    }
    const int width = call.layer->layout.head_dim;
    for (int d = 0; d < width; ++d) {
      if (f32_is_finite(row[d])) continue;
      ++report->bad_values;
      fault(side, token, head, "a value that is not finite");
    }
    add_to_checksum(row, width, &report->checksum);
  }
};

Status verify_rows(Verifier* v, const kvrt_batch& batch, int32_t seq, void* stream) {
  const Call& call = v->call;
  const std::int64_t heads = call.n_heads(), n_rows = v->sequence.length() * heads;
  DeviceRows on_device;
  if (call.on_device() && n_rows > 0) {
    if (Status status = on_device.start(call, batch, seq, v->sequence.first_position, v->pools, stream); !status.ok()) return status;
  }
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    const bool checks_position = side == KVRT_K && v->knows_position;
    on_device.select(side, checks_position);
    for (std::int64_t i = 0; i < n_rows; ++i) {
      const std::int64_t token = i / heads;
      const int head = static_cast<int>(i % heads);
      const float* row = nullptr;
      std::uint8_t faults = 0;
      if (call.on_device()) {
        if (Status status = on_device.fetch(i, n_rows, &row, &faults); !status.ok()) return status;
      } else {
        auto* const scratch = static_cast<float*>(call.scratch(0));
        faults = v->read(side, token, head, checks_position, scratch);
        row = scratch;
      }
      v->add(side, token, head, row, faults);
    }
    v->report->n_tokens += v->sequence.length();
  }
  return {};
}

Status verify(const Call& call, const kvrt_batch& batch, int32_t seq, const kvrt_pools& pools, kvrt_verify_report* out, void* stream) {
  if (!out) return Status(Code::kArgument, "out is null");
  if (seq < 0 || seq >= batch.n_seqs) return Status(Code::kArgument, "seq " + std::to_string(seq) + " is not in a batch of " + std::to_string(batch.n_seqs));
  *out = {};
  out->checksum = 0xCBF29CE484222325ull;
  Verifier verifier{call, pools, sequence_of(batch, seq), false, out, {}};
  Sequence& sequence = verifier.sequence;
  verifier.knows_position = call.layer->units[KVRT_K].pre && sequence.length() > 0;
  if (verifier.knows_position && sequence.n_rows == 0) {
    if (Status status = stored_first_position(call, pools, sequence, stream, &sequence.first_position); !status.ok()) return status;
  }
  if (Status status = verify_rows(&verifier, batch, seq, stream); !status.ok()) return keep_driver_error(*call.context, status);
  return verifier.first_fault.empty() ? Status() : Status(Code::kNumeric, verifier.first_fault);
}

}  // namespace
}  // namespace kvrt

extern "C" kvrt_status kvrt_page_verify(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, int32_t seq, const kvrt_pools* pools,
                                        const kvrt_workspace* workspace, kvrt_verify_report* out, void* stream, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> kvrt::Status {
    kvrt::Call call;
    if (kvrt::Status status = kvrt::begin_call(context, layer, batch, pools, workspace, stream, &call); !status.ok()) return status;
    return kvrt::verify(call, *batch, seq, *pools, out, stream);
  });
}

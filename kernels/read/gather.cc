// kvrt_gather: stored tokens in order, in the model's own coordinates.

#include "kernels/read/gather_launch.h"
#include "kernels/reference/reference.h"

namespace kvrt {
namespace {

Status gather(const Call& call, const kvrt_batch& batch, const kvrt_gather_args* args, const kvrt_pools& pools, void* stream) {
  if (!args) return Status(Code::kArgument, "args is null");
  if (args->seq < 0 || args->seq >= batch.n_seqs)
    return Status(Code::kArgument, "seq " + std::to_string(args->seq) + " is not in a batch of " + std::to_string(batch.n_seqs));
  if (args->side != KVRT_K && args->side != KVRT_V) return Status(Code::kArgument, "side is unknown");
  const UnitContext& unit = call.layer->units[args->side];
  if (args->frame != KVRT_POST_ROPE && args->frame != KVRT_AS_STORED) return Status(Code::kArgument, unit.name + ": frame must be POST_ROPE or AS_STORED");
  const Sequence sequence = sequence_of(batch, args->seq);
  if (args->first_token < 0 || args->n_tokens < 0 || args->first_token > sequence.length() - args->n_tokens) {
    return Status(Code::kArgument, unit.name + ": tokens " + std::to_string(args->first_token) + " + " + std::to_string(args->n_tokens) + " of a sequence of " +
                                       std::to_string(sequence.length()));
  }
  if (args->n_tokens == 0) return {};
  const int width = call.layer->layout.head_dim;
  const kvrt_rows_out& out = args->out;
  if (Status status = check_rows("out", out.data, out.dtype, out.row_stride, out.head_stride, width); !status.ok()) return status;
  const bool rotates = unit.pre && args->frame == KVRT_POST_ROPE;
  std::int64_t first_position = sequence.first_position;
  if (rotates && sequence.n_rows == 0) {
    if (Status status = stored_first_position(call, pools, sequence, stream, &first_position); !status.ok()) return status;
  }
  if (rotates && (first_position < 0 || first_position > call.context->limits().max_length - sequence.length())) {
    return Status(Code::kNumeric, unit.name + ": the first page says position " + std::to_string(first_position));
  }
  if (call.on_device()) return keep_driver_error(*call.context, gather_on_device(call, batch, *args, rotates, first_position, pools, stream));
  const std::int64_t heads = call.n_heads();
  for_each(call.context->limits(), heads, [&](std::int64_t head, std::int32_t worker) {
    float* const row = static_cast<float*>(call.scratch(worker));
    for (std::int64_t t = 0; t < args->n_tokens; ++t) {
      const std::int64_t token = args->first_token + t;
      read_token(*call.layer, pools, sequence, static_cast<int>(head), args->side, token, row, row + width);
      if (rotates) rope_rotate(call.layer->rope, first_position + token, row);
      store_row(out, heads, width, t, head, row);
    }
  });
  return {};
}

}  // namespace
}  // namespace kvrt

extern "C" kvrt_status kvrt_gather(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, const kvrt_gather_args* args, const kvrt_pools* pools,
                                   const kvrt_workspace* workspace, void* stream, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> kvrt::Status {
    kvrt::Call call;
    if (kvrt::Status status = kvrt::begin_call(context, layer, batch, pools, workspace, stream, &call); !status.ok()) return status;
    return kvrt::gather(call, *batch, args, *pools, stream);
  });
}

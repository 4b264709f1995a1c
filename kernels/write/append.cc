// kvrt_append: checks, then one piece of work a sequence and head.

#include "kernels/core/call.h"
#include "kernels/reference/reference.h"
#include "kernels/write/append_launch.h"
#include "kernels/write/append_sequence.h"

namespace kvrt {
namespace {

Status check_qkv(const Call& call, const kvrt_qkv& qkv) {
  const int width = call.layer->layout.head_dim;
  if (Status status = check_rows("k", qkv.k.data, qkv.k.dtype, qkv.k.row_stride, qkv.k.head_stride, width); !status.ok()) return status;
  if (Status status = check_rows("v", qkv.v.data, qkv.v.dtype, qkv.v.row_stride, qkv.v.head_stride, width); !status.ok()) return status;
  const UnitContext& k = call.layer->units[KVRT_K];
  if (qkv.k_frame != KVRT_PRE_ROPE && qkv.k_frame != KVRT_POST_ROPE) return Status(Code::kArgument, k.name + ": k_frame must be PRE_ROPE or POST_ROPE");
  if (k.pre && qkv.k_frame == KVRT_POST_ROPE) return Status(Code::kArgument, k.name + ": the layer stores keys before RoPE, k_frame is POST_ROPE");
  return {};
}

Status append(const Call& call, const kvrt_batch& batch, const kvrt_qkv* qkv, const kvrt_pools& pools, void* stream) {
  if (batch.n_seqs == 0 || batch.row_offsets[batch.n_seqs] == batch.row_offsets[0]) return {};
  if (!qkv) return Status(Code::kArgument, "qkv is null");
  if (Status status = check_qkv(call, *qkv); !status.ok()) return status;
  if (call.on_device()) return keep_driver_error(*call.context, append_on_device(call, batch, *qkv, pools, stream));
  const std::int64_t heads = call.n_heads();
  const WritePath* const path = call.context->write_path(*call.layer);
  for_each(call.context->limits(), batch.n_seqs * heads, [&](std::int64_t i, std::int32_t worker) {
    const Sequence sequence = sequence_of(batch, i / heads);
    EncodeCounters counters[KVRT_SIDES];
    std::int64_t n_coded = 0;
    const int head = static_cast<int>(i % heads);
    if (path) append_sequence(*call.layer, *path, sequence, head, *qkv, pools, call.scratch(worker), counters, &n_coded);
    else append_reference(*call.layer, sequence, head, *qkv, pools, call.scratch(worker), counters, &n_coded);
    for (const kvrt_side side : {KVRT_K, KVRT_V}) call.context->health(*call.layer, side).add(n_coded, counters[side]);
  });
  return {};
}

}  // namespace
}  // namespace kvrt

extern "C" kvrt_status kvrt_append(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, const kvrt_qkv* qkv, const kvrt_pools* pools,
                                   const kvrt_workspace* workspace, void* stream, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> kvrt::Status {
    kvrt::Call call;
    if (kvrt::Status status = kvrt::begin_call(context, layer, batch, pools, workspace, stream, &call); !status.ok()) return status;
    return kvrt::append(call, *batch, qkv, *pools, stream);
  });
}

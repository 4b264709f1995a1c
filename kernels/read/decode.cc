// kvrt_decode: checks, then one piece of work a sequence and KV head.

#include <cmath>

#include "kernels/core/call.h"
#include "kernels/read/decode_launch.h"
#include "kernels/read/decode_step.h"
#include "kernels/reference/reference.h"

namespace kvrt {
namespace {

Status check_attn(const Call& call, const kvrt_batch& batch, const kvrt_attn& attn) {
  const int width = call.layer->layout.head_dim;
  const std::string where = "layer " + std::to_string(call.layer->plan->index);
  if (Status status = check_rows("q", attn.q.data, attn.q.dtype, attn.q.row_stride, attn.q.head_stride, width); !status.ok()) return status;
  if (Status status = check_rows("out", attn.out.data, attn.out.dtype, attn.out.row_stride, attn.out.head_stride, width); !status.ok()) return status;
  if (attn.q_frame != KVRT_PRE_ROPE && attn.q_frame != KVRT_POST_ROPE) return Status(Code::kArgument, where + ": q_frame must be PRE_ROPE or POST_ROPE");
  if (!std::isfinite(attn.softmax_scale) || attn.softmax_scale < 0 || !std::isfinite(attn.soft_cap) || attn.soft_cap < 0) {
    return Status(Code::kArgument, where + ": softmax_scale and soft_cap must be finite and not negative");
  }
  if (attn.sliding_window != 0) return Status(Code::kUnsupported, where + ": sliding_window is not offered by this build");
  for (int s = 0; s < batch.n_seqs; ++s) {
    if (const std::int64_t n = sequence_of(batch, s).n_rows; n > 1) {
      return Status(Code::kUnsupported,
                    where + " sequence " + std::to_string(s) + ": " + std::to_string(n) + " query tokens in one step are not offered by this build");
    }
  }
  return {};
}

Status decode(const Call& call, const kvrt_batch& batch, const kvrt_attn* attn, const kvrt_pools& pools, void* stream) {
  if (batch.n_seqs == 0 || batch.row_offsets[batch.n_seqs] == batch.row_offsets[0]) return {};
  if (!attn) return Status(Code::kArgument, "attn is null");
  if (Status status = check_attn(call, batch, *attn); !status.ok()) return status;
  if (call.on_device()) return keep_driver_error(*call.context, decode_on_device(call, batch, *attn, pools, stream));
  if (call.context->backend() == KVRT_BACKEND_CPU) return decode_step(call, batch, *attn, pools), Status();
  const std::int64_t heads = call.n_heads();
  for_each(call.context->limits(), batch.n_seqs * heads, [&](std::int64_t i, std::int32_t worker) {
    const Sequence sequence = sequence_of(batch, i / heads);
    if (sequence.n_rows == 0) return;
    decode_reference(*call.layer, sequence, static_cast<int>(i % heads), *attn, pools, call.scratch(worker));
  });
  return {};
}

}  // namespace
}  // namespace kvrt

extern "C" kvrt_status kvrt_decode(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, const kvrt_attn* attn, const kvrt_pools* pools,
                                   const kvrt_workspace* workspace, void* stream, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> kvrt::Status {
    kvrt::Call call;
    if (kvrt::Status status = kvrt::begin_call(context, layer, batch, pools, workspace, stream, &call); !status.ok()) return status;
    return kvrt::decode(call, *batch, attn, *pools, stream);
  });
}

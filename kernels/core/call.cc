#include "kernels/core/call.h"

#include <string>

namespace kvrt {

Status begin_call(const kvrt_context* context, int32_t layer, void* stream, Call* out) {
  if (!context) return Status(Code::kArgument, "context is null");
  out->context = &context->context;
  out->layer = context->context.find(layer);
  if (!out->layer) return Status(Code::kArgument, "layer " + std::to_string(layer) + " has no KV in this plan");
  if (stream) return Status(Code::kArgument, std::string("stream must be null on backend ") + backend_name(out->context->backend()));
  return {};
}

Status begin_call(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, const kvrt_pools* pools, const kvrt_workspace* workspace,
                  void* stream, Call* out) {
  if (Status status = begin_call(context, layer, stream, out); !status.ok()) return status;
  if (!batch || !pools || !workspace) return Status(Code::kArgument, std::string(!batch ? "batch" : !pools ? "pools" : "workspace") + " is null");
  const std::int64_t needed = out->context->workspace_bytes();
  if (!workspace->data) return Status(Code::kArgument, "workspace data is null");
  if (workspace->bytes < needed) {
    return Status(Code::kCapacity, "workspace of " + std::to_string(workspace->bytes) + " bytes, kvrt_workspace_bytes is " + std::to_string(needed));
  }
  const auto at = reinterpret_cast<std::uintptr_t>(workspace->data);
  out->workspace = static_cast<std::uint8_t*>(workspace->data) + (64 - at % 64) % 64;
  if (Status status = check_batch(*out->context, *out->layer, *batch); !status.ok()) return status;
  return check_pages(*out->layer, *batch, *pools);
}

Status check_rows(const char* name, const void* data, kvrt_dtype dtype, std::int64_t row_stride, std::int64_t head_stride, int head_dim) {
  if (!data) return Status(Code::kArgument, std::string(name) + " is null");
  if (dtype != KVRT_F32 && dtype != KVRT_F16 && dtype != KVRT_BF16) return Status(Code::kArgument, std::string(name) + ": unknown dtype " + std::to_string(dtype));
  const std::int64_t row = std::int64_t{head_dim} * (dtype == KVRT_F32 ? 4 : 2);
  for (const std::int64_t stride : {row_stride, head_stride}) {
    if (stride != 0 && stride < row) {
      return Status(Code::kArgument, std::string(name) + ": stride " + std::to_string(stride) + ", expected 0 or at least the " + std::to_string(row) + " bytes of a row");
    }
  }
  return {};
}

}  // namespace kvrt

#include "kernels/core/call.h"

#include <string>
#include <utility>

#include "kernels/codec/page_header.h"
#include "kernels/core/device.h"
#include "kernels/core/device_call.h"

namespace kvrt {

namespace {

/// Kernels move 16 bytes at a time.
Status check_alignment(const LayerContext& layer, const kvrt_pools& pools) {
  constexpr std::uintptr_t kAlign = 16;
  for (int side = 0; side < KVRT_SIDES; ++side) {
    for (const auto& [name, pool] : {std::pair("exact", &pools.exact[side]), std::pair("base", &pools.base[side])}) {
      const auto at = reinterpret_cast<std::uintptr_t>(pool->base), stride = static_cast<std::uintptr_t>(pool->page_stride);
      if ((at | stride) % kAlign == 0) continue;
      return Status(Code::kArgument, layer.units[side].name + ": base and page_stride of the " + name + " pool must be multiples of 16 on cuda");
    }
  }
  return {};
}

}  // namespace

Status begin_call(const kvrt_context* context, int32_t layer, void* stream, Call* out) {
  if (!context) return Status(Code::kArgument, "context is null");
  out->context = &context->context;
  out->layer = context->context.find(layer);
  if (!out->layer) return Status(Code::kArgument, "layer " + std::to_string(layer) + " has no KV in this plan");
  if (const char* text = out->context->driver_error().text()) return Status(Code::kCuda, std::string(text) + "; the context is lost: an earlier call failed");
  if (stream && out->context->backend() != KVRT_BACKEND_CUDA)
    return Status(Code::kArgument, std::string("stream must be null on backend ") + backend_name(out->context->backend()));
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
  out->workspace = static_cast<std::uint8_t*>(workspace->data) + (kWorkspaceAlign - at % kWorkspaceAlign) % kWorkspaceAlign;
  if (Status status = check_batch(*out->context, *out->layer, *batch); !status.ok()) return status;
  if (Status status = check_pages(*out->layer, *batch, *pools); !status.ok()) return status;
  return out->on_device() ? check_alignment(*out->layer, *pools) : Status();
}

Status stored_first_position(const Call& call, const kvrt_pools& pools, const Sequence& sequence, void* stream, std::int64_t* out) {
  // Token 0 is in slot 0 of the first page of its segment: a ring that holds it has not come round yet.
  const TokenIndex token = find_token(call.layer->tiers(), sequence.length(), 0);
  const Segment segment = segment_of(*call.layer, pools, sequence, 0, token.segment);
  const std::uint8_t* header = page_start(segment.k, segment.pages[0]);
  std::uint8_t copy[16];  // position and the first offsets
  if (call.on_device()) {
    if (Status status = copy_to_host(copy, header, sizeof copy, stream); !status.ok()) return keep_driver_error(*call.context, status);
    header = copy;
  }
  *out = load_slot_position(header, token.segment == KVRT_BASE ? 1 : 2, 0);
  return {};
}

Status check_rows(const char* name, const void* data, kvrt_dtype dtype, std::int64_t row_stride, std::int64_t head_stride, int head_dim) {
  if (!data) return Status(Code::kArgument, std::string(name) + " is null");
  if (dtype != KVRT_F32 && dtype != KVRT_F16 && dtype != KVRT_BF16) return Status(Code::kArgument, std::string(name) + ": unknown dtype " + std::to_string(dtype));
  const std::int64_t row = std::int64_t{head_dim} * (dtype == KVRT_F32 ? 4 : 2);
  for (const std::int64_t stride : {row_stride, head_stride}) {
    if (stride != 0 && stride < row) {
      return Status(Code::kArgument,
                    std::string(name) + ": stride " + std::to_string(stride) + ", expected 0 or at least the " + std::to_string(row) + " bytes of a row");
    }
  }
  return {};
}

}  // namespace kvrt

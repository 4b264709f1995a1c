#pragma once
// What every call on a layer checks first.

#include <cstdint>

#include "kernels/core/abi.h"
#include "kernels/core/sequence.h"

namespace kvrt {

struct Call {
  const Context* context = nullptr;
  const LayerContext* layer = nullptr;
  std::uint8_t* workspace = nullptr;  ///< aligned; null for calls without one

  void* scratch(std::int32_t worker) const { return workspace + worker * context->worker_bytes(); }
  bool on_device() const { return context->backend() == KVRT_BACKEND_CUDA; }
  void* shared() const { return workspace + context->limits().n_workers * context->worker_bytes(); }
  std::int64_t n_heads() const { return layer->layout.n_kv_heads; }
};

/// Context, layer and stream.
Status begin_call(const kvrt_context* context, int32_t layer, void* stream, Call* out);
/// The same, and batch, pools and workspace.
Status begin_call(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, const kvrt_pools* pools, const kvrt_workspace* workspace,
                  void* stream, Call* out);

/// first_position of a sequence without rows in this step, from the header that a K page before RoPE has; on a device this waits for the
/// stream. Requires: length > 0.
Status stored_first_position(const Call& call, const kvrt_pools& pools, const Sequence& sequence, void* stream, std::int64_t* out);

/// data is there (if any row needs it), dtype known, strides 0 or at least a row.
Status check_rows(const char* name, const void* data, kvrt_dtype dtype, std::int64_t row_stride, std::int64_t head_stride, int head_dim);

}  // namespace kvrt

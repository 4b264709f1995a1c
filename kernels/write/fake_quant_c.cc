// kvrt_fake_quant: a unit's scheme and constants on rows outside the cache.

#include <algorithm>

#include "kernels/core/device.h"
#include "kernels/core/device_call.h"
#include "kernels/write/fake_quant_cuda.h"

namespace kvrt {
namespace {

/// Outliers of channel groups need whole blocks: memory for the time of the call, which waits for its end.
Status with_pages(const Call& call, const UnitContext& unit, DeviceFakeQuantArgs args) {
  constexpr std::int64_t kMaxPages = 512;
  args.page_bytes = unit.base_page.block, args.n_pages = std::min(kMaxPages, args.n_tokens / args.step * args.n_heads);
  if (args.n_pages == 0) return {};
  void* memory = nullptr;
  if (Status status = allocate_device(call.context->device(), args.n_pages * args.page_bytes, &memory); !status.ok()) return status;
  args.pages = static_cast<std::uint8_t*>(memory);
  Status status = fake_quant_cuda(args, nullptr);
  std::uint8_t last = 0;
  if (status.ok()) status = copy_to_host(&last, memory, 1, nullptr);
  release_device(call.context->device(), memory);
  return status;
}

Status fake_quant_unit(const Call& call, kvrt_side side, int64_t n_tokens, const float* x, float* out) {
  if (side != KVRT_K && side != KVRT_V) return Status(Code::kArgument, "side is unknown");
  const UnitContext& unit = call.layer->units[side];
  FakeQuantArgs args = unit.args;
  args.n_tokens = n_tokens, args.x = x, args.out = out;
  if (call.on_device()) {
    FakeQuantJob job;
    if (const Status status = make_fake_quant_job(args, &job); !status.ok()) return Status(status.code(), unit.name + ": " + status.text());
    const int step = job.scheme.granularity == Granularity::kChannel ? job.group : 1;
    DeviceFakeQuantArgs device = {};
    device.layer = call.layer->on_device, device.side = side, device.n_heads = job.n_heads, device.step = step;
    device.has_outliers = job.scheme.outlier_per_mille > 0, device.n_tokens = n_tokens, device.x = x, device.out = out;
    return keep_driver_error(*call.context, device.has_outliers && step > 1 ? with_pages(call, unit, device) : fake_quant_cuda(device, nullptr));
  }
  const Status status = call.context->backend() == KVRT_BACKEND_REF ? fake_quant_reference(args) : fake_quant_on(args, write_paths().back(), nullptr);
  return status.ok() ? status : Status(status.code(), unit.name + ": " + status.text());
}

}  // namespace
}  // namespace kvrt

extern "C" kvrt_status kvrt_fake_quant(const kvrt_context* context, int32_t layer, kvrt_side side, int64_t n_tokens, const float* x, float* out,
                                       kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> kvrt::Status {
    kvrt::Call call;
    if (kvrt::Status status = kvrt::begin_call(context, layer, nullptr, &call); !status.ok()) return status;
    return kvrt::fake_quant_unit(call, side, n_tokens, x, out);
  });
}

// kvrt_fake_quant: a unit's scheme and constants on rows outside the cache.

#include "kernels/core/device_call.h"
#include "kernels/write/fake_quant_cuda.h"

namespace kvrt {
namespace {

Status fake_quant_unit(const Call& call, kvrt_side side, int64_t n_tokens, const float* x, float* out) {
  if (side != KVRT_K && side != KVRT_V) return Status(Code::kArgument, "side is unknown");
  const UnitContext& unit = call.layer->units[side];
  FakeQuantArgs args = unit.args;
  args.n_tokens = n_tokens, args.x = x, args.out = out;
  if (call.on_device()) {
    FakeQuantJob job;
    if (const Status status = make_fake_quant_job(args, &job); !status.ok()) return Status(status.code(), unit.name + ": " + status.text());
    const int step = job.scheme.granularity == Granularity::kChannel ? job.group : 1;
    const bool has_outliers = job.scheme.outlier_per_mille > 0;
    if (has_outliers && step > 1) return Status(Code::kUnsupported, unit.name + ": fake_quant on cuda has no outliers of channel groups");
    return keep_driver_error(*call.context, fake_quant_cuda({call.layer->on_device, side, job.n_heads, step, has_outliers, n_tokens, x, out}, nullptr));
  }
  const Status status = call.context->backend() == KVRT_BACKEND_REF ? fake_quant_reference(args) : fake_quant_on(args, fake_quant_backends().back(), nullptr);
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

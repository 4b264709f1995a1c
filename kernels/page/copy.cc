// kvrt_copy_pages: whole pages, both sides. Everything is checked before the first byte moves.

#include <algorithm>
#include <cstring>

#include "kernels/core/call.h"

namespace kvrt {
namespace {

Status copy_pages(const Call& call, kvrt_segment segment, const kvrt_pools* pools, const int32_t* from, const int32_t* to, int64_t n) {
  const std::string where = "layer " + std::to_string(call.layer->plan->index);
  if (segment == KVRT_SALIENT) return Status(Code::kUnsupported, where + ": salient pages are not offered by this build");
  if (segment < 0 || segment > KVRT_SALIENT) return Status(Code::kArgument, where + ": segment is unknown");
  if (n < 0) return Status(Code::kArgument, where + ": n is " + std::to_string(n));
  if (n == 0) return {};
  if (!pools || !from || !to) return Status(Code::kArgument, where + ": " + (!pools ? "pools" : !from ? "from" : "to") + " is null");
  const kvrt_pool* const both = segment == KVRT_BASE ? pools->base : pools->exact;
  for (int side = 0; side < KVRT_SIDES; ++side) {
    const UnitContext& unit = call.layer->units[side];
    if (Status status = check_pool(unit, both[side], segment == KVRT_BASE ? unit.base_page : unit.exact_page, segment == KVRT_BASE ? "base" : "exact"); !status.ok()) {
      return status;
    }
  }
  const std::int64_t limit = std::min(both[KVRT_K].n_pages, both[KVRT_V].n_pages);
  for (std::int64_t i = 0; i < n; ++i) {
    for (const std::int64_t id : {from[i], to[i]}) {
      if (id < 0 || id >= limit) {
        return Status(Code::kArgument, where + ": copy " + std::to_string(i) + " names page " + std::to_string(id) + ", the pool has " + std::to_string(limit) + " pages");
      }
    }
  }
  for (int side = 0; side < KVRT_SIDES; ++side) {
    const UnitContext& unit = call.layer->units[side];
    const BlockLayout& page = segment == KVRT_BASE ? unit.base_page : unit.exact_page;
    auto* const base = static_cast<std::uint8_t*>(both[side].base);
    const std::int64_t stride = page_stride(both[side], page);
    for (std::int64_t i = 0; i < n; ++i) {
      if (from[i] != to[i]) std::memcpy(base + to[i] * stride, base + from[i] * stride, static_cast<std::size_t>(page.page));
    }
  }
  return {};
}

}  // namespace
}  // namespace kvrt

extern "C" kvrt_status kvrt_copy_pages(const kvrt_context* context, int32_t layer, kvrt_segment segment, const kvrt_pools* pools, const int32_t* from,
                                       const int32_t* to, int64_t n, void* stream, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> kvrt::Status {
    kvrt::Call call;
    if (kvrt::Status status = kvrt::begin_call(context, layer, stream, &call); !status.ok()) return status;
    return kvrt::copy_pages(call, segment, pools, from, to, n);
  });
}

// kvrt_copy_pages: whole pages, both sides. Everything is checked before the first byte moves.

#include <algorithm>
#include <cstring>

#include "kernels/core/device_call.h"
#include "kernels/page/copy_cuda.h"

namespace kvrt {
namespace {

/// The result is that of one copy after the other.
Status copy_on_device(const Call& call, kvrt_segment segment, const kvrt_pool* both, const int32_t* from, const int32_t* to, int64_t n, void* stream) {
  CopyArgs args;
  for (int side = 0; side < KVRT_SIDES; ++side) {
    const UnitContext& unit = call.layer->units[side];
    const BlockLayout& page = segment == KVRT_BASE ? unit.base_page : unit.exact_page;
    args.pools[side] = static_cast<std::uint8_t*>(both[side].base);
    args.strides[side] = page_stride(both[side], page), args.bytes[side] = page.page;
  }
  for (int64_t first = 0; first < n;) {
    args.n = 0;
    for (; first < n && args.n < kCopiesALaunch; ++first, ++args.n) {
      const bool meets_another = std::any_of(args.from, args.from + args.n, [&](int32_t id) { return id == to[first]; }) ||
                                 std::any_of(args.to, args.to + args.n, [&](int32_t id) { return id == from[first] || id == to[first]; });
      if (meets_another) break;  // it waits for the copies before it: the next launch
      args.from[args.n] = from[first], args.to[args.n] = to[first];
    }
    if (Status status = copy_cuda(args, stream); !status.ok()) return status;
  }
  return {};
}

Status copy_pages(const Call& call, kvrt_segment segment, const kvrt_pools* pools, const int32_t* from, const int32_t* to, int64_t n, void* stream) {
  const std::string where = "layer " + std::to_string(call.layer->plan->index);
  if (segment == KVRT_SALIENT) return Status(Code::kUnsupported, where + ": salient pages are not offered by this build");
  if (segment < 0 || segment > KVRT_SALIENT) return Status(Code::kArgument, where + ": segment is unknown");
  if (n < 0) return Status(Code::kArgument, where + ": n is " + std::to_string(n));
  if (n == 0) return {};
  if (!pools || !from || !to) return Status(Code::kArgument, where + ": " + (!pools ? "pools" : !from ? "from" : "to") + " is null");
  const kvrt_pool* const both = segment == KVRT_BASE ? pools->base : pools->exact;
  for (int side = 0; side < KVRT_SIDES; ++side) {
    const UnitContext& unit = call.layer->units[side];
    if (Status status = check_pool(unit, both[side], segment == KVRT_BASE ? unit.base_page : unit.exact_page, segment == KVRT_BASE ? "base" : "exact");
        !status.ok()) {
      return status;
    }
  }
  const std::int64_t limit = std::min(both[KVRT_K].n_pages, both[KVRT_V].n_pages);
  for (std::int64_t i = 0; i < n; ++i) {
    for (const std::int64_t id : {from[i], to[i]}) {
      if (id < 0 || id >= limit) {
        return Status(Code::kArgument,
                      where + ": copy " + std::to_string(i) + " names page " + std::to_string(id) + ", the pool has " + std::to_string(limit) + " pages");
      }
    }
  }
  if (call.on_device()) return keep_driver_error(*call.context, copy_on_device(call, segment, both, from, to, n, stream));
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
    return kvrt::copy_pages(call, segment, pools, from, to, n, stream);
  });
}

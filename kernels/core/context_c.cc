// The C interface of contexts: creation, sizes, health, and the names of later versions.

#include <memory>

#include "kernels/core/call.h"

using kvrt::Code;
using kvrt::Status;

extern "C" kvrt_status kvrt_context_create(const kvrt_plan* plan, const kvrt_device* device, const kvrt_limits* limits, kvrt_context** out,
                                           kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> Status {
    if (!plan || !limits || !out) return Status(Code::kArgument, std::string(!plan ? "plan" : !limits ? "limits" : "out") + " is null");
    *out = nullptr;
    auto context = std::make_unique<kvrt_context>();
    if (Status status = kvrt::Context::make(plan->plan, device ? *device : kvrt_device{}, *limits, &context->context); !status.ok()) return status;
    *out = context.release();
    return {};
  });
}

extern "C" void kvrt_context_destroy(kvrt_context* context) { delete context; }

extern "C" const char* kvrt_describe(const kvrt_context* context, int32_t layer) {
  const kvrt::LayerContext* const found = context ? context->context.find(layer) : nullptr;
  return found ? found->description.c_str() : nullptr;
}

extern "C" kvrt_status kvrt_page_layout(const kvrt_context* context, int32_t layer, kvrt_side side, kvrt_segment segment, kvrt_layout* out, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> Status {
    kvrt::Call call;
    if (Status status = kvrt::begin_call(context, layer, nullptr, &call); !status.ok()) return status;
    if (!out || (side != KVRT_K && side != KVRT_V)) return Status(Code::kArgument, out ? "side is unknown" : "out is null");
    if (segment == KVRT_SALIENT) return Status(Code::kUnsupported, "the salient tier is not offered by this build");
    if (segment < 0 || segment > KVRT_SALIENT) return Status(Code::kArgument, "segment is unknown");
    const kvrt::UnitContext& unit = call.layer->units[side];
    const kvrt::BlockLayout& page = segment == KVRT_BASE ? unit.base_page : unit.exact_page;
    *out = {page.page_tokens, page.page, page.header, page.block, page.codes, page.params};
    return {};
  });
}

extern "C" kvrt_status kvrt_pages_needed(const kvrt_context* context, int32_t layer, int64_t n_tokens, int64_t n_pages[KVRT_SEGMENTS], kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> Status {
    kvrt::Call call;
    if (Status status = kvrt::begin_call(context, layer, nullptr, &call); !status.ok()) return status;
    if (!n_pages) return Status(Code::kArgument, "n_pages is null");
    if (n_tokens < 0) return Status(Code::kArgument, "n_tokens is " + std::to_string(n_tokens));
    if (n_tokens > call.context->limits().max_length) {
      return Status(Code::kCapacity, "n_tokens is " + std::to_string(n_tokens) + ", max_length is " + std::to_string(call.context->limits().max_length));
    }
    kvrt::pages_needed(*call.layer, n_tokens, n_pages);
    return {};
  });
}

extern "C" int64_t kvrt_workspace_bytes(const kvrt_context* context) { return context ? context->context.workspace_bytes() : -1; }

extern "C" kvrt_status kvrt_monitor_read(const kvrt_context* context, int32_t layer, kvrt_side side, kvrt_health* out, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> Status {
    kvrt::Call call;
    if (Status status = kvrt::begin_call(context, layer, nullptr, &call); !status.ok()) return status;
    if (!out || (side != KVRT_K && side != KVRT_V)) return Status(Code::kArgument, out ? "side is unknown" : "out is null");
    return call.context->read_health(*call.layer, side, out);
  });
}

extern "C" kvrt_status kvrt_schedule(const kvrt_context*, const kvrt_batch*, const kvrt_workspace*, void*, kvrt_error* err) {
  return kvrt::guarded(err, [] { return Status(Code::kUnsupported, "kvrt_schedule is not offered by this build; append and decode need no schedule"); });
}

extern "C" kvrt_status kvrt_requant(const kvrt_context*, int32_t, const kvrt_batch*, const kvrt_pools*, void*, kvrt_error* err) {
  return kvrt::guarded(err, [] { return Status(Code::kUnsupported, "kvrt_requant is not offered by this build: it has no salient tier"); });
}

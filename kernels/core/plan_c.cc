// The C interface of plans.

#include <cmath>
#include <memory>

#include "kernels/core/abi.h"
#include "kernels/core/context.h"
#include "kernels/core/cuda_paths.h"
#include "kernels/core/plan_loader.h"

namespace kvrt {
namespace {

template <class T>
const T* or_null(const std::vector<T>& v) {
  return v.empty() ? nullptr : v.data();
}

kvrt_unit_view view_of(const UnitPlan& u) {
  kvrt_unit_view v = {};
  v.scheme = u.text.c_str(), v.chan_perm = u.chan_perm.c_str();
  v.block_order = u.block_order.empty() ? nullptr : u.block_order.c_str();
  v.mean = or_null(u.mean), v.smooth = or_null(u.smooth), v.clip_lo = or_null(u.clip_lo), v.clip_hi = or_null(u.clip_hi);
  v.clip_alpha = or_null(u.clip_alpha), v.codebook = or_null(u.codebook);
  v.basis_mean = or_null(u.basis_mean), v.basis_in = or_null(u.basis_in), v.basis = or_null(u.basis);
  v.ef_u = or_null(u.ef_u), v.ef_order = or_null(u.ef_order);
  return v;
}

/// The handle of a plan, with its view.
std::unique_ptr<kvrt_plan> handle_of(Plan plan) {
  auto handle = std::make_unique<kvrt_plan>();
  handle->plan = std::move(plan);
  const Plan& p = handle->plan;
  for (const LayerPlan& l : p.layers) {
    kvrt_layer_view v = {};
    v.index = l.index, v.n_q_heads = l.n_q_heads, v.n_kv_heads = l.layout.n_kv_heads, v.head_dim = l.layout.head_dim;
    v.rotary_dim = l.rotary_dim, v.rope_style = l.rope_style, v.attention_factor = l.attention_factor;
    v.inv_freq = or_null(l.inv_freq), v.softmax_scale = l.softmax_scale, v.sliding_window = l.layout.sliding_window;
    v.sink_tokens = l.layout.tiers.n_sinks, v.window_tokens = l.layout.tiers.window, v.salient_fraction = l.salient_fraction;
    v.k = view_of(l.units[KVRT_K]), v.v = view_of(l.units[KVRT_V]);
    handle->layer_views.push_back(v);
  }
  kvrt_plan_view& v = handle->view;
  v.architecture = p.architecture.c_str(), v.model_name = p.model_name.c_str(), v.weights_sha256 = p.weights_sha256.c_str();
  v.n_layers = static_cast<std::int32_t>(p.layers.size()), v.layers = handle->layer_views.data();
  v.page_tokens = p.page_tokens, v.scale_refresh_tokens = p.scale_refresh_tokens;
  return handle;
}

Status mismatch(const std::string& what, const std::string& got, const std::string& expected) {
  return Status(Code::kMismatch, what + ": the plan has " + got + ", the model " + expected);
}

Status compare_text(const char* what, const std::string& plan, const char* model) {
  return model && plan != model ? mismatch(what, "'" + plan + "'", "'" + std::string(model) + "'") : Status();
}

Status compare_layer(const LayerPlan& plan, const kvrt_layer_view& model) {
  const std::string where = "layer " + std::to_string(model.index);
  struct Number {
    const char* name;
    std::int64_t plan, model;
  };
  for (const Number& n : {Number{"n_q_heads", plan.n_q_heads, model.n_q_heads}, Number{"n_kv_heads", plan.layout.n_kv_heads, model.n_kv_heads},
                          Number{"head_dim", plan.layout.head_dim, model.head_dim}, Number{"rotary_dim", plan.rotary_dim, model.rotary_dim},
                          Number{"rope_style", plan.rope_style, model.rope_style}}) {
    if (n.plan != n.model) return mismatch(where + " " + n.name, std::to_string(n.plan), std::to_string(n.model));
  }
  for (std::size_t i = 0; model.inv_freq && i < plan.inv_freq.size(); ++i) {
    if (!(std::fabs(plan.inv_freq[i] - model.inv_freq[i]) <= 1e-6 * std::fabs(plan.inv_freq[i]))) {
      return mismatch(where + " inv_freq[" + std::to_string(i) + "]", std::to_string(plan.inv_freq[i]), std::to_string(model.inv_freq[i]));
    }
  }
  return {};
}

Status check_model(const Plan& plan, const kvrt_plan_view& model) {
  for (const Status& status : {compare_text("architecture", plan.architecture, model.architecture), compare_text("model name", plan.model_name, model.model_name),
                               compare_text("weights_sha256", plan.weights_sha256, model.weights_sha256)}) {
    if (!status.ok()) return status;
  }
  if (model.n_layers == 0) return {};
  if (!model.layers) return Status(Code::kArgument, "layers is null");
  if (static_cast<std::size_t>(model.n_layers) != plan.layers.size()) {
    return mismatch("layers with KV", std::to_string(plan.layers.size()), std::to_string(model.n_layers));
  }
  for (int i = 0; i < model.n_layers; ++i) {
    const LayerPlan* layer = plan.find(model.layers[i].index);
    if (!layer) return mismatch("layer " + std::to_string(model.layers[i].index), "none", "one");
    if (Status status = compare_layer(*layer, model.layers[i]); !status.ok()) return status;
  }
  return {};
}

Status check_units(const Plan& plan, const kvrt_device& device, kvrt_unit_report_fn report_unit, void* user) {
  kvrt_backend backend = KVRT_BACKEND_DEFAULT;
  if (Status status = choose_backend(device, &backend); !status.ok()) return status;
  Status first;
  for (const LayerPlan& layer : plan.layers) {
    const CudaPath cuda = backend == KVRT_BACKEND_CUDA ? cuda_path(layer) : CudaPath();
    for (const kvrt_side side : {KVRT_K, KVRT_V}) {
      const CacheSide cache_side = side == KVRT_K ? CacheSide::kK : CacheSide::kV;
      std::string reason = missing_part(plan, layer, cache_side);
      const std::string nearest = nearest_offered(plan, layer, cache_side);
      if (reason.empty() && backend == KVRT_BACKEND_CUDA && cuda.path == KVRT_PATH_MISSING) {
        reason = (cuda.side == side ? "" : "the other side of the layer: ") + cuda.reason;
      }
      const kvrt_path offered = backend == KVRT_BACKEND_CUDA ? cuda.path : KVRT_PATH_FUSED;
      const kvrt_unit_report r = {layer.index, side, layer.units[side].text.c_str(), reason.empty() ? offered : KVRT_PATH_MISSING, backend,
                                  reason.c_str(), nearest.c_str()};
      if (!reason.empty() && first.ok())
        first = Status(Code::kUnsupported, unit_name(layer, cache_side) + ": " + reason + (nearest.empty() ? "" : "; nearest: " + nearest));
      if (report_unit) report_unit(user, &r);
    }
  }
  return first;
}

}  // namespace
}  // namespace kvrt

using kvrt::Code;
using kvrt::Status;

extern "C" kvrt_status kvrt_plan_load(const char* plan_json, const char* plan_tensors, kvrt_plan** out, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> Status {
    if (!plan_json || !out) return Status(Code::kArgument, std::string(plan_json ? "out" : "plan_json") + " is null");
    *out = nullptr;
    kvrt::Plan plan;
    if (Status status = kvrt::load_plan(plan_json, plan_tensors ? plan_tensors : "", &plan); !status.ok()) return status;
    *out = kvrt::handle_of(std::move(plan)).release();
    return {};
  });
}

extern "C" kvrt_status kvrt_plan_adopt(const kvrt_plan_view* view, kvrt_plan** out, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> Status {
    if (!view || !out) return Status(Code::kArgument, std::string(view ? "out" : "view") + " is null");
    *out = nullptr;
    kvrt::Plan plan;
    if (Status status = kvrt::make_plan(*view, &plan); !status.ok()) return status;
    *out = kvrt::handle_of(std::move(plan)).release();
    return {};
  });
}

extern "C" void kvrt_plan_release(kvrt_plan* plan) { delete plan; }

extern "C" kvrt_status kvrt_plan_describe(const kvrt_plan* plan, kvrt_plan_view* out, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> Status {
    if (!plan || !out) return Status(Code::kArgument, std::string(plan ? "out" : "plan") + " is null");
    *out = plan->view;
    return {};
  });
}

extern "C" kvrt_status kvrt_plan_check_model(const kvrt_plan* plan, const kvrt_plan_view* model, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> Status {
    if (!plan || !model) return Status(Code::kArgument, std::string(plan ? "model" : "plan") + " is null");
    return kvrt::check_model(plan->plan, *model);
  });
}

extern "C" kvrt_status kvrt_plan_check(const kvrt_plan* plan, const kvrt_device* device, kvrt_unit_report_fn report, void* user, kvrt_error* err) {
  return kvrt::guarded(err, [&]() -> Status {
    if (!plan) return Status(Code::kArgument, "plan is null");
    return kvrt::check_units(plan->plan, device ? *device : kvrt_device{}, report, user);
  });
}

extern "C" int64_t kvrt_cache_bytes(const kvrt_plan* plan, int32_t layer, kvrt_side side, int64_t n_tokens) {
  const kvrt::LayerPlan* const found = plan ? plan->plan.find(layer) : nullptr;
  constexpr std::int64_t kMaxTokens = std::int64_t{1} << 32;
  if (!found || (side != KVRT_K && side != KVRT_V) || n_tokens < 0 || n_tokens > kMaxTokens) return -1;
  return kvrt::cache_bytes(found->layout, side == KVRT_K ? kvrt::CacheSide::kK : kvrt::CacheSide::kV, n_tokens);
}

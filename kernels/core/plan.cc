#include "kernels/core/plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "kernels/codec/group_range.h"
#include "kernels/core/plan_constants.h"

namespace kvrt {
namespace {

constexpr std::int64_t kMaxRowValues = std::int64_t{1} << 20;   ///< H D: keeps every byte count far from 2^63
constexpr std::int64_t kMaxExactTokens = std::int64_t{1} << 24; ///< sinks, window
constexpr int kMaxLayers = 1 << 16;

Status bad_plan(const std::string& where, const std::string& text) { return Status(Code::kFormat, where + ": " + text); }

/// natural -> 0, spread<N> -> N; false if it is neither or does not fit.
bool read_chan_perm(std::string_view text, int head_dim, int* spread) {
  *spread = 0;
  if (text == "natural") return true;
  constexpr std::string_view kWord = "spread";
  if (text.substr(0, kWord.size()) != kWord) return false;
  text.remove_prefix(kWord.size());
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), *spread);
  return failure == std::errc() && end == text.data() + text.size() && text[0] != '0' && *spread > 0 && *spread % 4 == 0 && head_dim % *spread == 0;
}

/// Copies one array that the scheme asks for, or finds that it is absent. `constant` is null if the scheme has none.
template <class T>
Status copy_constant(const std::string& where, const char* name, const T* values, const PlanConstant* constant, std::vector<T>* out) {
  if (!constant) return values ? bad_plan(where, std::string(name) + " is given, but the scheme has none") : Status();
  const std::int64_t n = constant->count();
  if (!values) return bad_plan(where, std::string(name) + " is missing; the scheme needs " + std::to_string(n) + " values");
  out->assign(values, values + n);
  for (std::int64_t i = 0; i < n; ++i) {
    const bool finite = f32_is_finite(static_cast<float>(values[i]));
    if (finite && (!constant->positive || values[i] > 0)) continue;
    return bad_plan(where, std::string(name) + "[" + std::to_string(i) + "] is " + (finite ? std::to_string(values[i]) : "not finite") +
                               ", expected a finite number" + (constant->positive ? " > 0" : ""));
  }
  return {};
}

Status copy_constants(const std::string& where, const kvrt_unit_view& view, const LayerLayout& layout, UnitPlan* unit) {
  const std::vector<PlanConstant> constants = plan_constants(unit->scheme, layout.n_kv_heads, layout.head_dim);
  const auto find = [&](std::string_view name) -> const PlanConstant* {
    for (const PlanConstant& c : constants) {
      if (name == c.name) return &c;
    }
    return nullptr;
  };
  struct Floats {
    const char* name;
    const float* values;
    std::vector<float>* out;
  };
  for (const Floats& f :
       {Floats{"mean", view.mean, &unit->mean}, Floats{"smooth", view.smooth, &unit->smooth}, Floats{"clip_lo", view.clip_lo, &unit->clip_lo},
        Floats{"clip_hi", view.clip_hi, &unit->clip_hi}, Floats{"clip_alpha", view.clip_alpha, &unit->clip_alpha},
        Floats{"codebook", view.codebook, &unit->codebook}, Floats{"basis_mean", view.basis_mean, &unit->basis_mean},
        Floats{"basis_in", view.basis_in, &unit->basis_in}, Floats{"basis", view.basis, &unit->basis}, Floats{"ef_u", view.ef_u, &unit->ef_u}}) {
    if (Status status = copy_constant(where, f.name, f.values, find(f.name), f.out); !status.ok()) return status;
  }
  if (Status status = copy_constant(where, "ef_order", view.ef_order, find("ef_order"), &unit->ef_order); !status.ok()) return status;
  for (std::size_t i = 0; i < unit->clip_lo.size(); ++i) {
    if (!(unit->clip_lo[i] <= unit->clip_hi[i])) return bad_plan(where, "clip_lo[" + std::to_string(i) + "] is above clip_hi");
  }
  return {};
}

Status read_unit(const kvrt_unit_view& view, CacheSide side, LayerPlan* layer) {
  const bool is_key = side == CacheSide::kK;
  UnitPlan& unit = layer->units[is_key ? KVRT_K : KVRT_V];
  const std::string where = unit_name(*layer, side);
  if (!view.scheme) return Status(Code::kArgument, where + ": scheme is null");
  std::string error;
  if (const std::string text = other_encoding(view.scheme); !text.empty()) return Status(Code::kUnsupported, where + ": " + text);
  if (!parse_scheme(view.scheme, &unit.scheme, &error)) return bad_plan(where, "scheme \"" + std::string(view.scheme) + "\": " + error);
  unit.text = to_string(unit.scheme);
  const int width = layer->layout.head_dim;
  if (const std::string text = check_shape(unit.scheme, width, is_key); !text.empty()) return bad_plan(where + " " + unit.text, text);

  if (view.chan_perm) unit.chan_perm = view.chan_perm;
  if (!read_chan_perm(unit.chan_perm, width, &unit.spread) || (unit.spread != 0 && !is_key)) {
    return bad_plan(where, "chan_perm is \"" + unit.chan_perm + "\", expected natural" +
                               (is_key ? " or spread<N> with N a multiple of 4 that divides head_dim " + std::to_string(width) : ""));
  }
  if (unit.spread != 0 && unit.scheme.lowrank)
    return bad_plan(where, "chan_perm is \"" + unit.chan_perm + "\", expected natural: coefficients of a basis have no channels");
  if (view.block_order) unit.block_order = view.block_order;
  const bool has_order = is_key && is_llamacpp_block(unit.scheme.format);
  if (!unit.block_order.empty() && (!has_order || (unit.block_order != "adjacent" && unit.block_order != "half_split"))) {
    return bad_plan(where, "block_order is \"" + unit.block_order + "\", expected " + (has_order ? "half_split or adjacent" : "none for " + unit.text));
  }

  if (Status status = copy_constants(where, view, layer->layout, &unit); !status.ok()) return status;
  if (!unit.clip_alpha.empty() && unit.clip_alpha[0] > 1) return bad_plan(where, "clip_alpha is " + std::to_string(unit.clip_alpha[0]) + ", expected at most 1");
  // Factors of keys before RoPE go over to the query only where both channels of a pair have one factor.
  for (std::size_t i = 0; unit.scheme.pre && i < unit.smooth.size(); ++i) {
    const int channel = static_cast<int>(i) % width, pairs = layer->rotary_dim / 2;
    const bool interleaved = layer->rope_style == KVRT_ROPE_INTERLEAVED;
    if (channel >= layer->rotary_dim || (interleaved ? channel % 2 != 0 : channel >= pairs)) continue;
    if (unit.smooth[i] != unit.smooth[i + static_cast<std::size_t>(interleaved ? 1 : pairs)]) {
      return bad_plan(where, "smooth[" + std::to_string(i) + "] differs from the other channel of its RoPE pair");
    }
  }
  return {};
}

Status read_rope(const kvrt_layer_view& view, const std::string& where, LayerPlan* layer) {
  layer->rope_style = view.rope_style;
  layer->rotary_dim = view.rotary_dim;
  layer->attention_factor = view.attention_factor;
  const bool rotates = view.rope_style == KVRT_ROPE_HALF_SPLIT || view.rope_style == KVRT_ROPE_INTERLEAVED;
  if (!rotates && view.rope_style != KVRT_ROPE_NONE) return bad_plan(where, "rope_style is unknown");
  if (view.rotary_dim < 0 || view.rotary_dim > view.head_dim || view.rotary_dim % 2 != 0 || (rotates != (view.rotary_dim > 0))) {
    return bad_plan(where, "rotary_dim is " + std::to_string(view.rotary_dim) + ", expected " +
                               (rotates ? "an even number of 2 to head_dim " + std::to_string(view.head_dim) : "0 without RoPE"));
  }
  if (!std::isfinite(view.attention_factor) || !(view.attention_factor > 0)) return bad_plan(where, "attention_factor must be finite and > 0");
  if (!std::isfinite(view.softmax_scale) || !(view.softmax_scale > 0)) return bad_plan(where, "softmax_scale must be finite and > 0");
  if (rotates && !view.inv_freq) return Status(Code::kArgument, where + ": inv_freq is null");
  if (rotates) layer->inv_freq.assign(view.inv_freq, view.inv_freq + view.rotary_dim / 2);
  for (const double f : layer->inv_freq) {
    if (!std::isfinite(f)) return bad_plan(where, "inv_freq holds a value that is not finite");
  }
  return {};
}

Status read_layer(const kvrt_plan_view& plan, const kvrt_layer_view& view, LayerPlan* layer) {
  layer->index = view.index;
  const std::string where = "layer " + std::to_string(view.index);
  const auto in = [](std::int64_t x, std::int64_t low, std::int64_t high) { return x >= low && x <= high; };
  if (view.index < 0) return bad_plan(where, "index is negative");
  if (!in(view.n_kv_heads, 1, kMaxRowValues) || !in(view.head_dim, 1, 65535) || std::int64_t{view.n_kv_heads} * view.head_dim > kMaxRowValues) {
    return bad_plan(where, std::to_string(view.n_kv_heads) + " KV heads of head_dim " + std::to_string(view.head_dim) + ", expected both >= 1 and at most " +
                               std::to_string(kMaxRowValues) + " values a row");
  }
  if (view.n_q_heads < view.n_kv_heads || view.n_q_heads % view.n_kv_heads != 0 || std::int64_t{view.n_q_heads} * view.head_dim > kMaxRowValues) {
    return bad_plan(where, "n_q_heads is " + std::to_string(view.n_q_heads) + ", expected a multiple of n_kv_heads " + std::to_string(view.n_kv_heads));
  }
  if (!in(view.sink_tokens, 0, kMaxExactTokens) || !in(view.window_tokens, 0, kMaxExactTokens)) {
    return bad_plan(where, "sink_tokens " + std::to_string(view.sink_tokens) + ", window_tokens " + std::to_string(view.window_tokens) +
                               ", expected both in 0.." + std::to_string(kMaxExactTokens));
  }
  if (view.sliding_window < 0) return bad_plan(where, "sliding_window is negative");
  if (!(view.salient_fraction >= 0 && view.salient_fraction < 1)) return bad_plan(where, "salient_fraction must be in [0, 1)");
  layer->n_q_heads = view.n_q_heads;
  layer->softmax_scale = view.softmax_scale;
  layer->salient_fraction = view.salient_fraction;
  LayerLayout& layout = layer->layout;
  layout.n_kv_heads = view.n_kv_heads, layout.head_dim = view.head_dim;
  layout.page_tokens = plan.page_tokens, layout.sliding_window = view.sliding_window;
  layout.refresh_tokens = static_cast<int>(plan.scale_refresh_tokens);
  if (Status status = read_rope(view, where, layer); !status.ok()) return status;
  if (Status status = read_unit(view.k, CacheSide::kK, layer); !status.ok()) return status;
  if (Status status = read_unit(view.v, CacheSide::kV, layer); !status.ok()) return status;
  layout.k = layer->units[KVRT_K].scheme, layout.v = layer->units[KVRT_V].scheme;
  layout.tiers = finish_tiers(layout.k, layout.v, view.sink_tokens, view.window_tokens, view.salient_fraction);
  return {};
}

}  // namespace

const LayerPlan* Plan::find(int layer) const {
  const auto it = std::lower_bound(layers.begin(), layers.end(), layer, [](const LayerPlan& l, int index) { return l.index < index; });
  return it != layers.end() && it->index == layer ? &*it : nullptr;
}

Status make_plan(const kvrt_plan_view& view, Plan* out) {
  if (!view.layers || view.n_layers < 1 || view.n_layers > kMaxLayers) {
    return Status(Code::kArgument, "layers is null or n_layers " + std::to_string(view.n_layers) + " is not in 1.." + std::to_string(kMaxLayers));
  }
  if (view.page_tokens != 32 && view.page_tokens != 64 && view.page_tokens != 128) {
    return bad_plan("plan", "page_tokens is " + std::to_string(view.page_tokens) + ", expected 32, 64 or 128");
  }
  if (view.scale_refresh_tokens < 0 || view.scale_refresh_tokens > INT32_MAX) return bad_plan("plan", "scale_refresh_tokens is out of range");
  Plan plan;
  if (view.architecture) plan.architecture = view.architecture;
  if (view.model_name) plan.model_name = view.model_name;
  if (view.weights_sha256) plan.weights_sha256 = view.weights_sha256;
  plan.page_tokens = view.page_tokens;
  plan.scale_refresh_tokens = view.scale_refresh_tokens;
  plan.layers.resize(static_cast<std::size_t>(view.n_layers));
  for (int i = 0; i < view.n_layers; ++i) {
    const kvrt_layer_view& layer = view.layers[i];
    if (i > 0 && layer.index <= view.layers[i - 1].index) {
      return bad_plan("layer " + std::to_string(layer.index), layer.index == view.layers[i - 1].index ? "is there twice" : "stands behind layer " +
                      std::to_string(view.layers[i - 1].index) + "; expected ascending indices");
    }
    if (Status status = read_layer(view, layer, &plan.layers[static_cast<std::size_t>(i)]); !status.ok()) return status;
  }
  *out = std::move(plan);
  return {};
}

std::string unit_name(const LayerPlan& layer, CacheSide side) {
  const UnitPlan& unit = layer.units[side == CacheSide::kK ? KVRT_K : KVRT_V];
  return "layer " + std::to_string(layer.index) + (side == CacheSide::kK ? " K" : " V") + (unit.text.empty() ? "" : " " + unit.text);
}

namespace {

/// missing_part() of another scheme in the unit's place.
std::string missing_with(const Scheme& scheme, const Plan& plan, const LayerPlan& layer) {
  if (layer.salient_fraction > 0) return "the salient tier is not offered by this build";
  if (layer.layout.sliding_window > 0) return "a sliding window (" + std::to_string(layer.layout.sliding_window) + " keys) is not offered by this build";
  if (plan.scale_refresh_tokens > 0) return "scale_refresh_tokens is not offered by this build";
  if (scheme.pre && layer.rope_style == KVRT_ROPE_NONE) return "pre: the layer has no RoPE";
  if (scheme.pair && layer.rope_style == KVRT_ROPE_NONE) return "pair: the layer has no RoPE";
  if (scheme.pair && scheme.granularity == Granularity::kToken && scheme.group > 0 &&
      !pairs_map_groups(layer.rotary_dim, layer.rope_style == KVRT_ROPE_INTERLEAVED, layer.layout.head_dim, scheme.group)) {
    return "pair: RoPE pairs of " + std::to_string(layer.rotary_dim) + " channels do not map groups of " + std::to_string(scheme.group) + " onto groups";
  }
  return check_implemented(scheme);
}

}  // namespace

std::string missing_part(const Plan& plan, const LayerPlan& layer, CacheSide side) {
  return missing_with(layer.units[side == CacheSide::kK ? KVRT_K : KVRT_V].scheme, plan, layer);
}

std::string nearest_offered(const Plan& plan, const LayerPlan& layer, CacheSide side) {
  const Scheme& own = layer.units[side == CacheSide::kK ? KVRT_K : KVRT_V].scheme;
  const auto runs = [&](const Scheme& s) {
    return check_shape(s, layer.layout.head_dim, side == CacheSide::kK).empty() && missing_with(s, plan, layer).empty();
  };
  if (runs(own)) return "";
  // The parts that may be missing, each only where it is.
  Scheme s = own;
  s.lowrank = 0;
  if (s.group > 0 && layer.layout.head_dim % s.group != 0) s.group = 0;  // it divided the rank
  if (runs(s)) return to_string(s);
  s.pair = false;
  if (runs(s)) return to_string(s);
  s.pre = false;
  if (runs(s)) return to_string(s);
  return runs(Scheme{}) ? to_string(Scheme{}) : "";
}

}  // namespace kvrt

#include "libcalib/sens/contender.h"

#include <algorithm>

#include "kernels/core/layout.h"
#include "libcalib/base/plural.h"
#include "libcalib/quant/carried_error.h"
#include "libcalib/quant/scale_refresh.h"

namespace calib::sens {
namespace {

UnitCandidate unit_of(const std::string& scheme_text, std::size_t layer, Side side, std::int64_t n_sinks, const ModelIdentity& model,
                      const ParamsProvider& params) {
  UnitCandidate unit{0, quant::in_frame_of(quant::parse_scheme(scheme_text), model.layers[layer]), {}};
  quant::check_scheme(unit.scheme, model.layers[layer], side);
  if (kvrt::needs_calibration(unit.scheme)) unit.params = params(layer, side, unit.scheme, n_sinks);
  return unit;
}

constexpr const char* rotation_name(quant::RotationKind kind) {
  return kind == quant::RotationKind::kQuery ? "query" : kind == quant::RotationKind::kGrouped2 ? "grouped2" : "grouped4";
}

}  // namespace

std::string only_in_place(const LayerChange& layer) {
  if (layer.scale_refresh > 0) return "raising static ranges";
  if (layer.k_rotation || layer.v_rotation) return "a rotation of --rotate";
  return layer.value_carry > 0 ? "carrying the errors of values" : "";
}

double effective_bits(const ModelIdentity& model, const std::vector<LayerChange>& layers, std::int64_t n_tokens) {
  CALIB_CHECK(layers.size() == model.layers.size());
  double bytes = 0, elements = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerGeometry& geometry = model.layers[l];
    CALIB_CHECK(layers[l].k.has_value() && layers[l].v.has_value());
    kvrt::LayerLayout layout;
    layout.n_kv_heads = geometry.n_kv_heads;
    layout.head_dim = geometry.head_dim;
    layout.k = layers[l].k->scheme;
    layout.v = layers[l].v->scheme;
    layout.tiers = layers[l].tiers;
    if (layers[l].salient) layout.salient = layers[l].salient->scheme;
    layout.sliding_window = geometry.sliding_window;
    layout.refresh_tokens = static_cast<int>(layers[l].scale_refresh);
    bytes += static_cast<double>(kvrt::cache_bytes(layout, kvrt::CacheSide::kK, n_tokens) + kvrt::cache_bytes(layout, kvrt::CacheSide::kV, n_tokens));
    const std::int64_t held = geometry.sliding_window > 0 ? std::min(n_tokens, geometry.sliding_window) : n_tokens;
    elements += 2.0 * static_cast<double>(held) * geometry.n_kv_heads * geometry.head_dim;
  }
  return bytes * 8 / elements;
}

Contender uniform_contender(const std::string& text, const ModelIdentity& model, const PairTiers& pair_tiers, const ParamsProvider& params,
                            const LogSink& log, const SaliencyProvider& saliency) {
  CALIB_CHECK(!model.layers.empty());
  const quant::Preset preset = quant::resolve_preset(text, model.layers.front().head_dim, log);
  const bool pair = text.find(':') != std::string::npos;
  Contender out;
  out.header.name = text;
  out.header.kind = "uniform";
  out.header.k = preset.k;
  out.header.v = preset.v;
  out.header.n_sinks = pair ? pair_tiers.n_sinks : preset.n_sinks;
  out.header.window = pair ? pair_tiers.window : preset.window;
  out.header.description = fmt::format("K {}, V {}, sinks {}, window {}{}", preset.k, preset.v, out.header.n_sinks, out.header.window,
                                       quant::tier_text(preset.salient_fraction, preset.salient));
  if (preset.salient_fraction > 0 && !saliency)
    fail(ErrorKind::kUsage, text, "ranks tokens for its salient tier by the queries' statistics: give --stats with a file made by kvcalib for this model");
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    LayerChange layer;
    layer.k = unit_of(preset.k, l, Side::kK, out.header.n_sinks, model, params);
    layer.v = unit_of(preset.v, l, Side::kV, out.header.n_sinks, model, params);
    layer.tiers = kvrt::finish_tiers(layer.k->scheme, layer.v->scheme, out.header.n_sinks, out.header.window, preset.salient_fraction);
    if (preset.salient_fraction > 0) {
      const quant::SalientTier tier{quant::parse_salient_scheme(preset.salient, text), saliency(l)};
      for (const Side side : {Side::kK, Side::kV}) quant::check_scheme(tier.scheme, model.layers[l], side);
      layer.salient = std::make_shared<const quant::SalientTier>(tier);
    }
    out.layers.push_back(std::move(layer));
  }
  out.header.effective_bits_2048 = effective_bits(model, out.layers, 2048);
  out.header.effective_bits_8192 = effective_bits(model, out.layers, 8192);
  return out;
}

bool refresh_scales(std::vector<LayerChange>& layers, std::int64_t interval) {
  CALIB_CHECK(interval >= 1);
  bool any = false;
  for (LayerChange& layer : layers) {
    const auto raised = [](const std::optional<UnitCandidate>& unit) { return unit && quant::can_refresh(unit->scheme); };
    if (layer.salient || (!raised(layer.k) && !raised(layer.v))) continue;
    layer.scale_refresh = interval;
    any = true;
  }
  return any;
}

std::optional<Contender> refreshed_contender(const Contender& contender, const ModelIdentity& model, std::int64_t interval) {
  Contender out = contender;
  if (!refresh_scales(out.layers, interval)) return std::nullopt;
  out.header.name += fmt::format(" refresh {}", interval);
  out.header.description += fmt::format(", static ranges raised every {}", counted(interval, "token"));
  out.header.effective_bits_2048 = effective_bits(model, out.layers, 2048);
  out.header.effective_bits_8192 = effective_bits(model, out.layers, 8192);
  return out;
}

std::optional<Contender> rotated_contender(const Contender& contender, const ModelIdentity& model, quant::RotationKind kind, const RotationProvider& rotations) {
  Contender out = contender;
  std::size_t n_keys = 0, n_values = 0;
  for (std::size_t l = 0; l < out.layers.size(); ++l) {
    LayerChange& layer = out.layers[l];
    for (const Side side : {Side::kK, Side::kV}) {
      std::optional<UnitCandidate>& unit = side == Side::kK ? layer.k : layer.v;
      if (!unit || !unit->scheme.had || (side == Side::kV && kind != quant::RotationKind::kQuery)) continue;
      const std::string where = fmt::format("{}, layer {} {} {}", contender.header.name, model.layers[l].index, side_name(side), kvrt::to_string(unit->scheme));
      if (layer.salient) fail(ErrorKind::kUnsupported, where, "--rotate is not offered beside a salient tier");
      if (kvrt::needs_calibration(unit->scheme))
        fail(ErrorKind::kUsage, where, "its constants were fitted for the Hadamard rotation; --rotate takes schemes with had that need none");
      quant::check_rotation(kind, model.layers[l]);
      unit->scheme.had = false;
      unit->scheme.pre = kind != quant::RotationKind::kQuery;
      quant::parse_scheme(kvrt::to_string(unit->scheme));
      quant::check_scheme(unit->scheme, model.layers[l], side);
      (side == Side::kK ? layer.k_rotation : layer.v_rotation) = rotations(l, side);
      ++(side == Side::kK ? n_keys : n_values);
    }
  }
  if (n_keys + n_values == 0) return std::nullopt;
  out.header.name += fmt::format(" rotate {}", rotation_name(kind));
  out.header.description +=
      fmt::format(", {} in the place of had on the keys of {} and the values of {}", rotation_name(kind), counted(n_keys, "layer"), counted(n_values, "layer"));
  return out;
}

std::optional<Contender> carrying_contender(const Contender& contender, double share) {
  CALIB_CHECK(share > 0 && share <= 1);
  Contender out = contender;
  bool any = false;
  for (LayerChange& layer : out.layers) {
    if (!layer.v || !quant::can_carry_error(layer.v->scheme)) continue;
    if (layer.salient) fail(ErrorKind::kUnsupported, contender.header.name, "--carry-value-error is not offered beside a salient tier");
    layer.value_carry = static_cast<float>(share);
    any = true;
  }
  if (!any) return std::nullopt;
  out.header.name += fmt::format(" carry {:g}", share);
  out.header.description += fmt::format(", {:g} of the error of a value row carried to the next", share);
  return out;
}

Contender noise_contender(const ModelIdentity& model, double sigma, std::uint64_t seed, std::int64_t n_sinks) {
  Contender out;
  out.header.name = fmt::format("key noise {:g}", sigma);
  out.header.kind = "noise";
  out.header.description = fmt::format("keys with noise of {:g} times their norm, V exact", sigma);
  out.header.n_sinks = n_sinks;
  LayerChange layer;
  layer.tiers = {0, 0, 1, 0};
  layer.key_noise = sigma, layer.noise_seed = seed;
  out.layers.assign(model.layers.size(), layer);
  return out;
}

Contender negative_control(const ModelIdentity& model) {
  Contender out;
  out.header.name = "int2.token.g on all K";
  out.header.kind = "negative_control";
  out.header.k = "int2.token.g";
  out.header.v = "bf16";
  out.header.n_sinks = 0;
  out.header.window = 2;
  out.header.description = "K int2.token.g, V exact, sinks 0, window 2: shows that the harness applies quantisation";
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    LayerChange layer;
    layer.k = UnitCandidate{0, quant::parse_scheme(out.header.k), {}};
    layer.tiers = {0, 2, 1, 0};
    out.layers.push_back(std::move(layer));
  }
  return out;
}

}  // namespace calib::sens

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/stats_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/json.h"
#include "libcalib/model/cache_geometry.h"
#include "libcalib/plan/budget.h"
#include "libcalib/plan/cost_model.h"
#include "libcalib/plan/decision_flow.h"
#include "libcalib/quant/scheme.h"
#include "tools/kvplan/commands.h"

namespace calib::tools {
namespace {

/// What one preset takes; `reason` says why it does not fit the model, `import` how it is made of a file (then nothing is counted).
struct PresetBytes {
  std::string name, reason, import;
  bool counted = false;
  std::vector<std::int64_t> k, v;  ///< per layer
  std::int64_t k_sum = 0, v_sum = 0;
};

PresetBytes count_preset(const quant::Preset& preset, const std::vector<LayerGeometry>& layers, plan::Accounting accounting) {
  PresetBytes out;
  out.name = preset.name;
  accounting.sink_tokens = preset.n_sinks;
  for (const LayerGeometry& layer : layers) {
    const quant::Preset fitted = quant::resolve_preset(preset.name, layer.head_dim);
    const kvrt::Scheme k = quant::parse_scheme(fitted.k), v = quant::parse_scheme(fitted.v);
    for (const Side side : {Side::kK, Side::kV})
      if (const std::string shape = kvrt::check_shape(side == Side::kK ? k : v, layer.head_dim, side == Side::kK); !shape.empty()) {
        out.reason = fmt::format("does not fit layer {}: {}", layer.index, shape);
        return out;
      }
    const kvrt::LayerLayout layout = plan::make_layout(
        layer, k, v, {fitted.window, fitted.salient_fraction, fitted.salient.empty() ? kvrt::Scheme{} : quant::parse_scheme(fitted.salient)}, accounting);
    out.k.push_back(accounting.batch * kvrt::cache_bytes(layout, kvrt::CacheSide::kK, accounting.context_tokens));
    out.v.push_back(accounting.batch * kvrt::cache_bytes(layout, kvrt::CacheSide::kV, accounting.context_tokens));
    out.k_sum += out.k.back();
    out.v_sum += out.v.back();
  }
  out.counted = true;
  return out;
}

/// Layers of the same shape, which take the same bytes.
struct LayerClass {
  std::size_t first = 0;
  std::vector<int> indices;
};

std::vector<LayerClass> classes_of(const std::vector<LayerGeometry>& layers) {
  std::vector<LayerClass> classes;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const auto same = std::find_if(classes.begin(), classes.end(), [&](const LayerClass& c) {
      const LayerGeometry& g = layers[c.first];
      return g.n_kv_heads == layers[l].n_kv_heads && g.head_dim == layers[l].head_dim && g.sliding_window == layers[l].sliding_window;
    });
    if (same == classes.end()) classes.push_back({l, {layers[l].index}});
    else same->indices.push_back(layers[l].index);
  }
  return classes;
}

/// "0-4, 6-10".
std::string ranges_text(const std::vector<int>& indices) {
  std::string text;
  for (std::size_t begin = 0; begin < indices.size();) {
    std::size_t end = begin;
    while (end + 1 < indices.size() && indices[end + 1] == indices[end] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", indices[begin]);
    if (end > begin) text += fmt::format("-{}", indices[end]);
    begin = end + 1;
  }
  return text;
}

void print_row(const PresetBytes& p, std::int64_t k, std::int64_t v, std::int64_t elements) {
  const double bits = plan::effective_bits(k + v, elements);
  fmt::print("  {:<18}  {:>14}  {:>14}  {:>14}  {:>11}  {:>6.3f}  {:>6.2f}x\n", p.name, k, v, k + v, plan::format_bytes(k + v), bits, 16 / bits);
}

}  // namespace

int run_memory_of_model(const KvplanOptions& options, const Invocation& call, Progress&) {
  if (!options.contexts.empty()) fail(ErrorKind::kUsage, "--contexts", "belongs to PLAN; with --model and --stats give one --context");
  if (options.page_tokens != 32 && options.page_tokens != 64 && options.page_tokens != 128)
    fail(ErrorKind::kUsage, "--page-tokens", "is {}, expected 32, 64 or 128", options.page_tokens);
  model::CacheGeometry geometry;
  if (!options.model.empty()) {
    geometry = model::read_cache_geometry(options.model);
  } else {
    const ModelIdentity identity = artifacts::StatsReader(options.stats).header().model;
    geometry.model_type = identity.architecture;
    geometry.n_layers = identity.n_layers;
    geometry.max_positions = identity.max_positions;
    geometry.layers = identity.layers;
    geometry.n_without = identity.n_layers - static_cast<std::int64_t>(identity.layers.size());
  }
  plan::Accounting accounting;
  accounting.context_tokens = options.context;
  accounting.batch = options.batch;
  accounting.page_tokens = static_cast<int>(options.page_tokens);
  std::int64_t widest = 0;
  for (const quant::Preset& p : quant::presets()) widest = std::max(widest, p.window);
  if (!plan::countable(geometry.layers, widest, accounting))
    fail(ErrorKind::kUsage, "--context, --batch", "{} tokens x batch {} is beyond what can be counted", options.context, options.batch);

  std::vector<PresetBytes> presets;
  for (const quant::Preset& preset : quant::presets()) presets.push_back(count_preset(preset, geometry.layers, accounting));
  for (const quant::NamedOnly& p : quant::presets_by_name_only()) {
    presets.push_back({});
    presets.back().name = p.name;
    presets.back().import = p.reason;
  }
  const std::int64_t elements = plan::cache_elements(geometry.layers, accounting), plain = plan::plain_16_bit_bytes(geometry.layers, accounting);
  std::int64_t per_token = 0;  // of layers that grow with the context
  for (const LayerGeometry& g : geometry.layers)
    if (g.sliding_window == 0 || g.sliding_window > options.context) per_token += 4 * g.n_kv_heads * g.head_dim;

  if (call.json) {
    nlohmann::ordered_json out = {{"model_type", geometry.model_type},
                                  {"n_layers", geometry.n_layers},
                                  {"cache_layers", geometry.layers.size()},
                                  {"shared_layers", geometry.n_shared},
                                  {"context_tokens", options.context},
                                  {"batch", options.batch},
                                  {"elements", elements},
                                  {"plain_16_bit_bytes", 2 * elements},
                                  {"bytes_per_token_16_bit", per_token},
                                  {"presets", nlohmann::ordered_json::array()}};
    for (const PresetBytes& p : presets) {
      nlohmann::ordered_json row = {{"name", p.name}, {"offered", p.reason.empty()}};
      if (!p.reason.empty()) row["reason"] = p.reason;
      if (!p.import.empty()) row["import"] = p.import;
      if (p.counted) {
        const double bits = plan::effective_bits(p.k_sum + p.v_sum, elements);
        row.update({{"k_bytes", p.k_sum}, {"v_bytes", p.v_sum}, {"bytes", p.k_sum + p.v_sum}, {"effective_bits", bits}, {"compression", 16 / bits}});
        for (std::size_t l = 0; l < geometry.layers.size(); ++l)
          row["layers"].push_back({{"index", geometry.layers[l].index}, {"k_bytes", p.k[l]}, {"v_bytes", p.v[l]}});
      }
      out["presets"].push_back(std::move(row));
    }
    fmt::print("{}", io::json_text(out, "standard output"));
    return 0;
  }

  std::string others;
  if (geometry.n_shared > 0) others += fmt::format(", {} read another layer's", geometry.n_shared);
  if (geometry.n_without > 0) others += fmt::format(", {} have none", geometry.n_without);
  fmt::print("{}: {} of {} hold keys and values{}; {} tokens x batch {}\n", to_valid_utf8(geometry.model_type), geometry.layers.size(),
             counted(geometry.n_layers, "layer"), others, options.context, options.batch);
  fmt::print("plain 16 bit: {} bytes ({}), {} more bytes a token and sequence\n", 2 * elements, plan::format_bytes(plain), per_token);
  const auto header = [](const std::string& title) {
    fmt::print("\n{}\n  {:<18}  {:>14}  {:>14}  {:>14}  {:>11}  {:>6}  {:>7}\n", title, "preset", "K bytes", "V bytes", "K + V", "", "bits", "smaller");
  };
  header("all layers");
  for (const PresetBytes& p : presets) {
    if (p.counted) print_row(p, p.k_sum, p.v_sum, elements);
    else fmt::print("  {:<18}  {}\n", p.name, p.reason.empty() ? p.import : p.reason);
  }
  for (const LayerClass& c : classes_of(geometry.layers)) {
    const LayerGeometry& g = geometry.layers[c.first];
    header(fmt::format("each of layers {} ({}): {} x {}{}", ranges_text(c.indices), c.indices.size(), counted(g.n_kv_heads, "KV head"), g.head_dim,
                       g.sliding_window > 0 ? fmt::format(", sliding window {}", g.sliding_window) : ""));
    for (const PresetBytes& p : presets)
      if (p.counted) print_row(p, p.k[c.first], p.v[c.first], plan::cache_elements({g}, accounting));
  }
  fmt::print("\nsinks, window, padding, scales and zeros included; constants that all sequences share are not\n");
  return 0;
}

}  // namespace calib::tools

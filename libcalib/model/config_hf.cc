#include <cmath>
#include <optional>

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/json.h"
#include "libcalib/base/utf8.h"
#include "libcalib/model/architecture.h"
#include "libcalib/model/config.h"
#include "libcalib/model/config_checks.h"
#include "libcalib/model/config_hf_reader.h"

namespace calib::model {
namespace {

using nlohmann::json;

/// A decoder of gemma3_text beside a vision tower.
constexpr std::string_view kMultimodalGemma3 = "gemma3";

std::vector<std::int64_t> read_windows(const KeyReader& keys, ModelConfig& config, const LogSink& log) {
  std::vector<std::int64_t> windows(static_cast<std::size_t>(config.n_layers), 0);
  const auto window = keys.count("sliding_window");
  const ArchitectureRow& row = *config.architecture;
  if (row.window == WindowRule::kNone) {
    if (window) log.note(fmt::format("{}: sliding_window {} is not a key of {} and is not used", keys.path(), *window, row.model_type));
    return windows;
  }
  const bool by_pattern = row.window == WindowRule::kPattern;
  const bool switched_on = by_pattern || row.window == WindowRule::kAllLayers || keys.flag("use_sliding_window").value_or(false);
  std::int64_t size = window.value_or(0);
  const auto take_default = [&] {
    if (window || keys.is_null("sliding_window")) return;
    size = row.defaults.sliding_window;
    config.defaults.push_back(fmt::format("sliding_window={}", size));
  };
  if (by_pattern) take_default();
  if (const json* types = keys.array("layer_types")) {
    if (static_cast<std::int64_t>(types->size()) != config.n_layers)
      fail(ErrorKind::kFormat, keys.path(), "layer_types has {} entries and num_hidden_layers is {}", types->size(), config.n_layers);
    for (std::size_t l = 0; l < windows.size(); ++l) {
      const json& type = (*types)[l];
      if (type == "full_attention") continue;
      if (type != "sliding_attention")
        fail(ErrorKind::kUnsupported, keys.path(), "layer_types[{}] is {}; offered: full_attention, sliding_attention", l, shorten(type));
      if (size == 0) fail(ErrorKind::kFormat, keys.path(), "layer_types[{}] is sliding_attention and sliding_window is absent", l);
      windows[l] = size;
    }
    return windows;
  }
  if (!switched_on) return windows;
  if (row.defaults.no_rope_interval > 0)
    fail(ErrorKind::kUnsupported, keys.path(), "use_sliding_window without layer_types is not offered for {}; state the layers that have a window", row.model_type);
  if (by_pattern) {
    if (size == 0) fail(ErrorKind::kFormat, keys.path(), "{}sliding_window is null; {} needs a positive integer", keys.scope(), row.model_type);
    const std::int64_t every = or_default(keys.count("sliding_window_pattern"), row.defaults.window_pattern, "sliding_window_pattern", config);
    for (std::int64_t l = 0; l < config.n_layers; ++l) windows[static_cast<std::size_t>(l)] = (l + 1) % every == 0 ? 0 : size;
    return windows;
  }
  take_default();
  std::int64_t first = 0;
  if (row.window == WindowRule::kUseSlidingWindow)
    first = or_default<std::int64_t>(keys.count_or_zero("max_window_layers"), 28, "max_window_layers", config);
  for (std::int64_t l = first; l < config.n_layers; ++l) windows[static_cast<std::size_t>(l)] = size;
  return windows;
}

/// no_rope_layers of config.json holds 1 for the layers that have RoPE.
std::vector<std::uint8_t> read_rope_layers(const KeyReader& keys, ModelConfig& config) {
  std::vector<std::uint8_t> has_rope(static_cast<std::size_t>(config.n_layers), 1);
  const std::int64_t family = config.architecture->defaults.no_rope_interval;
  if (family == 0) return has_rope;
  if (const json* list = keys.array("no_rope_layers")) {
    if (list->size() != has_rope.size())
      fail(ErrorKind::kFormat, keys.path(), "no_rope_layers has {} entries and num_hidden_layers is {}", list->size(), config.n_layers);
    for (std::size_t l = 0; l < has_rope.size(); ++l) {
      if ((*list)[l] != 0 && (*list)[l] != 1) fail(ErrorKind::kFormat, keys.path(), "no_rope_layers[{}] is {}, expected 0 or 1 (has RoPE)", l, shorten((*list)[l]));
      has_rope[l] = (*list)[l] == 1;
    }
    return has_rope;
  }
  const std::int64_t every = or_default(keys.count("no_rope_layer_interval"), family, "no_rope_layer_interval", config);
  for (std::int64_t l = every - 1; l < config.n_layers; l += every) has_rope[static_cast<std::size_t>(l)] = 0;
  return has_rope;
}

void check_activation(const KeyReader& keys, const ModelConfig& config) {
  const bool gelu = config.architecture->activation == Activation::kGeluTanh;
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const auto name = keys.text(key);
    if (!name || (gelu ? *name == "gelu_pytorch_tanh" : *name == "silu" || *name == "swish")) continue;
    fail(ErrorKind::kUnsupported, keys.path(), "{}{} \"{}\" is not offered for {} ({})", keys.scope(), key, *name, config.model_type,
         gelu ? "gelu_pytorch_tanh" : "silu");
  }
}

void refuse_other_features(const KeyReader& keys, const ModelConfig& config) {
  if (keys.has("quantization_config"))
    fail(ErrorKind::kUnsupported, keys.path(), "quantization_config: quantised Hugging Face checkpoints are not offered; use the "
         "unquantised checkpoint or a GGUF file");
  if (const auto part = keys.positive("partial_rotary_factor"); part && *part != 1.0)
    fail(ErrorKind::kUnsupported, keys.path(), "partial_rotary_factor {} is not offered for {}", *part, config.model_type);
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"})
    if (const auto cap = keys.number(key); cap && *cap != 0.0)
      fail(ErrorKind::kUnsupported, keys.path(), "{}{} {} is not offered for {}", keys.scope(), key, *cap, config.model_type);
  for (const char* key : {"use_bidirectional_attention", "attention_k_eq_v"})
    if (keys.has(key) && keys.flag(key).value_or(false))
      fail(ErrorKind::kUnsupported, keys.path(), "{}{} is not offered for {}", keys.scope(), key, config.model_type);
}

/// The part of a multimodal configuration that describes the decoder.
const json& text_part(const json& document, const KeyReader& keys, const LogSink& log) {
  const json* text = keys.object("text_config");
  if (!text) fail(ErrorKind::kFormat, keys.path(), "model_type is gemma3 and text_config, which describes its decoder, is absent");
  const KeyReader inner(*text, keys.path(), "text_config.");
  if (const auto type = inner.text("model_type"); type && *type != "gemma3_text")
    fail(ErrorKind::kUnsupported, keys.path(), "text_config.model_type \"{}\" is not offered (gemma3_text)", to_valid_utf8(*type));
  if (document.contains("tie_word_embeddings") && text->contains("tie_word_embeddings") &&
      document["tie_word_embeddings"] != (*text)["tie_word_embeddings"])
    fail(ErrorKind::kFormat, keys.path(), "tie_word_embeddings is {} and text_config.tie_word_embeddings is {}; they must agree",
         shorten(document["tie_word_embeddings"]), shorten((*text)["tie_word_embeddings"]));
  log.note(fmt::format("{}: text_config is read; the vision part takes no part", keys.path()));
  return *text;
}

std::int64_t count_or_default(const KeyReader& keys, const char* key, std::int64_t fallback, ModelConfig& config) {
  return fallback > 0 ? or_default(keys.count(key), fallback, key, config) : keys.required_count(key);
}

void read_sizes(const KeyReader& keys, ModelConfig& config) {
  const FamilyDefaults& family = config.architecture->defaults;
  config.n_layers = keys.required_count("num_hidden_layers");
  check_layer_count(config.n_layers, "num_hidden_layers", keys.path());
  config.hidden_size = keys.required_count("hidden_size");
  config.intermediate_size = keys.required_count("intermediate_size");
  config.vocab_size = count_or_default(keys, "vocab_size", family.vocab_size, config);
  config.n_q_heads = count_or_default(keys, "num_attention_heads", family.n_q_heads, config);
  config.n_kv_heads = or_default(keys.count("num_key_value_heads"), family.n_kv_heads > 0 ? family.n_kv_heads : config.n_q_heads,
                                 "num_key_value_heads", config);
  config.head_dim = or_default(keys.count("head_dim"), family.head_dim > 0 ? family.head_dim : config.hidden_size / config.n_q_heads,
                               "head_dim", config);
  config.max_positions = or_default(keys.count("max_position_embeddings"), family.max_positions, "max_position_embeddings", config);
  check_heads(config, {"num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"}, keys.path());
  double scalar = static_cast<double>(config.head_dim);
  if (family.query_pre_attn_scalar > 0)
    scalar = or_default(keys.positive("query_pre_attn_scalar"), family.query_pre_attn_scalar, "query_pre_attn_scalar", config);
  config.softmax_scale = 1.0 / std::sqrt(scalar);
}

}  // namespace

ModelConfig parse_hf_config(std::string_view text, const std::string& path, const LogSink& log) {
  const json document = parse_json_strict(text, path);
  if (!document.is_object()) fail(ErrorKind::kFormat, path, "is {}, expected a JSON object", shorten(document));
  const KeyReader top(document, path);
  ModelConfig config;
  const auto model_type = top.text("model_type");
  if (!model_type) fail(ErrorKind::kFormat, path, "key model_type is missing; offered: {}", supported_model_types());
  const bool multimodal = *model_type == kMultimodalGemma3;
  config.model_type = multimodal ? "gemma3_text" : *model_type;
  config.architecture = find_model_type(config.model_type);
  if (!config.architecture)
    fail(ErrorKind::kUnsupported, path, "model_type \"{}\" is not offered ({})", to_valid_utf8(config.model_type), supported_model_types());
  const ArchitectureRow& row = *config.architecture;
  refuse_other_features(top, config);
  const KeyReader keys = multimodal ? KeyReader(text_part(document, top, log), path, "text_config.") : top;
  refuse_other_features(keys, config);
  check_activation(keys, config);

  read_sizes(keys, config);
  config.rms_epsilon = or_default(keys.positive("rms_norm_eps"), 1e-6, "rms_norm_eps", config);
  const auto tied = keys.flag("tie_word_embeddings");
  config.tied_embedding = or_default(tied ? tied : top.flag("tie_word_embeddings"), row.defaults.tied_embedding, "tie_word_embeddings", config);
  if (row.bias == BiasRule::kConfigured)
    config.attention_bias = config.output_bias = or_default(keys.flag("attention_bias"), false, "attention_bias", config);
  if (row.bias == BiasRule::kQkv) config.attention_bias = true;
  if (row.has_mlp_bias) config.mlp_bias = or_default(keys.flag("mlp_bias"), false, "mlp_bias", config);
  read_hf_rope(keys, config);
  config.sliding_window = read_windows(keys, config, log);
  config.has_rope = read_rope_layers(keys, config);
  return config;
}

}  // namespace calib::model

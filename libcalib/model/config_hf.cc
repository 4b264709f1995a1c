#include <cmath>
#include <optional>

#include <nlohmann/json.hpp>

#include "libcalib/base/json.h"
#include "libcalib/base/utf8.h"
#include "libcalib/model/architecture.h"
#include "libcalib/model/config.h"
#include "libcalib/model/config_checks.h"

namespace calib::model {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxCount = std::int64_t{1} << 31;

std::string shorten(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 60) text = to_valid_utf8(text.substr(0, 57)) + "...";
  return text;
}

/// One JSON object read key by key: null counts as absent, nothing is converted between types.
class KeyReader {
 public:
  KeyReader(const json& object, std::string path, std::string scope = "")
      : object_(object), path_(std::move(path)), scope_(std::move(scope)) {}

  bool has(const char* key) const { return find(key) != nullptr; }
  bool is_null(const char* key) const {
    const auto it = object_.find(key);
    return it != object_.end() && it->is_null();
  }

  std::optional<std::int64_t> count(const char* key) const {  // positive integer
    const json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_number_integer() || (value->is_number_unsigned() && value->get<std::uint64_t>() > kMaxCount) ||
        value->get<std::int64_t>() < 1 || value->get<std::int64_t>() > kMaxCount)
      wrong(key, *value, "a positive integer");
    return value->get<std::int64_t>();
  }
  std::optional<std::int64_t> count_or_zero(const char* key) const {
    const json* value = find(key);
    if (value && value->is_number_integer() && *value == 0) return 0;
    return count(key);
  }
  std::int64_t required_count(const char* key) const {
    const auto value = count(key);
    if (!value) fail(ErrorKind::kFormat, path_, "key {}{} is missing; expected a positive integer", scope_, key);
    return *value;
  }
  std::optional<double> positive(const char* key) const {
    const json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_number() || !(value->get<double>() > 0.0) || !std::isfinite(value->get<double>()))
      wrong(key, *value, "a positive number");
    return value->get<double>();
  }
  std::optional<bool> flag(const char* key) const {
    const json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_boolean()) wrong(key, *value, "true or false");
    return value->get<bool>();
  }
  std::optional<std::string> text(const char* key) const {
    const json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_string()) wrong(key, *value, "a string");
    return value->get<std::string>();
  }
  const json* object(const char* key) const {
    const json* value = find(key);
    if (value && !value->is_object()) wrong(key, *value, "an object or null");
    return value;
  }
  const json* array(const char* key) const {
    const json* value = find(key);
    if (value && !value->is_array()) wrong(key, *value, "an array or null");
    return value;
  }
  const std::string& path() const { return path_; }

 private:
  const json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  [[noreturn]] void wrong(const char* key, const json& value, const char* expected) const {
    fail(ErrorKind::kFormat, path_, "key {}{} is {}, expected {}", scope_, key, shorten(value), expected);
  }

  const json& object_;
  std::string path_, scope_;
};

/// Keeps what a family default was used for, so that it can be written to the output.
template <typename T>
T or_default(const std::optional<T>& value, T fallback, const char* key, ModelConfig& config) {
  if (value) return *value;
  config.defaults.push_back(fmt::format("{}={}", key, fallback));
  return fallback;
}

/// The type of a scaling block: older files say "type", newer ones "rope_type".
std::string scaling_type(const KeyReader& block, const char* block_name) {
  const auto rope_type = block.text("rope_type"), type = block.text("type");
  if (rope_type && type && *rope_type != *type)
    fail(ErrorKind::kFormat, block.path(), "{}.rope_type is \"{}\" and {}.type is \"{}\"; they must agree", block_name, *rope_type,
         block_name, *type);
  if (rope_type) return *rope_type;
  if (type) return *type;
  if (block.has("rope_theta")) return "default";
  fail(ErrorKind::kFormat, block.path(), "{} has no key rope_type (nor type)", block_name);
}

void apply_scaling(const KeyReader& block, const char* block_name, RopeConfig& rope) {
  const std::string type = scaling_type(block, block_name);
  const auto need = [&](const char* key) {
    const auto value = block.positive(key);
    if (!value) fail(ErrorKind::kFormat, block.path(), "{} of type {} needs the key {}", block_name, type, key);
    return *value;
  };
  if (const auto theta = block.positive("rope_theta")) rope.theta = *theta;
  if (const auto part = block.positive("partial_rotary_factor"); part && *part != 1.0)
    fail(ErrorKind::kUnsupported, block.path(), "{}.partial_rotary_factor {} is not offered for this model_type", block_name, *part);
  if (type == "default" || type == "mrope") return;  // on text alone the three position axes of mrope are equal
  if (type == "linear") {
    rope.scaling = RopeScaling::kLinear;
    rope.factor = need("factor");
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::kLlama3;
    rope.factor = need("factor");
    rope.low_freq_factor = need("low_freq_factor");
    rope.high_freq_factor = need("high_freq_factor");
    rope.original_max_positions = need("original_max_position_embeddings");
    if (rope.high_freq_factor <= rope.low_freq_factor)
      fail(ErrorKind::kFormat, block.path(), "{}.high_freq_factor {} must exceed low_freq_factor {}", block_name,
           rope.high_freq_factor, rope.low_freq_factor);
  } else {
    fail(ErrorKind::kUnsupported, block.path(), "{} type \"{}\" is not offered (default, linear, llama3)", block_name, type);
  }
}

void read_rope(const KeyReader& keys, ModelConfig& config) {
  const json* scaling = keys.object("rope_scaling");
  const json* parameters = keys.object("rope_parameters");
  if (scaling && parameters && *scaling != *parameters)
    fail(ErrorKind::kFormat, keys.path(), "rope_scaling and rope_parameters are both present and differ: {} and {}",
         shorten(*scaling), shorten(*parameters));
  const char* block_name = parameters ? "rope_parameters" : "rope_scaling";
  const json* block = parameters ? parameters : scaling;
  const auto top_theta = keys.positive("rope_theta");
  if (top_theta) config.rope.theta = *top_theta;
  bool block_theta = false;
  if (block) {
    for (const auto& item : block->items())
      if (item.value().is_object())
        fail(ErrorKind::kUnsupported, keys.path(), "{}.{}: RoPE settings per layer type are not offered for {}", block_name,
             item.key(), config.model_type);
    const KeyReader reader(*block, keys.path(), std::string(block_name) + ".");
    const auto theta = reader.positive("rope_theta");
    block_theta = theta.has_value();
    if (theta && top_theta && *theta != *top_theta)
      fail(ErrorKind::kFormat, keys.path(), "rope_theta is {} and {}.rope_theta is {}; they must agree", *top_theta, block_name,
           *theta);
    apply_scaling(reader, block_name, config.rope);
  }
  if (!top_theta && !block_theta) config.defaults.push_back("rope_theta=10000");
}

std::vector<std::int64_t> read_windows(const KeyReader& keys, ModelConfig& config, const LogSink& log) {
  std::vector<std::int64_t> windows(static_cast<std::size_t>(config.n_layers), 0);
  const auto window = keys.count("sliding_window");
  const ArchitectureRow& row = *config.architecture;
  if (row.window == WindowRule::kNone) {
    if (window) log.note(fmt::format("{}: sliding_window {} is not a key of {} and is not used", keys.path(), *window, row.model_type));
    return windows;
  }
  const bool switched_on = row.window == WindowRule::kAllLayers || keys.flag("use_sliding_window").value_or(false);
  if (const json* types = keys.array("layer_types")) {
    if (static_cast<std::int64_t>(types->size()) != config.n_layers)
      fail(ErrorKind::kFormat, keys.path(), "layer_types has {} entries and num_hidden_layers is {}", types->size(), config.n_layers);
    for (std::size_t l = 0; l < windows.size(); ++l) {
      const json& type = (*types)[l];
      if (type == "full_attention") continue;
      if (type != "sliding_attention")
        fail(ErrorKind::kUnsupported, keys.path(), "layer_types[{}] is {}; offered: full_attention, sliding_attention", l, shorten(type));
      if (!window) fail(ErrorKind::kFormat, keys.path(), "layer_types[{}] is sliding_attention and sliding_window is absent", l);
      windows[l] = *window;
    }
    return windows;
  }
  if (!switched_on) return windows;
  std::int64_t size = window.value_or(0);
  if (!window && !keys.is_null("sliding_window")) {
    size = row.default_sliding_window;
    config.defaults.push_back(fmt::format("sliding_window={}", size));
  }
  std::int64_t first = 0;
  if (row.window == WindowRule::kUseSlidingWindow)
    first = or_default<std::int64_t>(keys.count_or_zero("max_window_layers"), 28, "max_window_layers", config);
  for (std::int64_t l = first; l < config.n_layers; ++l) windows[static_cast<std::size_t>(l)] = size;
  return windows;
}

void refuse_other_features(const KeyReader& keys, const ModelConfig& config) {
  if (keys.has("quantization_config"))
    fail(ErrorKind::kUnsupported, keys.path(), "quantization_config: quantised Hugging Face checkpoints are not offered; use the "
         "unquantised checkpoint or a GGUF file");
  if (const auto act = keys.text("hidden_act"); act && *act != "silu" && *act != "swish")
    fail(ErrorKind::kUnsupported, keys.path(), "hidden_act \"{}\" is not offered for {} (silu)", *act, config.model_type);
  if (const auto part = keys.positive("partial_rotary_factor"); part && *part != 1.0)
    fail(ErrorKind::kUnsupported, keys.path(), "partial_rotary_factor {} is not offered for {}", *part, config.model_type);
}

}  // namespace

ModelConfig parse_hf_config(std::string_view text, const std::string& path, const LogSink& log) {
  const json document = parse_json_strict(text, path);
  if (!document.is_object()) fail(ErrorKind::kFormat, path, "is {}, expected a JSON object", shorten(document));
  const KeyReader keys(document, path);
  ModelConfig config;
  const auto model_type = keys.text("model_type");
  if (!model_type) fail(ErrorKind::kFormat, path, "key model_type is missing; offered: {}", supported_model_types());
  config.model_type = *model_type;
  config.architecture = find_model_type(config.model_type);
  if (!config.architecture)
    fail(ErrorKind::kUnsupported, path, "model_type \"{}\" is not offered ({})", to_valid_utf8(config.model_type), supported_model_types());
  const ArchitectureRow& row = *config.architecture;
  refuse_other_features(keys, config);

  config.n_layers = keys.required_count("num_hidden_layers");
  check_layer_count(config.n_layers, "num_hidden_layers", path);
  config.hidden_size = keys.required_count("hidden_size");
  config.intermediate_size = keys.required_count("intermediate_size");
  config.vocab_size = keys.required_count("vocab_size");
  config.n_q_heads = keys.required_count("num_attention_heads");
  config.n_kv_heads = or_default(keys.count("num_key_value_heads"), config.n_q_heads, "num_key_value_heads", config);
  const std::int64_t head_dim = row.default_head_dim ? row.default_head_dim : config.hidden_size / config.n_q_heads;
  config.head_dim = or_default(keys.count("head_dim"), head_dim, "head_dim", config);
  config.max_positions =
      or_default(keys.count("max_position_embeddings"), row.default_max_positions, "max_position_embeddings", config);
  config.rms_epsilon = or_default(keys.positive("rms_norm_eps"), 1e-6, "rms_norm_eps", config);
  config.tied_embedding = or_default(keys.flag("tie_word_embeddings"), false, "tie_word_embeddings", config);
  if (row.bias == BiasRule::kConfigured)
    config.attention_bias = config.output_bias = or_default(keys.flag("attention_bias"), false, "attention_bias", config);
  if (row.bias == BiasRule::kQkv) config.attention_bias = true;
  if (row.has_mlp_bias) config.mlp_bias = or_default(keys.flag("mlp_bias"), false, "mlp_bias", config);
  check_heads(config, {"num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"}, path);
  read_rope(keys, config);
  config.sliding_window = read_windows(keys, config, log);
  return config;
}

}  // namespace calib::model

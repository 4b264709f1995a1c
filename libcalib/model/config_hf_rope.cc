#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"
#include "libcalib/model/architecture.h"
#include "libcalib/model/config_hf_reader.h"

namespace calib::model {
namespace {

using nlohmann::json;

/// The type of a scaling block: older files say "type", newer ones "rope_type".
std::string scaling_type(const KeyReader& block, const std::string& block_name) {
  const auto rope_type = block.text("rope_type"), type = block.text("type");
  if (rope_type && type && *rope_type != *type)
    fail(ErrorKind::kFormat, block.path(), "{}.rope_type is \"{}\" and {}.type is \"{}\"; they must agree", block_name, *rope_type,
         block_name, *type);
  if (rope_type) return *rope_type;
  if (type) return *type;
  if (block.has("rope_theta")) return "default";
  fail(ErrorKind::kFormat, block.path(), "{} has no key rope_type (nor type)", block_name);
}

void apply_scaling(const KeyReader& block, const std::string& block_name, RopeConfig& rope) {
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

/// The one setting of most families.
void read_single(const KeyReader& keys, const json* scaling, const json* parameters, ModelConfig& config) {
  if (scaling && parameters && *scaling != *parameters)
    fail(ErrorKind::kFormat, keys.path(), "rope_scaling and rope_parameters are both present and differ: {} and {}",
         shorten(*scaling), shorten(*parameters));
  const std::string block_name = parameters ? "rope_parameters" : "rope_scaling";
  const json* block = parameters ? parameters : scaling;
  const auto top_theta = keys.positive("rope_theta");
  if (top_theta) config.rope.theta = *top_theta;
  bool block_theta = false;
  if (block) {
    for (const auto& item : block->items())
      if (item.value().is_object())
        fail(ErrorKind::kUnsupported, keys.path(), "{}.{}: RoPE settings per layer type are not offered for {}", block_name,
             item.key(), config.model_type);
    const KeyReader reader(*block, keys.path(), block_name + ".");
    const auto theta = reader.positive("rope_theta");
    block_theta = theta.has_value();
    if (theta && top_theta && *theta != *top_theta)
      fail(ErrorKind::kFormat, keys.path(), "rope_theta is {} and {}.rope_theta is {}; they must agree", *top_theta, block_name,
           *theta);
    apply_scaling(reader, block_name, config.rope);
  }
  if (!top_theta && !block_theta) config.defaults.push_back(fmt::format("rope_theta={}", config.rope.theta));
}

/// One layer type's settings: the block `rope_parameters.<layer_type>`, or theta under a key of its own.
void read_layer_type(const KeyReader& keys, const json* parameters, const char* layer_type, const char* theta_key, RopeConfig& rope,
                     ModelConfig& config) {
  const auto own_theta = keys.positive(theta_key);
  if (own_theta) rope.theta = *own_theta;
  std::optional<double> block_theta;
  if (parameters) {
    const KeyReader types(*parameters, keys.path(), keys.scope() + "rope_parameters.");
    if (const json* block = types.object(layer_type)) {
      const std::string name = fmt::format("{}rope_parameters.{}", keys.scope(), layer_type);
      const KeyReader reader(*block, keys.path(), name + ".");
      block_theta = reader.positive("rope_theta");
      if (block_theta && own_theta && *block_theta != *own_theta)
        fail(ErrorKind::kFormat, keys.path(), "{}{} is {} and {}.rope_theta is {}; they must agree", keys.scope(), theta_key, *own_theta,
             name, *block_theta);
      apply_scaling(reader, name, rope);
    }
  }
  if (!own_theta && !block_theta) config.defaults.push_back(fmt::format("{}={}", theta_key, rope.theta));
}

/// Layers with a sliding window have frequencies of their own; rope_scaling is for the others alone.
void read_by_layer_type(const KeyReader& keys, const json* scaling, const json* parameters, ModelConfig& config) {
  if (parameters)
    for (const auto& item : parameters->items())
      if (item.key() != "full_attention" && item.key() != "sliding_attention")
        fail(ErrorKind::kUnsupported, keys.path(), "{}rope_parameters.{} is not offered for {}, whose keys there are full_attention and "
             "sliding_attention", keys.scope(), to_valid_utf8(item.key()), config.model_type);
  config.local_rope.emplace();
  config.local_rope->theta = config.architecture->defaults.local_rope_theta;
  read_layer_type(keys, parameters, "full_attention", "rope_theta", config.rope, config);
  read_layer_type(keys, parameters, "sliding_attention", "rope_local_base_freq", *config.local_rope, config);
  if (!scaling) return;
  RopeConfig scaled = config.rope;
  scaled.scaling = RopeScaling::kDefault;
  scaled.factor = 1.0;
  apply_scaling(KeyReader(*scaling, keys.path(), keys.scope() + "rope_scaling."), keys.scope() + "rope_scaling", scaled);
  const bool same = scaled.theta == config.rope.theta && scaled.scaling == config.rope.scaling && scaled.factor == config.rope.factor;
  if (parameters && parameters->contains("full_attention") && !same)
    fail(ErrorKind::kFormat, keys.path(), "{0}rope_scaling and {0}rope_parameters.full_attention are both present and differ: {1} and {2}",
         keys.scope(), shorten(*scaling), shorten((*parameters)["full_attention"]));
  config.rope = scaled;
}

}  // namespace

void read_hf_rope(const KeyReader& keys, ModelConfig& config) {
  const json* scaling = keys.object("rope_scaling");
  const json* parameters = keys.object("rope_parameters");
  config.rope.theta = config.architecture->defaults.rope_theta;
  if (config.architecture->window == WindowRule::kPattern) read_by_layer_type(keys, scaling, parameters, config);
  else read_single(keys, scaling, parameters, config);
}

}  // namespace calib::model

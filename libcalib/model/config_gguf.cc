#include <cmath>

#include "libcalib/base/utf8.h"
#include "libcalib/model/architecture.h"
#include "libcalib/model/config.h"
#include "libcalib/model/config_checks.h"
#include "libcalib/weights/gguf.h"

namespace calib::model {
namespace {

constexpr std::int64_t kMaxCount = std::int64_t{1} << 31;

/// Keys of one architecture: "<arch>.<name>".
class ArchitectureKeys {
 public:
  ArchitectureKeys(const weights::GgufMetadata& metadata, std::string arch) : metadata_(metadata), arch_(std::move(arch)) {}

  std::string key(const char* name) const { return arch_ + "." + name; }
  std::optional<std::int64_t> count(const char* name, std::int64_t smallest = 1) const {
    const auto value = metadata_.integer(key(name));
    if (value && (*value < smallest || *value > kMaxCount))
      fail(ErrorKind::kFormat, metadata_.path, "key {} is {}, expected an integer from {} to {}", key(name), *value, smallest, kMaxCount);
    return value;
  }
  std::int64_t required_count(const char* name) const {
    const auto value = count(name);
    if (!value) fail(ErrorKind::kFormat, metadata_.path, "key {} is missing; expected a positive integer", key(name));
    return *value;
  }
  /// A number, or one number per layer; arrays with unequal entries are refused.
  std::optional<std::int64_t> equal_count(const char* name) const {
    const auto it = metadata_.values.find(key(name));
    if (it == metadata_.values.end() || !std::holds_alternative<std::vector<std::int64_t>>(it->second)) return count(name);
    const std::vector<std::int64_t>* list = &std::get<std::vector<std::int64_t>>(it->second);
    if (list->empty()) fail(ErrorKind::kFormat, metadata_.path, "key {} is an empty array", key(name));
    for (const std::int64_t n : *list) {
      if (n != list->front())
        fail(ErrorKind::kUnsupported, metadata_.path, "key {} differs between layers ({} and {}), which is not offered", key(name),
             list->front(), n);
      if (n < 1 || n > kMaxCount) fail(ErrorKind::kFormat, metadata_.path, "key {} holds {}, expected positive integers", key(name), n);
    }
    return list->front();
  }
  std::optional<double> positive(const char* name) const {
    const auto value = metadata_.number(key(name));
    if (value && (!std::isfinite(*value) || *value <= 0.0))
      fail(ErrorKind::kFormat, metadata_.path, "key {} is {}, expected a positive number", key(name), *value);
    return value;
  }

 private:
  const weights::GgufMetadata& metadata_;
  std::string arch_;
};

template <typename T>
T or_default(const std::optional<T>& value, T fallback, const std::string& key, ModelConfig& config) {
  if (value) return *value;
  config.defaults.push_back(fmt::format("{}={}", key, fallback));
  return fallback;
}

void refuse_other_features(const ArchitectureKeys& keys, const weights::GgufMetadata& metadata, const ModelConfig& config) {
  for (const char* name : {"attention.scale", "logit_scale", "embedding_scale", "residual_scale", "attn_logit_softcapping",
                           "final_logit_softcapping", "attention.clamp_kqv", "attention.max_alibi_bias"})
    if (const auto value = metadata.number(keys.key(name)); value && *value != 0.0)
      fail(ErrorKind::kUnsupported, metadata.path, "key {} = {} is not offered for {}", keys.key(name), *value, config.model_type);
  if (const auto experts = metadata.integer(keys.key("expert_count")); experts && *experts > 0)
    fail(ErrorKind::kUnsupported, metadata.path, "key {} = {}: mixtures of experts are not offered", keys.key("expert_count"), *experts);
  if (const auto value_length = keys.count("attention.value_length"); value_length && *value_length != config.head_dim)
    fail(ErrorKind::kUnsupported, metadata.path, "{} {} differs from the key length {}, which is not offered",
         keys.key("attention.value_length"), *value_length, config.head_dim);
  if (const auto rotary = keys.count("rope.dimension_count"); rotary && *rotary != config.head_dim)
    fail(*rotary % 2 != 0 || *rotary > config.head_dim ? ErrorKind::kFormat : ErrorKind::kUnsupported, metadata.path,
         "key {} is {} and head_dim is {}: partial rotation is not offered for {}", keys.key("rope.dimension_count"), *rotary,
         config.head_dim, config.model_type);
}

void read_rope(const ArchitectureKeys& keys, const weights::GgufMetadata& metadata, ModelConfig& config) {
  config.rope.theta = or_default(keys.positive("rope.freq_base"), 10000.0, keys.key("rope.freq_base"), config);
  const std::string type = metadata.text(keys.key("rope.scaling.type")).value_or("linear");
  auto factor = metadata.number(keys.key("rope.scaling.factor"));
  if (!factor) factor = metadata.number(keys.key("rope.scale_linear"));
  if (factor && (!std::isfinite(*factor) || *factor < 0.0))
    fail(ErrorKind::kFormat, metadata.path, "key {} is {}, expected a positive number", keys.key("rope.scaling.factor"), *factor);
  if (type == "none") return;
  if (type != "linear")
    fail(ErrorKind::kUnsupported, metadata.path, "key {} \"{}\" is not offered (none, linear; llama3 comes as rope_freqs.weight)",
         keys.key("rope.scaling.type"), to_valid_utf8(type));
  // A factor of 0 is what llama.cpp writes for "not scaled".
  if (factor && *factor != 0.0 && *factor != 1.0) {
    config.rope.scaling = RopeScaling::kLinear;
    config.rope.factor = *factor;
  }
}

/// GGUF files do not state query_pre_attn_scalar. Gemma 3's is head_dim, but for the 27B model, which llama.cpp knows by its 62
/// layers, the hidden size of a head.
double pre_attention_scalar(const ModelConfig& config) {
  constexpr std::int64_t kLayersOfGemma3_27B = 62;
  if (config.architecture->defaults.query_pre_attn_scalar > 0 && config.n_layers == kLayersOfGemma3_27B)
    return static_cast<double>(config.hidden_size / config.n_q_heads);
  return static_cast<double>(config.head_dim);
}

/// Windows by layer, and the RoPE base of the layers that have one where the family gives them their own.
void read_windows(const ArchitectureKeys& keys, const weights::GgufMetadata& metadata, const LogSink& log, ModelConfig& config) {
  const std::int64_t window = keys.count("attention.sliding_window", 0).value_or(0);
  config.sliding_window.assign(static_cast<std::size_t>(config.n_layers), window);
  const FamilyDefaults& family = config.architecture->defaults;
  if (config.architecture->window != WindowRule::kPattern || window == 0) {
    if (window) log.note(fmt::format("{}: sliding window of {} tokens in every layer", metadata.path, window));
    return;
  }
  const std::string key = keys.key("attention.sliding_window_pattern");
  const auto it = metadata.values.find(key);
  if (it != metadata.values.end() && std::holds_alternative<std::vector<std::int64_t>>(it->second)) {  // true = a window
    const auto& pattern = std::get<std::vector<std::int64_t>>(it->second);
    if (static_cast<std::int64_t>(pattern.size()) != config.n_layers)
      fail(ErrorKind::kFormat, metadata.path, "key {} has {} entries and {} is {}", key, pattern.size(), keys.key("block_count"), config.n_layers);
    for (std::size_t l = 0; l < pattern.size(); ++l) config.sliding_window[l] = pattern[l] != 0 ? window : 0;
  } else {
    const std::int64_t every = or_default(keys.count("attention.sliding_window_pattern"), family.window_pattern, key, config);
    for (std::int64_t l = every - 1; l < config.n_layers; l += every) config.sliding_window[static_cast<std::size_t>(l)] = 0;
  }
  config.local_rope.emplace();
  config.local_rope->theta = or_default(keys.positive("rope.freq_base_swa"), family.local_rope_theta, keys.key("rope.freq_base_swa"), config);
}

}  // namespace

ModelConfig parse_gguf_config(const weights::GgufMetadata& metadata, const LogSink& log) {
  ModelConfig config;
  const auto arch = metadata.text("general.architecture");
  if (!arch) fail(ErrorKind::kFormat, metadata.path, "key general.architecture is missing");
  config.architecture = find_gguf_architecture(*arch);
  if (!config.architecture)
    fail(ErrorKind::kUnsupported, metadata.path, "general.architecture \"{}\" is not offered ({})", to_valid_utf8(*arch),
         supported_model_types());
  const ArchitectureRow& row = *config.architecture;
  config.model_type = row.model_type;
  const ArchitectureKeys keys(metadata, *arch);

  config.n_layers = keys.required_count("block_count");
  check_layer_count(config.n_layers, keys.key("block_count"), metadata.path);
  config.hidden_size = keys.required_count("embedding_length");
  const auto ffn = keys.equal_count("feed_forward_length");
  if (!ffn) fail(ErrorKind::kFormat, metadata.path, "key {} is missing; expected a positive integer", keys.key("feed_forward_length"));
  config.intermediate_size = *ffn;
  const auto q_heads = keys.equal_count("attention.head_count");
  if (!q_heads) fail(ErrorKind::kFormat, metadata.path, "key {} is missing; expected a positive integer", keys.key("attention.head_count"));
  config.n_q_heads = *q_heads;
  config.n_kv_heads = or_default(keys.equal_count("attention.head_count_kv"), config.n_q_heads, keys.key("attention.head_count_kv"), config);
  config.head_dim = or_default(keys.count("attention.key_length"), config.hidden_size / config.n_q_heads,
                               keys.key("attention.key_length"), config);
  config.max_positions = or_default(keys.count("context_length"), row.defaults.max_positions, keys.key("context_length"), config);
  config.rms_epsilon = or_default(keys.positive("attention.layer_norm_rms_epsilon"), 1e-6,
                                  keys.key("attention.layer_norm_rms_epsilon"), config);
  if (row.bias == BiasRule::kQkv) config.attention_bias = true;
  check_heads(config, {keys.key("attention.head_count"), keys.key("attention.head_count_kv"), keys.key("attention.key_length"),
                       keys.key("embedding_length")}, metadata.path);
  refuse_other_features(keys, metadata, config);
  read_rope(keys, metadata, config);
  config.softmax_scale = 1.0 / std::sqrt(pre_attention_scalar(config));
  read_windows(keys, metadata, log, config);
  config.has_rope.assign(static_cast<std::size_t>(config.n_layers), 1);  // GGUF files do not state the interval
  if (const std::int64_t every = row.defaults.no_rope_interval; every > 0)
    for (std::int64_t l = every - 1; l < config.n_layers; l += every) config.has_rope[static_cast<std::size_t>(l)] = 0;
  return config;
}

}  // namespace calib::model

#include "libcalib/base/utf8.h"
#include "libcalib/model/architecture.h"
#include "libcalib/model/cache_geometry_layers.h"
#include "libcalib/model/config_checks.h"
#include "libcalib/weights/gguf.h"

namespace calib::model {
namespace {

constexpr std::int64_t kMaxCount = std::int64_t{1} << 31;

/// "<arch>.<name>"; a number, or one per layer.
class ArchKeys {
 public:
  ArchKeys(const weights::GgufMetadata& metadata, const std::string& arch) : metadata_(metadata), arch_(arch) {}
  std::string key(const char* name) const { return arch_ + "." + name; }
  std::optional<std::int64_t> count(const char* name, std::int64_t least = 1) const {
    const auto value = metadata_.integer(key(name));
    if (value) check(name, *value, least);
    return value;
  }
  std::int64_t required(const char* name) const {
    const auto value = count(name);
    if (!value) fail(ErrorKind::kFormat, metadata_.path, "key {} is missing; expected a positive integer", key(name));
    return *value;
  }
  bool is_list(const char* name) const {
    const auto it = metadata_.values.find(key(name));
    return it != metadata_.values.end() && std::holds_alternative<std::vector<std::int64_t>>(it->second);
  }
  std::vector<std::int64_t> per_layer(const char* name, std::int64_t n_layers, std::int64_t least) const {
    if (!is_list(name)) {
      const auto value = count(name, least);
      return value ? std::vector<std::int64_t>(static_cast<std::size_t>(n_layers), *value) : std::vector<std::int64_t>{};
    }
    const std::vector<std::int64_t>& list = *metadata_.integers(key(name));
    if (list.size() != static_cast<std::size_t>(n_layers))
      fail(ErrorKind::kFormat, metadata_.path, "key {} has {} entries for {} layers", key(name), list.size(), n_layers);
    for (const std::int64_t n : list) check(name, n, least);
    return list;
  }

 private:
  void check(const char* name, std::int64_t value, std::int64_t least) const {
    if (value < least || value > kMaxCount)
      fail(ErrorKind::kFormat, metadata_.path, "key {} is {}, expected an integer from {} to {}", key(name), value, least, kMaxCount);
  }
  const weights::GgufMetadata& metadata_;
  const std::string& arch_;
};

}  // namespace

CacheGeometry parse_gguf_cache_geometry(const weights::GgufMetadata& metadata) {
  const auto arch = metadata.text("general.architecture");
  if (!arch) fail(ErrorKind::kFormat, metadata.path, "key general.architecture is missing (a later part of a split model? name the first)");
  const ArchKeys keys(metadata, *arch);
  CacheGeometry out;
  const ArchitectureRow* const row = find_gguf_architecture(*arch);
  out.model_type = row ? row->model_type : *arch;  // the name that every file of ours has
  for (const char* key : {"attention.kv_lora_rank", "attention.key_length_swa", "attention.chunk_size"})
    if (metadata.has(keys.key(key))) fail(ErrorKind::kUnsupported, metadata.path, "key {}: a cache of this kind is not counted by this version", keys.key(key));
  out.n_layers = keys.required("block_count");
  check_layer_count(out.n_layers, keys.key("block_count"), metadata.path);
  out.max_positions = keys.count("context_length").value_or(0);

  CacheLayers layers;
  layers.where = metadata.path;
  layers.q_heads = keys.per_layer("attention.head_count", out.n_layers, 0);
  if (layers.q_heads.empty()) fail(ErrorKind::kFormat, metadata.path, "key {} is missing; expected a positive integer", keys.key("attention.head_count"));
  layers.kv_heads = keys.per_layer("attention.head_count_kv", out.n_layers, 0);
  if (layers.kv_heads.empty()) layers.kv_heads = layers.q_heads;
  std::int64_t most_heads = 0;
  for (const std::int64_t heads : layers.q_heads) most_heads = std::max(most_heads, heads);
  if (most_heads == 0) fail(ErrorKind::kFormat, metadata.path, "key {} is 0 in every layer", keys.key("attention.head_count"));
  layers.head_dim = keys.count("attention.key_length").value_or(keys.required("embedding_length") / most_heads);
  if (const auto values = keys.count("attention.value_length"); values && *values != layers.head_dim)
    fail(ErrorKind::kUnsupported, metadata.path, "keys of {} and values of {} channels: a cache of this kind is not counted by this version", layers.head_dim,
         *values);
  layers.sliding_window = keys.count("attention.sliding_window", 0).value_or(0);
  layers.n_shared = keys.count("attention.shared_kv_layers", 0).value_or(0);

  const auto n = static_cast<std::size_t>(out.n_layers);
  if (const auto interval = keys.count("full_attention_interval")) {
    layers.kind = every_nth_full(out.n_layers, *interval, LayerKind::kNone);
  } else if (layers.sliding_window == 0) {
    layers.kind.assign(n, LayerKind::kFull);
  } else if (keys.is_list("attention.sliding_window_pattern")) {
    for (const std::int64_t slides : keys.per_layer("attention.sliding_window_pattern", out.n_layers, 0))
      layers.kind.push_back(slides ? LayerKind::kSliding : LayerKind::kFull);
  } else if (const auto pattern = keys.count("attention.sliding_window_pattern")) {
    layers.kind = every_nth_full(out.n_layers, *pattern, LayerKind::kSliding);
  } else if (const auto period = *arch == "llama" ? std::optional<std::int64_t>(0) : known_sliding_period(*arch)) {
    if (*period == 0) layers.kind.assign(n, LayerKind::kSliding);
    else layers.kind = every_nth_full(out.n_layers, *period, LayerKind::kSliding);
  } else {
    fail(ErrorKind::kUnsupported, metadata.path, "key {} is {}, but which layers of a {} slide is not known; use the model's config.json with layer_types",
         keys.key("attention.sliding_window"), layers.sliding_window, to_valid_utf8(*arch));
  }
  fill_cache_layers(layers, out);
  return out;
}

}  // namespace calib::model

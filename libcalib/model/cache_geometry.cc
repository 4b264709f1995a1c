#include "libcalib/model/cache_geometry.h"

#include <filesystem>

#include <nlohmann/json.hpp>

#include "libcalib/base/json.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/base/utf8.h"
#include "libcalib/model/architecture.h"
#include "libcalib/model/cache_geometry_layers.h"
#include "libcalib/model/config_checks.h"
#include "libcalib/weights/gguf.h"

namespace calib::model {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxCount = std::int64_t{1} << 31;

/// Keys of one object; null counts as absent. The same thing has other names in other families.
class Keys {
 public:
  Keys(const json& object, const std::string& path) : object_(object), path_(path) {}

  const json* find(std::initializer_list<const char*> names, const char** found = nullptr) const {
    for (const char* name : names)
      if (const auto it = object_.find(name); it != object_.end() && !it->is_null()) {
        if (found) *found = name;
        return &*it;
      }
    return nullptr;
  }
  std::int64_t count_of(const json& value, const char* name, std::int64_t least) const {
    if (!value.is_number_integer() || value.get<double>() < static_cast<double>(least) || value.get<double>() > static_cast<double>(kMaxCount))
      fail(ErrorKind::kFormat, path_, "key {} is {}, expected an integer from {} to {}", name,
           to_valid_utf8(value.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 60)), least, kMaxCount);
    return value.get<std::int64_t>();
  }
  std::optional<std::int64_t> count(std::initializer_list<const char*> names, std::int64_t least = 1) const {
    const char* name = nullptr;
    const json* value = find(names, &name);
    if (!value) return std::nullopt;
    return count_of(*value, name, least);
  }
  std::int64_t required(std::initializer_list<const char*> names) const {
    const auto value = count(names);
    if (!value) fail(ErrorKind::kFormat, path_, "key {} is missing; expected a positive integer", *names.begin());
    return *value;
  }
  /// One number for all layers, or a list with one for each. Empty if absent.
  std::vector<std::int64_t> per_layer(std::initializer_list<const char*> names, std::int64_t n_layers) const {
    const char* name = nullptr;
    const json* value = find(names, &name);
    if (!value) return {};
    if (!value->is_array()) return std::vector<std::int64_t>(static_cast<std::size_t>(n_layers), count_of(*value, name, 1));
    if (value->size() != static_cast<std::size_t>(n_layers)) fail(ErrorKind::kFormat, path_, "key {} has {} entries for {} layers", name, value->size(), n_layers);
    std::vector<std::int64_t> list;
    for (const json& item : *value) list.push_back(count_of(item, name, 1));
    return list;
  }
  std::string text(const char* name) const {
    const json* value = find({name});
    if (!value) return "";
    if (!value->is_string()) fail(ErrorKind::kFormat, path_, "key {} is not a string", name);
    return value->get<std::string>();
  }
  bool flag(const char* name, bool absent) const {
    const json* value = find({name});
    if (!value) return absent;
    if (!value->is_boolean()) fail(ErrorKind::kFormat, path_, "key {} is neither true nor false", name);
    return value->get<bool>();
  }
  const std::string& path() const { return path_; }

 private:
  const json& object_;
  const std::string& path_;
};

LayerKind kind_of(const json& name, const std::string& path) {
  const std::string text = name.is_string() ? name.get<std::string>() : "";
  if (text == "full_attention" || text == "attention") return LayerKind::kFull;
  if (text == "sliding_attention") return LayerKind::kSliding;
  if (text == "linear_attention" || text == "mamba" || text == "conv" || text == "recurrent") return LayerKind::kNone;
  fail(ErrorKind::kUnsupported, path,
       "layer_types holds {}, whose cache is not known; known: full_attention, sliding_attention, linear_attention, mamba, conv, recurrent",
       to_valid_utf8(name.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 60)));
}

std::vector<LayerKind> layer_kinds(const Keys& keys, const std::string& model_type, std::int64_t n, std::int64_t window) {
  const auto all = [&](LayerKind kind) { return std::vector<LayerKind>(static_cast<std::size_t>(n), kind); };
  if (const json* types = keys.find({"layer_types", "layers_block_type"})) {
    if (!types->is_array() || types->size() != static_cast<std::size_t>(n))
      fail(ErrorKind::kFormat, keys.path(), "layer_types is not a list with one entry for each of {} layers", n);
    std::vector<LayerKind> kinds;
    for (const json& type : *types) kinds.push_back(kind_of(type, keys.path()));
    return kinds;
  }
  if (const auto interval = keys.count({"full_attention_interval"})) return every_nth_full(n, *interval, LayerKind::kNone);
  if (const auto period = keys.count({"attn_layer_period"})) {
    const std::int64_t offset = keys.count({"attn_layer_offset"}, 0).value_or(0);
    std::vector<LayerKind> kinds = all(LayerKind::kNone);
    for (std::int64_t l = 0; l < n; ++l)
      if (l % *period == offset) kinds[static_cast<std::size_t>(l)] = LayerKind::kFull;
    return kinds;
  }
  const ArchitectureRow* const row = find_model_type(model_type);
  const WindowRule rule = row ? row->window : keys.find({"use_sliding_window"}) ? WindowRule::kUseSlidingWindow : WindowRule::kAllLayers;
  if (window == 0 || rule == WindowRule::kNone) return all(LayerKind::kFull);
  if (rule == WindowRule::kUseSlidingWindow) {
    if (!keys.flag("use_sliding_window", false)) return all(LayerKind::kFull);
    const std::int64_t first = keys.count({"max_window_layers"}, 0).value_or(28);
    std::vector<LayerKind> kinds = all(LayerKind::kSliding);
    for (std::int64_t l = 0; l < std::min(first, n); ++l) kinds[static_cast<std::size_t>(l)] = LayerKind::kFull;
    return kinds;
  }
  if (const auto pattern = keys.count({"sliding_window_pattern"})) return every_nth_full(n, *pattern, LayerKind::kSliding);
  if (const auto period = known_sliding_period(model_type)) return *period == 0 ? all(LayerKind::kSliding) : every_nth_full(n, *period, LayerKind::kSliding);
  fail(ErrorKind::kUnsupported, keys.path(), "sliding_window is {}, but which layers of a {} slide is not known; add the key layer_types", window,
       to_valid_utf8(model_type));
}

}  // namespace

std::vector<LayerKind> every_nth_full(std::int64_t n_layers, std::int64_t period, LayerKind others) {
  std::vector<LayerKind> kinds;
  for (std::int64_t l = 0; l < n_layers; ++l) kinds.push_back((l + 1) % period == 0 ? LayerKind::kFull : others);
  return kinds;
}

std::optional<std::int64_t> known_sliding_period(const std::string& model_type) {
  for (const char* all : {"mistral", "mixtral", "phi3", "starcoder2"})
    if (model_type == all) return 0;
  if (model_type == "gemma2") return 2;
  if (model_type == "cohere2") return 4;
  if (model_type == "gemma3n" || model_type == "gemma3n_text") return 5;
  if (model_type == "gemma3" || model_type == "gemma3_text") return 6;
  return std::nullopt;
}

void fill_cache_layers(const CacheLayers& in, CacheGeometry& out) {
  const auto n = static_cast<std::int64_t>(in.kind.size());
  if (in.n_shared >= n && in.n_shared > 0) fail(ErrorKind::kFormat, in.where, "{} of {} layers share keys and values with others", in.n_shared, n);
  if (in.head_dim < 1) fail(ErrorKind::kFormat, in.where, "head_dim is {}", in.head_dim);
  for (std::int64_t l = 0; l < n; ++l) {
    const auto at = static_cast<std::size_t>(l);
    if (in.kind[at] == LayerKind::kNone || in.kv_heads[at] == 0) {
      ++out.n_without;
      continue;
    }
    if (l >= n - in.n_shared) {
      ++out.n_shared;
      continue;
    }
    if (in.kv_heads[at] > in.q_heads[at] || in.q_heads[at] % in.kv_heads[at] != 0)
      fail(ErrorKind::kFormat, in.where, "layer {} has {} KV heads for {} query heads", l, in.kv_heads[at], in.q_heads[at]);
    LayerGeometry g;
    g.index = static_cast<int>(l);
    g.n_q_heads = static_cast<int>(in.q_heads[at]);
    g.n_kv_heads = static_cast<int>(in.kv_heads[at]);
    g.head_dim = g.rotary_dim = static_cast<int>(in.head_dim);
    g.sliding_window = in.kind[at] == LayerKind::kSliding ? in.sliding_window : 0;
    out.layers.push_back(std::move(g));
  }
  if (out.layers.empty()) fail(ErrorKind::kFormat, in.where, "no layer has a KV cache");
}

CacheGeometry parse_hf_cache_geometry(std::string_view text, const std::string& path) {
  const json whole = parse_json_strict(text, path);
  if (!whole.is_object()) fail(ErrorKind::kFormat, path, "not a JSON object");
  const auto nested = whole.find("text_config");
  const json& object = nested != whole.end() && nested->is_object() ? *nested : whole;
  const Keys keys(object, path);
  CacheGeometry out;
  out.model_type = keys.text("model_type");
  for (const char* key : {"kv_lora_rank", "global_head_dim", "num_global_key_value_heads", "v_head_dim", "attention_chunk_size"})
    if (keys.find({key})) fail(ErrorKind::kUnsupported, path, "key {}: a cache of this kind is not counted by this version", key);
  out.n_layers = keys.required({"num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_transformer_layers"});
  check_layer_count(out.n_layers, "num_hidden_layers", path);
  out.max_positions = keys.count({"max_position_embeddings", "n_positions", "max_context_length", "max_seq_len"}).value_or(0);

  CacheLayers layers;
  layers.where = path;
  layers.q_heads = keys.per_layer({"num_attention_heads", "n_head", "n_heads", "num_query_heads"}, out.n_layers);
  if (layers.q_heads.empty()) fail(ErrorKind::kFormat, path, "key num_attention_heads is missing; expected a positive integer");
  layers.kv_heads = keys.per_layer({"num_key_value_heads", "num_kv_heads", "n_head_kv"}, out.n_layers);
  if (layers.kv_heads.empty()) layers.kv_heads = keys.flag("multi_query", false) ? std::vector<std::int64_t>(layers.q_heads.size(), 1) : layers.q_heads;
  if (const auto dim = keys.count({"head_dim", "d_kv"})) {
    layers.head_dim = *dim;
  } else {
    const std::int64_t hidden = keys.required({"hidden_size", "n_embd", "d_model", "model_dim"});
    if (hidden % layers.q_heads.front() != 0)
      fail(ErrorKind::kFormat, path, "head_dim is missing and hidden_size {} is no multiple of {} heads", hidden, layers.q_heads.front());
    layers.head_dim = hidden / layers.q_heads.front();
  }
  const ArchitectureRow* const row = find_model_type(out.model_type);
  layers.sliding_window = keys.count({"sliding_window"}, 0).value_or(row && !object.contains("sliding_window") ? row->defaults.sliding_window : 0);
  layers.kind = layer_kinds(keys, out.model_type, out.n_layers, layers.sliding_window);
  layers.n_shared = keys.count({"num_kv_shared_layers"}, 0).value_or(0);
  for (const LayerKind kind : layers.kind)
    if (kind == LayerKind::kSliding && layers.sliding_window == 0) fail(ErrorKind::kFormat, path, "layers slide, but the key sliding_window is missing");
  fill_cache_layers(layers, out);
  return out;
}

CacheGeometry read_cache_geometry(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::string file = path;
  if (fs::is_directory(path, ignored)) {
    file = (fs::path(path) / "config.json").string();
    if (!fs::exists(file, ignored)) fail(ErrorKind::kNotFound, path, "holds no config.json; name a model's folder, its config.json or a GGUF file");
  }
  require_file(file, "name a model's folder, its config.json or a GGUF file");
  const MappedFile mapped(file);
  if (mapped.bytes().substr(0, 4) == "GGUF") return parse_gguf_cache_geometry(weights::parse_gguf_metadata(mapped));
  if (const std::string what = describe_foreign_content(mapped.bytes()); !what.empty())
    fail(ErrorKind::kFormat, file, "{}; expected config.json or a GGUF file", what);
  return parse_hf_cache_geometry(mapped.bytes(), file);
}

}  // namespace calib::model

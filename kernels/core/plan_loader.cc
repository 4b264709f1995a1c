#include "kernels/core/plan_loader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "kernels/codec/hadamard_order.h"
#include "kernels/core/plan_constants.h"
#include "kernels/core/sha256.h"

namespace kvrt {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxJsonBytes = std::int64_t{1} << 28;
constexpr std::int64_t kMaxTensorBytes = std::int64_t{1} << 32;
constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{1} << 26;
constexpr int kMaxDepth = 32;  // plans need 7

/// Inside this file only; read_plan() makes a Status of it.
struct PlanError {
  Code code;
  std::string text;
};
[[noreturn]] void fail(Code code, std::string text) { throw PlanError{code, std::move(text)}; }
[[noreturn]] void bad(const std::string& where, const std::string& expected) { fail(Code::kFormat, where + ": expected " + expected); }

/// Texts of a file go into messages: printable, and not endless.
std::string in_quotes(const std::string& text) {
  std::string out = "\"";
  for (const char c : text.substr(0, 80)) out += c >= 0x20 && c < 0x7F ? c : '?';
  return out + (text.size() > 80 ? "...\"" : "\"");
}

/// The document, without keys that stand twice in one object: readers would disagree on which one counts.
json parse(std::string_view text, const std::string& what) {
  std::vector<std::set<std::string>> keys;
  std::string problem;
  const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMaxDepth && problem.empty()) problem = "nested deeper than " + std::to_string(kMaxDepth) + " levels";
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.empty()) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second && problem.empty()) problem = "key " + in_quotes(key) + " stands twice in one object";
    }
    return problem.empty();
  };
  json document;
  try {
    document = json::parse(text.begin(), text.end(), check);
  } catch (const json::exception& e) {
    if (problem.empty()) problem = std::string("not valid JSON: ") + e.what();
  }
  if (!problem.empty()) fail(Code::kFormat, what + ": " + problem);
  if (!document.is_object()) fail(Code::kFormat, what + ": expected a JSON object");
  return document;
}

/// One value and where it stands.
struct Node {
  const json* value;
  std::string where;

  bool has(const char* key) const { return value->is_object() && value->contains(key); }
  Node at(const char* key) const {
    if (!value->is_object()) bad(where, "an object");
    const auto it = value->find(key);
    if (it == value->end()) fail(Code::kFormat, where + "/" + key + " is missing");
    return {&*it, where + "/" + key};
  }
  std::size_t size() const {
    if (!value->is_array()) bad(where, "a list");
    return value->size();
  }
  Node element(std::size_t i) const { return {&(*value)[i], where + "/" + std::to_string(i)}; }
  std::string text() const {
    if (!value->is_string()) bad(where, "a string");
    return value->get<std::string>();
  }
  std::int64_t integer(std::int64_t low, std::int64_t high) const {
    const std::string range = "a whole number of " + std::to_string(low) + " to " + std::to_string(high);
    if (!value->is_number_integer()) bad(where, range);
    if (value->is_number_unsigned() && value->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) bad(where, range);
    const auto x = value->get<std::int64_t>();
    if (x < low || x > high) bad(where, range + ", got " + std::to_string(x));
    return x;
  }
  int count() const { return static_cast<int>(integer(0, INT32_MAX)); }
  double number() const {
    if (!value->is_number()) bad(where, "a number");
    const auto x = value->get<double>();
    if (!std::isfinite(x)) bad(where, "a finite number");
    return x;
  }
};

/// One array of the .safetensors file, F32 or I32; values are unaligned bytes.
struct Tensor {
  bool integer = false;
  std::vector<std::int64_t> shape;
  std::string_view bytes;
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

std::map<std::string, Tensor> read_tensors(std::string_view file) {
  const std::string what = "plan tensors";
  std::uint64_t length = 0;
  if (file.size() < 8) fail(Code::kFormat, what + ": " + std::to_string(file.size()) + " bytes, expected a safetensors file");
  for (std::size_t i = 0; i < 8; ++i) length |= static_cast<std::uint64_t>(static_cast<unsigned char>(file[i])) << (8 * i);
  if (length > kMaxHeaderBytes || length > file.size() - 8) {
    fail(Code::kFormat, what + ": header length " + std::to_string(length) + " does not fit a file of " + std::to_string(file.size()) + " bytes");
  }
  const json header = parse(file.substr(8, static_cast<std::size_t>(length)), what + " header");
  const std::string_view data = file.substr(8 + static_cast<std::size_t>(length));
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const Node node{&entry, what + " " + in_quotes(name)};
    const std::string dtype = node.at("dtype").text();
    if (dtype != "F32" && dtype != "I32") bad(node.at("dtype").where, "F32 or I32");
    Tensor tensor;
    tensor.integer = dtype == "I32";
    const Node shape = node.at("shape"), offsets = node.at("data_offsets");
    std::int64_t bytes = 4;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      tensor.shape.push_back(shape.element(i).integer(0, INT64_MAX));
      if (__builtin_mul_overflow(bytes, tensor.shape.back(), &bytes)) bad(shape.where, "a product below 2^63");
    }
    if (offsets.size() != 2) bad(offsets.where, "two numbers");
    const std::int64_t size = static_cast<std::int64_t>(data.size());
    const std::int64_t begin = offsets.element(0).integer(0, size), end = offsets.element(1).integer(begin, size);
    if (end - begin != bytes) bad(offsets.where, std::to_string(bytes) + " bytes, as the shape says");
    tensor.bytes = data.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(bytes));
    tensors.emplace(name, std::move(tensor));
  }
  return tensors;
}

/// What a kvrt_unit_view points to.
struct UnitStorage {
  std::string scheme, chan_perm, block_order;
  std::map<std::string, std::vector<float>> floats;  ///< by name of the constant
  std::vector<std::int32_t> ef_order;

  const float* values(const char* name) const {
    const auto it = floats.find(name);
    return it == floats.end() ? nullptr : it->second.data();
  }
};
struct LayerStorage {
  std::vector<double> inv_freq;
  UnitStorage units[KVRT_SIDES];
};

class PlanReader {
 public:
  PlanReader(const json& document, std::string_view file) : root_{&document, ""} {
    if (!root_.at("tensors").value->is_null()) tensors_ = read_tensors(file);
  }
  Status read(Plan* out);

 private:
  void read_model();
  void read_layer(const Node& node, std::size_t slot);
  void read_unit(const Node& node, CacheSide side, const kvrt_layer_view& layer, UnitStorage* storage, kvrt_unit_view* view);
  void read_params(const Node& node, const std::string& prefix, const std::vector<PlanConstant>& constants, UnitStorage* storage);
  void check_rope();

  Node root_;
  std::map<std::string, Tensor> tensors_;
  std::size_t n_tensors_used_ = 0;
  std::string architecture_, name_, sha256_;
  std::vector<kvrt_layer_view> layers_;
  std::vector<LayerStorage> storage_;
};

void PlanReader::read_model() {
  const Node model = root_.at("model"), layers = model.at("layers");
  architecture_ = model.at("architecture").text(), name_ = model.at("name").text(), sha256_ = model.at("weights_sha256").text();
  if (layers.size() == 0 || layers.size() > static_cast<std::size_t>(model.at("n_layers").count())) {
    bad(layers.where, "1 to n_layers = " + std::to_string(model.at("n_layers").count()) + " entries");
  }
  layers_.resize(layers.size());
  storage_.resize(layers.size());
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const Node g = layers.element(l);
    kvrt_layer_view& view = layers_[l];
    view.index = g.at("index").count();
    if (l > 0 && view.index <= layers_[l - 1].index) {
      fail(Code::kFormat, g.where + ": layer " + std::to_string(view.index) + (view.index == layers_[l - 1].index ? " is there twice" : " is out of order"));
    }
    view.n_q_heads = g.at("n_q_heads").count(), view.n_kv_heads = g.at("n_kv_heads").count(), view.head_dim = g.at("head_dim").count();
    view.rotary_dim = g.at("rotary_dim").count();
    const std::string style = g.at("rope_style").text();
    if (style != "none" && style != "half_split" && style != "interleaved") bad(g.at("rope_style").where, "none, half_split or interleaved");
    view.rope_style = style == "none" ? KVRT_ROPE_NONE : style == "half_split" ? KVRT_ROPE_HALF_SPLIT : KVRT_ROPE_INTERLEAVED;
    view.attention_factor = g.at("attention_factor").number(), view.softmax_scale = g.at("softmax_scale").number();
    view.sliding_window = g.at("sliding_window").integer(0, INT64_MAX);
    const Node inv_freq = g.at("inv_freq");
    if (view.rope_style == KVRT_ROPE_NONE) view.rotary_dim = 0;
    if (inv_freq.size() != static_cast<std::size_t>(view.rotary_dim / 2)) {
      bad(inv_freq.where, std::to_string(view.rotary_dim / 2) + " frequencies for rotary_dim " + std::to_string(view.rotary_dim));
    }
    for (std::size_t i = 0; i < inv_freq.size(); ++i) storage_[l].inv_freq.push_back(inv_freq.element(i).number());
    view.inv_freq = storage_[l].inv_freq.data();
  }
}

template <class T>
std::vector<T> copy_values(const Tensor& tensor) {
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

void PlanReader::read_params(const Node& node, const std::string& prefix, const std::vector<PlanConstant>& constants, UnitStorage* storage) {
  if (!node.value->is_object()) bad(node.where, "an object");
  for (const auto& item : node.value->items()) {
    const bool known = std::any_of(constants.begin(), constants.end(), [&](const PlanConstant& c) { return item.key() == c.name; });
    // `scale` is clip_hi over the largest value of the format, for other readers.
    if (!known && item.key() != "scale") fail(Code::kFormat, node.where + ": " + storage->scheme + " has no " + in_quotes(item.key()));
  }
  for (const PlanConstant& constant : constants) {
    const Node reference = node.at(constant.name), shape = reference.at("shape");
    const std::string name = reference.at("tensor").text();
    if (name != prefix + constant.name) bad(reference.where + "/tensor", in_quotes(prefix + constant.name) + ", got " + in_quotes(name));
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail(Code::kMismatch, reference.where + ": the tensors of this plan do not hold " + in_quotes(name));
    const Tensor& tensor = found->second;
    std::vector<std::int64_t> stated, expected{constant.shape[0]};
    if (constant.shape[1]) expected.push_back(constant.shape[1]);
    for (std::size_t i = 0; i < shape.size(); ++i) stated.push_back(shape.element(i).integer(0, INT64_MAX));
    if (stated != expected) bad(shape.where, shape_text(expected) + " for " + storage->scheme + ", got " + shape_text(stated));
    if (tensor.shape != expected || tensor.integer != constant.integer) {
      fail(Code::kMismatch, "tensor " + in_quotes(name) + " is " + (tensor.integer ? "I32 " : "F32 ") + shape_text(tensor.shape) + ", expected " +
                                (constant.integer ? "I32 " : "F32 ") + shape_text(expected));
    }
    if (constant.integer) storage->ef_order = copy_values<std::int32_t>(tensor);
    else storage->floats[constant.name] = copy_values<float>(tensor);
    ++n_tensors_used_;
  }
}

void PlanReader::read_unit(const Node& node, CacheSide side, const kvrt_layer_view& layer, UnitStorage* storage, kvrt_unit_view* view) {
  const bool is_key = side == CacheSide::kK;
  storage->scheme = node.at("scheme").text();
  Scheme scheme;
  std::string error;
  if (const std::string text = other_encoding(storage->scheme); !text.empty()) fail(Code::kUnsupported, node.where + "/scheme: " + text);
  if (!parse_scheme(storage->scheme, &scheme, &error)) fail(Code::kFormat, node.where + "/scheme " + in_quotes(storage->scheme) + ": " + error);
  if (const std::string text = check_shape(scheme, layer.head_dim, is_key); !text.empty()) {
    fail(Code::kFormat, "layer " + std::to_string(layer.index) + (is_key ? " K " : " V ") + in_quotes(storage->scheme) + ": " + text);
  }
  if (node.at("bits").count() != code_bits(scheme.format)) bad(node.at("bits").where, std::to_string(code_bits(scheme.format)) + ", as the scheme says");
  if (is_key && node.at("frame").text() != (scheme.pre ? "pre" : "post"))
    bad(node.at("frame").where, std::string(scheme.pre ? "pre" : "post") + ", as the scheme says");
  const HadamardOrder order = !scheme.had ? HadamardOrder{} : is_llamacpp_block(scheme.format) ? llamacpp_hadamard_order(layer.head_dim, is_key)
                                                                                               : hadamard_order(layer.head_dim);
  const Node rotation = node.at("rotation");
  if (rotation.value->is_null() != !scheme.had) bad(rotation.where, scheme.had ? "the rotation of had" : "null, as the scheme says");
  if (scheme.had && (rotation.at("kind").text() != "hadamard" || rotation.at("size").count() != order.size || rotation.at("base").count() != order.base ||
                     rotation.at("power").count() != order.power)) {
    bad(rotation.where, "hadamard, size " + std::to_string(order.size) + ", base " + std::to_string(order.base) + ", power " + std::to_string(order.power));
  }
  storage->chan_perm = node.at("chan_perm").text();
  view->chan_perm = storage->chan_perm.c_str();
  if (node.has("block_order")) {
    storage->block_order = node.at("block_order").text();
    view->block_order = storage->block_order.c_str();
  }
  read_params(node.at("params"), "layers." + std::to_string(layer.index) + (is_key ? ".k." : ".v."),
              plan_constants(scheme, layer.n_kv_heads, layer.head_dim), storage);
  view->scheme = storage->scheme.c_str();
  view->mean = storage->values("mean"), view->smooth = storage->values("smooth");
  view->clip_lo = storage->values("clip_lo"), view->clip_hi = storage->values("clip_hi");
  view->clip_alpha = storage->values("clip_alpha"), view->codebook = storage->values("codebook");
  view->basis_mean = storage->values("basis_mean"), view->basis_in = storage->values("basis_in"), view->basis = storage->values("basis");
  view->ef_u = storage->values("ef_u");
  view->ef_order = storage->ef_order.empty() ? nullptr : storage->ef_order.data();
}

void PlanReader::read_layer(const Node& node, std::size_t slot) {
  kvrt_layer_view& view = layers_[slot];
  const Node tiers = root_.at("tiers");
  view.sink_tokens = tiers.at("sink_tokens").integer(0, INT64_MAX);
  view.window_tokens = node.has("window_tokens") ? node.at("window_tokens").integer(0, INT64_MAX) : tiers.at("window_tokens").integer(0, INT64_MAX);
  view.salient_fraction = node.at("salient_fraction").number();
  if (view.salient_fraction != 0) fail(Code::kUnsupported, node.where + "/salient_fraction: a salient tier is not offered by this build");
  read_unit(node.at("k"), CacheSide::kK, view, &storage_[slot].units[KVRT_K], &view.k);
  read_unit(node.at("v"), CacheSide::kV, view, &storage_[slot].units[KVRT_V], &view.v);
}

/// runtime.rope says once more, by groups of layers, what /model/layers says.
void PlanReader::check_rope() {
  const Node classes = root_.at("runtime").at("rope");
  std::set<int> seen;
  for (std::size_t c = 0; c < classes.size(); ++c) {
    const Node rope = classes.element(c), members = rope.at("layers"), inv_freq = rope.at("inv_freq");
    const std::string layout = rope.at("layout").text();
    for (std::size_t m = 0; m < members.size(); ++m) {
      const int index = members.element(m).count();
      std::size_t l = 0;
      while (l < layers_.size() && layers_[l].index != index) ++l;
      if (l == layers_.size() || !seen.insert(index).second) bad(members.where, "every layer of /model/layers once");
      const kvrt_layer_view& view = layers_[l];
      const char* const style = view.rope_style == KVRT_ROPE_NONE ? "none" : view.rope_style == KVRT_ROPE_HALF_SPLIT ? "half_split" : "interleaved";
      bool same = layout == style && rope.at("attention_factor").number() == view.attention_factor && inv_freq.size() == storage_[l].inv_freq.size() &&
                  (view.rope_style == KVRT_ROPE_NONE || rope.at("rotary_width").count() == view.rotary_dim);
      for (std::size_t i = 0; same && i < inv_freq.size(); ++i) same = inv_freq.element(i).number() == storage_[l].inv_freq[i];
      if (!same) bad(rope.where, "what /model/layers says of layer " + std::to_string(index));
    }
  }
  if (seen.size() != layers_.size()) bad(classes.where, "every layer of /model/layers once");
}

Status PlanReader::read(Plan* out) {
  if (const Node schema = root_.at("schema"); schema.at("name").text() != "kvcalib.plan") bad(schema.where + "/name", "kvcalib.plan");
  if (const int version = root_.at("schema").at("version").count(); version != 1) {
    fail(Code::kUnsupported, "/schema/version is " + std::to_string(version) + "; this build reads version 1");
  }
  if (const Node target = root_.at("request").at("target"); target.text() != "native") {
    fail(Code::kUnsupported, target.where + " is " + in_quotes(target.text()) + "; this build runs plans for native");
  }
  if (!root_.at("tiers").at("salient").value->is_null()) fail(Code::kUnsupported, "/tiers/salient: a salient tier is not offered by this build");
  read_model();
  const Node layers = root_.at("layers");
  std::vector<bool> seen(layers_.size(), false);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Node node = layers.element(i);
    const int index = node.at("index").count();
    std::size_t slot = 0;
    while (slot < layers_.size() && layers_[slot].index != index) ++slot;
    if (slot == layers_.size()) fail(Code::kFormat, node.where + ": layer " + std::to_string(index) + " is none of /model/layers");
    if (seen[slot]) fail(Code::kFormat, node.where + ": layer " + std::to_string(index) + " is there twice");
    seen[slot] = true;
    read_layer(node, slot);
  }
  for (std::size_t l = 0; l < seen.size(); ++l) {
    if (!seen[l]) fail(Code::kFormat, "/layers has no entry for layer " + std::to_string(layers_[l].index));
  }
  if (n_tensors_used_ != tensors_.size()) {
    fail(Code::kMismatch, "the tensors hold " + std::to_string(tensors_.size()) + " arrays, of which the plan uses " + std::to_string(n_tensors_used_));
  }
  check_rope();
  const Node runtime = root_.at("runtime");
  kvrt_plan_view view = {};
  view.architecture = architecture_.c_str(), view.model_name = name_.c_str(), view.weights_sha256 = sha256_.c_str();
  view.n_layers = static_cast<std::int32_t>(layers_.size());
  view.layers = layers_.data();
  view.page_tokens = runtime.at("page_tokens").count();
  view.scale_refresh_tokens = runtime.at("scale_refresh_tokens").count();
  return make_plan(view, out);
}

std::string read_file(const std::string& path, std::int64_t limit) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) fail(Code::kIo, path + ": is a folder, expected a file");
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  const std::int64_t size = in ? static_cast<std::int64_t>(in.tellg()) : -1;
  if (size < 0) fail(Code::kIo, path + ": cannot be opened");
  if (size > limit) fail(Code::kIo, path + ": " + std::to_string(size) + " bytes, expected at most " + std::to_string(limit));
  std::string bytes(static_cast<std::size_t>(size), '\0');
  in.seekg(0);
  if (size > 0 && !in.read(bytes.data(), size)) fail(Code::kIo, path + ": cannot be read");
  return bytes;
}

Status read_document(const json& document, std::string_view tensors, Plan* out) {
  const Node named = Node{&document, ""}.at("tensors");
  if (named.value->is_null() && !tensors.empty()) fail(Code::kMismatch, "/tensors is null, but tensors are given");
  Plan plan;
  if (Status status = PlanReader(document, tensors).read(&plan); !status.ok()) return status;
  if (!named.value->is_null()) {
    if (named.at("bytes").integer(0, INT64_MAX) != static_cast<std::int64_t>(tensors.size())) {
      fail(Code::kMismatch, "/tensors/bytes is " + named.at("bytes").value->dump() + ", the tensors have " + std::to_string(tensors.size()));
    }
    if (const std::string sha = sha256_hex(tensors.data(), tensors.size()); named.at("sha256").text() != sha) {
      fail(Code::kMismatch, "/tensors/sha256 is " + in_quotes(named.at("sha256").text()) + ", the tensors have " + sha + ": not those of this plan");
    }
  }
  *out = std::move(plan);
  return {};
}

}  // namespace

Status read_plan(std::string_view json_text, std::string_view tensors, Plan* out) {
  try {
    return read_document(parse(json_text, "plan"), tensors, out);
  } catch (const PlanError& e) {
    return Status(e.code, e.text);
  }
}

Status load_plan(const std::string& json_path, const std::string& tensors_path, Plan* out) {
  try {
    const json document = parse(read_file(json_path, kMaxJsonBytes), json_path);
    std::string path = tensors_path;
    const Node named = Node{&document, ""}.at("tensors");
    if (!path.empty() && named.value->is_null()) fail(Code::kMismatch, "/tensors is null, but " + path + " is given; pass no tensors");
    if (path.empty() && !named.value->is_null()) {
      const std::string file = named.at("file").text();
      if (file.empty() || file.find_first_of("/\\") != std::string::npos || file.find('\0') != std::string::npos) {
        bad(named.where + "/file", "a file name without folders");
      }
      const std::size_t slash = json_path.find_last_of('/');
      path = (slash == std::string::npos ? "" : json_path.substr(0, slash + 1)) + file;
    }
    const bool reads = !named.value->is_null();
    const Status status = read_document(document, reads ? read_file(path, kMaxTensorBytes) : std::string(), out);
    return status.ok() ? status : Status(status.code(), json_path + ": " + status.text());
  } catch (const PlanError& e) {
    return Status(e.code, e.text.compare(0, json_path.size(), json_path) == 0 || e.code == Code::kIo ? e.text : json_path + ": " + e.text);
  }
}

}  // namespace kvrt

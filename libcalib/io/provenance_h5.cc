#include <limits>

#include "libcalib/base/error.h"
#include "libcalib/io/provenance.h"

namespace calib::io {
namespace {

// One dataset per field, all over the same list.
template <typename T, typename Item, typename Get>
void write_column(H5Writer& file, const std::string& name, const std::vector<Item>& items, Get get) {
  std::vector<T> column;
  for (const Item& item : items) column.push_back(static_cast<T>(get(item)));
  file.write(name, std::span<const T>(column), {static_cast<std::int64_t>(column.size())});
}
template <typename Item, typename Get>
void write_text_column(H5Writer& file, const std::string& name, const std::vector<Item>& items, Get get) {
  std::vector<std::string> column;
  for (const Item& item : items) column.push_back(get(item));
  file.write_strings(name, column);
}

int to_int(const H5Reader& file, const std::string& name, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<int>::max()) file.wrong(name, fmt::format("value {} is out of range", value));
  return static_cast<int>(value);
}

}  // namespace

void write_provenance(H5Writer& file, const std::string& group, const Provenance& provenance) {
  file.group(group);
  file.attribute(group, "tool", provenance.tool);
  file.attribute(group, "version", provenance.version);
  file.attribute(group, "started_utc", provenance.started_utc);
  file.attribute(group, "seconds", provenance.seconds);
  file.attribute(group, "seed", provenance.seed);
  file.attribute(group, "device", provenance.device);
  file.attribute(group, "dtype", provenance.dtype);
  file.write_strings(group + "/argv", provenance.argv);
  write_text_column(file, group + "/parents/role", provenance.parents, [](const auto& p) { return p.first; });
  write_text_column(file, group + "/parents/sha256", provenance.parents, [](const auto& p) { return p.second; });
}

Provenance read_provenance(const H5Reader& file, const std::string& group) {
  Provenance out;
  out.tool = file.string_attribute(group, "tool");
  out.version = file.string_attribute(group, "version");
  out.started_utc = file.string_attribute(group, "started_utc");
  out.seconds = file.number_attribute(group, "seconds");
  out.seed = file.unsigned_attribute(group, "seed");
  out.device = file.string_attribute(group, "device");
  out.dtype = file.string_attribute(group, "dtype");
  out.argv = file.read_strings(group + "/argv");
  const auto roles = file.read_strings(group + "/parents/role"), hashes = file.read_strings(group + "/parents/sha256");
  if (roles.size() != hashes.size()) file.wrong(group + "/parents", "role and sha256 differ in length");
  for (std::size_t i = 0; i < roles.size(); ++i) out.parents.emplace_back(roles[i], hashes[i]);
  return out;
}

void write_model(H5Writer& file, const std::string& group, const ModelIdentity& model) {
  file.group(group);
  file.attribute(group, "architecture", model.architecture);
  file.attribute(group, "name", model.name);
  file.attribute(group, "n_layers", model.n_layers);
  file.attribute(group, "hidden_size", model.hidden_size);
  file.attribute(group, "vocab_size", model.vocab_size);
  file.attribute(group, "max_positions", model.max_positions);
  file.attribute(group, "weights_sha256", model.weights_sha256);
  file.attribute(group, "fast_identity", static_cast<std::int64_t>(model.fast));
  file.attribute(group, "tokenizer_sha256", model.tokenizer_sha256);
  const auto& layers = model.layers;
  write_column<std::int64_t>(file, group + "/layer_index", layers, [](const auto& l) { return l.index; });
  write_column<std::int64_t>(file, group + "/n_q_heads", layers, [](const auto& l) { return l.n_q_heads; });
  write_column<std::int64_t>(file, group + "/n_kv_heads", layers, [](const auto& l) { return l.n_kv_heads; });
  write_column<std::int64_t>(file, group + "/head_dim", layers, [](const auto& l) { return l.head_dim; });
  write_column<std::int64_t>(file, group + "/rotary_dim", layers, [](const auto& l) { return l.rotary_dim; });
  write_text_column(file, group + "/rope_style", layers, [](const auto& l) { return std::string(rope_style_name(l.rope_style)); });
  write_column<double>(file, group + "/attention_factor", layers, [](const auto& l) { return l.attention_factor; });
  write_column<double>(file, group + "/softmax_scale", layers, [](const auto& l) { return l.softmax_scale; });
  write_column<std::int64_t>(file, group + "/sliding_window", layers, [](const auto& l) { return l.sliding_window; });
  write_column<double>(file, group + "/k_bias_norm", layers, [](const auto& l) { return l.k_bias_norm; });
  write_column<std::uint8_t>(file, group + "/llamacpp_adjacent_pairs", layers, [](const auto& l) { return l.llamacpp_adjacent_pairs; });
  std::vector<std::int64_t> offsets = {0};
  std::vector<double> frequencies;
  for (const LayerGeometry& layer : layers) {
    frequencies.insert(frequencies.end(), layer.inv_freq.begin(), layer.inv_freq.end());
    offsets.push_back(static_cast<std::int64_t>(frequencies.size()));
  }
  file.write(group + "/inv_freq_offset", std::span<const std::int64_t>(offsets), {static_cast<std::int64_t>(offsets.size())});
  file.write(group + "/inv_freq", std::span<const double>(frequencies), {static_cast<std::int64_t>(frequencies.size())});
}

ModelIdentity read_model(const H5Reader& file, const std::string& group) {
  ModelIdentity out;
  out.architecture = file.string_attribute(group, "architecture");
  out.name = file.string_attribute(group, "name");
  out.n_layers = file.integer_attribute(group, "n_layers");
  out.hidden_size = file.integer_attribute(group, "hidden_size");
  out.vocab_size = file.integer_attribute(group, "vocab_size");
  out.max_positions = file.integer_attribute(group, "max_positions");
  out.weights_sha256 = file.string_attribute(group, "weights_sha256");
  out.fast = file.integer_attribute(group, "fast_identity") != 0;
  out.tokenizer_sha256 = file.string_attribute(group, "tokenizer_sha256");

  const auto index = file.read<std::int64_t>(group + "/layer_index", {kAnySize});
  const std::size_t n = index.size();
  const Shape per_layer = {static_cast<std::int64_t>(n)};
  const auto integers = [&](const char* name) { return file.read<std::int64_t>(group + "/" + name, per_layer); };
  const auto numbers = [&](const char* name) { return file.read<double>(group + "/" + name, per_layer); };
  const auto q_heads = integers("n_q_heads"), kv_heads = integers("n_kv_heads"), head_dim = integers("head_dim"), rotary = integers("rotary_dim"),
             window = integers("sliding_window");
  const auto factor = numbers("attention_factor"), scale = numbers("softmax_scale"), bias = numbers("k_bias_norm");
  const auto adjacent = file.read<std::uint8_t>(group + "/llamacpp_adjacent_pairs", per_layer);
  const auto styles = file.read_strings(group + "/rope_style");
  const auto offsets = file.read<std::int64_t>(group + "/inv_freq_offset", {static_cast<std::int64_t>(n) + 1});
  const auto frequencies = file.read<double>(group + "/inv_freq", {kAnySize});
  if (styles.size() != n) file.wrong(group + "/rope_style", fmt::format("{} values for {} layers", styles.size(), n));
  for (std::size_t i = 0; i < n; ++i) {
    const std::string at = fmt::format("{}, layer {}", group, index[i]);
    LayerGeometry layer;
    layer.index = to_int(file, at, index[i]);
    layer.n_q_heads = to_int(file, at, q_heads[i]);
    layer.n_kv_heads = to_int(file, at, kv_heads[i]);
    layer.head_dim = to_int(file, at, head_dim[i]);
    layer.rotary_dim = to_int(file, at, rotary[i]);
    layer.attention_factor = factor[i];
    layer.softmax_scale = scale[i];
    layer.sliding_window = window[i];
    layer.k_bias_norm = bias[i];
    layer.llamacpp_adjacent_pairs = adjacent[i] != 0;
    if (layer.n_kv_heads < 1 || layer.n_q_heads % layer.n_kv_heads != 0 || layer.n_q_heads < 1 || layer.head_dim < 1 || layer.rotary_dim > layer.head_dim)
      file.wrong(at, fmt::format("{} query heads, {} KV heads, head_dim {}, rotary_dim {} do not go together", layer.n_q_heads, layer.n_kv_heads,
                                 layer.head_dim, layer.rotary_dim));
    bool known = false;
    for (const RopeStyle style : {RopeStyle::kNone, RopeStyle::kHalfSplit, RopeStyle::kInterleaved})
      if (styles[i] == rope_style_name(style)) {
        layer.rope_style = style;
        known = true;
      }
    if (!known) file.wrong(at, "unknown rope_style \"" + styles[i] + "\"");
    if (offsets[i] < 0 || offsets[i] > offsets[i + 1] || offsets[i + 1] > static_cast<std::int64_t>(frequencies.size()))
      file.wrong(group + "/inv_freq_offset", fmt::format("entry {} is out of order", i));
    layer.inv_freq.assign(frequencies.begin() + offsets[i], frequencies.begin() + offsets[i + 1]);
    out.layers.push_back(std::move(layer));
  }
  return out;
}

void write_data(H5Writer& file, const std::string& group, const DataIdentity& data) {
  file.group(group);
  file.attribute(group, "tokenizer_sha256", data.tokenizer_sha256);
  file.attribute(group, "joining", data.joining);
  file.attribute(group, "seq_len", data.seq_len);
  file.attribute(group, "n_documents", data.n_documents);
  file.attribute(group, "n_tokens", data.n_tokens);
  file.attribute(group, "n_bos", data.n_bos);
  file.attribute(group, "documents_sha256", data.documents_sha256);
  write_text_column(file, group + "/files/path", data.files, [](const auto& f) { return f.path; });
  write_text_column(file, group + "/files/sha256", data.files, [](const auto& f) { return f.sha256; });
  write_text_column(file, group + "/files/options", data.files, [](const auto& f) { return f.options; });
  write_column<std::int64_t>(file, group + "/files/n_documents", data.files, [](const auto& f) { return f.n_documents; });
  write_column<std::int64_t>(file, group + "/files/n_tokens", data.files, [](const auto& f) { return f.n_tokens; });
}

DataIdentity read_data(const H5Reader& file, const std::string& group) {
  DataIdentity out;
  out.tokenizer_sha256 = file.string_attribute(group, "tokenizer_sha256");
  out.joining = file.string_attribute(group, "joining");
  out.seq_len = file.integer_attribute(group, "seq_len");
  out.n_documents = file.integer_attribute(group, "n_documents");
  out.n_tokens = file.integer_attribute(group, "n_tokens");
  out.n_bos = file.integer_attribute(group, "n_bos");
  out.documents_sha256 = file.string_attribute(group, "documents_sha256");
  const auto paths = file.read_strings(group + "/files/path"), hashes = file.read_strings(group + "/files/sha256"),
             options = file.read_strings(group + "/files/options");
  const Shape per_file = {static_cast<std::int64_t>(paths.size())};
  const auto documents = file.read<std::int64_t>(group + "/files/n_documents", per_file), tokens = file.read<std::int64_t>(group + "/files/n_tokens", per_file);
  if (hashes.size() != paths.size() || options.size() != paths.size()) file.wrong(group + "/files", "lists differ in length");
  for (std::size_t i = 0; i < paths.size(); ++i) out.files.push_back({paths[i], hashes[i], options[i], documents[i], tokens[i]});
  return out;
}

}  // namespace calib::io

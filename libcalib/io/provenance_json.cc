#include <limits>

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/io/provenance.h"

namespace calib::io {
namespace {

using nlohmann::ordered_json;

int small_integer(const JsonValue& value) {
  const std::int64_t x = value.integer();
  if (x < 0 || x > std::numeric_limits<int>::max()) value.wrong("an integer from 0 to 2147483647");
  return static_cast<int>(x);
}

}  // namespace

const char* rope_style_name(RopeStyle style) {
  return style == RopeStyle::kNone ? "none" : style == RopeStyle::kHalfSplit ? "half_split" : "interleaved";
}

ordered_json provenance_to_json(const Provenance& p) {
  ordered_json parents = ordered_json::array();
  for (const auto& [role, hash] : p.parents) parents.push_back({{"role", role}, {"sha256", hash}});
  return {{"tool", p.tool}, {"version", p.version}, {"argv", p.argv}, {"started_utc", p.started_utc}, {"seconds", p.seconds},
          {"seed", p.seed}, {"device", p.device}, {"dtype", p.dtype}, {"parents", parents}};
}

Provenance provenance_from_json(const JsonValue& value) {
  Provenance out;
  out.tool = value.at("tool").string();
  out.version = value.at("version").string();
  out.argv = value.at("argv").strings();
  out.started_utc = value.at("started_utc").string();
  out.seconds = value.at("seconds").number();
  out.seed = value.at("seed").unsigned_integer();
  out.device = value.at("device").string();
  out.dtype = value.at("dtype").string();
  const JsonValue parents = value.at("parents");
  for (std::size_t i = 0; i < parents.size(); ++i) out.parents.emplace_back(parents.element(i).at("role").string(), parents.element(i).at("sha256").string());
  return out;
}

ordered_json model_to_json(const ModelIdentity& m) {
  ordered_json layers = ordered_json::array();
  for (const LayerGeometry& l : m.layers)
    layers.push_back({{"index", l.index}, {"n_q_heads", l.n_q_heads}, {"n_kv_heads", l.n_kv_heads}, {"head_dim", l.head_dim},
                      {"rotary_dim", l.rotary_dim}, {"rope_style", rope_style_name(l.rope_style)}, {"attention_factor", l.attention_factor},
                      {"softmax_scale", l.softmax_scale}, {"sliding_window", l.sliding_window}, {"k_bias_norm", l.k_bias_norm},
                      {"llamacpp_adjacent_pairs", l.llamacpp_adjacent_pairs}, {"inv_freq", l.inv_freq}});
  return {{"architecture", m.architecture}, {"name", m.name}, {"n_layers", m.n_layers}, {"hidden_size", m.hidden_size},
          {"vocab_size", m.vocab_size}, {"max_positions", m.max_positions}, {"weights_sha256", m.weights_sha256},
          {"fast_identity", m.fast}, {"tokenizer_sha256", m.tokenizer_sha256}, {"layers", layers}};
}

ModelIdentity model_from_json(const JsonValue& value) {
  ModelIdentity out;
  out.architecture = value.at("architecture").string();
  out.name = value.at("name").string();
  out.n_layers = value.at("n_layers").integer();
  out.hidden_size = value.at("hidden_size").integer();
  out.vocab_size = value.at("vocab_size").integer();
  out.max_positions = value.at("max_positions").integer();
  out.weights_sha256 = value.at("weights_sha256").string();
  out.fast = value.at("fast_identity").boolean();
  out.tokenizer_sha256 = value.at("tokenizer_sha256").string();
  const JsonValue layers = value.at("layers");
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const JsonValue from = layers.element(i), style = from.at("rope_style"), frequencies = from.at("inv_freq");
    LayerGeometry layer;
    layer.index = small_integer(from.at("index"));
    layer.n_q_heads = small_integer(from.at("n_q_heads"));
    layer.n_kv_heads = small_integer(from.at("n_kv_heads"));
    layer.head_dim = small_integer(from.at("head_dim"));
    layer.rotary_dim = small_integer(from.at("rotary_dim"));
    layer.attention_factor = from.at("attention_factor").number();
    layer.softmax_scale = from.at("softmax_scale").number();
    layer.sliding_window = from.at("sliding_window").integer();
    layer.k_bias_norm = from.at("k_bias_norm").number();
    layer.llamacpp_adjacent_pairs = from.at("llamacpp_adjacent_pairs").boolean();
    for (std::size_t j = 0; j < frequencies.size(); ++j) layer.inv_freq.push_back(frequencies.element(j).number());
    const std::string name = style.string();
    if (name == "none") layer.rope_style = RopeStyle::kNone;
    else if (name == "half_split") layer.rope_style = RopeStyle::kHalfSplit;
    else if (name == "interleaved") layer.rope_style = RopeStyle::kInterleaved;
    else style.wrong("one of none, half_split, interleaved");
    out.layers.push_back(std::move(layer));
  }
  return out;
}

ordered_json data_to_json(const DataIdentity& d) {
  ordered_json files = ordered_json::array();
  for (const DataFile& f : d.files)
    files.push_back({{"path", f.path}, {"sha256", f.sha256}, {"options", f.options}, {"n_documents", f.n_documents}, {"n_tokens", f.n_tokens}});
  return {{"files", files}, {"tokenizer_sha256", d.tokenizer_sha256}, {"joining", d.joining}, {"seq_len", d.seq_len},
          {"n_documents", d.n_documents}, {"n_tokens", d.n_tokens}, {"n_bos", d.n_bos}, {"documents_sha256", d.documents_sha256}};
}

DataIdentity data_from_json(const JsonValue& value) {
  DataIdentity out;
  const JsonValue files = value.at("files");
  for (std::size_t i = 0; i < files.size(); ++i) {
    const JsonValue f = files.element(i);
    out.files.push_back({f.at("path").string(), f.at("sha256").string(), f.at("options").string(), f.at("n_documents").integer(), f.at("n_tokens").integer()});
  }
  out.tokenizer_sha256 = value.at("tokenizer_sha256").string();
  out.joining = value.at("joining").string();
  out.seq_len = value.at("seq_len").integer();
  out.n_documents = value.at("n_documents").integer();
  out.n_tokens = value.at("n_tokens").integer();
  out.n_bos = value.at("n_bos").integer();
  out.documents_sha256 = value.at("documents_sha256").string();
  return out;
}

}  // namespace calib::io

// The files of a tiny model: config.json, tokenizer.json, safetensors shards, GGUF.
#include <algorithm>
#include <filesystem>
#include <map>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/utf8.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

using Json = nlohmann::ordered_json;

// GPT-2's byte alphabet: printable bytes stand for themselves, the others for U+0100, U+0101, … in byte order.
std::string byte_character(int byte) {
  const auto printable = [](int b) { return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF); };
  char32_t scalar = static_cast<char32_t>(byte);
  if (!printable(byte)) {
    scalar = 0x100;
    for (int b = 0; b < byte; ++b) scalar += printable(b) ? 0 : 1;
  }
  std::string out;
  append_utf8(scalar, out);
  return out;
}

std::string id_character(std::int64_t id) {
  std::string out;
  append_utf8(static_cast<char32_t>(0x4E00 + id), out);
  return out;
}

const std::vector<std::string> kSpecials = {"<s>", "</s>", "<filler_0>", "<filler_1>"};  // ids 256 to 259

Json bpe_model(Json vocab) {
  return {{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", nullptr}, {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr}, {"fuse_unk", false}, {"byte_fallback", false}, {"ignore_merges", false},
          {"vocab", std::move(vocab)}, {"merges", Json::array()}};
}

std::string typed_bytes(const std::string& dtype, const std::vector<float>& values) {
  if (dtype == "F32") return f32_bytes(values);
  if (dtype == "F16") return f16_bytes(values);
  if (dtype == "BF16") return bf16_bytes(values);
  if (dtype == "F64") return f64_bytes(values);
  throw std::runtime_error("dtype " + dtype);
}

void add_tokenizer(GgufWriter& out, const TinyModel& m) {
  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;
  if (m.ids_tokenizer) {
    for (std::int64_t i = 0; i < m.vocab; ++i) tokens.push_back(id_character(i)), types.push_back(1);
    out.add<std::string>("tokenizer.ggml.model", "llama");
    out.add_array("tokenizer.ggml.tokens", tokens);
    out.add_array("tokenizer.ggml.scores", std::vector<float>(tokens.size(), 0.0f));
    out.add_array("tokenizer.ggml.token_type", types);
    out.add<bool>("tokenizer.ggml.add_space_prefix", false);
  } else {
    for (int b = 0; b < 256; ++b) tokens.push_back(byte_character(b)), types.push_back(1);
    for (const auto& s : kSpecials) tokens.push_back(s), types.push_back(3);
    out.add<std::string>("tokenizer.ggml.model", "gpt2");
    out.add<std::string>("tokenizer.ggml.pre", "gpt-2");
    out.add_array("tokenizer.ggml.tokens", tokens);
    out.add_array("tokenizer.ggml.token_type", types);
    out.add_array("tokenizer.ggml.merges", std::vector<std::string>{});
    out.add<std::uint32_t>("tokenizer.ggml.bos_token_id", 256);
    out.add<std::uint32_t>("tokenizer.ggml.eos_token_id", 257);
  }
  out.add<bool>("tokenizer.ggml.add_bos_token", false);
}

void add_model_keys(GgufWriter& out, const TinyModel& m, const GgufOptions& options) {
  const std::string arch = m.model_type == "mistral" ? "llama" : m.gemma() ? "gemma3" : m.model_type;
  const auto u32 = [&](const std::string& key, std::int64_t v) { out.add<std::uint32_t>(arch + key, static_cast<std::uint32_t>(v)); };
  out.add<std::string>("general.architecture", arch);
  out.add<std::string>("general.name", "tiny " + m.model_type);
  u32(".block_count", m.n_layers);
  u32(".context_length", m.max_positions);
  u32(".embedding_length", m.hidden);
  u32(".feed_forward_length", m.intermediate);
  u32(".attention.head_count", m.n_q_heads);
  u32(".attention.head_count_kv", m.n_kv_heads);
  if (m.explicit_head_dim) {
    u32(".attention.key_length", m.head_dim);
    u32(".attention.value_length", m.head_dim);
  }
  if (m.sliding_window > 0) u32(".attention.sliding_window", m.sliding_window);
  if (m.gemma()) {
    u32(".attention.sliding_window_pattern", 2);
    out.add<float>(arch + ".rope.freq_base_swa", static_cast<float>(m.local_rope_theta));
  }
  out.add<float>(arch + ".attention.layer_norm_rms_epsilon", static_cast<float>(m.rms_eps));
  if (arch == "llama") u32(".rope.dimension_count", m.head_dim);
  if (options.write_rope_theta) out.add<float>(arch + ".rope.freq_base", static_cast<float>(m.rope_theta));
  u32(".vocab_size", m.vocab);
  if (!options.drop_tokenizer) add_tokenizer(out, m);
}

// Hugging Face pairs channels i and i + head_dim/2; llama-type GGUF files hold the two as rows 2i and 2i + 1.
std::vector<float> adjacent_pairs(const TinyTensor& t, std::int64_t head_dim) {
  const auto columns = static_cast<std::size_t>(t.values.size() / static_cast<std::size_t>(t.shape[0]));
  std::vector<float> out(t.values.size());
  for (std::int64_t row = 0; row < t.shape[0]; ++row) {
    const std::int64_t head = row / head_dim, r = row % head_dim, half = head_dim / 2;
    const std::int64_t to = head * head_dim + 2 * (r % half) + r / half;
    std::copy_n(t.values.begin() + row * static_cast<std::int64_t>(columns), columns, out.begin() + to * static_cast<std::int64_t>(columns));
  }
  return out;
}

}  // namespace

std::string tok_byte_json() {
  Json vocab = Json::object(), added = Json::array();
  for (int b = 0; b < 256; ++b) vocab[byte_character(b)] = b;
  for (std::size_t i = 0; i < kSpecials.size(); ++i) {
    vocab[kSpecials[i]] = 256 + i;
    added.push_back({{"id", 256 + i}, {"content", kSpecials[i]}, {"single_word", false}, {"lstrip", false},
                     {"rstrip", false}, {"normalized", false}, {"special", true}});
  }
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  return Json{{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}, {"added_tokens", added}, {"normalizer", nullptr},
              {"pre_tokenizer", byte_level}, {"post_processor", nullptr}, {"decoder", byte_level}, {"model", bpe_model(vocab)}}.dump(1);
}

std::string tok_ids_json(std::int64_t n_ids) {
  Json vocab = Json::object();
  for (std::int64_t i = 0; i < n_ids; ++i) vocab[id_character(i)] = i;
  return Json{{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}, {"added_tokens", Json::array()}, {"normalizer", nullptr},
              {"pre_tokenizer", nullptr}, {"post_processor", nullptr}, {"decoder", nullptr}, {"model", bpe_model(vocab)}}.dump(1);
}

std::string ids_text(const std::vector<std::int32_t>& ids) {
  std::string out;
  for (auto id : ids) out += id_character(id);
  return out;
}

std::string config_json(const TinyModel& m) {
  const std::map<std::string, std::string> classes = {{"llama", "LlamaForCausalLM"}, {"mistral", "MistralForCausalLM"},
                                                      {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"},
                                                      {"gemma3_text", "Gemma3ForCausalLM"}, {"smollm3", "SmolLM3ForCausalLM"}};
  Json c = {{"architectures", {classes.at(m.model_type)}}, {"model_type", m.model_type}, {"hidden_size", m.hidden},
            {"intermediate_size", m.intermediate}, {"num_hidden_layers", m.n_layers}, {"num_attention_heads", m.n_q_heads},
            {"num_key_value_heads", m.n_kv_heads}, {"hidden_act", "silu"}, {"max_position_embeddings", m.max_positions},
            {"rms_norm_eps", m.rms_eps}, {"rope_theta", m.rope_theta}, {"tie_word_embeddings", m.tied},
            {"torch_dtype", "float32"}, {"vocab_size", m.vocab}, {"bos_token_id", m.ids_tokenizer ? 1 : 256},
            {"eos_token_id", m.ids_tokenizer ? 2 : 257}};
  if (m.explicit_head_dim) c["head_dim"] = m.head_dim;
  if (m.model_type == "mistral") c["sliding_window"] = m.sliding_window;
  if (m.model_type == "smollm3") c["no_rope_layer_interval"] = 4, c["no_rope_layers"] = nullptr, c["sliding_window"] = nullptr, c["use_sliding_window"] = false;
  if (m.model_type == "llama" || m.model_type == "qwen3") c["attention_bias"] = false;
  if (m.model_type == "qwen2" || m.model_type == "qwen3") c["use_sliding_window"] = false;
  if (m.gemma()) {
    c.erase("hidden_act");
    c["hidden_activation"] = "gelu_pytorch_tanh";
    c["attention_bias"] = false;
    c["query_pre_attn_scalar"] = m.head_dim;
    c["rope_local_base_freq"] = m.local_rope_theta;
    c["sliding_window"] = m.sliding_window;
    c["attn_logit_softcapping"] = nullptr;
    c["final_logit_softcapping"] = nullptr;
    for (std::int64_t l = 0; l < m.n_layers; ++l) c["layer_types"].push_back(m.layer_slides(l) ? "sliding_attention" : "full_attention");
  }
  return c.dump(2);
}

void patch_json_file(const std::string& path, const std::string& key, const std::string& value_json) {
  Json j = Json::parse(read_file(path));
  if (value_json.empty()) j.erase(key);
  else j[key] = Json::parse(value_json);
  write_file(path, j.dump(2));
}

void write_hf_folder(const TinyModel& m, const std::string& folder, const HfOptions& options) {
  write_file(folder + "/config.json", config_json(m));
  write_file(folder + "/tokenizer.json", m.ids_tokenizer ? tok_ids_json(m.vocab) : tok_byte_json());
  std::vector<std::vector<SafetensorsTensor>> shards(static_cast<std::size_t>(options.n_shards));
  Json weight_map = Json::object();
  std::size_t total = 0;
  for (const TinyTensor& t : m.tensors) {
    std::string name = t.name;
    if (name.compare(0, 6, "model.") == 0) name = options.prefix + name.substr(6);
    const int shard = shard_of(m, t.name, options.n_shards);
    SafetensorsTensor s{name, options.dtype, t.shape, typed_bytes(options.dtype, t.values)};
    total += s.bytes.size();
    weight_map[name] = fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, options.n_shards);
    shards[static_cast<std::size_t>(shard)].push_back(std::move(s));
  }
  if (options.n_shards == 1) {
    write_file(folder + "/model.safetensors", safetensors_bytes(shards[0], {{"format", "pt"}}));
    return;
  }
  for (std::size_t i = 0; i < shards.size(); ++i)
    write_file(fmt::format("{}/model-{:05}-of-{:05}.safetensors", folder, i + 1, shards.size()), safetensors_bytes(shards[i], {{"format", "pt"}}));
  write_file(folder + "/model.safetensors.index.json", Json{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}}.dump(2));
}

std::string gguf_name(const std::string& hf_name, bool gemma) {
  if (gemma && hf_name.ends_with("post_attention_layernorm.weight"))
    return "blk." + hf_name.substr(13, hf_name.find('.', 13) - 13) + ".post_attention_norm.weight";
  static const std::map<std::string, std::string> whole = {
      {"model.embed_tokens.weight", "token_embd.weight"}, {"model.norm.weight", "output_norm.weight"}, {"lm_head.weight", "output.weight"}};
  static const std::map<std::string, std::string> parts = {
      {"input_layernorm", "attn_norm"}, {"self_attn.q_proj", "attn_q"}, {"self_attn.k_proj", "attn_k"},
      {"self_attn.v_proj", "attn_v"}, {"self_attn.o_proj", "attn_output"}, {"self_attn.q_norm", "attn_q_norm"},
      {"self_attn.k_norm", "attn_k_norm"}, {"post_attention_layernorm", "ffn_norm"}, {"mlp.gate_proj", "ffn_gate"},
      {"mlp.up_proj", "ffn_up"}, {"mlp.down_proj", "ffn_down"}, {"pre_feedforward_layernorm", "ffn_norm"},
      {"post_feedforward_layernorm", "post_ffw_norm"}};
  if (const auto it = whole.find(hf_name); it != whole.end()) return it->second;
  const std::string rest = hf_name.substr(std::string("model.layers.").size());
  const auto dot = rest.find('.'), last = rest.rfind('.');
  return "blk." + rest.substr(0, dot) + "." + parts.at(rest.substr(dot + 1, last - dot - 1)) + rest.substr(last);
}

std::vector<std::string> write_gguf(const TinyModel& m, const std::string& path, const GgufOptions& options) {
  std::vector<GgufWriter> parts(static_cast<std::size_t>(options.n_splits));
  std::size_t n_tensors = 0;
  for (auto& p : parts) p.version = options.version, p.alignment = options.alignment;
  add_model_keys(parts[0], m, options);
  const bool permuted = m.model_type == "llama" || m.model_type == "mistral" || m.model_type == "smollm3";
  const auto put = [&](GgufWriter& out, const std::string& name, const std::vector<std::int64_t>& shape, const std::vector<float>& values, bool f16) {
    if (std::find(options.omit.begin(), options.omit.end(), name) != options.omit.end()) return;
    if (f16) out.add_tensor(name, {shape.rbegin(), shape.rend()}, GgmlType::kF16, f16_bytes(values));
    else out.add_f32(name, shape, values);
    ++n_tensors;
  };
  for (const TinyTensor& t : m.tensors) {
    const bool turn = permuted && (t.name.find("self_attn.q_proj") != std::string::npos || t.name.find("self_attn.k_proj") != std::string::npos);
    std::vector<float> values = turn ? adjacent_pairs(t, m.head_dim) : t.values;
    if (m.gemma() && t.name.ends_with("norm.weight"))
      for (float& w : values) w += 1.0f;
    put(parts[static_cast<std::size_t>(shard_of(m, t.name, options.n_splits))], gguf_name(t.name, m.gemma()), t.shape, values,
        options.f16_weights && t.shape.size() > 1);
  }
  for (const TinyTensor& t : options.extra) put(parts.back(), t.name, t.shape, t.values, false);

  std::vector<std::string> paths;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (options.alignment != 32) parts[i].add<std::uint32_t>("general.alignment", static_cast<std::uint32_t>(options.alignment));
    if (parts.size() > 1) {
      parts[i].add<std::uint16_t>("split.no", static_cast<std::uint16_t>(i));
      parts[i].add<std::uint16_t>("split.count", static_cast<std::uint16_t>(parts.size()));
      parts[i].add<std::int32_t>("split.tensors.count", static_cast<std::int32_t>(n_tensors));
    }
    paths.push_back(parts.size() == 1 ? path : fmt::format("{}-{:05}-of-{:05}.gguf", path.substr(0, path.size() - 5), i + 1, parts.size()));
    write_file(paths.back(), parts[i].bytes());
  }
  return paths;
}

}  // namespace calib::test

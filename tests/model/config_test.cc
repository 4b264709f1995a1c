#include "libcalib/model/config.h"

#include <cmath>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "libcalib/model/architecture.h"
#include "libcalib/weights/gguf.h"
#include "tests/support/expect_error.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

using model::ModelConfig;
using model::parse_hf_config;
using Windows = std::vector<std::int64_t>;
using nlohmann::json;

json base(const std::string& name = "m-llama") { return json::parse(config_json(make_tiny_model(name))); }
ModelConfig parse(const json& config) { return parse_hf_config(config.dump(), "m/config.json"); }
json with(json config, const char* key, json value) {
  config[key] = std::move(value);
  return config;
}
json without(json config, const char* key) {
  config.erase(key);
  return config;
}

/// What the rest of the program sees of a configuration.
std::string essence(const ModelConfig& c) {
  return fmt::format("{} L{} C{} F{} V{} P{} q{} kv{} d{} eps{} tied{} bias{}{}{} theta{} scaling{} {} {} {} {} windows {}", c.model_type,
                     c.n_layers, c.hidden_size, c.intermediate_size, c.vocab_size, c.max_positions, c.n_q_heads, c.n_kv_heads, c.head_dim,
                     c.rms_epsilon, c.tied_embedding, c.attention_bias, c.output_bias, c.mlp_bias, c.rope.theta,
                     static_cast<int>(c.rope.scaling), c.rope.factor, c.rope.low_freq_factor, c.rope.high_freq_factor,
                     c.rope.original_max_positions, json(c.sliding_window).dump());
}

TEST(HfConfig, NullCountsAsAbsentAndTypesAreNotConverted) {  // CF-07
  const json plain = without(base(), "head_dim");
  const std::string expected = essence(parse(plain));
  EXPECT_EQ(essence(parse(with(plain, "head_dim", nullptr))), expected);
  EXPECT_EQ(essence(parse(with(plain, "head_dim", 8))), expected);
  for (const char* key : {"head_dim", "num_key_value_heads", "sliding_window", "max_position_embeddings"})
    for (const json& bad : {json(0), json("8"), json(8.5), json(-4), json(true), json::array({8}), json(1e300)})
      expect_error([&] { parse(with(base(), key, bad)); }, ErrorKind::kFormat, {"m/config.json", key});
  for (const char* key : {"rope_theta", "rms_norm_eps"})
    for (const json& bad : {json(0), json("10000"), json(-1.0), json(true)})
      expect_error([&] { parse(with(base(), key, bad)); }, ErrorKind::kFormat, {"m/config.json", key});
  for (const char* key : {"tie_word_embeddings", "attention_bias", "mlp_bias"})
    expect_error([&] { parse(with(base(), key, 1)); }, ErrorKind::kFormat, {key, "true or false"});
  const json one_group = with(base(), "num_key_value_heads", 8);
  EXPECT_EQ(essence(parse(without(one_group, "num_key_value_heads"))), essence(parse(one_group)));
  EXPECT_EQ(essence(parse(with(one_group, "num_key_value_heads", nullptr))), essence(parse(one_group)));
  EXPECT_EQ(essence(parse(with(base(), "sliding_window", nullptr))), essence(parse(base())));
}

TEST(HfConfig, RequiredKeysAreNamed) {
  for (const char* key : {"num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "model_type"})
    expect_error([&] { parse(without(base(), key)); }, ErrorKind::kFormat, {"m/config.json", key, "missing"});
  expect_error([&] { parse(with(base(), "model_type", "unknown_x")); }, ErrorKind::kUnsupported,
               {"unknown_x", "llama, mistral, qwen2, qwen3, gemma3_text, smollm3"});
  // SN-03, SN-04: learned sink logits and latent caches, which no score here would account for.
  for (const char* type : {"gpt_oss", "deepseek_v3"}) expect_error([&] { parse(with(base(), "model_type", type)); }, ErrorKind::kUnsupported, {type});
  expect_error([&] { parse_hf_config("[1]", "m/config.json"); }, ErrorKind::kFormat, {"object"});
  expect_error([&] { parse_hf_config("{", "m/config.json"); }, ErrorKind::kFormat, {"m/config.json"});
  // A claimed count must not lead to an allocation of its size.
  expect_error([&] { parse(with(base(), "num_hidden_layers", 2000000000)); }, ErrorKind::kFormat, {"num_hidden_layers", "2000000000"});
}

TEST(HfConfig, HeadCountsMustFit) {  // CF-09
  const auto heads = [](std::int64_t q, std::int64_t kv) { return with(with(base(), "num_attention_heads", q), "num_key_value_heads", kv); };
  for (const auto& [q, kv] : {std::pair{7, 2}, std::pair{4, 8}, std::pair{8, 3}})
    expect_error([&] { parse(heads(q, kv)); }, ErrorKind::kFormat, {"num_attention_heads", "num_key_value_heads"});
  for (const int kv : {0, -2}) expect_error([&] { parse(heads(8, kv)); }, ErrorKind::kFormat, {"num_key_value_heads"});
  expect_error([&] { parse(with(base(), "head_dim", 7)); }, ErrorKind::kFormat, {"head_dim", "odd"});
  expect_error([&] { parse(with(without(base(), "head_dim"), "hidden_size", 4)); }, ErrorKind::kFormat, {"hidden_size", "num_attention_heads"});
}

TEST(HfConfig, RopeKeysThatMoved) {  // CF-12, AR-03, AR-12
  json plain = base();
  plain.erase("rope_theta"), plain.erase("rope_scaling"), plain.erase("rope_parameters");
  const std::string expected = essence(parse(with(plain, "rope_theta", 10000.0)));
  EXPECT_EQ(essence(parse(plain)), expected);
  EXPECT_EQ(essence(parse(with(plain, "rope_scaling", nullptr))), expected);
  EXPECT_EQ(essence(parse(with(plain, "rope_theta", 10000))), expected);
  EXPECT_EQ(essence(parse(with(plain, "rope_scaling", {{"rope_type", "default"}}))), expected);
  EXPECT_EQ(essence(parse(with(plain, "rope_scaling", {{"type", "mrope"}}))), expected);
  EXPECT_NE(json(parse(plain).defaults).dump().find("rope_theta=10000"), std::string::npos);
  expect_error([&] { parse(with(plain, "rope_scaling", json::object())); }, ErrorKind::kFormat, {"rope_scaling", "rope_type"});

  const json linear = {{"rope_type", "linear"}, {"factor", 4.0}};
  json everywhere = linear;
  everywhere["rope_theta"] = 20000.0;
  const std::string scaled = essence(parse(with(with(plain, "rope_theta", 20000.0), "rope_scaling", linear)));
  EXPECT_EQ(essence(parse(with(plain, "rope_scaling", everywhere))), scaled);
  EXPECT_EQ(essence(parse(with(plain, "rope_parameters", everywhere))), scaled);
  EXPECT_EQ(essence(parse(with(with(plain, "rope_theta", 20000.0), "rope_parameters", everywhere))), scaled);
  EXPECT_EQ(essence(parse(with(with(plain, "rope_theta", 20000.0), "rope_scaling", {{"type", "linear"}, {"factor", 4}}))), scaled);
  expect_error([&] { parse(with(with(plain, "rope_scaling", linear), "rope_parameters", everywhere)); }, ErrorKind::kFormat,
               {"rope_scaling", "rope_parameters"});
  expect_error([&] { parse(with(with(plain, "rope_theta", 5.0), "rope_parameters", everywhere)); }, ErrorKind::kFormat,
               {"rope_theta", "rope_parameters.rope_theta"});
  expect_error([&] { parse(with(plain, "rope_scaling", {{"rope_type", "linear"}, {"type", "llama3"}, {"factor", 2}})); },
               ErrorKind::kFormat, {"rope_scaling.rope_type", "rope_scaling.type"});
  expect_error([&] { parse(with(plain, "rope_scaling", {{"rope_type", "linear"}})); }, ErrorKind::kFormat, {"factor", "linear"});
  expect_error([&] { parse(with(plain, "rope_scaling", {{"rope_type", "llama3"}, {"factor", 8}})); }, ErrorKind::kFormat,
               {"llama3", "low_freq_factor"});
  for (const char* type : {"yarn", "su", "longrope", "dynamic", "foo"})
    expect_error([&] { parse(with(plain, "rope_scaling", {{"rope_type", type}, {"factor", 2}})); }, ErrorKind::kUnsupported, {type});
  expect_error([&] { parse(with(plain, "rope_parameters", {{"full_attention", linear}})); }, ErrorKind::kUnsupported, {"full_attention"});
  expect_error([&] { parse(with(plain, "rope_scaling", json::array())); }, ErrorKind::kFormat, {"rope_scaling"});
}

TEST(HfConfig, FamilyDefaultsAndWindows) {
  EXPECT_EQ(parse(without(base("m-qwen3"), "head_dim")).head_dim, 128);
  EXPECT_EQ(parse(base("m-qwen3")).head_dim, 32);
  EXPECT_TRUE(parse(base("m-qwen2")).attention_bias);
  EXPECT_FALSE(parse(base("m-qwen2")).output_bias);
  EXPECT_FALSE(parse(with(base("m-mistral"), "attention_bias", true)).attention_bias);
  EXPECT_TRUE(parse(with(base(), "attention_bias", true)).output_bias);

  EXPECT_EQ(parse(base("m-mistral")).sliding_window, Windows(4, 8));
  EXPECT_EQ(parse(with(base("m-mistral"), "sliding_window", nullptr)).sliding_window, Windows(4, 0));
  EXPECT_EQ(parse(without(base("m-mistral"), "sliding_window")).sliding_window, Windows(4, 4096));
  EXPECT_EQ(parse(with(base(), "sliding_window", 8)).sliding_window, Windows(4, 0));  // not a key of llama
  json qwen = with(base("m-qwen2"), "sliding_window", 16);
  qwen.erase("layer_types");
  EXPECT_EQ(parse(qwen).sliding_window, Windows(4, 0));
  qwen["use_sliding_window"] = true;
  qwen["max_window_layers"] = 2;
  EXPECT_EQ(parse(qwen).sliding_window, (Windows{0, 0, 16, 16}));
  qwen["layer_types"] = {"sliding_attention", "full_attention", "full_attention", "sliding_attention"};
  EXPECT_EQ(parse(qwen).sliding_window, (Windows{16, 0, 0, 16}));
  expect_error([&] { parse(with(qwen, "layer_types", {"full_attention"})); }, ErrorKind::kFormat, {"layer_types", "num_hidden_layers"});
  qwen["layer_types"][1] = "linear_attention";
  expect_error([&] { parse(qwen); }, ErrorKind::kUnsupported, {"layer_types[1]", "linear_attention"});
}

TEST(HfConfig, FeaturesThatAreNotOffered) {
  expect_error([&] { parse(with(base(), "quantization_config", {{"quant_method", "gptq"}})); }, ErrorKind::kUnsupported, {"quantization_config"});
  expect_error([&] { parse(with(base(), "hidden_act", "gelu")); }, ErrorKind::kUnsupported, {"hidden_act", "gelu"});
  expect_error([&] { parse(with(base(), "partial_rotary_factor", 0.5)); }, ErrorKind::kUnsupported, {"partial_rotary_factor"});
}

weights::GgufMetadata gguf(const std::string& arch = "llama") {
  weights::GgufMetadata m;
  m.path = "m.gguf";
  m.values = {{"general.architecture", arch},
              {arch + ".block_count", std::int64_t{4}},
              {arch + ".embedding_length", std::int64_t{64}},
              {arch + ".feed_forward_length", std::int64_t{128}},
              {arch + ".attention.head_count", std::int64_t{8}},
              {arch + ".attention.head_count_kv", std::int64_t{4}},
              {arch + ".context_length", std::int64_t{4096}},
              {arch + ".attention.layer_norm_rms_epsilon", 1e-5}};
  return m;
}
weights::GgufMetadata gguf_with(const std::string& key, weights::GgufValue value) {
  weights::GgufMetadata m = gguf();
  m.values[key] = std::move(value);
  return m;
}

TEST(GgufConfig, DefaultsAndRefusals) {  // GG-10
  const ModelConfig plain = model::parse_gguf_config(gguf());
  EXPECT_EQ(plain.rope.theta, 10000.0);
  EXPECT_EQ(plain.head_dim, 8);
  EXPECT_NE(json(plain.defaults).dump().find("llama.rope.freq_base=10000"), std::string::npos);
  EXPECT_EQ(model::parse_gguf_config(gguf_with("llama.rope.freq_base", 1e6)).rope.theta, 1e6);
  EXPECT_EQ(model::parse_gguf_config(gguf_with("llama.attention.key_length", std::int64_t{16})).head_dim, 16);
  const ModelConfig linear = model::parse_gguf_config(gguf_with("llama.rope.scaling.factor", 4.0));
  EXPECT_EQ(linear.rope.scaling, model::RopeScaling::kLinear);
  EXPECT_EQ(linear.rope.factor, 4.0);
  const std::vector<std::int64_t> equal(4, 4), unequal{4, 4, 2, 4};
  EXPECT_EQ(model::parse_gguf_config(gguf_with("llama.attention.head_count_kv", equal)).n_kv_heads, 4);

  const auto refuse = [](const std::string& key, weights::GgufValue value, ErrorKind kind) {
    expect_error([&] { model::parse_gguf_config(gguf_with(key, value)); }, kind, {"m.gguf", key});
  };
  refuse("llama.attention.head_count_kv", unequal, ErrorKind::kUnsupported);
  refuse("llama.attention.head_count_kv", std::int64_t{3}, ErrorKind::kFormat);
  refuse("llama.attention.head_count_kv", std::string("4"), ErrorKind::kFormat);
  refuse("llama.block_count", std::int64_t{1} << 30, ErrorKind::kFormat);
  refuse("llama.rope.freq_base", -1.0, ErrorKind::kFormat);
  refuse("llama.rope.scaling.type", std::string("yarn"), ErrorKind::kUnsupported);
  refuse("llama.rope.dimension_count", std::int64_t{4}, ErrorKind::kUnsupported);
  refuse("llama.rope.dimension_count", std::int64_t{32}, ErrorKind::kFormat);
  refuse("llama.expert_count", std::int64_t{8}, ErrorKind::kUnsupported);
  refuse("llama.attention.scale", 0.5, ErrorKind::kUnsupported);
  refuse("general.architecture", std::string("gemma2"), ErrorKind::kUnsupported);
  for (const char* key : {"llama.block_count", "llama.embedding_length", "llama.feed_forward_length", "llama.attention.head_count"}) {
    weights::GgufMetadata m = gguf();
    m.values.erase(key);
    expect_error([&] { model::parse_gguf_config(m); }, ErrorKind::kFormat, {key, "missing"});
  }
}

TEST(Gemma3Config, LayerTypesAndTheirRope) {  // AR-12
  const ModelConfig c = parse(base("m-gemma3"));
  EXPECT_EQ(c.sliding_window, (Windows{8, 0, 8, 0}));
  EXPECT_EQ(c.rope.theta, 1e6);
  EXPECT_EQ(c.local_rope.value().theta, 10000.0);
  EXPECT_EQ(c.softmax_scale, 0.25);
  EXPECT_TRUE(c.tied_embedding);
  EXPECT_EQ(parse(with(base("m-gemma3"), "query_pre_attn_scalar", 64)).softmax_scale, 0.125);

  // The keys that moved, and what a checkpoint of today writes.
  json plain = base("m-gemma3");
  for (const char* key : {"rope_theta", "rope_local_base_freq"}) plain.erase(key);
  const json local = {{"rope_type", "default"}, {"rope_theta", 5000.0}}, full = {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 2e6}};
  const json by_type = {{"full_attention", full}, {"sliding_attention", local}};
  const auto rope = [](const ModelConfig& m) {
    return fmt::format("{} {} {} / {} {}", m.rope.theta, static_cast<int>(m.rope.scaling), m.rope.factor, m.local_rope->theta,
                       static_cast<int>(m.local_rope->scaling));
  };
  const std::string expected = rope(parse(with(plain, "rope_parameters", by_type)));
  EXPECT_EQ(expected, "2000000 1 8 / 5000 0");
  const json old = with(with(plain, "rope_theta", 2e6), "rope_local_base_freq", 5000);
  EXPECT_EQ(rope(parse(with(old, "rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}))), expected) << "rope_scaling: full layers only";
  EXPECT_EQ(rope(parse(with(old, "rope_parameters", by_type))), expected);
  EXPECT_EQ(rope(parse(plain)), "1000000 0 1 / 10000 0");
  EXPECT_NE(json(parse(plain).defaults).dump().find("rope_local_base_freq=10000"), std::string::npos);
  expect_error([&] { parse(with(with(plain, "rope_theta", 5.0), "rope_parameters", by_type)); }, ErrorKind::kFormat,
               {"rope_theta is 5", "rope_parameters.full_attention.rope_theta"});
  expect_error([&] { parse(with(with(plain, "rope_local_base_freq", 5.0), "rope_parameters", by_type)); }, ErrorKind::kFormat,
               {"rope_local_base_freq is 5", "rope_parameters.sliding_attention.rope_theta"});
  expect_error([&] { parse(with(with(plain, "rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}), "rope_parameters", by_type)); },
               ErrorKind::kFormat, {"rope_scaling", "rope_parameters.full_attention"});
  expect_error([&] { parse(with(plain, "rope_parameters", full)); }, ErrorKind::kUnsupported, {"full_attention and sliding_attention"});
  expect_error([&] { parse(with(plain, "rope_parameters", {{"full_attention", {{"rope_type", "yarn"}, {"factor", 2}}}})); },
               ErrorKind::kUnsupported, {"rope_parameters.full_attention", "yarn"});
}

TEST(Gemma3Config, PatternsAndRefusals) {
  json by_pattern = without(base("m-gemma3"), "layer_types");
  by_pattern["num_hidden_layers"] = 7;
  EXPECT_EQ(parse(by_pattern).sliding_window, (Windows{8, 8, 8, 8, 8, 0, 8}));
  EXPECT_EQ(parse(with(by_pattern, "sliding_window_pattern", 3)).sliding_window, (Windows{8, 8, 0, 8, 8, 0, 8}));
  EXPECT_EQ(parse(without(by_pattern, "sliding_window")).sliding_window, (Windows{4096, 4096, 4096, 4096, 4096, 0, 4096}));
  expect_error([&] { parse(with(by_pattern, "sliding_window", nullptr)); }, ErrorKind::kFormat, {"sliding_window is null"});
  expect_error([&] { parse(with(base("m-gemma3"), "sliding_window", nullptr)); }, ErrorKind::kFormat, {"layer_types[0]", "sliding_window"});

  const auto refuse = [](const char* key, json value) {
    expect_error([&] { parse(with(base("m-gemma3"), key, std::move(value))); }, ErrorKind::kUnsupported, {key});
  };
  refuse("attn_logit_softcapping", 50.0);
  refuse("final_logit_softcapping", 30.0);
  refuse("use_bidirectional_attention", true);
  refuse("attention_k_eq_v", true);  // AR-19
  refuse("hidden_activation", "silu");
  EXPECT_EQ(parse(with(base("m-gemma3"), "final_logit_softcapping", 0)).n_layers, 4);
  expect_error([&] { parse(with(base(), "hidden_act", "gelu_pytorch_tanh")); }, ErrorKind::kUnsupported, {"hidden_act", "llama"});
}

TEST(SmolLm3Config, LayersWithoutRope) {
  using Flags = std::vector<std::uint8_t>;
  EXPECT_EQ(parse(base("m-smollm3")).has_rope, (Flags{1, 1, 1, 0}));
  EXPECT_EQ(parse(with(base("m-smollm3"), "no_rope_layer_interval", 2)).has_rope, (Flags{1, 0, 1, 0}));
  EXPECT_EQ(parse(with(base("m-smollm3"), "no_rope_layers", {0, 1, 1, 1})).has_rope, (Flags{0, 1, 1, 1}));
  EXPECT_EQ(parse(base()).has_rope, (Flags{1, 1, 1, 1}));
  expect_error([&] { parse(with(base("m-smollm3"), "no_rope_layers", {1, 1, 0})); }, ErrorKind::kFormat, {"no_rope_layers has 3 entries"});
  expect_error([&] { parse(with(base("m-smollm3"), "no_rope_layers", {1, 2, 0, 1})); }, ErrorKind::kFormat, {"no_rope_layers[1] is 2"});
  json slides = with(with(base("m-smollm3"), "use_sliding_window", true), "sliding_window", 8);
  expect_error([&] { parse(slides); }, ErrorKind::kUnsupported, {"use_sliding_window", "layer_types"});
  slides["layer_types"] = {"full_attention", "full_attention", "full_attention", "sliding_attention"};
  EXPECT_EQ(parse(slides).sliding_window, (Windows{0, 0, 0, 8}));
}

TEST(Gemma3Config, TextPartOfTheMultimodalConfiguration) {
  // What google/gemma-3-4b-it states; the rest are the family's defaults.
  const json text = {{"hidden_size", 2560}, {"intermediate_size", 10240}, {"model_type", "gemma3_text"}, {"num_hidden_layers", 34},
                     {"rope_scaling", {{"factor", 8.0}, {"rope_type", "linear"}}}, {"sliding_window", 1024}};
  const json config = {{"model_type", "gemma3"}, {"text_config", text}, {"vision_config", {{"hidden_size", 1152}}}};
  const ModelConfig c = parse(config);
  EXPECT_EQ(essence(c), "gemma3_text L34 C2560 F10240 V262208 P131072 q8 kv4 d256 eps1e-06 tiedtrue biasfalsefalsefalse theta1000000 "
                        "scaling1 8 1 4 8192 windows " + json(c.sliding_window).dump());
  EXPECT_EQ(c.sliding_window[4], 1024);
  EXPECT_EQ(c.sliding_window[5], 0);
  EXPECT_EQ(c.softmax_scale, 0.0625);
  expect_error([&] { parse(without(config, "text_config")); }, ErrorKind::kFormat, {"text_config"});
  expect_error([&] { parse(with(config, "text_config", with(text, "head_dim", "256"))); }, ErrorKind::kFormat, {"text_config.head_dim"});
  expect_error([&] { parse(with(config, "text_config", with(text, "model_type", "qwen3"))); }, ErrorKind::kUnsupported, {"text_config", "qwen3"});
  json untied = with(config, "tie_word_embeddings", false);
  EXPECT_FALSE(parse(untied).tied_embedding);
  untied["text_config"]["tie_word_embeddings"] = true;
  expect_error([&] { parse(untied); }, ErrorKind::kFormat, {"tie_word_embeddings"});
  expect_error([&] { parse(with(config, "quantization_config", {{"bits", 4}})); }, ErrorKind::kUnsupported, {"quantization_config"});
}

TEST(Gemma3Config, GgufKeys) {
  weights::GgufMetadata m = gguf("gemma3");
  m.values["gemma3.block_count"] = std::int64_t{7};
  m.values["gemma3.attention.sliding_window"] = std::int64_t{512};
  m.values["gemma3.rope.freq_base"] = 1e6;
  m.values["gemma3.rope.scaling.factor"] = 8.0;
  const ModelConfig c = model::parse_gguf_config(m);
  EXPECT_EQ(c.sliding_window, (Windows{512, 512, 512, 512, 512, 0, 512}));
  EXPECT_EQ(c.local_rope.value().theta, 10000.0);
  EXPECT_EQ(c.local_rope->scaling, model::RopeScaling::kDefault);
  EXPECT_EQ(c.rope.factor, 8.0);
  EXPECT_EQ(c.softmax_scale, 1.0 / std::sqrt(8.0));
  m.values["gemma3.rope.freq_base_swa"] = 2e4;
  m.values["gemma3.attention.sliding_window_pattern"] = std::int64_t{3};
  EXPECT_EQ(model::parse_gguf_config(m).sliding_window, (Windows{512, 512, 0, 512, 512, 0, 512}));
  EXPECT_EQ(model::parse_gguf_config(m).local_rope->theta, 2e4);
  m.values["gemma3.attention.sliding_window_pattern"] = std::vector<std::int64_t>{1, 0, 1, 1, 0, 0, 1};
  EXPECT_EQ(model::parse_gguf_config(m).sliding_window, (Windows{512, 0, 512, 512, 0, 0, 512}));
  m.values["gemma3.attention.sliding_window_pattern"] = std::vector<std::int64_t>{1, 0};
  expect_error([&] { model::parse_gguf_config(m); }, ErrorKind::kFormat, {"sliding_window_pattern has 2 entries", "block_count is 7"});
  m.values.erase("gemma3.attention.sliding_window_pattern");
  m.values["gemma3.final_logit_softcapping"] = 30.0;
  expect_error([&] { model::parse_gguf_config(m); }, ErrorKind::kUnsupported, {"final_logit_softcapping"});
  m.values.erase("gemma3.final_logit_softcapping");
  // The 27B model, known by its layers, scales by its hidden size per query head.
  m.values["gemma3.block_count"] = std::int64_t{62};
  m.values["gemma3.embedding_length"] = std::int64_t{5376};
  m.values["gemma3.attention.head_count"] = std::int64_t{32};
  m.values["gemma3.attention.key_length"] = std::int64_t{128};
  EXPECT_EQ(model::parse_gguf_config(m).softmax_scale, 1.0 / std::sqrt(168.0));
}

TEST(Architectures, TableIsConsistent) {
  EXPECT_EQ(model::supported_model_types(), "llama, mistral, qwen2, qwen3, gemma3_text, smollm3");
  for (const auto& row : model::architecture_rows()) {
    EXPECT_EQ(model::find_model_type(row.model_type), &row);
    if (*row.gguf_architecture) { EXPECT_EQ(model::find_gguf_architecture(row.gguf_architecture), &row); }
    // Rows stored with pairs adjacent and llama.cpp's NORM rope are two views of one convention.
    EXPECT_EQ(row.gguf_rows_permuted, row.llamacpp_adjacent_pairs);
  }
  EXPECT_EQ(model::find_gguf_architecture(""), nullptr);
  const auto name = [](const char* type, model::BlockPart part, bool gguf) {
    return model::block_tensor_name(*model::find_model_type(type), part, 3, gguf);
  };
  EXPECT_EQ(name("qwen3", model::BlockPart::kKNorm, false), "layers.3.self_attn.k_norm.weight");
  EXPECT_EQ(name("llama", model::BlockPart::kDownBias, true), "blk.3.ffn_down.bias");
  EXPECT_EQ(name("llama", model::BlockPart::kMlpNorm, false), "layers.3.post_attention_layernorm.weight");
  EXPECT_EQ(name("gemma3_text", model::BlockPart::kMlpNorm, false), "layers.3.pre_feedforward_layernorm.weight");
  EXPECT_EQ(name("gemma3_text", model::BlockPart::kPostAttentionNorm, false), "layers.3.post_attention_layernorm.weight");
  EXPECT_EQ(name("gemma3_text", model::BlockPart::kMlpNorm, true), "blk.3.ffn_norm.weight");
}

}  // namespace
}  // namespace calib::test

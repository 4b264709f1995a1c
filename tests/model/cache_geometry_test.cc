#include "libcalib/model/cache_geometry.h"

#include <gtest/gtest.h>
#include <filesystem>
#include <functional>

#include <nlohmann/json.hpp>

#include "libcalib/model/config.h"
#include "tests/support/expect_error.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

using model::CacheGeometry;
using model::parse_hf_cache_geometry;
using nlohmann::json;

CacheGeometry parse(const json& config) { return parse_hf_cache_geometry(config.dump(), "m/config.json"); }

json decoder(const char* model_type, int n_layers) {
  return {{"model_type", model_type}, {"num_hidden_layers", n_layers}, {"hidden_size", 64},
          {"num_attention_heads", 4}, {"num_key_value_heads", 2},      {"head_dim", 16}};
}

std::vector<int> indices(const CacheGeometry& g) {
  std::vector<int> list;
  for (const LayerGeometry& layer : g.layers) list.push_back(layer.index);
  return list;
}
std::vector<std::int64_t> windows(const CacheGeometry& g) {
  std::vector<std::int64_t> list;
  for (const LayerGeometry& layer : g.layers) list.push_back(layer.sliding_window);
  return list;
}

// Families that can be run: the strict reader and this one must not disagree.
TEST(CacheGeometry, AgreesWithTheReaderThatRunsModels) {
  for (const char* name : {"m-llama", "m-mistral", "m-qwen2", "m-qwen3"}) {
    json config = json::parse(config_json(make_tiny_model(name)));
    for (int variant = 0; variant < 4; ++variant) {
      if (variant == 1) config["use_sliding_window"] = true, config["sliding_window"] = 8, config["max_window_layers"] = 1;
      if (variant == 2) config.erase("max_window_layers");
      if (variant == 3) config["sliding_window"] = nullptr;
      const model::ModelConfig strict = model::parse_hf_config(config.dump(), "m/config.json");
      const CacheGeometry loose = parse(config);
      ASSERT_EQ(loose.layers.size(), static_cast<std::size_t>(strict.n_layers)) << name;
      for (std::size_t l = 0; l < loose.layers.size(); ++l) {
        EXPECT_EQ(loose.layers[l].n_kv_heads, strict.n_kv_heads);
        EXPECT_EQ(loose.layers[l].n_q_heads, strict.n_q_heads);
        EXPECT_EQ(loose.layers[l].head_dim, strict.head_dim);
        EXPECT_EQ(loose.layers[l].sliding_window, strict.sliding_window[l]) << name << " variant " << variant << " layer " << l;
      }
    }
  }
}

// CASES.md PL-05, AR-18, AR-20, AR-21.
TEST(CacheGeometry, LayersThatDiffer) {
  json gemma = decoder("gemma3_text", 4);
  gemma["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention", "full_attention"};
  gemma["sliding_window"] = 8;
  EXPECT_EQ(windows(parse(gemma)), (std::vector<std::int64_t>{8, 0, 8, 0}));

  json hybrid = decoder("qwen3_next", 8);
  hybrid["full_attention_interval"] = 4;
  EXPECT_EQ(indices(parse(hybrid)), (std::vector<int>{3, 7}));
  EXPECT_EQ(parse(hybrid).n_without, 6);
  hybrid.erase("full_attention_interval");
  hybrid["layer_types"] = json::array();
  for (int l = 0; l < 8; ++l) hybrid["layer_types"].push_back(l % 4 == 3 ? "full_attention" : "linear_attention");
  EXPECT_EQ(indices(parse(hybrid)), (std::vector<int>{3, 7}));

  json share = decoder("gemma3n_text", 6);
  share["num_kv_shared_layers"] = 2;
  EXPECT_EQ(indices(parse(share)), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(parse(share).n_shared, 2);

  json heads = {{"model_type", "openelm"}, {"num_transformer_layers", 3},  {"model_dim", 64},
                {"head_dim", 16},          {"num_query_heads", {4, 4, 8}}, {"num_kv_heads", {2, 2, 4}}};
  const CacheGeometry openelm = parse(heads);
  ASSERT_EQ(openelm.layers.size(), 3u);
  EXPECT_EQ(openelm.layers[1].n_kv_heads, 2);
  EXPECT_EQ(openelm.layers[2].n_kv_heads, 4);

  json jamba = decoder("jamba", 8);
  jamba["attn_layer_period"] = 4;
  jamba["attn_layer_offset"] = 2;
  EXPECT_EQ(indices(parse(jamba)), (std::vector<int>{2, 6}));
}

TEST(CacheGeometry, RulesThatTheCodeOfAFamilyHolds) {
  const auto full = [](const char* type, int n_layers) {
    json config = decoder(type, n_layers);
    config["sliding_window"] = 512;
    std::vector<int> list;
    for (const LayerGeometry& layer : parse(config).layers)
      if (layer.sliding_window == 0) list.push_back(layer.index);
    return list;
  };
  EXPECT_EQ(full("gemma2", 4), (std::vector<int>{1, 3}));
  EXPECT_EQ(full("gemma3_text", 12), (std::vector<int>{5, 11}));
  EXPECT_EQ(full("cohere2", 8), (std::vector<int>{3, 7}));
  EXPECT_EQ(full("phi3", 2), (std::vector<int>{}));
  EXPECT_EQ(full("llama", 2), (std::vector<int>{0, 1}));  // not a key of that family
  expect_error([&] { full("newcomer", 2); }, ErrorKind::kUnsupported, {"sliding_window is 512", "newcomer", "layer_types"});
  json pattern = decoder("newcomer", 6);
  pattern["sliding_window"] = 512;
  pattern["sliding_window_pattern"] = 3;
  EXPECT_EQ(windows(parse(pattern)), (std::vector<std::int64_t>{512, 512, 0, 512, 512, 0}));
  EXPECT_EQ(parse(json{{"model_type", "gemma3"}, {"text_config", pattern}}).layers.size(), 6u);
}

TEST(CacheGeometry, WhatIsNotCountedIsRefused) {
  json mla = decoder("deepseek_v3", 2);
  mla["kv_lora_rank"] = 16;
  expect_error([&] { parse(mla); }, ErrorKind::kUnsupported, {"kv_lora_rank"});
  json odd = decoder("newcomer", 2);
  odd["layer_types"] = {"full_attention", "chunked_attention"};
  expect_error([&] { parse(odd); }, ErrorKind::kUnsupported, {"chunked_attention"});
  odd["layer_types"] = {"full_attention"};
  expect_error([&] { parse(odd); }, ErrorKind::kFormat, {"layer_types", "2 layers"});
  odd["layer_types"] = {"sliding_attention", "full_attention"};
  expect_error([&] { parse(odd); }, ErrorKind::kFormat, {"sliding_window is missing"});
  json heads = decoder("newcomer", 2);
  heads["num_key_value_heads"] = 3;
  expect_error([&] { parse(heads); }, ErrorKind::kFormat, {"3 KV heads for 4 query heads"});
  heads["num_key_value_heads"] = {2, 2, 2};
  expect_error([&] { parse(heads); }, ErrorKind::kFormat, {"num_key_value_heads", "3 entries for 2 layers"});
  heads["num_key_value_heads"] = 2.5;
  expect_error([&] { parse(heads); }, ErrorKind::kFormat, {"num_key_value_heads", "2.5"});
  json all_shared = decoder("gemma3n_text", 2);
  all_shared["num_kv_shared_layers"] = 2;
  expect_error([&] { parse(all_shared); }, ErrorKind::kFormat, {"2 of 2 layers share"});
  json huge = decoder("llama", 2);
  huge["num_hidden_layers"] = 1 << 20;
  expect_error([&] { parse(huge); }, ErrorKind::kFormat, {"num_hidden_layers"});
  expect_error([&] { parse(json::array()); }, ErrorKind::kFormat, {"not a JSON object"});
}

std::string gguf(const std::function<void(GgufWriter&)>& add) {
  GgufWriter w;
  w.add<std::string>("general.architecture", "newarch");
  w.add<std::uint32_t>("newarch.block_count", 4);
  w.add<std::uint32_t>("newarch.embedding_length", 64);
  w.add<std::uint32_t>("newarch.attention.head_count", 4);
  w.add<std::uint32_t>("newarch.attention.key_length", 16);
  add(w);
  return w.bytes();
}

TEST(CacheGeometry, GgufHeadsAndWindowsPerLayer) {
  TempFolder folder;
  const std::string path = folder.file("m.gguf");
  const auto read = [&](const std::function<void(GgufWriter&)>& add) {
    write_file(path, gguf(add));
    return model::read_cache_geometry(path);
  };
  const CacheGeometry heads = read([](GgufWriter& w) { w.add_array<std::int32_t>("newarch.attention.head_count_kv", {2, 0, 4, 0}); });
  EXPECT_EQ(indices(heads), (std::vector<int>{0, 2}));
  EXPECT_EQ(heads.layers[1].n_kv_heads, 4);
  EXPECT_EQ(heads.n_without, 2);
  const CacheGeometry sliding = read([](GgufWriter& w) {
    w.add<std::uint32_t>("newarch.attention.sliding_window", 128);
    w.add<std::uint32_t>("newarch.attention.sliding_window_pattern", 2);
    w.add<std::uint32_t>("newarch.attention.shared_kv_layers", 1);
  });
  EXPECT_EQ(windows(sliding), (std::vector<std::int64_t>{128, 0, 128}));
  EXPECT_EQ(sliding.n_shared, 1);
  expect_error([&] { read([](GgufWriter& w) { w.add<std::uint32_t>("newarch.attention.sliding_window", 128); }); }, ErrorKind::kUnsupported,
               {"sliding_window", "newarch"});
  expect_error([&] { read([](GgufWriter& w) { w.add<std::uint32_t>("newarch.attention.value_length", 8); }); }, ErrorKind::kUnsupported, {"16", "8"});
  expect_error([&] { read([](GgufWriter& w) { w.add<std::uint32_t>("newarch.attention.kv_lora_rank", 8); }); }, ErrorKind::kUnsupported, {"kv_lora_rank"});
  expect_error([&] { read([](GgufWriter& w) {
                       w.add_array<std::int32_t>("newarch.attention.head_count_kv", {2, 2});
                     }); }, ErrorKind::kFormat,
               {"2 entries for 4 layers"});
}

TEST(CacheGeometry, HeadersAlone) {
  TempFolder folder;
  // A GGUF file cut behind its metadata, and a folder with nothing but config.json.
  const std::string whole = folder.file("whole.gguf"), cut = folder.file("cut.gguf");
  write_gguf(make_tiny_model("m-mistral"), whole);
  const std::string bytes = read_file(whole);
  write_file(cut, bytes.substr(0, bytes.size() / 3));
  EXPECT_EQ(windows(model::read_cache_geometry(cut)), (std::vector<std::int64_t>{8, 8, 8, 8}));
  write_gguf(make_tiny_model("m-gemma3"), whole);
  EXPECT_EQ(model::read_cache_geometry(whole).model_type, "gemma3_text");  // as the readers that run models name it
  std::filesystem::create_directory(folder.file("hf"));
  write_file(folder.file("hf/config.json"), config_json(make_tiny_model("m-llama")));
  for (const char* name : {"hf", "hf/config.json"}) EXPECT_EQ(model::read_cache_geometry(folder.file(name)).layers.size(), 4u);
  expect_error([&] { model::read_cache_geometry(folder.file("none")); }, ErrorKind::kNotFound, {"none"});
  std::filesystem::create_directory(folder.file("empty"));
  expect_error([&] { model::read_cache_geometry(folder.file("empty")); }, ErrorKind::kNotFound, {"config.json"});
  write_file(folder.file("page.json"), "<!DOCTYPE html><html>");
  expect_error([&] { model::read_cache_geometry(folder.file("page.json")); }, ErrorKind::kFormat, {"HTML"});
  for (std::size_t n : {std::size_t{0}, std::size_t{3}, std::size_t{30}, std::size_t{300}}) {
    write_file(cut, bytes.substr(0, n));
    EXPECT_THROW(model::read_cache_geometry(cut), Error) << n;
  }
}

}  // namespace
}  // namespace calib::test

// Logits, k_pre, k_post and v against the reference implementation (scripts/make_golden.py), 1e-4 of the tensor's maximum.

#include <cmath>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/rng.h"
#include "tests/model/forward_model.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

using nlohmann::json;

constexpr double kTolerance = 1e-4;

json golden(const std::string& name) {
  return json::parse(read_file(std::string(CALIB_SOURCE_DIR) + "/tests/golden/model/" + name + ".json"));
}

/// Norms and biases as make_golden.py fills them.
void vary_vectors(TinyModel& model) {
  for (TinyTensor& t : model.tensors) {
    if (t.shape.size() != 1) continue;
    const double base = t.name.ends_with(".bias") || model.gemma() ? 0.0 : 1.0;
    Rng rng = Rng::for_item(2, fnv1a64(t.name));
    for (float& v : t.values) v = static_cast<float>(base + 0.3 * rng.normal());
  }
}

void add_bias(TinyModel& model, const std::string& name, std::int64_t n) {
  model.tensors.push_back({name, {n}, std::vector<float>(static_cast<std::size_t>(n))});
}

/// Entries are taken at i * 7919 mod size; `first` cuts the leading rows away.
void expect_sample(const std::vector<float>& got, const json& want, const std::string& what, std::size_t first = 0) {
  ASSERT_EQ(got.size() - first, want["size"].get<std::size_t>()) << what;
  const double scale = want["absmax"].get<double>();
  double absmax = 0;
  for (std::size_t i = first; i < got.size(); ++i) absmax = std::max(absmax, std::fabs(static_cast<double>(got[i])));
  EXPECT_NEAR(absmax, scale, kTolerance * scale) << what;
  const json& values = want["values"];
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_NEAR(got[first + (i * 7919) % (got.size() - first)], values[i].get<double>(), kTolerance * scale) << what << " sample " << i;
}

void expect_golden(const Forward& forward, const json& want) {
  ASSERT_EQ(forward.layers.size(), want["layers"].size());
  const std::size_t n_tokens = want["ids"].size();
  for (std::size_t l = 0; l < forward.layers.size(); ++l) {
    const CapturedLayer& layer = forward.layers[l];
    const json& expected = want["layers"][l];
    const std::string where = "layer " + std::to_string(l) + " ";
    expect_sample(layer.k_pre, expected["k_pre"], where + "k_pre");
    if (expected.contains("k_post")) {
      expect_sample(layer.k_post, expected["k_post"], where + "k_post");
      expect_sample(layer.v, expected["v"], where + "v");
    } else {
      const std::size_t skip = layer.v.size() / n_tokens * (n_tokens - 4);
      expect_sample(layer.k_post, expected["k_post_last"], where + "k_post", skip);
      expect_sample(layer.v, expected["v_last"], where + "v", skip);
    }
  }
  expect_sample(forward.logits, want["logits"], "logits");
  EXPECT_NEAR(forward.mean_nll(), want["nll"].get<double>(), 1e-4 * want["nll"].get<double>());
}

struct Case {
  const char* golden;
  const char* model;
  const char* rope_scaling;  // JSON, or ""
  const char* rope_theta;
  bool biases;
  const char* query_pre_attn_scalar = "";
};

class ModelGolden : public ::testing::TestWithParam<Case> {};

TEST_P(ModelGolden, MatchesReference) {
  const Case& c = GetParam();
  TinyModel model = make_tiny_model(c.model);
  if (c.biases)
    for (std::int64_t l = 0; l < model.n_layers; ++l) {
      const std::string p = "model.layers." + std::to_string(l) + ".";
      add_bias(model, p + "self_attn.q_proj.bias", 64);
      add_bias(model, p + "self_attn.k_proj.bias", 32);
      add_bias(model, p + "self_attn.v_proj.bias", 32);
      add_bias(model, p + "self_attn.o_proj.bias", 64);
      add_bias(model, p + "mlp.gate_proj.bias", 128);
      add_bias(model, p + "mlp.up_proj.bias", 128);
      add_bias(model, p + "mlp.down_proj.bias", 64);
    }
  vary_vectors(model);
  const TempFolder folder;
  write_hf_folder(model, folder.path());
  if (*c.rope_scaling) patch_json_file(folder.file("config.json"), "rope_scaling", c.rope_scaling);
  if (*c.rope_theta) patch_json_file(folder.file("config.json"), "rope_theta", c.rope_theta);
  if (*c.query_pre_attn_scalar) patch_json_file(folder.file("config.json"), "query_pre_attn_scalar", c.query_pre_attn_scalar);
  if (c.biases) {
    patch_json_file(folder.file("config.json"), "attention_bias", "true");
    patch_json_file(folder.file("config.json"), "mlp_bias", "true");
  }
  const json want = golden(c.golden);
  expect_golden(run_forward(folder.path(), want["ids"].get<std::vector<text::TokenId>>()), want);
}

INSTANTIATE_TEST_SUITE_P(
    Families, ModelGolden,
    ::testing::Values(Case{"llama", "m-llama", "", "", false},
                      Case{"llama_rope_linear", "m-llama", R"({"rope_type":"linear","factor":4.0})", "", false},
                      Case{"llama_rope_llama3", "m-llama",
                           R"({"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":64})",
                           "500000.0", false},
                      Case{"llama_bias", "m-llama", "", "", true}, Case{"mistral_sliding", "m-mistral", "", "", false},
                      Case{"qwen2", "m-qwen2", "", "", false}, Case{"qwen3", "m-qwen3", "", "", false},
                      Case{"gemma3", "m-gemma3", "", "", false}, Case{"smollm3", "m-smollm3", "", "", false},
                      Case{"gemma3_rope_linear", "m-gemma3", R"({"rope_type":"linear","factor":8.0})", "", false, "40"}),
    [](const auto& info) { return std::string(info.param.golden); });

void expect_gguf_golden(const char* name) {
  TinyModel model = make_tiny_model(std::string("m-") + name);
  vary_vectors(model);
  const TempFolder folder;
  const std::string path = write_gguf(model, folder.file("m.gguf")).front();
  const json want = golden(name);
  expect_golden(run_forward(path, want["ids"].get<std::vector<text::TokenId>>()), want);
}

TEST(ModelGolden, GemmaFromGgufMatchesReference) { expect_gguf_golden("gemma3"); }    // norms there hold 1 + w
TEST(ModelGolden, SmolLm3FromGgufMatchesReference) { expect_gguf_golden("smollm3"); }  // rows permuted in all layers, RoPE in three of four

void expect_real_golden(const char* name, const char* variable, const char* fetch) {
  const json want = golden(name);
  const std::string file = want["file"].get<std::string>(), path = real_model(variable, file);
  if (path.empty()) GTEST_SKIP() << "SKIP RealModelGolden: " << file << " not found; set " << variable << " or run scripts/fetch_model " << fetch;
  expect_golden(run_forward(path, want["ids"].get<std::vector<text::TokenId>>()), want);
}

TEST(RealModelGolden, SmolLm2MatchesReference) { expect_real_golden("smollm2", "KVCALIB_MODEL", "smollm2"); }
TEST(RealModelGolden, Gemma3MatchesReference) { expect_real_golden("gemma3_270m", "KVCALIB_GEMMA_MODEL", "gemma3"); }

}  // namespace
}  // namespace calib::test

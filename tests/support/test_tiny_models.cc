#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "libcalib/base/sha256.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

TEST(TinyModels, HaveTheShapesOfTheCatalogue) {
  const TinyModel llama = make_tiny_model("m-llama");
  EXPECT_EQ(llama.tensor("model.layers.0.self_attn.k_proj.weight").shape, (std::vector<std::int64_t>{32, 64}));
  EXPECT_EQ(llama.tensors.size(), 1u + 4 * 9 + 2);
  const TinyModel qwen3 = make_tiny_model("m-qwen3");
  EXPECT_EQ(qwen3.tensor("model.layers.2.self_attn.q_proj.weight").shape, (std::vector<std::int64_t>{128, 64}));
  EXPECT_EQ(qwen3.tensor("model.layers.2.self_attn.k_norm.weight").shape, (std::vector<std::int64_t>{32}));
}

TEST(TinyModels, ValuesDependOnTheNameOnly) {
  // m-llama and m-mistral share names and shapes, so they share values.
  const TinyModel a = make_tiny_model("m-llama"), b = make_tiny_model("m-mistral");
  EXPECT_EQ(a.tensor("model.layers.3.mlp.up_proj.weight").values, b.tensor("model.layers.3.mlp.up_proj.weight").values);
  EXPECT_NE(a.tensor("model.layers.2.mlp.up_proj.weight").values, a.tensor("model.layers.3.mlp.up_proj.weight").values);
}

TEST(TinyModels, KnownValues) {  // from an independent Python version
  const TinyModel m = make_tiny_model("m-llama");
  const auto& k = m.tensor("model.layers.0.self_attn.k_proj.weight").values;
  EXPECT_FLOAT_EQ(k[0], -0.08572755008935928f);
  EXPECT_FLOAT_EQ(k[1], -0.28809547424316406f);
  const auto& e = m.tensor("model.embed_tokens.weight").values;
  EXPECT_FLOAT_EQ(e[0], -0.20056356489658356f);
  EXPECT_FLOAT_EQ(e[2], -0.10794343054294586f);
}

TEST(TinyModels, WeightsHaveUnitGain) {
  const TinyModel m = make_tiny_model("m-llama");
  const auto& w = m.tensor("model.layers.1.mlp.up_proj.weight").values;
  double sum = 0, squares = 0;
  for (float v : w) sum += v, squares += static_cast<double>(v) * v;
  const double n = static_cast<double>(w.size());  // 8192 draws of N(0, 1/8): 5 sigma of mean and of variance
  EXPECT_NEAR(sum / n, 0, 5 / 8.0 / std::sqrt(n));
  EXPECT_NEAR(squares / n * 64, 1, 5 * std::sqrt(2 / n));
}

TEST(TinyModels, BigBiasesHaveTheStatedNorms) {
  const TinyModel m = make_tiny_model("m-qwen2-big");
  for (const auto& [l, norm] : {std::pair{0, 600.0}, {1, 20.0}, {2, 20.0}, {3, 900.0}}) {
    const auto& b = m.tensor("model.layers." + std::to_string(l) + ".self_attn.k_proj.bias").values;
    double squares = 0;
    for (float v : b) squares += static_cast<double>(v) * v;
    EXPECT_NEAR(std::sqrt(squares), norm, norm * 1e-6);
  }
}

TEST(TinyModels, Stories260kIsRestored) {
  CALIB_SHARED_FILE(path, "models/stories260K.bin");
  const auto m = restore_s260k();  // checks the sha256 of the restored file itself
  ASSERT_TRUE(m);
  EXPECT_EQ(m->tensors.size(), 1u + 5 * 9 + 1);
}

TEST(TinyModels, HalfPrecisionRoundsToNearestEven) {
  const std::vector<float> values = {1.0f, 1.0f + 0x1p-11f, 1.0f + 3 * 0x1p-11f, 65504.0f, 65520.0f, 0x1p-24f, 0x1p-25f, -2.0f};
  const std::string b = f16_bytes(values);
  std::vector<int> codes;
  for (std::size_t i = 0; i < b.size(); i += 2) codes.push_back(static_cast<unsigned char>(b[i]) | static_cast<unsigned char>(b[i + 1]) << 8);
  EXPECT_EQ(codes, (std::vector<int>{0x3C00, 0x3C00, 0x3C02, 0x7BFF, 0x7C00, 0x0001, 0x0000, 0xC000}));
}

TEST(TinyModels, ShardsSplitByLayer) {
  const TinyModel m = make_tiny_model("m-llama");
  EXPECT_EQ(shard_of(m, "model.embed_tokens.weight", 3), 0);
  EXPECT_EQ(shard_of(m, "model.layers.1.self_attn.v_proj.weight", 3), 1);
  EXPECT_EQ(shard_of(m, "lm_head.weight", 3), 2);
}

TEST(TinyModels, TextHasTheAskedLength) {
  EXPECT_EQ(txt(4096).size(), 4096u);
  EXPECT_EQ(txt(4096), txt(8192).substr(0, 4096));
  EXPECT_EQ(ids_text({1, 403}), "\u4E01\u4F93");
}

}  // namespace
}  // namespace calib::test

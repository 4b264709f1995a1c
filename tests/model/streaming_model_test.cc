#include "libcalib/model/streaming_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "tests/model/forward_model.h"
#include "tests/model/s260k_golden.h"
#include "tests/support/expect_error.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

using model::StreamingModel;

std::vector<text::TokenId> some_ids(std::int64_t n, std::int64_t vocab = 260) {
  std::vector<text::TokenId> ids;
  for (std::int64_t i = 0; i < n; ++i) ids.push_back(static_cast<text::TokenId>((i * 89 + i * i * 7) % vocab));
  return ids;
}

double absmax(const std::vector<float>& values) {
  double largest = 0;
  for (const float v : values) largest = std::max(largest, std::fabs(static_cast<double>(v)));
  return largest;
}

void expect_same(const Forward& a, const Forward& b, double tolerance) {
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (std::size_t l = 0; l < a.layers.size(); ++l) {
    EXPECT_LE(relative_difference(a.layers[l].q_post, b.layers[l].q_post), tolerance) << "layer " << l << " q_post";
    EXPECT_LE(relative_difference(a.layers[l].k_pre, b.layers[l].k_pre), tolerance) << "layer " << l << " k_pre";
    EXPECT_LE(relative_difference(a.layers[l].k_post, b.layers[l].k_post), tolerance) << "layer " << l << " k_post";
    EXPECT_LE(relative_difference(a.layers[l].v, b.layers[l].v), tolerance) << "layer " << l << " v";
  }
  EXPECT_LE(relative_difference(a.logits, b.logits), tolerance);
}

TEST(Stories260K, GoldenIdsLikelihoodAndMaxima) {  // AR-01, GG-11
  const auto tiny = restore_s260k();
  if (!tiny) GTEST_SKIP() << "SKIP Stories260K: ../shared/data/models/stories260K.bin not found";
  const TempFolder folder;
  write_hf_folder(*tiny, folder.file("hf"));
  write_gguf(*tiny, folder.file("s260k.gguf"));
  const Forward hf = run_forward(folder.file("hf"), kS260kIds), gguf = run_forward(folder.file("s260k.gguf"), kS260kIds);
  EXPECT_NEAR(hf.mean_nll(), kS260kNll, 1e-4);
  EXPECT_NEAR(gguf.mean_nll(), kS260kNll, 1e-4);
  expect_same(gguf, hf, 1e-5);
  for (std::size_t l = 0; l < kS260kAbsmax.size(); ++l) {
    EXPECT_NEAR(absmax(hf.layers[l].k_pre), kS260kAbsmax[l].k_pre, 1e-3 * kS260kAbsmax[l].k_pre);
    EXPECT_NEAR(absmax(hf.layers[l].k_post), kS260kAbsmax[l].k_post, 1e-3 * kS260kAbsmax[l].k_post);
    EXPECT_NEAR(absmax(hf.layers[l].v), kS260kAbsmax[l].v, 1e-3 * kS260kAbsmax[l].v);
  }
  // Greedy continuation: the argmax at every position is the next id.
  for (std::size_t t = 0; t + 1 < kS260kIds.size(); ++t) EXPECT_EQ(hf.argmax(static_cast<std::int64_t>(t)), kS260kIds[t + 1]) << t;
  double mass = 0;
  for (std::int64_t v = 0; v < hf.vocab; ++v) mass += std::exp(static_cast<double>(hf.logits[static_cast<std::size_t>(v)]));
  EXPECT_NEAR(std::exp(static_cast<double>(hf.logits[403])) / mass, kS260kProbabilityOf403, 1e-4);
}

TEST(StreamingModel, FolderAndGgufAgreeInHuggingFaceOrder) {  // GG-11, GG-12
  for (const char* name : {"m-llama", "m-mistral", "m-qwen2-big", "m-qwen3", "m-gemma3"}) {
    const TinyModel tiny = make_tiny_model(name);
    const TempFolder folder;
    write_hf_folder(tiny, folder.file("hf"));
    write_gguf(tiny, folder.file("f32.gguf"));
    GgufOptions half;
    half.f16_weights = true;
    write_gguf(tiny, folder.file("f16.gguf"), half);
    const Forward hf = run_forward(folder.file("hf"), some_ids(40));
    expect_same(run_forward(folder.file("f32.gguf"), some_ids(40)), hf, 1e-5);
    // Only the bias-dominated K of m-qwen2-big is promised to 1e-3 with halved weights.
    const Forward rounded = run_forward(folder.file("f16.gguf"), some_ids(40));
    if (std::string(name) != "m-qwen2-big") continue;
    for (const std::size_t l : {0u, 3u}) EXPECT_LE(relative_difference(rounded.layers[l].k_pre, hf.layers[l].k_pre), 1e-3);
  }
}

TEST(StreamingModel, BiasNormsAreRecorded) {  // SA-01
  const TempFolder folder;
  write_hf_folder(make_tiny_model("m-qwen2-big"), folder.path());
  const StreamingModel opened = StreamingModel::open(folder.path(), {});
  const double expected[4] = {600, 20, 20, 900};
  for (std::int64_t l = 0; l < 4; ++l) EXPECT_NEAR(opened.layer(l).k_bias_norm, expected[l], 0.01);
  EXPECT_FALSE(opened.layer(0).llamacpp_adjacent_pairs);
  EXPECT_EQ(opened.identity().architecture, "qwen2");
}

TEST(StreamingModel, ThetaComesFromTheFile) {  // GG-10
  const TempFolder folder;
  TinyModel tiny = make_tiny_model("m-llama");
  tiny.rope_theta = 1e6;
  write_gguf(tiny, folder.file("theta.gguf"));
  GgufOptions silent;
  silent.write_rope_theta = false;
  write_gguf(tiny, folder.file("default.gguf"), silent);
  for (const auto& [file, theta] : {std::pair{"theta.gguf", 1e6}, std::pair{"default.gguf", 1e4}}) {
    const Forward forward = run_forward(folder.file(file), some_ids(200));
    const CapturedLayer& layer = forward.layers[0];
    std::vector<float> expected(layer.k_pre.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::size_t t = i / 32, c = i % 8, pair = c % 4, first = i - c + pair;
      const double angle = static_cast<double>(t) * std::pow(theta, -2.0 * static_cast<double>(pair) / 8);
      const double a = layer.k_pre[first], b = layer.k_pre[first + 4];
      expected[i] = static_cast<float>(c < 4 ? a * std::cos(angle) - b * std::sin(angle) : b * std::cos(angle) + a * std::sin(angle));
    }
    EXPECT_LE(relative_difference(layer.k_post, expected), 1e-5) << file;
  }
}

TEST(StreamingModel, RealFileWithoutOptionalKeys) {  // GG-10
  CALIB_SHARED_FILE(path, "models/llama-2-tiny-random.gguf");
  const StreamingModel opened = StreamingModel::open(path, {});
  ASSERT_EQ(opened.n_layers(), 1);
  EXPECT_EQ(opened.layer(0).head_dim, 4);
  EXPECT_EQ(opened.layer(0).inv_freq, (std::vector<double>{1.0, 0.01}));
  bool recorded = false;
  for (const std::string& d : opened.defaults_used()) recorded = recorded || d == "llama.rope.freq_base=10000";
  EXPECT_TRUE(recorded);
  EXPECT_TRUE(std::isfinite(run_forward(opened, some_ids(20, 32000)).mean_nll()));
}

TEST(StreamingModel, TiedAndUntiedAreBitEqual) {  // CF-02
  TinyModel untied = make_tiny_model("m-llama"), tied = untied;
  untied.tensor("lm_head.weight").values = untied.tensor("model.embed_tokens.weight").values;
  tied.tied = true;
  std::erase_if(tied.tensors, [](const TinyTensor& t) { return t.name == "lm_head.weight"; });
  const TempFolder folder;
  write_hf_folder(untied, folder.file("untied"));
  write_hf_folder(tied, folder.file("tied"));
  write_gguf(tied, folder.file("tied.gguf"));
  const Forward a = run_forward(folder.file("untied"), some_ids(30)), b = run_forward(folder.file("tied"), some_ids(30)),
                c = run_forward(folder.file("tied.gguf"), some_ids(30));
  EXPECT_EQ(a.logits, b.logits);
  EXPECT_EQ(a.logits, c.logits);
  EXPECT_EQ(a.layers[3].k_post, b.layers[3].k_post);
  EXPECT_NE(StreamingModel::open(folder.file("untied"), {}).identity().weights_sha256,
            StreamingModel::open(folder.file("tied"), {}).identity().weights_sha256);
}

TEST(StreamingModel, WithoutAHeadOnlyTheHeadIsRefused) {  // CF-01
  TinyModel tiny = make_tiny_model("m-llama");
  std::erase_if(tiny.tensors, [](const TinyTensor& t) { return t.name == "lm_head.weight"; });
  const TempFolder folder;
  write_hf_folder(tiny, folder.path());
  const StreamingModel opened = StreamingModel::open(folder.path(), {});
  EXPECT_FALSE(opened.has_head());
  EXPECT_EQ(opened.head_bytes(), 0);
  expect_error([&] { load_and_drop_head(opened); }, ErrorKind::kMismatch, {"lm_head.weight", "attn_kl", "attn_out"});
  const Forward forward = run_forward(opened, some_ids(30));
  EXPECT_EQ(forward.layers.size(), 4u);
  EXPECT_FALSE(forward.nll.computed());
}

TEST(StreamingModel, PrefixesAndStorageGiveTheSameNumbers) {  // CF-03
  const TinyModel tiny = make_tiny_model("m-qwen3");
  const TempFolder folder;
  write_hf_folder(tiny, folder.file("plain"));
  const Forward plain = run_forward(folder.file("plain"), some_ids(30));
  for (const char* prefix : {"", "language_model.model.", "transformer."}) {
    HfOptions options;
    options.prefix = prefix;
    options.n_shards = 2;
    const std::string path = folder.file("p" + std::to_string(std::string(prefix).size()));
    write_hf_folder(tiny, path, options);
    EXPECT_EQ(run_forward(path, some_ids(30)).logits, plain.logits) << prefix;
  }
}

TEST(StreamingModel, WindowsBelongToTheirLayers) {  // AR-16
  const TempFolder folder;
  write_hf_folder(make_tiny_model("m-gemma3"), folder.path());
  constexpr std::int64_t kRow = 60;
  const auto entering = [&](const Forward& f, std::size_t layer) {
    const auto& h = f.layers[layer].hidden;
    return std::vector<float>(h.begin() + kRow * 64, h.begin() + (kRow + 1) * 64);
  };
  std::vector<text::TokenId> ids = some_ids(64);
  const Forward plain = run_forward(folder.path(), ids);
  for (const std::int64_t distance : {8, 7}) {
    std::vector<text::TokenId> changed = ids;
    changed[static_cast<std::size_t>(kRow - distance)] = (changed[static_cast<std::size_t>(kRow - distance)] + 1) % 260;
    const Forward other = run_forward(folder.path(), changed);
    // Layer 0 slides: its 8 keys are t - 7 ... t. Layer 1 sees every token.
    EXPECT_EQ(entering(plain, 1) == entering(other, 1), distance == 8) << distance;
    EXPECT_NE(entering(plain, 2), entering(other, 2)) << distance;
  }
}

TEST(StreamingModel, LayersWithAWindowHaveTheirOwnFrequencies) {
  const TempFolder folder;
  write_hf_folder(make_tiny_model("m-gemma3"), folder.path());
  patch_json_file(folder.file("config.json"), "rope_scaling", R"({"rope_type":"linear","factor":8.0})");
  const StreamingModel m = StreamingModel::open(folder.path(), {});
  for (std::int64_t l = 0; l < 4; ++l) {
    const LayerGeometry& g = m.layer(l);
    EXPECT_EQ(g.sliding_window, l % 2 == 0 ? 8 : 0);
    EXPECT_DOUBLE_EQ(g.inv_freq[1], l % 2 == 0 ? std::pow(1e4, -0.125) : std::pow(1e6, -0.125) / 8) << l;
  }
  EXPECT_EQ(m.identity().architecture, "gemma3_text");
}

float to_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

TEST(StreamingModel, ResidualsBeyondTheRangeOfHalfPrecision) {  // AR-22
  TinyModel tiny = make_tiny_model("m-gemma3");
  for (std::int64_t l = 0; l < 4; ++l) {
    auto& norm = tiny.tensor("model.layers." + std::to_string(l) + ".post_attention_layernorm.weight").values;
    std::fill(norm.begin(), norm.end(), 30000.0f);
  }
  const TempFolder folder;
  HfOptions bf16;
  bf16.dtype = "BF16";
  write_hf_folder(tiny, folder.file("bf16"), bf16);
  for (TinyTensor& t : tiny.tensors)
    for (float& v : t.values) v = to_bf16(v);
  write_hf_folder(tiny, folder.file("f32"));
  const Forward a = run_forward(folder.file("bf16"), some_ids(40)), b = run_forward(folder.file("f32"), some_ids(40));
  EXPECT_GT(absmax(a.layers[3].hidden), 65504);
  expect_same(a, b, 1e-6);
  model::ModelOptions options;
  options.dtype = "bf16";
  const Forward narrow = run_forward(StreamingModel::open(folder.file("bf16"), options), some_ids(40));
  EXPECT_GT(absmax(narrow.layers[3].hidden), 65504);
  for (const Forward* f : {&a, &narrow})
    for (const float v : f->logits) ASSERT_TRUE(std::isfinite(v));
  EXPECT_LT(relative_difference(narrow.logits, a.logits), 0.1);
}

TEST(StreamingModel, WarnsWhereAFamilyNeedsBosAndGetsNone) {
  const TempFolder folder;
  write_gguf(make_tiny_model("m-gemma3"), folder.file("m.gguf"));  // tok-byte sets none
  std::vector<std::string> warnings;
  LogSink log;
  log.warning = [&](const std::string& text) { warnings.push_back(text); };
  StreamingModel::open(folder.file("m.gguf"), {}).load_tokenizer(log);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("BOS"), std::string::npos) << warnings[0];
}

TEST(StreamingModel, DevicesAndDtypes) {
  const TempFolder folder;
  write_hf_folder(make_tiny_model("m-llama"), folder.path());
  const auto open = [&](const char* device, const char* dtype) {
    model::ModelOptions options;
    options.device = device;
    options.dtype = dtype;
    return StreamingModel::open(folder.path(), options);
  };
  EXPECT_EQ(open("cpu", "auto").dtype(), "fp32");
  for (const char* device : {"gpu", "cuda:", "cuda:x", "cuda:-1", ""})
    expect_error([&] { open(device, "auto"); }, ErrorKind::kUsage, {"--device"});
  expect_error([&] { open("cpu", "fp16"); }, ErrorKind::kUsage, {"--dtype", "fp16"});
  const Forward narrow = run_forward(open("cpu", "bf16"), some_ids(40)), wide = run_forward(open("cpu", "fp32"), some_ids(40));
  // Eight bits of mantissa: 2^-9 each for input, weight and result of the first projection.
  EXPECT_LE(relative_difference(narrow.layers[0].k_pre, wide.layers[0].k_pre), 3.0 / 512);
  EXPECT_NEAR(narrow.mean_nll(), wide.mean_nll(), 0.05 * wide.mean_nll());
}

}  // namespace
}  // namespace calib::test

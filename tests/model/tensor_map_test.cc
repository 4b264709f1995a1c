#include "libcalib/model/tensor_map.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

using model::BlockPart;

struct Mapped {
  weights::Checkpoint checkpoint;
  model::ModelConfig config;
  model::TensorMap map;
  std::vector<std::string> notes;
};
Mapped map(const std::string& path) {
  Mapped m{weights::Checkpoint::open(path), {}, {}, {}};
  LogSink log;
  log.note = [&](const std::string& text) { m.notes.push_back(text); };
  m.config = model::read_config(m.checkpoint, log);
  m.map = model::map_tensors(m.config, m.checkpoint, log);
  return m;
}

void rename(TinyModel& model, const std::string& from, const std::string& to) { model.tensor(from).name = to; }
void drop(TinyModel& model, const std::string& name) { std::erase_if(model.tensors, [&](const TinyTensor& t) { return t.name == name; }); }

TEST(TensorMap, AllPrefixesAndOneThatIsNone) {  // CF-03
  const TinyModel tiny = make_tiny_model("m-llama");
  for (const char* prefix : {"model.", "", "language_model.model.", "model.language_model.", "transformer."}) {
    const TempFolder folder;
    HfOptions options;
    options.prefix = prefix;
    write_hf_folder(tiny, folder.path(), options);
    const Mapped m = map(folder.path());
    EXPECT_EQ(m.map.blocks[3][static_cast<std::size_t>(BlockPart::kK)]->name, std::string(prefix) + "layers.3.self_attn.k_proj.weight");
    ASSERT_NE(m.map.head, nullptr) << prefix;
  }
  const TempFolder folder;
  HfOptions options;
  options.prefix = "foo.bar.";
  write_hf_folder(tiny, folder.path(), options);
  expect_error([&] { map(folder.path()); }, ErrorKind::kMismatch,
               {"foo.bar.embed_tokens.weight", "foo.bar.layers.0.input_layernorm.weight", "model.embed_tokens.weight",
                "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"});
}

TEST(TensorMap, MissingAndUnexpectedAreListedTogether) {  // CF-04, CF-06
  TinyModel tiny = make_tiny_model("m-qwen3");
  rename(tiny, "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.key_proj.weight");
  drop(tiny, "model.layers.2.self_attn.k_norm.weight");
  const TempFolder folder;
  write_hf_folder(tiny, folder.path());
  expect_error([&] { map(folder.path()); }, ErrorKind::kMismatch,
               {"missing: model.layers.1.self_attn.k_proj.weight", "missing: model.layers.2.self_attn.k_norm.weight",
                "unexpected: model.layers.1.self_attn.key_proj.weight", "34 of 35 tensors used"});
}

TEST(TensorMap, ShapesContradictTheConfiguration) {  // CF-05
  const TempFolder folder;
  write_hf_folder(make_tiny_model("m-qwen3"), folder.path());
  const Mapped m = map(folder.path());
  EXPECT_EQ(m.config.head_dim, 32);
  patch_json_file(folder.file("config.json"), "head_dim", "16");
  expect_error([&] { map(folder.path()); }, ErrorKind::kMismatch, {"q_proj", "[128, 64]", "[64, 64]"});
}

TEST(TensorMap, LayerCountsMustAgree) {  // CF-08
  const TempFolder folder;
  write_hf_folder(make_tiny_model("m-llama"), folder.path());
  patch_json_file(folder.file("config.json"), "num_hidden_layers", "5");
  expect_error([&] { map(folder.path()); }, ErrorKind::kMismatch, {"layer 4", "num_hidden_layers is 5", "4 layers"});
  patch_json_file(folder.file("config.json"), "num_hidden_layers", "3");
  expect_error([&] { map(folder.path()); }, ErrorKind::kMismatch, {"layer 3", "num_hidden_layers is 3"});
}

TEST(TensorMap, GemmaNormsAndVisionTensors) {
  TinyModel tiny = make_tiny_model("m-gemma3");
  tiny.tensors.push_back({"vision_tower.x.weight", {4}, std::vector<float>(4)});
  const TempFolder folder;
  HfOptions options;
  options.prefix = "language_model.model.";
  write_hf_folder(tiny, folder.path(), options);
  const Mapped m = map(folder.path());
  const auto name = [&](BlockPart part) { return m.map.blocks[2][static_cast<std::size_t>(part)]->name; };
  EXPECT_EQ(name(BlockPart::kMlpNorm), "language_model.model.layers.2.pre_feedforward_layernorm.weight");
  EXPECT_EQ(name(BlockPart::kPostAttentionNorm), "language_model.model.layers.2.post_attention_layernorm.weight");
  EXPECT_EQ(name(BlockPart::kPostMlpNorm), "language_model.model.layers.2.post_feedforward_layernorm.weight");
  EXPECT_EQ(m.map.head, m.map.embedding);
  EXPECT_EQ(m.notes.size(), 1u);
  EXPECT_NE(m.notes.front().find("vision_tower.x.weight"), std::string::npos);
}

TEST(TensorMap, ABiasThatTheConfigurationDeniesIsAnError) {
  TinyModel tiny = make_tiny_model("m-llama");
  tiny.tensors.push_back({"model.layers.0.self_attn.k_proj.bias", {32}, std::vector<float>(32)});
  const TempFolder folder;
  write_hf_folder(tiny, folder.path());
  expect_error([&] { map(folder.path()); }, ErrorKind::kMismatch, {"unexpected: model.layers.0.self_attn.k_proj.bias"});
}

TEST(TensorMap, HeadsTiedUntiedAndAbsent) {  // CF-01, CF-02
  TinyModel tiny = make_tiny_model("m-llama");
  drop(tiny, "lm_head.weight");
  const TempFolder folder;
  write_hf_folder(tiny, folder.path());
  Mapped m = map(folder.path());
  EXPECT_EQ(m.map.head, nullptr);
  ASSERT_FALSE(m.notes.empty());
  patch_json_file(folder.file("config.json"), "tie_word_embeddings", "true");
  m = map(folder.path());
  EXPECT_EQ(m.map.head, m.map.embedding);
}

TEST(TensorMap, GgufExtrasAndMissingTensors) {  // GG-08
  const TinyModel tiny = make_tiny_model("m-llama");
  const TempFolder folder;
  GgufOptions options;
  for (int i = 0; i < 5; ++i) options.extra.push_back({"v.blk." + std::to_string(i) + ".weight", {4}, std::vector<float>(4)});
  write_gguf(tiny, folder.file("extra.gguf"), options);
  const Mapped m = map(folder.file("extra.gguf"));
  ASSERT_EQ(m.notes.size(), 1u);
  EXPECT_NE(m.notes[0].find("5 tensors"), std::string::npos) << m.notes[0];
  options = {};
  options.omit = {"blk.1.attn_k.weight"};
  write_gguf(tiny, folder.file("omit.gguf"), options);
  expect_error([&] { map(folder.file("omit.gguf")); }, ErrorKind::kMismatch, {"omit.gguf", "blk.1.attn_k.weight"});
}

TEST(TensorMap, RightContainerWrongContent) {  // ST-13
  CALIB_SHARED_FILE(hadamards, "misc/hadamards.safetensors");
  const TempFolder folder;
  write_hf_folder(make_tiny_model("m-llama"), folder.path());
  write_file(folder.file("model.safetensors"), read_file(hadamards));
  expect_error([&] { map(folder.path()); }, ErrorKind::kMismatch, {"model.embed_tokens.weight"});
}

TEST(TensorMap, VocabularyOnly) {  // GG-13
  CALIB_SHARED_FILE(vocabulary, "vocab/ggml-vocab-llama-spm.gguf");
  expect_error([&] { map(vocabulary); }, ErrorKind::kMismatch, {"ggml-vocab-llama-spm.gguf", "no tensors, vocabulary only"});
}

}  // namespace
}  // namespace calib::test

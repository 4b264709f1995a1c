// GGUF files and splits: rows GG-03, GG-06 to GG-08, GG-12 and GG-13 of the case catalogue.
#include <filesystem>

#include <gtest/gtest.h>

#include "libcalib/weights/checkpoint.h"
#include "libcalib/weights/gguf.h"
#include "tests/support/expect_error.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::weights {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

std::vector<float> values_of(const Checkpoint& c, const std::string& name) {
  const TensorInfo* t = c.find(name);
  if (t == nullptr) throw std::runtime_error("no tensor " + name);
  std::vector<float> out(static_cast<std::size_t>(t->n_elements));
  c.read_f32(*t, out);
  return out;
}

class CheckpointGguf : public ::testing::Test {
 protected:
  std::vector<std::string> write(const std::string& model, const std::string& name, const test::GgufOptions& options = {}) {
    return test::write_gguf(test::make_tiny_model(model), scratch_.file(name), options);
  }
  std::string identity(const std::string& path) { return Checkpoint::open(path).identity_sha256(false); }
  test::TempFolder scratch_;
};

test::GgufOptions in_three() {
  test::GgufOptions o;
  o.n_splits = 3;
  return o;
}

TEST_F(CheckpointGguf, HoldsTheValuesOfTheFolder) {
  for (const char* name : {"m-qwen2-big", "m-qwen3"}) {  // families whose rows are not permuted
    const test::TinyModel m = test::make_tiny_model(name);
    const Checkpoint c = Checkpoint::open(test::write_gguf(m, scratch_.file(std::string(name) + ".gguf"))[0]);
    EXPECT_EQ(c.kind(), ContainerKind::kGguf);
    EXPECT_TRUE(c.folder().empty());
    EXPECT_EQ(c.tensors().size(), m.tensors.size());
    EXPECT_EQ(c.gguf().text("general.architecture"), m.model_type);
    for (const auto& t : m.tensors) {
      EXPECT_EQ(values_of(c, test::gguf_name(t.name)), t.values) << t.name;
      EXPECT_EQ(c.find(test::gguf_name(t.name))->shape, t.shape) << t.name;
    }
  }
}

TEST_F(CheckpointGguf, Gg12SmallTensorsKeepFullPrecision) {
  test::GgufOptions f16;
  f16.f16_weights = true;
  const test::TinyModel m = test::make_tiny_model("m-qwen2-big");
  const Checkpoint c = Checkpoint::open(test::write_gguf(m, scratch_.file("m.gguf"), f16)[0]);
  EXPECT_EQ(values_of(c, "blk.0.attn_k.bias"), m.tensor("model.layers.0.self_attn.k_proj.bias").values);
  EXPECT_EQ(c.find("blk.0.attn_k.weight")->type, TensorType::kF16);
  const auto half = values_of(c, "blk.0.attn_k.weight");
  const auto& full = m.tensor("model.layers.0.self_attn.k_proj.weight").values;
  for (std::size_t i = 0; i < full.size(); ++i) ASSERT_NEAR(half[i], full[i], std::abs(full[i]) * 0x1p-11 + 0x1p-25);
}

TEST_F(CheckpointGguf, VersionsAndAlignmentsGiveTheSameModel) {
  const std::string plain = identity(write("m-llama", "m.gguf")[0]);
  test::GgufOptions v2;
  v2.version = 2;
  EXPECT_EQ(identity(write("m-llama", "v2.gguf", v2)[0]), plain);
  for (std::size_t a : {8, 16, 64, 4096}) {
    test::GgufOptions o;
    o.alignment = a;
    EXPECT_EQ(identity(write("m-llama", "a.gguf", o)[0]), plain) << a;
  }
}

TEST_F(CheckpointGguf, Gg07SplitEqualsWhole) {
  const std::string whole = identity(write("m-llama", "whole.gguf")[0]);
  fs::create_directory(scratch_.file("split"));
  const auto parts = write("m-llama", "split/m.gguf", in_three());
  ASSERT_EQ(parts.size(), 3u);
  for (const std::string& given : {parts[0], parts[1], parts[2], scratch_.file("split")}) {
    const Checkpoint c = Checkpoint::open(given);
    EXPECT_EQ(c.identity_sha256(false), whole) << given;
    EXPECT_EQ(c.gguf().integer("llama.block_count"), 4) << given;
  }
}

TEST_F(CheckpointGguf, Gg07DamagedSplits) {
  const auto parts = write("m-llama", "m.gguf", in_three());
  const auto foreign = write("m-qwen2", "q.gguf", in_three());
  const std::string second = test::read_file(parts[1]), third = test::read_file(parts[2]);
  fs::remove(parts[1]);
  expect_error([&] { Checkpoint::open(parts[0]); }, ErrorKind::kNotFound, {parts[1]});
  expect_error([&] { Checkpoint::open(parts[2]); }, ErrorKind::kNotFound, {parts[1]});
  fs::remove(parts[0]);
  expect_error([&] { Checkpoint::open(parts[2]); }, ErrorKind::kNotFound, {"2 of 3", parts[0], parts[1]});
  write("m-llama", "m.gguf", in_three());
  fs::copy_file(foreign[1], parts[1], fs::copy_options::overwrite_existing);
  expect_error([&] { Checkpoint::open(parts[0]); }, ErrorKind::kMismatch, {parts[1], "split.tensors.count", "51", "39"});
  test::write_file(parts[1], third);  // the right model, the wrong part
  expect_error([&] { Checkpoint::open(parts[0]); }, ErrorKind::kMismatch, {parts[1], "split.no", "part 2"});
  test::write_file(parts[1], second.substr(0, second.size() - 1));
  expect_error([&] { Checkpoint::open(parts[0]); }, ErrorKind::kFormat, {parts[1], "cut off"});
  test::write_file(scratch_.file("renamed.gguf"), second);
  expect_error([&] { Checkpoint::open(scratch_.file("renamed.gguf")); }, ErrorKind::kMismatch, {"renamed.gguf", "part 2", "-00002-of-00003.gguf"});
}

TEST_F(CheckpointGguf, Gg07TotalsAndDuplicates) {
  const auto part = [&](int no, std::vector<std::string> names, int total) {
    test::GgufWriter w;
    w.add<std::uint16_t>("split.no", static_cast<std::uint16_t>(no));
    w.add<std::uint16_t>("split.count", 2);
    w.add<std::int32_t>("split.tensors.count", total);
    const std::vector<float> values(4);
    for (const auto& n : names) w.add_f32(n, {4}, values);
    const std::string path = scratch_.file("t-0000" + std::to_string(no + 1) + "-of-00002.gguf");
    test::write_file(path, w.bytes());
    return path;
  };
  part(0, {"a", "b"}, 3);
  EXPECT_EQ(Checkpoint::open(part(1, {"c"}, 3)).tensors().size(), 3u);
  expect_error([&] { Checkpoint::open(part(1, {"b"}, 3)); }, ErrorKind::kMismatch, {"tensor b", "t-00001-of-00002.gguf", "t-00002-of-00002.gguf"});
  expect_error([&] { Checkpoint::open(part(1, {"c", "d"}, 3)); }, ErrorKind::kMismatch, {"split.tensors.count is 3", "4 tensors"});
}

TEST_F(CheckpointGguf, Gg08ExtraTensorsAreListed) {
  test::GgufOptions o;
  for (int l = 0; l < 5; ++l) o.extra.push_back({"v.blk." + std::to_string(l) + ".weight", {4}, {1, 2, 3, 4}});
  o.omit = {"blk.1.attn_k.weight"};
  const Checkpoint c = Checkpoint::open(write("m-llama", "m.gguf", o)[0]);
  EXPECT_EQ(c.tensors().size(), 39u - 1 + 5);
  EXPECT_EQ(c.find("blk.1.attn_k.weight"), nullptr);
  EXPECT_EQ(values_of(c, "v.blk.4.weight"), (std::vector<float>{1, 2, 3, 4}));
}

TEST_F(CheckpointGguf, FolderWithOneFile) {
  fs::create_directory(scratch_.file("f"));
  const std::string one = write("m-llama", "f/m.gguf")[0];
  EXPECT_EQ(identity(scratch_.file("f")), identity(one));
  test::write_file(scratch_.file("f/config.json"), "{}");  // published beside GGUF files too
  EXPECT_EQ(identity(scratch_.file("f")), identity(one));
  write("m-qwen2", "f/q.gguf");
  expect_error([&] { Checkpoint::open(scratch_.file("f")); }, ErrorKind::kUsage, {"2 GGUF models", "m.gguf", "q.gguf"});
}

TEST_F(CheckpointGguf, UnreadableTypesAreNamedWhenRead) {
  test::GgufWriter w;
  w.add_tensor("t", {256}, test::GgmlType::kIq4Xs, std::string(136, '\0'));
  test::write_file(scratch_.file("t.gguf"), w.bytes());
  const Checkpoint c = Checkpoint::open(scratch_.file("t.gguf"));
  EXPECT_EQ(c.tensors()[0].type, TensorType::kOther);
  expect_error([&] { values_of(c, "t"); }, ErrorKind::kUnsupported, {"tensor t", "IQ4_XS"});
}

TEST_F(CheckpointGguf, RowsOfQuantisedTensors) {
  test::GgufWriter w;
  std::string blocks;
  for (int i = 0; i < 6; ++i) blocks += std::string("\x00\x3C", 2) + std::string(32, static_cast<char>(i));  // scale 1, all values i
  w.add_tensor("t", {64, 3}, test::GgmlType::kQ8_0, blocks);
  test::write_file(scratch_.file("t.gguf"), w.bytes());
  const Checkpoint c = Checkpoint::open(scratch_.file("t.gguf"));
  std::vector<float> row(64);
  c.read_rows_f32(*c.find("t"), 1, 1, row);
  EXPECT_EQ(row[0], 2.0f);
  EXPECT_EQ(row[31], 2.0f);
  EXPECT_EQ(row[32], 3.0f);
  EXPECT_EQ(row[63], 3.0f);
}

TEST_F(CheckpointGguf, InfiniteBlockScaleIsNamed) {
  test::GgufWriter w;
  w.add_tensor("t", {32}, test::GgmlType::kQ8_0, std::string("\x00\x7C", 2) + std::string(32, '\1'));
  test::write_file(scratch_.file("t.gguf"), w.bytes());
  expect_error([&] { values_of(Checkpoint::open(scratch_.file("t.gguf")), "t"); }, ErrorKind::kNumeric, {"tensor t", "element 0"});
}

TEST_F(CheckpointGguf, Gg13VocabularyOnly) {
  CALIB_SHARED_FILE(path, "vocab/ggml-vocab-llama-spm.gguf");
  expect_error([&] { Checkpoint::open(path); }, ErrorKind::kMismatch, {"no tensors, vocabulary only", path});
}

TEST_F(CheckpointGguf, Stories260kKeepsItsValues) {
  const auto m = test::restore_s260k();
  if (!m) GTEST_SKIP() << "SKIP CheckpointGguf.Stories260kKeepsItsValues: ../shared/data/models/stories260K.bin not found";
  const Checkpoint c = Checkpoint::open(test::write_gguf(*m, scratch_.file("s.gguf"))[0]);
  EXPECT_EQ(c.find("output.weight"), nullptr);
  EXPECT_EQ(values_of(c, "blk.3.attn_v.weight"), m->tensor("model.layers.3.self_attn.v_proj.weight").values);
  // llama2.c stores adjacent pairs, as llama-type GGUF files do: row 2 of a head is the second of its first half in Hugging Face order.
  const auto k = values_of(c, "blk.0.attn_k.weight");
  const auto& hf = m->tensor("model.layers.0.self_attn.k_proj.weight").values;
  EXPECT_TRUE(std::equal(hf.begin() + 64, hf.begin() + 128, k.begin() + 128));
  EXPECT_TRUE(std::equal(hf.begin() + 4 * 64, hf.begin() + 5 * 64, k.begin() + 64));
}

}  // namespace
}  // namespace calib::weights

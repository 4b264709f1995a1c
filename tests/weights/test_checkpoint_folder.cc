// Hugging Face folders: rows ST-02 and ST-07 to ST-13 of the case catalogue.
#include <cmath>
#include <filesystem>
#include <limits>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/sha256.h"
#include "libcalib/weights/checkpoint.h"
#include "tests/support/expect_error.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::weights {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using Json = nlohmann::ordered_json;

constexpr const char* kKProj = "model.layers.0.self_attn.k_proj.weight";
constexpr const char* kVProj1 = "model.layers.1.self_attn.v_proj.weight";

std::vector<float> values_of(const Checkpoint& c, const std::string& name) {
  const TensorInfo* t = c.find(name);
  if (t == nullptr) throw std::runtime_error("no tensor " + name);
  std::vector<float> out(static_cast<std::size_t>(t->n_elements));
  c.read_f32(*t, out);
  return out;
}

class CheckpointFolder : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const test::HfOptions& options = {}) {
    const std::string folder = scratch_.file(name);
    test::write_hf_folder(model_, folder, options);
    return folder;
  }
  // One tensor of a single-file model replaced.
  std::string write_with(const std::string& name, const std::string& tensor, const std::string& dtype, const std::string& bytes,
                         std::vector<test::SafetensorsTensor> extra = {}) {
    const std::string folder = write(name);
    auto tensors = test::split_safetensors(test::read_file(folder + "/model.safetensors"));
    for (auto& t : tensors)
      if (t.name == tensor) t.dtype = dtype, t.bytes = bytes;
    tensors.insert(tensors.end(), extra.begin(), extra.end());
    test::write_file(folder + "/model.safetensors", test::safetensors_bytes(tensors));
    return folder;
  }
  test::TempFolder scratch_;
  test::TinyModel model_ = test::make_tiny_model("m-llama");
};

std::string shard(int i) { return "model-0000" + std::to_string(i) + "-of-00003.safetensors"; }
test::HfOptions sharded() {
  test::HfOptions o;
  o.n_shards = 3;
  return o;
}

TEST_F(CheckpointFolder, ReadsEveryTensor) {
  const Checkpoint c = Checkpoint::open(write("m"));
  EXPECT_EQ(c.kind(), ContainerKind::kSafetensors);
  EXPECT_EQ(c.folder(), scratch_.file("m"));
  EXPECT_EQ(c.tensors().size(), model_.tensors.size());
  for (const auto& t : model_.tensors) EXPECT_EQ(values_of(c, t.name), t.values) << t.name;
  EXPECT_TRUE(std::is_sorted(c.tensors().begin(), c.tensors().end(), [](const auto& a, const auto& b) { return a.name < b.name; }));
  EXPECT_EQ(c.find("lm_head"), nullptr);
}

TEST_F(CheckpointFolder, ReadsRowsAndSurvivesRelease) {
  const Checkpoint c = Checkpoint::open(write("m") + "/");
  const TensorInfo& t = *c.find("model.embed_tokens.weight");
  c.release(t);
  std::vector<float> rows(3 * 64);
  c.read_rows_f32(t, 257, 3, rows);
  const auto& all = model_.tensor("model.embed_tokens.weight").values;
  EXPECT_EQ(rows, std::vector<float>(all.begin() + 257 * 64, all.begin() + 260 * 64));
  expect_error([&] { c.read_rows_f32(t, 258, 3, rows); }, ErrorKind::kInternal, {});
}

TEST_F(CheckpointFolder, St02PlaceholderWeights) {
  const std::string folder = write("m");
  test::write_file(folder + "/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 538090408\n");
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kFormat, {"Git LFS pointer", "538090408", folder + "/model.safetensors"});
  test::write_file(folder + "/model.safetensors", "<html></html>");
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kFormat, {"HTML page"});
  const std::string parts = write("parts", sharded());
  test::write_file(parts + "/model.safetensors.index.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 77\n");
  expect_error([&] { Checkpoint::open(parts); }, ErrorKind::kFormat, {"Git LFS pointer", "index.json"});
}

TEST_F(CheckpointFolder, St07CutFiles) {
  for (const bool parts : {false, true}) {
    const std::string folder = write(parts ? "parts" : "one", parts ? sharded() : test::HfOptions{});
    const std::string file = folder + "/" + (parts ? shard(2) : "model.safetensors"), whole = test::read_file(file);
    for (const std::size_t size : {whole.size() - 1, whole.size() - 1024, whole.size() / 2}) {
      test::write_file(file, whole.substr(0, size));
      expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kFormat, {file, std::to_string(whole.size()), std::to_string(size)});
    }
  }
}

TEST_F(CheckpointFolder, St07ShrinkingWhileMapped) {
  const std::string folder = write("m");
  const Checkpoint c = Checkpoint::open(folder);
  fs::resize_file(folder + "/model.safetensors", 5000);
  expect_error([&] { values_of(c, "lm_head.weight"); }, ErrorKind::kIo, {"model.safetensors", "shrank", "5000"});
  expect_error([&] { c.identity_sha256(false); }, ErrorKind::kIo, {"shrank"});
}

TEST_F(CheckpointFolder, St08MissingShards) {
  const std::string folder = write("m", sharded());
  fs::remove(folder + "/" + shard(2));
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kNotFound, {shard(2), "index"});
  fs::remove(folder + "/" + shard(3));
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kNotFound, {"2 of 3", shard(2), shard(3)});
}

TEST_F(CheckpointFolder, St08IndexAndShardsDisagree) {
  const std::string folder = write("m", sharded());
  const std::string first = folder + "/" + shard(1), second = folder + "/" + shard(2);
  const std::string first_bytes = test::read_file(first), second_bytes = test::read_file(second);
  auto tensors = test::split_safetensors(second_bytes);
  const auto v_proj = *std::find_if(tensors.begin(), tensors.end(), [](const auto& t) { return t.name == kVProj1; });
  std::erase_if(tensors, [](const auto& t) { return t.name == kVProj1; });

  test::write_file(second, test::safetensors_bytes(tensors));
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kMismatch, {kVProj1, shard(2)});

  auto moved = test::split_safetensors(first_bytes);
  moved.push_back(v_proj);
  test::write_file(first, test::safetensors_bytes(moved));
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kMismatch, {kVProj1, shard(1), shard(2)});  // in another shard than listed
  test::write_file(second, second_bytes);
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kMismatch, {kVProj1, "2 files", shard(1), shard(2)});

  auto unlisted = test::split_safetensors(first_bytes);
  unlisted.push_back({"stranger", "F32", {1}, std::string(4, '\0')});
  test::write_file(first, test::safetensors_bytes(unlisted));
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kMismatch, {"stranger", shard(1), "not listed"});
}

TEST_F(CheckpointFolder, St08ExtraShardIsLeftAlone) {
  const std::string folder = write("m", sharded());
  const std::string clean = Checkpoint::open(folder).identity_sha256(false);
  const std::vector<float> nan(2048, std::numeric_limits<float>::quiet_NaN());
  test::write_file(folder + "/model-00004-of-00003.safetensors", test::safetensors_bytes({test::f32_tensor(kKProj, {32, 64}, nan)}));
  std::vector<std::string> notes;
  LogSink log;
  log.note = [&](const std::string& text) { notes.push_back(text); };
  const Checkpoint c = Checkpoint::open(folder, log);
  EXPECT_EQ(c.identity_sha256(false), clean);
  EXPECT_EQ(values_of(c, kKProj), model_.tensor(kKProj).values);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("model-00004-of-00003.safetensors"), std::string::npos);
}

TEST_F(CheckpointFolder, IdentityDoesNotDependOnSharding) {
  const Checkpoint one = Checkpoint::open(write("one")), parts = Checkpoint::open(write("parts", sharded()));
  EXPECT_EQ(one.identity_sha256(false), parts.identity_sha256(false));
  EXPECT_NE(one.identity_sha256(true), parts.identity_sha256(true));
  EXPECT_EQ(parts.identity_sha256(true), Checkpoint::open(scratch_.file("parts")).identity_sha256(true));
  EXPECT_EQ(one.identity_sha256(true).size(), 64u);
  model_.tensor("lm_head.weight").values.back() += 1;
  EXPECT_NE(one.identity_sha256(false), Checkpoint::open(write("other")).identity_sha256(false));
}

TEST_F(CheckpointFolder, St09NamesStayInsideTheFolder) {
  const std::string folder = write("m", sharded()), index = folder + "/model.safetensors.index.json";
  const std::string good = test::read_file(index);
  // Decoys that would load if the name were followed.
  const std::string decoy = test::safetensors_bytes({test::f32_tensor(kKProj, {32, 64}, model_.tensor(kKProj).values)});
  test::write_file(scratch_.file("x.safetensors"), decoy);
  test::write_file(folder + "/..\\x.safetensors", decoy);
  test::write_file(folder + "/C:\\x.safetensors", decoy);
  fs::create_directory(folder + "/a");
  const std::vector<Json> names = {"../x.safetensors", scratch_.file("x.safetensors"), "a/../../x.safetensors", "..\\x.safetensors", "C:\\x.safetensors",
                                   "C:x.safetensors", "", ".", "./x.safetensors", "a//x.safetensors", "a/", 3, nullptr, std::string("x.safetensors\0y", 15),
                                   Json::array({"x"}), true};
  for (const Json& name : names) {
    SCOPED_TRACE(name.dump());
    Json j = Json::parse(good);
    j["weight_map"][kKProj] = name;
    test::write_file(index, j.dump());
    expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kFormat, {kKProj, name.dump(), "weight_map"});
  }
}

TEST_F(CheckpointFolder, St09SubfoldersLoad) {
  const std::string folder = write("m", sharded()), index = folder + "/model.safetensors.index.json";
  fs::create_directory(folder + "/sub");
  fs::rename(folder + "/" + shard(2), folder + "/sub/x.safetensors");
  Json j = Json::parse(test::read_file(index));
  for (auto& item : j["weight_map"].items())
    if (item.value() == shard(2)) item.value() = "sub/x.safetensors";
  test::write_file(index, j.dump());
  EXPECT_EQ(values_of(Checkpoint::open(folder), kVProj1), model_.tensor(kVProj1).values);
}

TEST_F(CheckpointFolder, IndexMustBeSound) {
  const std::string folder = write("m", sharded()), index = folder + "/model.safetensors.index.json";
  for (const char* text : {"[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":{"a":"x","a":"y"}})", "{\"weight_map\":{\"a\":\"x\""}) {
    SCOPED_TRACE(text);
    test::write_file(index, text);
    expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kFormat, {"index.json"});
  }
}

TEST_F(CheckpointFolder, St10CacheOfLinks) {
  const std::string plain = write("plain", sharded()), cache = scratch_.file("cache"), revision = cache + "/snapshots/abc";
  fs::create_directories(cache + "/blobs");
  fs::create_directories(revision);
  for (const auto& entry : fs::directory_iterator(plain)) {
    const std::string hash = sha256_of_file(entry.path().string());
    fs::copy_file(entry.path(), cache + "/blobs/" + hash);
    fs::create_symlink("../../blobs/" + hash, revision + "/" + entry.path().filename().string());
  }
  fs::rename(revision + "/" + shard(3), revision + "/hop");  // one link through two hops
  fs::create_symlink("hop", revision + "/" + shard(3));
  const Checkpoint linked = Checkpoint::open(revision);
  EXPECT_EQ(linked.identity_sha256(false), Checkpoint::open(plain).identity_sha256(false));

  fs::remove(revision + "/" + shard(2));
  fs::create_symlink("../../blobs/gone", revision + "/" + shard(2));
  expect_error([&] { Checkpoint::open(revision); }, ErrorKind::kNotFound, {shard(2), "../../blobs/gone"});
}

TEST_F(CheckpointFolder, St11OtherFloatTypesLoad) {
  const auto& want = model_.tensor(kKProj).values;
  const auto close = [&](const std::string& folder, double relative) {
    const auto got = values_of(Checkpoint::open(folder), kKProj);
    for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], relative * std::fabs(want[i]) + 1e-7);
  };
  close(write_with("bf16", kKProj, "BF16", test::bf16_bytes(want)), 0x1p-8);
  close(write_with("f16", kKProj, "F16", test::f16_bytes(want)), 0x1p-11);
  close(write_with("f64", kKProj, "F64", test::f64_bytes(want)), 0);
}

TEST_F(CheckpointFolder, St11ScaledTypesAreRefused) {
  const std::string codes(2048, '\x38'), scale_name = "model.layers.0.self_attn.k_proj.weight_scale";
  const std::vector<float> scale = {0.02f};
  const auto scaled = write_with("f8", kKProj, "F8_E4M3", codes, {test::f32_tensor(scale_name, {}, scale)});
  expect_error([&] { values_of(Checkpoint::open(scaled), kKProj); }, ErrorKind::kUnsupported, {kKProj, "F8_E4M3", scale_name});
  const auto blocks = write_with("f8b", kKProj, "F8_E4M3", codes, {test::f32_tensor(scale_name + "_inv", {1, 1}, scale)});
  expect_error([&] { values_of(Checkpoint::open(blocks), kKProj); }, ErrorKind::kUnsupported, {kKProj, "F8_E4M3", scale_name + "_inv"});
  const auto bare = write_with("bare", kKProj, "F8_E4M3", codes);
  expect_error([&] { values_of(Checkpoint::open(bare), kKProj); }, ErrorKind::kMismatch, {kKProj, "F8_E4M3", "weight_scale"});
  const auto e5m2 = write_with("e5m2", kKProj, "F8_E5M2", codes);
  expect_error([&] { values_of(Checkpoint::open(e5m2), kKProj); }, ErrorKind::kUnsupported, {kKProj, "F8_E5M2"});
  const auto i8 = write_with("i8", kKProj, "I8", codes, {test::f32_tensor(scale_name, {}, scale)});
  expect_error([&] { values_of(Checkpoint::open(i8), kKProj); }, ErrorKind::kUnsupported, {kKProj, "I8", scale_name});
  // The others of such a file stay readable.
  EXPECT_EQ(values_of(Checkpoint::open(bare), "lm_head.weight"), model_.tensor("lm_head.weight").values);
}

TEST_F(CheckpointFolder, NonFiniteWeightsAreNamed) {
  auto& values = model_.tensor(kKProj).values;
  values[777] = std::numeric_limits<float>::infinity();
  values[900] = std::numeric_limits<float>::quiet_NaN();
  const Checkpoint c = Checkpoint::open(write("inf"));
  expect_error([&] { values_of(c, kKProj); }, ErrorKind::kNumeric, {kKProj, "element 777", "inf"});
  std::vector<float> row(64);
  expect_error([&] { c.read_rows_f32(*c.find(kKProj), 14, 1, row); }, ErrorKind::kNumeric, {kKProj, "element 900", "nan"});
  c.read_rows_f32(*c.find(kKProj), 11, 1, row);
  // A double beyond fp32 is no number here either.
  const double huge = 1e300;
  const auto f64 = write_with("huge", "model.norm.weight", "F64", std::string(reinterpret_cast<const char*>(&huge), 8) + std::string(63 * 8, '\0'));
  expect_error([&] { values_of(Checkpoint::open(f64), "model.norm.weight"); }, ErrorKind::kNumeric, {"model.norm.weight", "element 0"});
}

TEST_F(CheckpointFolder, St13ForeignMatrices) {
  CALIB_SHARED_FILE(path, "misc/hadamards.safetensors");
  const std::string folder = write("m");
  fs::copy_file(path, folder + "/model.safetensors", fs::copy_options::overwrite_existing);
  const Checkpoint c = Checkpoint::open(folder);
  EXPECT_EQ(c.find(kKProj), nullptr);
  ASSERT_EQ(c.tensors().size(), 66u);
  for (const TensorInfo& t : c.tensors()) {  // H H^T = n I
    const std::vector<float> h = values_of(c, t.name);
    const auto n = static_cast<std::size_t>(t.shape[0]);
    double diagonal = 0, beside = 0;
    for (std::size_t i = 0; i < n; ++i) diagonal += h[i] * h[i], beside += n > 1 ? h[i] * h[n + i] : 0;
    EXPECT_EQ(diagonal, static_cast<double>(n));
    EXPECT_EQ(beside, 0);
  }
}

TEST_F(CheckpointFolder, WhatIsNoModelIsSaid) {
  const std::string folder = write("m");
  expect_error([&] { Checkpoint::open(folder + "/model.safetensors"); }, ErrorKind::kFormat, {"pass the folder"});
  expect_error([&] { Checkpoint::open(scratch_.file("nowhere")); }, ErrorKind::kNotFound, {"nowhere"});
  fs::create_directory(scratch_.file("empty"));
  expect_error([&] { Checkpoint::open(scratch_.file("empty")); }, ErrorKind::kFormat, {"config.json", ".gguf"});
  fs::rename(folder + "/model.safetensors", folder + "/weights.safetensors");
  EXPECT_EQ(Checkpoint::open(folder).tensors().size(), 39u);  // the only one there
  fs::copy_file(folder + "/weights.safetensors", folder + "/more.safetensors");
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kNotFound, {"model.safetensors.index.json", "2"});
  fs::remove(folder + "/weights.safetensors");
  fs::remove(folder + "/more.safetensors");
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kNotFound, {"model.safetensors"});
  test::write_file(folder + "/pytorch_model.bin", "PK");
  expect_error([&] { Checkpoint::open(folder); }, ErrorKind::kUnsupported, {".bin", "safetensors"});
}

}  // namespace
}  // namespace calib::weights

#include "kernels/core/plan_loader.h"

#include <filesystem>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/kvrt.hpp"
#include "tests/kernels/tiny_plan.h"

namespace kvrt::testing {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

Status load(const TinyPlan& plan) {
  Plan out;
  return read_plan(plan.json(), plan.tensors, &out);
}

TEST(PlanLoader, ReadsWhatThePlannerWrites) {
  const TinyPlan tiny;
  Plan plan;
  const Status status = read_plan(tiny.json(), tiny.tensors, &plan);
  ASSERT_TRUE(status.ok()) << status.text();
  ASSERT_EQ(plan.layers.size(), 2u);
  EXPECT_EQ(plan.find(1), nullptr);
  const LayerPlan& first = *plan.find(0);
  EXPECT_EQ(first.units[KVRT_K].text, "int4.channel.g32.pre");
  EXPECT_EQ(first.units[KVRT_K].spread, 16);
  EXPECT_EQ(first.layout.tiers.window, 16);
  EXPECT_EQ(first.layout.tiers.block_base, 32);
  const LayerPlan& last = *plan.find(3);
  EXPECT_EQ(last.layout.tiers.window, 8);
  EXPECT_EQ(last.units[KVRT_K].mean, std::vector<float>(64, 0.5f));
  EXPECT_EQ(last.units[KVRT_V].clip_hi, std::vector<float>(2, 4.0f));
  EXPECT_EQ(plan.weights_sha256, std::string(64, 'a'));
}

TEST(PlanLoader, Sha256) {  // FIPS 180-4 examples, and lengths around the padding border
  EXPECT_EQ(sha256_hex("abc", 3), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex("", 0), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

struct Damage {
  const char* what;
  std::function<void(TinyPlan*)> apply;
  Code code;
  const char* text;
};

TEST(PlanLoader, EveryDamageIsNamed) {
  const Damage damages[] = {
      {"schema name", [](TinyPlan* p) { p->document["schema"]["name"] = "other"; }, Code::kFormat, "kvcalib.plan"},
      {"schema version", [](TinyPlan* p) { p->document["schema"]["version"] = 2; }, Code::kUnsupported, "version is 2"},
      {"no model", [](TinyPlan* p) { p->document.erase("model"); }, Code::kFormat, "/model is missing"},
      {"model is a list", [](TinyPlan* p) { p->document["model"] = Json::array(); }, Code::kFormat, "an object"},
      {"target", [](TinyPlan* p) { p->document["request"]["target"] = "vllm"; }, Code::kUnsupported, "\"vllm\""},
      {"salient", [](TinyPlan* p) { p->document["tiers"]["salient"] = Json::object(); }, Code::kUnsupported, "salient"},
      {"salient fraction", [](TinyPlan* p) { p->document["layers"][0]["salient_fraction"] = 0.2; }, Code::kUnsupported, "salient_fraction"},
      {"layer twice", [](TinyPlan* p) { p->document["layers"][1] = p->document["layers"][0]; }, Code::kFormat, "layer 0 is there twice"},
      {"layer missing", [](TinyPlan* p) { p->document["layers"].erase(1); }, Code::kFormat, "no entry for layer 3"},
      {"foreign layer", [](TinyPlan* p) { p->document["layers"][1]["index"] = 2; }, Code::kFormat, "layer 2 is none of"},
      {"model layers twice", [](TinyPlan* p) { p->document["model"]["layers"][1]["index"] = 0; }, Code::kFormat, "there twice"},
      {"unknown format", [](TinyPlan* p) { p->document["layers"][0]["k"]["scheme"] = "int5.token.g"; }, Code::kFormat, "unknown format 'int5'"},
      {"group does not divide", [](TinyPlan* p) { p->document["layers"][0]["v"]["scheme"] = "int3.token.g20.had"; }, Code::kFormat,
       "does not divide head_dim 32"},
      {"head_dim 0", [](TinyPlan* p) { p->document["model"]["layers"][0]["head_dim"] = 0; }, Code::kFormat, "head_dim 0"},
      {"head_dim negative", [](TinyPlan* p) { p->document["model"]["layers"][0]["head_dim"] = -8; }, Code::kFormat, "got -8"},
      {"heads beyond reason", [](TinyPlan* p) { p->document["model"]["layers"][0]["n_kv_heads"] = 2000000000; }, Code::kFormat, "2000000000 KV heads"},
      {"query heads", [](TinyPlan* p) { p->document["model"]["layers"][0]["n_q_heads"] = 5; }, Code::kFormat, "multiple of n_kv_heads"},
      {"count is a fraction", [](TinyPlan* p) { p->document["tiers"]["sink_tokens"] = 4.5; }, Code::kFormat, "/tiers/sink_tokens"},
      {"window beyond reason", [](TinyPlan* p) { p->document["tiers"]["window_tokens"] = 9000000000000000000ull; }, Code::kFormat, "window_tokens"},
      {"bits", [](TinyPlan* p) { p->document["layers"][0]["k"]["bits"] = 3; }, Code::kFormat, "/layers/0/k/bits"},
      {"frame", [](TinyPlan* p) { p->document["layers"][0]["k"]["frame"] = "post"; }, Code::kFormat, "/layers/0/k/frame"},
      {"rotation left out", [](TinyPlan* p) { p->document["layers"][0]["v"]["rotation"] = nullptr; }, Code::kFormat, "/layers/0/v/rotation"},
      {"rotation of another size", [](TinyPlan* p) { p->document["layers"][0]["v"]["rotation"]["size"] = 16; }, Code::kFormat, "/layers/0/v/rotation"},
      {"chan_perm", [](TinyPlan* p) { p->document["layers"][0]["k"]["chan_perm"] = "spread7"; }, Code::kFormat, "spread7"},
      {"rope of runtime", [](TinyPlan* p) { p->document["runtime"]["rope"][0]["inv_freq"][3] = 0.5; }, Code::kFormat, "/runtime/rope/0"},
      {"rope layers", [](TinyPlan* p) { p->document["runtime"]["rope"][0]["layers"] = {0}; }, Code::kFormat, "every layer"},
      {"frequencies missing", [](TinyPlan* p) { p->document["model"]["layers"][0]["inv_freq"].erase(0); }, Code::kFormat, "16 frequencies"},
      {"page_tokens", [](TinyPlan* p) { p->document["runtime"]["page_tokens"] = 48; }, Code::kFormat, "page_tokens is 48"},
      {"mean missing", [](TinyPlan* p) { p->document["layers"][1]["k"]["params"].erase("mean"); }, Code::kFormat, "mean is missing"},
      {"constant of no use", [](TinyPlan* p) { p->document["layers"][0]["k"]["params"]["mean"] = p->document["layers"][1]["k"]["params"]["mean"]; },
       Code::kFormat, "has no \"mean\""},
      {"tensor of another name", [](TinyPlan* p) { p->document["layers"][1]["k"]["params"]["mean"]["tensor"] = "layers.3.v.clip_hi"; }, Code::kFormat,
       "layers.3.k.mean"},
      {"shape in the plan",
       [](TinyPlan* p) {
         p->document["layers"][1]["k"]["params"]["mean"]["shape"] = {2, 31};
       },
       Code::kFormat, "[2, 32]"},
      {"tensors of another plan", [](TinyPlan* p) { p->tensors.back() ^= 1; }, Code::kMismatch, "sha256"},
      {"tensors cut", [](TinyPlan* p) { p->tensors.pop_back(); }, Code::kFormat, "data_offsets"},
      {"tensors with a tail", [](TinyPlan* p) { p->tensors += '\0'; }, Code::kMismatch, "/tensors/bytes"},
      {"tensors empty", [](TinyPlan* p) { p->tensors.clear(); }, Code::kFormat, "safetensors"},
      {"header length",
       [](TinyPlan* p) {
         p->tensors[6] = 1;
         p->seal();
       },
       Code::kFormat, "header length"},
      {"a scale of zero",
       [](TinyPlan* p) {
         std::memset(p->tensors.data() + p->tensors.size() - 4, 0, 4);
         p->seal();
       },
       Code::kFormat, "clip_hi[1]"},
      {"a scale that is NaN",
       [](TinyPlan* p) {
         std::memset(p->tensors.data() + p->tensors.size() - 4, 0xFF, 4);
         p->seal();
       },
       Code::kFormat, "clip_hi[1] is not finite"},
  };
  ASSERT_TRUE(load(TinyPlan()).ok());
  for (const Damage& d : damages) {
    TinyPlan plan;
    d.apply(&plan);
    const Status status = load(plan);
    EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(d.code)) << d.what << ": " << status.text();
    EXPECT_THAT(status.text(), HasSubstr(d.text)) << d.what;
  }
}

TEST(PlanLoader, TextThatIsNoPlan) {
  Plan out;
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"), std::string("\xFF\xFE"), std::string(100000, '['), std::string("null")}) {
    EXPECT_EQ(read_plan(text, "", &out).code(), Code::kFormat) << text.substr(0, 20);
  }
  std::string twice = TinyPlan().json();
  twice.insert(twice.find('{') + 1, "\"tiers\": {}, ");
  const Status status = read_plan(twice, TinyPlan().tensors, &out);
  EXPECT_EQ(status.code(), Code::kFormat);
  EXPECT_THAT(status.text(), HasSubstr("stands twice"));
}

TEST(PlanLoader, EveryPrefixOfBothFilesIsRefused) {
  const TinyPlan tiny;
  const std::string json = tiny.json();
  Plan out;
  for (std::size_t n = 0; n < json.size(); n += 7) EXPECT_FALSE(read_plan(std::string_view(json).substr(0, n), tiny.tensors, &out).ok()) << n;
  for (std::size_t n = 0; n < tiny.tensors.size(); ++n) EXPECT_FALSE(read_plan(json, std::string_view(tiny.tensors).substr(0, n), &out).ok()) << n;
}

TEST(PlanLoader, FilesOnDisk) {
  const std::string folder = std::filesystem::temp_directory_path() / ("kvrt_plan_" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  TinyPlan().write(folder);
  PlanHandle plan;
  EXPECT_TRUE(PlanHandle::load(folder + "/tiny.json", &plan).ok());
  EXPECT_TRUE(PlanHandle::load(folder + "/tiny.json", &plan, (folder + "/tiny.safetensors").c_str()).ok());
  EXPECT_EQ(PlanHandle::load(folder + "/tiny.json", &plan, (folder + "/none").c_str()).code(), Code::kIo);
  EXPECT_EQ(plan.get(), nullptr);
  EXPECT_EQ(PlanHandle::load(folder + "/none.json", &plan).code(), Code::kIo);
  const Status is_folder = PlanHandle::load(folder, &plan);
  EXPECT_EQ(is_folder.code(), Code::kIo);
  EXPECT_THAT(is_folder.text(), HasSubstr("is a folder"));
  TinyPlan bare;
  bare.document["tensors"] = nullptr;
  std::ofstream(folder + "/bare.json") << bare.json();
  const Status needless = PlanHandle::load(folder + "/bare.json", &plan, (folder + "/tiny.safetensors").c_str());
  EXPECT_EQ(needless.code(), Code::kMismatch);
  EXPECT_THAT(needless.text(), HasSubstr("/tensors is null"));
  TinyPlan escaping;
  escaping.document["tensors"]["file"] = "../tiny.safetensors";
  std::ofstream(folder + "/escaping.json") << escaping.json();
  EXPECT_EQ(PlanHandle::load(folder + "/escaping.json", &plan).code(), Code::kFormat);
  std::filesystem::remove_all(folder);
}

TEST(PlanLoader, APlanOfAnotherModelIsRefused) {
  const std::string folder = std::filesystem::temp_directory_path() / ("kvrt_model_" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  TinyPlan().write(folder);
  PlanHandle plan;
  ASSERT_TRUE(PlanHandle::load(folder + "/tiny.json", &plan).ok());
  std::filesystem::remove_all(folder);
  const auto check = [&](const kvrt_plan_view& model) { return checked([&](kvrt_error* e) { return kvrt_plan_check_model(plan.get(), &model, e); }); };
  EXPECT_TRUE(check(plan.view()).ok());
  kvrt_plan_view model = {};
  EXPECT_TRUE(check(model).ok());
  model.weights_sha256 = "b";
  EXPECT_EQ(check(model).code(), Code::kMismatch);
  model = plan.view();
  std::vector<kvrt_layer_view> layers(model.layers, model.layers + model.n_layers);
  model.layers = layers.data();
  layers[1].n_kv_heads = 3;
  EXPECT_THAT(check(model).text(), HasSubstr("layer 3 n_kv_heads: the plan has 2, the model 3"));
  layers[1].n_kv_heads = 2;
  std::vector<double> inv_freq(layers[0].inv_freq, layers[0].inv_freq + 16);
  inv_freq[5] *= 1.01;
  layers[0].inv_freq = inv_freq.data();
  EXPECT_THAT(check(model).text(), HasSubstr("inv_freq[5]"));
  model.n_layers = 1;
  EXPECT_EQ(check(model).code(), Code::kMismatch);
}

}  // namespace
}  // namespace kvrt::testing

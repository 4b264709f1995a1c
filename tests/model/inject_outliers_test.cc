// scripts/inject_outliers: the model computes what it did before, and the chosen key channels stand out by their factor.

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/model/forward_model.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

using nlohmann::json;

struct Outcome {
  int exit_code = -1;
  std::string text;
};

Outcome inject(const std::string& arguments) {
  Outcome out;
  FILE* pipe = popen((std::string(CALIB_SOURCE_DIR) + "/scripts/inject_outliers " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return out;
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) out.text.append(buffer.data(), n);
  const int status = pclose(pipe);
  out.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return out;
}

std::vector<text::TokenId> some_ids() {
  std::vector<text::TokenId> ids;
  for (int i = 0; i < 60; ++i) ids.push_back((i * 37 + 5) % 250);
  return ids;
}

/// Factor of each (layer, KV head, channel), from outliers.json.
double factor_of(const json& record, std::size_t layer, std::size_t head, std::size_t channel) {
  for (const json& o : record["outliers"])
    if (o["layer"] == layer && o["kv_head"] == head && (o["channels"][0] == channel || o["channels"][1] == channel)) return o["factor"].get<double>();
  return 1;
}

/// got = want * factor^power, channel by channel, bit for bit; `group`: heads that share a KV head.
void expect_scaled(const std::vector<float>& got, const std::vector<float>& want, const json& record, std::size_t layer, std::size_t n_heads, std::size_t group,
                   int power, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  const std::size_t d = want.size() / 60 / n_heads;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double factor = factor_of(record, layer, i / d % n_heads / group, i % d);
    ASSERT_EQ(got[i], static_cast<float>(power > 0 ? want[i] * factor : want[i] / factor)) << what << " layer " << layer << " entry " << i;
  }
}

struct Case {
  const char* name;
  const char* model;
  bool gguf;
  HfOptions hf;
  bool f16_gguf = false;
};

class InjectOutliers : public ::testing::TestWithParam<Case> {};

TEST_P(InjectOutliers, KeepsTheFunctionAndScalesTheChosenPairs) {
  const Case& c = GetParam();
  const TempFolder folder;
  const TinyModel tiny = make_tiny_model(c.model);
  std::string model = folder.file("m");
  if (c.gguf) {
    GgufOptions options;
    options.f16_weights = c.f16_gguf;
    model = write_gguf(tiny, folder.file("m.gguf"), options).front();
  } else {
    write_hf_folder(tiny, model, c.hf);
  }
  const Forward before = run_forward(model, some_ids());
  for (const auto& [factors, tolerance] : {std::pair("8,16,32", 0.0), {"10", 1e-5}}) {
    const std::string output = folder.file(std::string("by") + factors);
    const Outcome o = inject("--model " + model + " -o " + output + " --pairs 1 --factors " + factors);
    ASSERT_EQ(o.exit_code, 0) << o.text;
    const json record = json::parse(read_file(output + "/outliers.json"));
    EXPECT_EQ(record["outliers"].size(), static_cast<std::size_t>(tiny.n_layers * tiny.n_kv_heads));
    const Forward after = run_forward(output, some_ids());
    EXPECT_LE(relative_difference(after.logits, before.logits), tolerance);
    if (tolerance > 0) continue;  // powers of two change no rounding
    const auto kv_heads = static_cast<std::size_t>(tiny.n_kv_heads), q_heads = static_cast<std::size_t>(tiny.n_q_heads);
    for (std::size_t l = 0; l < before.layers.size(); ++l) {
      const CapturedLayer &x = after.layers[l], &y = before.layers[l];
      expect_scaled(x.k_pre, y.k_pre, record, l, kv_heads, 1, 1, "k_pre");
      expect_scaled(x.k_post, y.k_post, record, l, kv_heads, 1, 1, "k_post");
      expect_scaled(x.q_post, y.q_post, record, l, q_heads, q_heads / kv_heads, -1, "q_post");
      EXPECT_EQ(x.v, y.v);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Containers, InjectOutliers,
                         ::testing::Values(Case{"folder", "m-llama", false, {}}, Case{"shards", "m-llama", false, {3}},
                                           Case{"bf16", "m-mistral", false, {1, "BF16"}}, Case{"f16", "m-llama", false, {1, "F16"}},
                                           Case{"biases", "m-qwen2-big", false, {}}, Case{"gguf", "m-llama", true, {}},
                                           Case{"gguf_f16", "m-llama", true, {}, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(InjectOutliersCommand, SeedsAndLayers) {
  const TempFolder folder;
  write_hf_folder(make_tiny_model("m-llama"), folder.file("m"));
  const auto record = [&](const std::string& name, const std::string& options) {
    const Outcome o = inject("--model " + folder.file("m") + " -o " + folder.file(name) + options);
    EXPECT_EQ(o.exit_code, 0) << o.text;
    return json::parse(read_file(folder.file(name + "/outliers.json")))["outliers"];
  };
  const json a = record("a", ""), b = record("b", ""), other = record("c", " --seed 1"), two = record("d", " --layers 1,3");
  EXPECT_EQ(a, b);
  EXPECT_EQ(read_file(folder.file("a/model.safetensors")), read_file(folder.file("b/model.safetensors")));
  EXPECT_NE(a, other);
  ASSERT_EQ(two.size(), 2u * 4 * 2);
  for (const json& o : two) {
    EXPECT_TRUE(o["layer"] == 1 || o["layer"] == 3);
    EXPECT_NE(std::find(a.begin(), a.end(), o), a.end());  // a layer's choice does not depend on the others
  }
}

TEST(InjectOutliersCommand, RefusalsAreNamedAndLeaveNothing) {
  const TempFolder folder;
  write_hf_folder(make_tiny_model("m-llama"), folder.file("m"));
  write_hf_folder(make_tiny_model("m-qwen3"), folder.file("normed"));
  const std::string gguf = write_gguf(make_tiny_model("m-llama"), folder.file("whole.gguf")).front();
  write_file(folder.file("cut.gguf"), read_file(gguf).substr(0, 900));
  struct Row { std::string arguments; int exit_code; const char* named; };
  const std::string to = " -o " + folder.file("out");
  for (const Row& r : {Row{"--model " + folder.file("normed") + to, 7, "norm"}, Row{"--model " + folder.file("m") + to + " --pairs 9", 2, "--pairs 9"},
                       Row{"--model " + folder.file("m") + to + " --layers 7", 2, "no layer 7"}, Row{"--model " + folder.file("m") + to + " --layers 3-1", 2, "3-1"},
                       Row{"--model " + folder.file("m") + to + " --factors 0", 2, "--factors"}, Row{"--model " + folder.file("none") + to, 3, "not found"},
                       Row{"--model " + folder.file("cut.gguf") + to, 4, "cut.gguf"}, Row{"--model " + folder.file("m") + " -o " + folder.file("m"), 2, "exists"}}) {
    const Outcome o = inject(r.arguments);
    EXPECT_EQ(o.exit_code, r.exit_code) << o.text;
    EXPECT_NE(o.text.find(r.named), std::string::npos) << o.text;
    EXPECT_EQ(o.text.rfind("error: ", 0), 0u) << o.text;
    EXPECT_FALSE(std::filesystem::exists(folder.file("out"))) << r.arguments;
    EXPECT_FALSE(std::filesystem::exists(folder.file("out.partial"))) << r.arguments;
  }
}

}  // namespace
}  // namespace calib::test

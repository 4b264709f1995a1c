// kvcalib as its users meet it: exit codes, messages, what is written and what is left alone.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/stats_file.h"
#include "tests/cli/run_program.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Scene {
  TempFolder folder;
  std::string model = folder.file("m"), data = folder.file("text.txt"), out = folder.file("out/stats.h5");

  explicit Scene(const std::string& name = "m-llama", std::size_t n_bytes = 4096) {
    write_hf_folder(make_tiny_model(name), model);
    write_file(data, txt(n_bytes));
    fs::create_directory(folder.file("out"));
  }
  std::vector<std::string> args(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> a = {"--model", model, "--data", data, "-o", out, "--threads", "1"};
    if (std::find(more.begin(), more.end(), "--seq-len") == more.end()) a.insert(a.end(), {"--seq-len", "256"});
    a.insert(a.end(), more.begin(), more.end());
    return a;
  }
  ProgramResult run(const std::vector<std::string>& more = {}) const { return run_program("kvcalib", args(more)); }
  void expect_nothing_written() const { EXPECT_TRUE(fs::is_empty(folder.file("out"))); }
};

TEST(Kvcalib, HelpVersionAndConfig) {
  const ProgramResult help = run_program("kvcalib", {"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* part : {"--model", "--data", "--num-samples", "--seq-len", "2048", "--sinks", "Input", "Output", "Calibration", "Device", "Diagnostics"})
    EXPECT_NE(help.out.find(part), std::string::npos) << part;
  EXPECT_TRUE(help.err.empty());
  const ProgramResult version = run_program("kvcalib", {"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.find("kvcalib "), 0u);

  const Scene s;
  const ProgramResult printed = s.run({"--print-config", "--seed", "5"});
  EXPECT_EQ(printed.exit_code, 0) << printed.err;
  write_file(s.folder.file("run.toml"), printed.out);
  const ProgramResult again = run_program("kvcalib", {"--config", s.folder.file("run.toml"), "--dry-run", "--json"});
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(json::parse(again.out)["seed"], 5);
  EXPECT_EQ(json::parse(again.out)["seq_len"], 256);
  write_file(s.folder.file("bad.toml"), "nonsense=1\n");
  expect_refusal(run_program("kvcalib", {"--config", s.folder.file("bad.toml"), "--dry-run"}), 2, {"--config", "bad.toml", "--print-config"});
}

TEST(Kvcalib, UsageErrors) {
  const Scene s;
  expect_refusal(run_program("kvcalib", {}), 2, {"--model", "required"});
  expect_refusal(run_program("kvcalib", {"--model", s.model}), 2, {"--data", "required"});
  expect_refusal(s.run({"--frobnicate"}), 2, {"--frobnicate"});
  expect_refusal(s.run({"--seq-len", "0"}), 2, {"--seq-len", "\"0\""});
  expect_refusal(s.run({"--seq-len", "12x"}), 2, {"--seq-len", "12x"});
  expect_refusal(s.run({"--num-samples"}), 2, {"--num-samples", "missing"});
  expect_refusal(s.run({"--seed", "1", "--seed", "2"}), 2, {"--seed", "more than once"});
  expect_refusal(s.run({"--hidden-mem", "4XB"}), 2, {"--hidden-mem", "4XB"});
  expect_refusal(s.run({"--device", "tpu"}), 2, {"--device", "tpu"});
  expect_refusal(s.run({"--dtype", "fp16"}), 2, {"--dtype", "fp16"});
  expect_refusal(s.run({"-q", "-v"}), 2, {"-q", "-v"});
  expect_refusal(s.run({"--seq-len", "5000"}), 2, {"5000", "4096"});
  s.expect_nothing_written();
}

TEST(Kvcalib, FeaturesOfLaterVersionsAreRefusedByName) {
  const Scene s;
  expect_refusal(s.run({"--fisher"}), 7, {"--fisher"});
  expect_refusal(s.run({"--resume"}), 7, {"--resume"});
  expect_refusal(run_program("kvcalib", {"merge", "a.h5", "b.h5", "-o", s.out}), 7, {"merge"});
  patch_json_file(s.model + "/config.json", "model_type", "\"falcon\"");
  expect_refusal(s.run(), 7, {"falcon", "config.json", "llama"});
  s.expect_nothing_written();
}

TEST(Kvcalib, MissingAndDamagedInput) {
  const Scene s;
  const auto with = [&](const std::string& model, const std::string& data, const std::string& out) {
    return run_program("kvcalib", {"--model", model, "--data", data, "-o", out, "--seq-len", "64"});
  };
  expect_refusal(with(s.folder.file("absent"), s.data, s.out), 3, {"absent: file not found; expected a Hugging Face model folder or a GGUF file"});
  expect_refusal(with(s.model, s.folder.file("absent.txt"), s.out), 3, {"absent.txt"});
  expect_refusal(with(s.model, s.data, s.folder.file("no/such/stats.h5")), 3, {"no/such"});
  expect_refusal(with(s.model, s.data, s.folder.file("out")), 2, {"out", "folder"});
  write_file(s.folder.file("blank.txt"), std::string(100, '\n'));
  expect_refusal(with(s.model, s.folder.file("blank.txt"), s.out), 4, {"blank.txt", "no usable text"});
  write_file(s.folder.file("x.gguf"), "GGUF\x03");
  expect_refusal(with(s.folder.file("x.gguf"), s.data, s.out), 4, {"x.gguf"});
  patch_json_file(s.model + "/config.json", "num_hidden_layers", "5");
  expect_refusal(with(s.model, s.data, s.out), 5, {"layer 4"});
  s.expect_nothing_written();
}

TEST(Kvcalib, AnOlderFileSurvivesAFailure) {
  const Scene s;
  ASSERT_EQ(s.run({"--num-samples", "1"}).exit_code, 0);
  const std::string older = read_file(s.out);
  expect_refusal(s.run({"--num-samples", "4000"}), 6, {"4096", "1024000"});
  EXPECT_EQ(read_file(s.out), older);
  TinyModel broken = make_tiny_model("m-llama");
  for (float& v : broken.tensor("model.layers.1.self_attn.o_proj.weight").values) v = 3e38f;
  fs::remove_all(s.model);
  write_hf_folder(broken, s.model);
  expect_refusal(s.run({"--num-samples", "2"}), 8, {"layer 1"});  // found in the middle of the walk
  EXPECT_EQ(read_file(s.out), older);
  EXPECT_EQ(std::distance(fs::directory_iterator(s.folder.file("out")), {}), 1);
}

TEST(Kvcalib, CountsComeFromTheText) {  // SA-07, TX-04
  const Scene s("m-llama", 1193);
  write_file(s.folder.file("short.txt"), txt(13));
  expect_refusal(run_program("kvcalib", {"--model", s.model, "--data", s.folder.file("short.txt"), "-o", s.out, "--seq-len", "256",
                                         "--num-samples", "1"}), 6, {"13", "256"});
  s.expect_nothing_written();
  const ProgramResult r = run_program("kvcalib", {"--model", s.model, "--data", s.data, "-o", s.out, "--seq-len", "64", "--num-samples", "4"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const artifacts::StatsFile file = artifacts::read_stats_file(s.out);
  EXPECT_EQ(file.header.data.n_tokens, 256);
  EXPECT_EQ(file.header.data.n_documents, 4);
  for (const auto& layer : file.layers)
    EXPECT_EQ(layer.k_pre.body.n_tokens() + layer.k_pre.sink.n_tokens(), 256);
}

TEST(Kvcalib, EveryWindowIsFed) {  // SA-10
  const Scene s("m-llama", 1000);
  patch_json_file(s.model + "/config.json", "max_position_embeddings", "256");
  ASSERT_EQ(s.run().exit_code, 0);
  const artifacts::StatsFile file = artifacts::read_stats_file(s.out);
  EXPECT_EQ(file.header.data.n_documents, 4);
  EXPECT_EQ(file.header.data.n_tokens, 1000);
  EXPECT_EQ(file.header.model.max_positions, 256);
  for (const auto& layer : file.layers) {
    EXPECT_GT(layer.v.body.absmax(), 0.0f);
    EXPECT_TRUE(std::isfinite(layer.k_post.body.absmax()));
  }
  expect_refusal(s.run({"--seq-len", "512"}), 2, {"512", "256"});
}

/// A stats file without what may differ between two runs.
json essence(const std::string& path) {
  const artifacts::StatsFile f = artifacts::read_stats_file(path);
  json j = {{"nll", f.reference.nll_sum}, {"documents", f.header.data.documents_sha256}};
  for (const auto& layer : f.layers) {
    json l = {{"query_moment", layer.query_moment.sum_state()}, {"key_cov", layer.key_cov.sum_state()},
              {"value_cov", layer.value_cov.sum_state()}, {"attention", layer.attention.sum_state()}, {"pair", layer.pair_absmax}};
    for (const auto* part : {&layer.k_pre, &layer.k_post, &layer.v, &layer.q_pre, &layer.q_post})
      for (const stats::TensorStats* t : {&part->body, &part->sink})
        for (std::size_t i = 0; i < t->n_channels(); ++i)
          l["channels"].push_back({t->moments[i].mean, t->moments[i].m2, t->moments[i].m4, t->extrema[i].min, t->extrema[i].max});
    j["layers"].push_back(std::move(l));
  }
  return j;
}

TEST(Kvcalib, SameInputsGiveTheSameNumbers) {
  const Scene s;
  const ProgramResult first = s.run({"--num-samples", "4", "--json"});
  ASSERT_EQ(first.exit_code, 0) << first.err;
  const json result = json::parse(first.out);
  EXPECT_EQ(result["tokens"], 1024);
  EXPECT_TRUE(std::isfinite(result["nll_nats"].get<double>()));
  const json a = essence(s.out);
  ASSERT_EQ(s.run({"--num-samples", "4", "--hidden-mem", "64K"}).exit_code, 0);
  EXPECT_EQ(essence(s.out), a);
  ASSERT_EQ(s.run({"--num-samples", "4", "--seed", "1"}).exit_code, 0);
  const json b = essence(s.out);
  EXPECT_EQ(b["nll"], a["nll"]);
  EXPECT_NE(b["layers"][0]["attention"], a["layers"][0]["attention"]);  // other rows were sampled
  EXPECT_EQ(std::distance(fs::directory_iterator(s.folder.file("out")), {}), 1);
}

TEST(Kvcalib, PrefixesGiveTheSameStatistics) {  // CF-03
  const Scene s;
  ASSERT_EQ(s.run({"--num-samples", "2"}).exit_code, 0);
  const json plain = essence(s.out);
  fs::remove_all(s.model);
  HfOptions options;
  options.prefix = "language_model.model.";
  write_hf_folder(make_tiny_model("m-llama"), s.model, options);
  ASSERT_EQ(s.run({"--num-samples", "2"}).exit_code, 0);
  EXPECT_EQ(essence(s.out), plain);
}

TEST(Kvcalib, ModelsWithoutAHeadAndSilentLayers) {  // CF-01, SA-03
  const Scene s;
  TinyModel tiny = make_tiny_model("m-llama");
  std::erase_if(tiny.tensors, [](const TinyTensor& t) { return t.name == "lm_head.weight"; });
  for (float& v : tiny.tensor("model.layers.1.self_attn.v_proj.weight").values) v = 0;
  fs::remove_all(s.model);
  write_hf_folder(tiny, s.model);
  const ProgramResult r = s.run({"--num-samples", "2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_NE(r.err.find("lm_head.weight"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("layer 1: V is zero"), std::string::npos) << r.err;
  const artifacts::StatsFile file = artifacts::read_stats_file(s.out);
  EXPECT_TRUE(file.reference.nll_sum.empty());
  const auto noted = [&](const std::string& part) {
    return std::count_if(file.reference.warnings.begin(), file.reference.warnings.end(),
                         [&](const std::string& w) { return w.find(part) != std::string::npos; });
  };
  EXPECT_EQ(noted("lm_head.weight"), 1);
  EXPECT_EQ(noted("layer 1: V is zero"), 1);
  EXPECT_EQ(file.layers[1].v.body.absmax(), 0.0f);
}

TEST(Kvcalib, RepetitiveTextIsCalledSo) {  // SA-06
  const Scene s;
  write_file(s.folder.file("same.txt"), std::string(512, 'a'));
  const ProgramResult r = run_program("kvcalib", {"--model", s.model, "--data", s.folder.file("same.txt"), "-o", s.out, "--seq-len", "256"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_NE(r.err.find("low diversity"), std::string::npos) << r.err;
  const artifacts::StatsFile file = artifacts::read_stats_file(s.out);
  EXPECT_EQ(file.reference.n_distinct_tokens, 1);
  EXPECT_EQ(file.reference.commonest_token_share, 1.0);
  EXPECT_EQ(s.run({"--num-samples", "2"}).err.find("low diversity"), std::string::npos);
}

TEST(Kvcalib, FolderAndGgufGiveTheSameStatistics) {  // GG-11
  const Scene s;
  ASSERT_EQ(s.run({"--num-samples", "4"}).exit_code, 0);
  const artifacts::StatsFile a = artifacts::read_stats_file(s.out);
  write_gguf(make_tiny_model("m-llama"), s.folder.file("m.gguf"));
  const ProgramResult r = run_program("kvcalib", {"--model", s.folder.file("m.gguf"), "--data", s.data, "-o", s.out, "--seq-len", "256",
                                                  "--num-samples", "4", "--threads", "1"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const artifacts::StatsFile b = artifacts::read_stats_file(s.out);
  for (std::size_t l = 0; l < a.layers.size(); ++l)
    for (const auto part : {&stats::LayerStats::k_pre, &stats::LayerStats::k_post, &stats::LayerStats::v}) {
      const stats::TensorStats &x = (a.layers[l].*part).body, &y = (b.layers[l].*part).body;
      for (std::size_t c = 0; c < x.n_channels(); ++c) {
        EXPECT_NEAR(x.moments[c].mean, y.moments[c].mean, 1e-5 * x.absmax());
        EXPECT_NEAR(x.extrema[c].absmax(), y.extrema[c].absmax(), 1e-5 * x.absmax());
      }
    }
}

TEST(Kvcalib, DefaultsThatWereUsedAreInTheFile) {  // GG-10
  CALIB_SHARED_FILE(model, "models/llama-2-tiny-random.gguf");
  const Scene s;
  const ProgramResult r = run_program("kvcalib", {"--model", model, "--data", s.data, "-o", s.out, "--seq-len", "64", "--num-samples", "2"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const artifacts::StatsFile file = artifacts::read_stats_file(s.out);
  EXPECT_EQ(file.header.model.layers[0].inv_freq, (std::vector<double>{1.0, 0.01}));
  ASSERT_FALSE(file.reference.warnings.empty());
  EXPECT_NE(json(file.reference.warnings).dump().find("llama.rope.freq_base=10000"), std::string::npos);
}

TEST(Kvcalib, DryRunWritesNothing) {
  const Scene s;
  const ProgramResult r = s.run({"--dry-run"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  for (const char* part : {"time", "memory", "disk", "weights", "activations", "logits", "statistics"})
    EXPECT_NE(r.out.find(part), std::string::npos) << part;
  s.expect_nothing_written();
}

TEST(Kvcalib, WorkerThreadsDoNotSpinUnlessAskedTo) {
  const Scene s;
  const auto settings = [&] {  // as the OpenMP runtime prints them whenever it is loaded
    ::setenv("OMP_DISPLAY_ENV", "verbose", 1);
    const ProgramResult r = s.run();
    ::unsetenv("OMP_DISPLAY_ENV");
    EXPECT_EQ(r.exit_code, 0) << r.err;
    return r.err;
  };
  const std::string passive = "GOMP_SPINCOUNT = '0'";
  EXPECT_NE(settings().find(passive), std::string::npos);
  ::setenv("OMP_WAIT_POLICY", "active", 1);
  EXPECT_EQ(settings().find(passive), std::string::npos);
  ::unsetenv("OMP_WAIT_POLICY");
}

TEST(Kvcalib, InterruptLeavesNothing) {
  const Scene s("m-llama", 400000);
  const ProgramResult r = run_program("kvcalib", s.args({"--num-samples", "1500"}), "", 0.2);
  EXPECT_EQ(r.exit_code, 130) << r.err;
  EXPECT_NE(r.err.find("interrupted"), std::string::npos) << r.err;
  s.expect_nothing_written();
}

TEST(Kvcalib, OddNamesOfFolders) {  // CF-11
  const Scene s;
  for (const std::string& name : {std::string("\xD0\xBA\xD0\xBB\xD1\x8E\xD1\x87"), std::string("a b"), std::string("\xF0\x9F\x94\x91"),
                                  std::string("-dash"), std::string("line\nbreak"), std::string("quo'te"), std::string(200, 'x'),
                                  std::string("latin\xE9")}) {
    const std::string folder = s.folder.file(name);
    fs::create_directory(folder);
    write_hf_folder(make_tiny_model("m-llama"), folder + "/m");
    fs::copy_file(s.data, folder + "/text.txt");
    const ProgramResult r = run_program("kvcalib", {"--model", folder + "/m", "--data", folder + "/text.txt", "-o", folder + "/s.h5",
                                                    "--seq-len", "64", "--num-samples", "1", "--json"});
    ASSERT_EQ(r.exit_code, 0) << name << r.err;
    EXPECT_TRUE(json::accept(r.out)) << r.out;
    EXPECT_TRUE(fs::exists(folder + "/s.h5"));
    EXPECT_EQ(artifacts::read_stats_file(folder + "/s.h5").header.provenance.argv.size(), 12u);
  }
}

TEST(Kvcalib, ForeignContainersAreNamed) {  // GG-13, ST-13
  CALIB_SHARED_FILE(vocabulary, "vocab/ggml-vocab-llama-spm.gguf");
  CALIB_SHARED_FILE(hadamards, "misc/hadamards.safetensors");
  const Scene s;
  expect_refusal(run_program("kvcalib", {"--model", vocabulary, "--data", s.data, "-o", s.out}), 5, {"no tensors, vocabulary only"});
  write_file(s.model + "/model.safetensors", read_file(hadamards));
  expect_refusal(s.run(), 5, {"model.embed_tokens.weight"});
  s.expect_nothing_written();
}

TEST(KvcalibMemory, FlatInTheNumberOfDocuments) {  // SA-12
  const Scene s("m-llama", 70000);
  long smallest = 0, largest = 0;
  std::uintmax_t small_file = 0, large_file = 0;
  for (const char* n : {"8", "64", "256"}) {
    const ProgramResult r = s.run({"--num-samples", n});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    smallest = smallest ? std::min(smallest, r.peak_kib) : r.peak_kib;
    largest = std::max(largest, r.peak_kib);
    large_file = fs::file_size(s.out);
    if (!small_file) small_file = large_file;
  }
  const long hidden_kib = 256 * 256 * 64 * 4 / 1024;  // stated: hidden states of all documents, up to --hidden-mem
  EXPECT_LE(static_cast<double>(largest - hidden_kib), 1.05 * static_cast<double>(smallest));
  EXPECT_LE(large_file, 2 * small_file);  // 32 times the text: sketches fill octaves that were empty, nothing else grows
}

}  // namespace
}  // namespace calib::test

// kvplan import as a user runs it.

#include "tests/cli/kvplan_fixture.h"

namespace calib {
namespace {

std::string kvtuner_yaml(const std::vector<std::pair<int, int>>& layers) {
  std::string text = "# plan 0000, tiny, kivi\n";
  for (std::size_t l = 0; l < layers.size(); ++l)
    text += std::to_string(l) + ":\n  nbits_key: " + std::to_string(layers[l].first) + "\n  nbits_value: " + std::to_string(layers[l].second) + "\n";
  return text;
}

// EXPORTS.md 5.11, K1 and K2; 7.
TEST_F(Kvplan, ImportsKvtunersPerLayerWidths) {
  test::write_hf_folder(test::make_tiny_model("m-qwen3"), file("m"));
  const std::string yaml = kvtuner_yaml({{8, 4}, {4, 2}, {2, 8}});
  test::write_file(file("t.yaml"), yaml);
  const std::string common = "import --from kvtuner " + file("t.yaml") + " --base-model " + file("m") + " --mode ";
  const Outcome made = run(common + "kivi -o " + file("t.json"));
  ASSERT_EQ(made.exit_code, 0) << made.err;
  EXPECT_EQ(made.err, "");
  const plan::Plan plan = artifacts::read_plan(file("t.json"));
  EXPECT_THAT(made.out, HasSubstr("KVTuner counts 4.667 bits"));
  EXPECT_THAT(made.out, HasSubstr("they take " + fmt::format("{:.3f}", plan.summary.effective_bits) + " effective bits"));
  EXPECT_GT(plan.summary.effective_bits, 4.667);
  EXPECT_EQ(plan.sink_tokens, 0);
  EXPECT_EQ(plan.window_tokens, 32);
  EXPECT_EQ(kvrt::to_string(plan.layers[0].k.scheme), "int8.channel.g32");
  EXPECT_EQ(kvrt::to_string(plan.layers[1].v.scheme), "int2.token.g32");
  EXPECT_EQ(plan.request.imported, "kvtuner kivi");
  ASSERT_EQ(plan.provenance.parents.size(), 1u);
  EXPECT_EQ(plan.provenance.parents[0], std::make_pair(std::string("kvtuner"), sha256_hex(yaml)));
  ASSERT_EQ(plan.decision.size(), 1u);
  EXPECT_THAT(plan.decision[0].text, HasSubstr("t.yaml (sha256 " + sha256_hex(yaml)));

  const Outcome check = run("check " + file("t.json") + " --model " + file("m"));
  EXPECT_EQ(check.exit_code, 0) << check.out << check.err;
  EXPECT_THAT(run("show " + file("t.json")).out, HasSubstr("asked: imported from kvtuner kivi"));
  EXPECT_THAT(run("explain " + file("t.json") + " --layer 2").out, HasSubstr("nbits_key 2, nbits_value 8"));
  EXPECT_EQ(run("memory " + file("t.json") + " --contexts 8192").exit_code, 0);
  test::write_file(file("e.txt"), test::txt(3000));
  FILE* pipe = popen((std::string(CALIB_BIN_DIR) + "/kvsens evaluate --model " + file("m") + " --data " + file("e.txt") +
                      " --seq-len 200 --num-samples 1 --threads 1 --plan " + file("t.json") + " -o " + file("e.json") + " >/dev/null 2>&1")
                         .c_str(),
                     "r");
  EXPECT_EQ(WEXITSTATUS(pclose(pipe)), 0);
  const json eval = json::parse(test::read_file(file("e.json")));
  EXPECT_GT(eval["contenders"][0]["total"]["Mean KLD"]["mean"].get<double>(), 0);

  // The other reading of the same file; what it costs is counted by the plan, whatever the file says.
  const json per_token = json::parse(run(common + "pertoken --json -o " + file("p.json")).out);
  EXPECT_NEAR(per_token["mean_bits"].get<double>(), 28.0 / 6, 1e-12);
  EXPECT_EQ(per_token["window_tokens"], 0);
  EXPECT_EQ(kvrt::to_string(artifacts::read_plan(file("p.json")).layers[0].k.scheme), "int8.token.g");
  // With statistics alone they name the model, and give reasons.
  test::write_file(file("six.yaml"), kvtuner_yaml(std::vector<std::pair<int, int>>(kLayers, {4, 2})));
  const std::string six = "import --from kvtuner " + file("six.yaml") + " --mode pertoken --stats " + file("stats.h5");
  ASSERT_EQ(run(six + " -o " + file("six.json")).exit_code, 0);
  const plan::Plan with_reasons = artifacts::read_plan(file("six.json"));
  EXPECT_GT(with_reasons.layers[0].k.why.size(), 1u);
  EXPECT_EQ(with_reasons.provenance.parents.size(), 2u);
  expect_refusal(six + " --base-model " + file("m") + " -o " + file("no.json"), 5, {"stats.h5"}, "no.json");
  EXPECT_EQ(run(six + " --dry-run -o " + file("no.json")).exit_code, 0);
  EXPECT_FALSE(exists("no.json"));

  // K4: widths by head, and names that say another mode.
  std::string heads;
  for (int l = 0; l < kLayers; ++l) heads += fmt::format("{}:\n  0: {{nbits_key: 4, nbits_value: 2}}\n  1: {{nbits_key: {}, nbits_value: 4}}\n", l, l == 2 ? 8 : 4);
  test::write_file(file("x_kivi_KVTuner4_0.yaml"), heads);
  const Outcome per_head = run("import --from kvtuner " + file("x_kivi_KVTuner4_0.yaml") + " --mode pertoken --stats " + file("stats.h5") + " -o " + file("h.json"));
  EXPECT_EQ(per_head.exit_code, 0) << per_head.err;
  for (const char* part : {"each takes the widest: 6 of 6 layers", "named as a file for --mode kivi"}) EXPECT_THAT(per_head.err, HasSubstr(part));
  EXPECT_EQ(kvrt::to_string(artifacts::read_plan(file("h.json")).layers[2].k.scheme), "int8.token.g");
  EXPECT_EQ(kvrt::to_string(artifacts::read_plan(file("h.json")).layers[3].v.scheme), "int4.token.g");
}

TEST_F(Kvplan, ImportRefusals) {
  test::write_file(file("t.yaml"), kvtuner_yaml(std::vector<std::pair<int, int>>(kLayers, {4, 2})));
  const std::string out = " --stats " + file("stats.h5") + " -o " + file("no.json"), source = file("t.yaml");
  const auto refused = [&](const std::string& arguments, int code, const std::vector<std::string>& parts) {
    expect_refusal("import " + arguments, code, parts, "no.json");
  };
  refused(source + " --mode kivi" + out, 2, {"--from", "kvtuner"});
  refused(source + " --from vllm --mode kivi" + out, 7, {"--from vllm", "kvtuner"});
  refused(source + " --from kvtuner" + out, 2, {"--mode", "pertoken or kivi"});
  refused(source + " --from kvtuner --mode KIVI" + out, 2, {"--mode", "\"KIVI\""});
  refused(source + " --from kvtuner --mode kivi -o " + file("no.json"), 2, {"--base-model"});
  refused(source + " --from kvtuner --mode kivi --context 32" + out, 2, {"--context", "window of 32"});
  refused(source + " --from kvtuner --mode kivi --page-tokens 48" + out, 2, {"--page-tokens"});
  refused(file("absent.yaml") + " --from kvtuner --mode kivi" + out, 3, {"absent.yaml", "KVTuner"});
  refused("--from kvtuner --mode kivi" + out, 2, {"source"});
  refused(source + " --from kvtuner --mode kivi --stats " + file("stats.h5") + " -o " + source, 2, {"would replace an input"});
  test::write_file(file("t.yaml"), kvtuner_yaml({{4, 2}, {3, 2}}));
  refused(source + " --from kvtuner --mode kivi" + out, 7, {"t.yaml", "line 6, layer 1, nbits_key", "is 3"});
  test::write_file(file("t.yaml"), kvtuner_yaml({{4, 2}, {8, 2}}));
  refused(source + " --from kvtuner --mode kivi" + out, 5, {"layer 2, 3, 4, 5 is missing", "2 layers of the model's 6"});
  expect_refusal("--uniform kvtuner --stats " + file("stats.h5") + " -o " + file("no.json"), 2, {"kvtuner", "kvplan import --from kvtuner"}, "no.json");
  EXPECT_THAT(run("list presets").out, HasSubstr("kvplan import --from kvtuner"));
  EXPECT_THAT(run("list presets").out, testing::Not(HasSubstr("not offered")));
}

}  // namespace
}  // namespace calib

// kvplan as a user runs it: exit codes, files, messages.

#include "tests/cli/kvplan_fixture.h"

namespace calib {
namespace {

TEST_F(Kvplan, PlanShowExplainCheck) {
  const Outcome made = run(inputs() + " --budget 4.5 -o " + file("p.json"));
  ASSERT_EQ(made.exit_code, 0) << made.err;
  EXPECT_EQ(made.err, "");
  for (const char* part : {"effective bits at T=8192", "predicted mean KL", "unfitted", "proven optimal", "best uniform pair", "this plan"})
    EXPECT_THAT(made.out, HasSubstr(part));
  const plan::Plan plan = artifacts::read_plan(file("p.json"));
  EXPECT_LE(plan.summary.effective_bits, 4.5);
  EXPECT_EQ(plan.provenance.tool, "kvplan");
  ASSERT_EQ(plan.provenance.parents.size(), 2u);

  const Outcome show = run("show " + file("p.json"));
  EXPECT_EQ(show.exit_code, 0);
  EXPECT_EQ(std::count(show.out.begin(), show.out.end(), '\n'), kLayers + 8);
  EXPECT_EQ(json::parse(run("show " + file("p.json") + " --json").out)["layers"].size(), static_cast<std::size_t>(kLayers));

  const Outcome explain = run("explain " + file("p.json") + " --layer 3");
  EXPECT_EQ(explain.exit_code, 0);
  for (const char* part : {"layer 3 K:", "layer 3 V:", "score", "channel outlier ratio", "would"}) EXPECT_THAT(explain.out, HasSubstr(part));
  EXPECT_THAT(explain.out, testing::Not(HasSubstr("layer 2")));
  expect_refusal("explain " + file("p.json") + " --layer 99", 2, {"--layer", "layers 0 to 5"});
  expect_refusal("explain " + file("p.json") + " --layer -1", 2, {"--layer", "\"-1\""});

  const Outcome check = run("check " + file("p.json") + " --stats " + file("stats.h5"));
  EXPECT_EQ(check.exit_code, 0) << check.err;
  EXPECT_THAT(check.out, HasSubstr("ok"));
}

TEST_F(Kvplan, SameInputsGiveTheSameBytesOutsideProvenance) {
  ASSERT_EQ(run(inputs() + " --budget 4 -o " + file("a/../a.json")).exit_code, 3);  // no such folder
  ASSERT_EQ(run(inputs() + " --budget 4 -o " + file("a.json")).exit_code, 0);
  json first = json::parse(test::read_file(file("a.json")));
  const std::string tensors = exists("a.safetensors") ? test::read_file(file("a.safetensors")) : "";
  ASSERT_EQ(run("plan " + inputs() + " --budget 4 --threads 2 -o " + file("a.json")).exit_code, 0);
  json second = json::parse(test::read_file(file("a.json")));
  first.erase("provenance");
  second.erase("provenance");
  EXPECT_EQ(first.dump(), second.dump());
  EXPECT_EQ(exists("a.safetensors") ? test::read_file(file("a.safetensors")) : "", tensors);
}

TEST_F(Kvplan, UniformPresetsAndPairs) {
  ASSERT_EQ(run("--uniform fp8-vllm --stats " + file("stats.h5") + " -o " + file("fp8.json")).exit_code, 0);
  const plan::Plan fp8 = artifacts::read_plan(file("fp8.json"));
  EXPECT_EQ(fp8.sink_tokens, 0);
  EXPECT_EQ(fp8.layers[0].k.params.clip_hi.size(), 1u);
  ASSERT_EQ(run("--uniform int4.token.g64.center.had:int3.token.g64.had --window 32 --stats " + file("stats.h5") + " -o " + file("pair.json")).exit_code, 0);
  const plan::Plan pair = artifacts::read_plan(file("pair.json"));
  EXPECT_EQ(pair.window_tokens, 32);
  EXPECT_EQ(pair.layers[0].k.params.mean.size(), 128u);
  EXPECT_EQ(run("check " + file("pair.json")).exit_code, 0);
  const Outcome diff = run("diff " + file("fp8.json") + " " + file("pair.json"));
  EXPECT_EQ(diff.exit_code, 0);
  EXPECT_THAT(diff.out, HasSubstr("12 of 12 units differ"));
  const Outcome memory = run("memory " + file("fp8.json") + " --contexts 1024,2048 --json");
  EXPECT_EQ(memory.exit_code, 0) << memory.err;
  EXPECT_EQ(json::parse(memory.out)["contexts"][1]["effective_bits"], 8.0);
  expect_refusal("memory " + file("fp8.json") + " --contexts 2048,,8192", 2, {"--contexts", "empty item"});
  expect_refusal("memory " + file("fp8.json") + " --contexts 1024,4294967296 --batch 1048576", 2, {"--contexts", "counted"});  // before the first row is printed
  expect_refusal("--uniform kivi5 --stats " + file("stats.h5") + " -o " + file("no.json"), 2, {"kivi5", "kivi4"}, "no.json");
  // kvquant keeps one sink, these statistics four; and they were made without the moment that a codebook of values is weighted with.
  expect_refusal("--uniform kvquant4 --stats " + file("stats.h5") + " -o " + file("no.json"), 2, {"nuq4", "--sinks 1"}, "no.json");
  expect_refusal("--uniform bf16:nuq4.token.g --stats " + file("stats.h5") + " -o " + file("no.json"), 4, {"output_moment", "run kvcalib again"}, "no.json");
  expect_refusal("--uniform bf16:int4.token.g.lowrank8 --stats " + file("stats.h5") + " -o " + file("no.json"), 4,
                 {"layer 0 V", "output_moment", "run kvcalib again"}, "no.json");
  expect_refusal("--uniform fp8e4m3fnuz.head:bf16 --stats " + file("stats.h5") + " -o " + file("no.json"), 7, {"largest value 240", "largest value 448"},
                 "no.json");  // QZ-08
  const Outcome fitted = run("--uniform nuq3.channel.static.pre.out1:int4.token.g --stats " + file("stats.h5") + " -o " + file("fitted.json"));
  ASSERT_EQ(fitted.exit_code, 0) << fitted.err;
  const plan::Plan book = artifacts::read_plan(file("fitted.json"));
  EXPECT_EQ(book.layers[0].k.params.codebook.size(), 8u);
  EXPECT_EQ(book.layers[0].k.params.clip_hi.size(), 128u);
  const Outcome clipped = run("--uniform int3.channel.g32.pre.clip.pair.ef:bf16 --stats " + file("stats.h5") + " -o " + file("clipped.json"));
  ASSERT_EQ(clipped.exit_code, 0) << clipped.err;
  EXPECT_EQ(artifacts::read_plan(file("clipped.json")).layers[0].k.params.clip_alpha.size(), 1u);
  expect_refusal("--uniform kivi4 --window 0 --stats " + file("stats.h5") + " -o " + file("no.json"), 2, {"kivi4"}, "no.json");
  expect_refusal("--uniform kivi4 -o " + file("no.json"), 2, {"--stats"}, "no.json");
  expect_refusal("--uniform int4.token.g48:bf16 --stats " + file("stats.h5") + " -o " + file("no.json"), 2, {"token.g48", "head_dim 64"}, "no.json");
  expect_refusal("--uniform fp8e4m3.head:bf16 --sinks 2 --stats " + file("stats.h5") + " -o " + file("no.json"), 2, {"sink"}, "no.json");
}

// Measured, not run: the plan is made, its readers say what this build's runtime lacks.
TEST_F(Kvplan, LowRankPlansAreWrittenAndTheRuntimesGapIsNamed) {
  const Outcome made = run("--uniform int4.token.g8.pre.lowrank24:int4.token.g --stats " + file("stats.h5") + " -o " + file("low.json"));
  ASSERT_EQ(made.exit_code, 0) << made.err;
  EXPECT_THAT(made.err, HasSubstr("the runtime of this build keeps no cache in int4.token.g8.pre.lowrank24"));
  const plan::Plan plan = artifacts::read_plan(file("low.json"));
  EXPECT_EQ(plan.layers[0].k.params.basis_mean.size(), 128u);
  EXPECT_EQ(plan.layers[0].k.params.basis_in.size(), 2u * 64 * 24);
  EXPECT_EQ(plan.layers[0].k.params.basis.size(), 2u * 64 * 24);
  EXPECT_EQ(plan.layers[0].k.chan_perm, "natural");
  const json unit = json::parse(test::read_file(file("low.json")))["layers"][0]["k"];
  EXPECT_EQ(unit["group"], 8);
  EXPECT_TRUE(unit["rotation"].is_null());
  EXPECT_EQ(unit["params"]["basis"]["shape"], json({2, 24 * 64}));
  const Outcome check = run("check " + file("low.json"));
  EXPECT_EQ(check.exit_code, 0) << check.err;
  EXPECT_THAT(check.out, HasSubstr("the runtime of this build does not run it: layer 0 K int4.token.g8.pre.lowrank24: modifier 'lowrank24' is not offered"));
  EXPECT_THAT(check.out, HasSubstr("and 5 more"));
  EXPECT_EQ(json::parse(run("check " + file("low.json") + " --json").out)["runtime_gaps"].size(), 6u);
  ASSERT_EQ(run("--uniform int4.token.g:int4.token.g --stats " + file("stats.h5") + " -o " + file("plain.json")).exit_code, 0);
  EXPECT_EQ(json::parse(run("check " + file("plain.json") + " --json").out)["runtime_gaps"].size(), 0u);
  const std::string common = " --stats " + file("stats.h5") + " -o " + file("no.json");
  expect_refusal("--uniform int4.token.g.pre.lowrank65:bf16" + common, 2, {"lowrank65 is wider than head_dim 64", "at most 64"}, "no.json");
  expect_refusal("--uniform int4.token.g16.pre.lowrank40:bf16" + common, 2, {"token.g16 does not divide rank 40"}, "no.json");
  expect_refusal("--uniform int4.token.g.lowrank16:bf16" + common, 2, {"on keys needs 'pre'", "int4.token.g.pre.lowrank16"}, "no.json");
  expect_refusal("--uniform bf16:int4.token.g.pre.lowrank16" + common, 2, {"'pre' is for keys only"}, "no.json");
  expect_refusal("--uniform int4.channel.g64.pre.lowrank16:bf16" + common, 2, {"'channel.g64' does not go with 'lowrank16'"}, "no.json");
  expect_refusal("--uniform int4.token.g.pre.lowrank16:bf16 --sinks 0" + common, 7, {"holds no sinks", "keep 4 sinks"}, "no.json");
}

TEST_F(Kvplan, LimitsByLoss) {
  const Outcome kl = run(inputs() + " --max-kl 0.01 --json -o " + file("kl.json"));
  ASSERT_EQ(kl.exit_code, 0) << kl.err;
  EXPECT_LE(json::parse(kl.out)["predicted"]["score"].get<double>(), 0.01);
  EXPECT_EQ(run(inputs() + " --max-ppl-ratio 1.02 -o " + file("ppl.json")).exit_code, 0);
  EXPECT_LE(artifacts::read_plan(file("ppl.json")).summary.predicted->score, std::log(1.02));
  for (const char* ratio : {"0", "0.9", "1", "x"})
    expect_refusal(inputs() + " --max-ppl-ratio " + ratio + " -o " + file("no.json"), 2, {"--max-ppl-ratio", "above 1, such as 1.02"}, "no.json");
  expect_refusal(inputs() + " --max-kl 0 -o " + file("no.json"), 2, {"--max-kl 0", "above 0, such as 0.05"}, "no.json");
  expect_refusal(inputs() + " --max-kl 1e-30 -o " + file("no.json"), 6, {"predicted KL <= 1e-30", "lowest limit"}, "no.json");
  EXPECT_EQ(run(inputs() + " --budget 4.5 --dry-run -o " + file("dry.json")).exit_code, 0);
  EXPECT_FALSE(exists("dry.json"));
  const Outcome rich = run(inputs() + " --budget 40 -o " + file("rich.json"));
  EXPECT_EQ(rich.exit_code, 0) << rich.err;
  EXPECT_THAT(rich.out, HasSubstr("affordable: nothing needs to be compressed"));
  EXPECT_THAT(run("show " + file("rich.json")).out, HasSubstr("mean code width: K 16.00, V 16.00"));
  EXPECT_EQ(run("check " + file("rich.json")).exit_code, 0);
}

TEST_F(Kvplan, ExplainTellsTheWholeFlow) {
  ASSERT_EQ(run(inputs() + " --budget 4.5 -o " + file("flow.json")).exit_code, 0);
  const Outcome whole = run("explain " + file("flow.json"));
  EXPECT_EQ(whole.exit_code, 0) << whole.err;
  for (const char* part : {"asked ", "bf16 ", "not affordable", "outliers ", "frame ", "all before ", "ranges ", "all per token ", "bits ", "all 4 bits ",
                           "rotation ", "window ", "chosen ", "best uniform pair", "  5 V  "})
    EXPECT_THAT(whole.out, HasSubstr(part));
  const json out = json::parse(run("explain --json " + file("flow.json")).out);
  EXPECT_EQ(out["decision"].back()["rule"], "chosen");
  EXPECT_EQ(out["layers"].size(), static_cast<std::size_t>(kLayers));
  ASSERT_EQ(run("--uniform kivi4 --stats " + file("stats.h5") + " -o " + file("k.json")).exit_code, 0);
  EXPECT_THAT(run("explain " + file("k.json")).out, HasSubstr("uniform kivi4 was asked for"));
}

TEST_F(Kvplan, TargetRestrictions) {
  ASSERT_EQ(run(inputs() + " --budget 6 --same-kv --skip-layers 0 -o " + file("r.json")).exit_code, 0);
  const plan::Plan plan = artifacts::read_plan(file("r.json"));
  EXPECT_EQ(plan.request.restrictions.skip_layers, std::vector<int>{0});
  for (const plan::LayerPlan& layer : plan.layers) EXPECT_EQ(layer.k.scheme, layer.v.scheme);
  EXPECT_EQ(kvrt::to_string(plan.layers[0].k.scheme), "bf16");
  EXPECT_EQ(run("check " + file("r.json")).exit_code, 0);
  ASSERT_EQ(run(inputs() + " --budget 5 --one-pair --allow-v int4.token.g32,int3.token.g64.had -o " + file("r.json")).exit_code, 0);
  EXPECT_EQ(artifacts::read_plan(file("r.json")).request.restrictions.v.size(), 2u);
  const std::string out = " -o " + file("no.json");
  expect_refusal(inputs() + " --budget 5 --allow-k int5.token.g" + out, 2, {"--allow-k", "int5"}, "no.json");
  expect_refusal(inputs() + " --budget 5 --allow-k int4.token.g64" + out, 2, {"--allow-k int4.token.g64", "no candidate"}, "no.json");
  expect_refusal(inputs() + " --budget 5 --skip-layers 0,77" + out, 2, {"--skip-layers 77"}, "no.json");
  expect_refusal(inputs() + " --budget 5 --skip-layers 0,x" + out, 2, {"--skip-layers x", "such as 5-8"}, "no.json");
  expect_refusal(inputs() + " --budget 5 --skip-layers -1" + out, 2, {"--skip-layers -1", "such as 5-8"}, "no.json");
  expect_refusal(inputs() + " --budget 5 --skip-layers 5-3" + out, 2, {"--skip-layers 5-3", "write 3-5"}, "no.json");
  expect_refusal(inputs() + " --budget 5 --skip-layers 0-2,1" + out, 2, {"--skip-layers", "layer 1 twice"}, "no.json");
  for (const char* option : {"--skip-layers 0,,1", "--allow-k int4.token.g32,", "--allow-v ,bf16"})
    expect_refusal(inputs() + " --budget 5 " + option + out, 2, {std::string(option).substr(0, 7), "empty item"}, "no.json");
  ASSERT_EQ(run(inputs() + " --budget 15 --skip-layers 0,2-4 --skip-layers 5 -o " + file("r.json")).exit_code, 0);
  EXPECT_EQ(artifacts::read_plan(file("r.json")).request.restrictions.skip_layers, (std::vector<int>{0, 2, 3, 4, 5}));
  expect_refusal(inputs() + " --budget 5 --same-kv --allow-k int4.channel.g64.pre" + out, 6, {"--same-kv"}, "no.json");
  expect_refusal(inputs() + " --budget 2.9 --same-kv" + out, 6, {"--same-kv", "minimum"}, "no.json");
  expect_refusal("--uniform kivi4 --same-kv --stats " + file("stats.h5") + out, 2, {"--same-kv", "--uniform"}, "no.json");
}

// CASES.md PL-04.
TEST_F(Kvplan, DeviceCapabilities) {
  ASSERT_EQ(run(inputs() + " --budget 9 --target native --arch sm_86 -o " + file("d.json")).exit_code, 0);
  for (const plan::LayerPlan& layer : artifacts::read_plan(file("d.json")).layers)
    for (const Side side : {Side::kK, Side::kV}) {
      EXPECT_NE(kvrt::to_string(layer.unit(side).scheme), "fp8e4m3.head");
      EXPECT_TRUE(std::any_of(layer.unit(side).why.begin(), layer.unit(side).why.end(),
                              [](const plan::Reason& r) { return r.rule == "restricted" && r.text.find("sm_86 has no FP8") != std::string::npos; }));
    }
  const Outcome forced = run("--uniform fp8-head --arch sm_86 --stats " + file("stats.h5") + " -o " + file("d.json"));
  EXPECT_EQ(forced.exit_code, 0);
  EXPECT_THAT(forced.err, HasSubstr("in software"));
  EXPECT_EQ(run("check " + file("d.json")).exit_code, 0);
  for (const char* arch : {"sm_89", "sm_90"})
    EXPECT_EQ(run("--uniform fp8-head --stats " + file("stats.h5") + " -o " + file("d.json") + " --arch " + arch).err, "") << arch;
  expect_refusal(inputs() + " --budget 9 --arch sm_5 -o " + file("no.json"), 2, {"sm_5", "sm_89, sm_90"}, "no.json");
}

// CASES.md PL-05, PL-03.
TEST_F(Kvplan, MemoryOfAModel) {
  const auto memory = [](const std::string& arguments) { return json::parse(run("memory --json " + arguments).out); };
  const auto preset = [](const json& out, const std::string& name) {
    for (const json& p : out["presets"])
      if (p["name"] == name) return p;
    return json();
  };
  const auto config = [&](const std::string& name, const json& value) {
    test::write_file(file(name), value.dump());
    return "--model " + file(name);
  };
  // stories260K: 5 layers, 4 KV heads x 8.
  const json s260k = {{"model_type", "llama"}, {"num_hidden_layers", 5}, {"hidden_size", 64}, {"num_attention_heads", 8}, {"num_key_value_heads", 4}};
  const json small = memory(config("s260k.json", s260k) + " --context 1024");
  EXPECT_EQ(small["bytes_per_token_16_bit"], 640);
  EXPECT_EQ(small["plain_16_bit_bytes"], 640 * 1024);
  EXPECT_THAT(preset(small, "llamacpp-q4_0")["reason"].get<std::string>(), HasSubstr("head_dim 8"));
  // A window of 8 in half of four layers, 4,096 tokens: 2 sides x 2 heads x 16 channels x 2 bytes.
  json gemma = {{"model_type", "gemma3_text"}, {"num_hidden_layers", 4},
                {"hidden_size", 64},           {"num_attention_heads", 4},
                {"num_key_value_heads", 2},    {"head_dim", 16},
                {"sliding_window", 8},         {"layer_types", {"sliding_attention", "full_attention", "sliding_attention", "full_attention"}}};
  const json sliding = memory(config("gemma.json", gemma) + " --context 4096 --batch 3");
  EXPECT_EQ(sliding["plain_16_bit_bytes"], 3 * (2 * 4096 + 2 * 8) * 128);
  EXPECT_EQ(preset(sliding, "int8-token")["layers"][0], preset(memory("--model " + file("gemma.json") + " --context 100000 --batch 3"), "int8-token")["layers"][0]);
  json hybrid = gemma;
  hybrid["layer_types"] = {"linear_attention", "full_attention", "linear_attention", "full_attention"};
  EXPECT_EQ(memory(config("hybrid.json", hybrid))["cache_layers"], 2);
  // The same numbers as a plan's, also through statistics.
  const json of_stats = memory("--stats " + file("stats.h5") + " --context 8192");
  for (const char* name : {"kivi4", "fp8-vllm", "int8-channel", "tiered4"}) {
    ASSERT_EQ(run(std::string("--uniform ") + name + " --stats " + file("stats.h5") + " -o " + file("u.json")).exit_code, 0);
    EXPECT_EQ(preset(of_stats, name)["bytes"].get<std::int64_t>(), artifacts::read_plan(file("u.json")).summary.bytes) << name;
  }
  EXPECT_EQ(preset(of_stats, "kvquant4")["offered"], true);
  EXPECT_GT(preset(of_stats, "kvquant4")["bytes"].get<std::int64_t>(), 0);
  EXPECT_THAT(preset(of_stats, "kvtuner")["import"].get<std::string>(), HasSubstr("kvplan import --from kvtuner"));
  EXPECT_FALSE(preset(of_stats, "kvtuner").contains("bytes"));
  const Outcome text = run("memory --stats " + file("stats.h5"));
  for (const char* part : {"6 of 6 layers", "each of layers 0-5 (6): 2 KV heads x 64", "turboquant4", "kvplan import"}) EXPECT_THAT(text.out, HasSubstr(part));
  expect_refusal("memory", 2, {"PLAN", "--model"});
  expect_refusal("memory --stats " + file("stats.h5") + " --model " + file("gemma.json"), 2, {"one of"});
  expect_refusal("memory --model " + file("gemma.json") + " --contexts 1,2", 2, {"--contexts"});
  expect_refusal("memory --model " + file("absent"), 3, {"absent"});
  expect_refusal("memory --model " + file("gemma.json") + " --context 4294967296 --batch 1048576", 2, {"counted"});
}

TEST_F(Kvplan, ExactTokensLeaveSomeToCompress) {
  const std::string pair = "--uniform int4.token.g64:int4.token.g64 --stats " + file("stats.h5") + " -o " + file("no.json");
  for (const char* more : {" --window 1000000000", " --sinks 1000000000 --window 0", " --window 8188", " --context 132"})
    expect_refusal(pair + more, 2, {"--context", "nothing would be compressed"}, "no.json");
  EXPECT_EQ(run("--uniform int4.token.g64:int4.token.g64 --window 8187 --dry-run --stats " + file("stats.h5")).exit_code, 0);
  expect_refusal("--uniform kivi4 --context 128 --stats " + file("stats.h5") + " -o " + file("no.json"), 2, {"window of 128"}, "no.json");
  expect_refusal(inputs() + " --budget 9 --context 4 -o " + file("no.json"), 2, {"4 sinks"}, "no.json");
}

TEST_F(Kvplan, NeverReplacesAFileThatItDidNotMake) {
  // The tensor file of model.json would be model.safetensors: somebody's weights.
  test::write_file(file("model.safetensors"), "weights");
  const Outcome o = run("--uniform fp8-head --stats " + file("stats.h5") + " -o " + file("model.json"));
  EXPECT_EQ(o.exit_code, 2) << o.err;
  EXPECT_NE(o.err.find("model.safetensors: exists and is not the tensor file of a plan"), std::string::npos) << o.err;
  EXPECT_EQ(test::read_file(file("model.safetensors")), "weights");
  EXPECT_FALSE(exists("model.json"));
  // Its own it replaces, and takes away when the new plan has no constants.
  for (int i = 0; i < 2; ++i) ASSERT_EQ(run("--uniform fp8-head --stats " + file("stats.h5") + " -o " + file("own.json")).exit_code, 0);
  EXPECT_TRUE(exists("own.safetensors"));
  ASSERT_EQ(run("--uniform bf16 --stats " + file("stats.h5") + " -o " + file("own.json")).exit_code, 0);
  EXPECT_FALSE(exists("own.safetensors"));
  const std::string scores = test::read_file(file("sens.h5"));
  expect_refusal(inputs() + " --budget 4.5 -o " + file("sens.h5"), 2, {"would replace an input"}, "no.json");
  EXPECT_EQ(test::read_file(file("sens.h5")), scores);
  // What is no plan stays, whatever it is; an empty file is nobody's.
  const std::pair<const char*, const char*> foreign[] = {{"config.json", R"({"model_type": "llama"})"},
                                                         {"m.gguf", "GGUF\x03"},
                                                         {"notes.txt", "notes"},
                                                         {"e.json", R"({"schema": {"name": "kvcalib.eval", "version": 1}})"}};
  for (const auto& [name, text] : foreign) {
    test::write_file(file(name), text);
    expect_refusal(inputs() + " --budget 4.5 -o " + file(name), 2, {name, "is no kvcalib.plan file", "remove it or give another name"});
    expect_refusal("--uniform bf16 --stats " + file("stats.h5") + " -o " + file(name), 2, {name});
    EXPECT_EQ(test::read_file(file(name)), text);
  }
  test::write_file(file("empty.json"), "");
  EXPECT_EQ(run(inputs() + " --budget 4.5 -o " + file("empty.json")).exit_code, 0);
  test::write_file(file("newer.json"), R"({"schema": {"name": "kvcalib.plan", "version": 99}})");
  EXPECT_EQ(run(inputs() + " --budget 4.5 -o " + file("newer.json")).exit_code, 0);
  expect_refusal(inputs() + " --budget 4.5 -o " + file("constants.safetensors"), 2, {".safetensors"}, "constants.safetensors");
}

TEST_F(Kvplan, RefusalsLeaveNothingAndKeepOldFiles) {
  const std::string out = " -o " + file("no.json");
  expect_refusal(inputs() + " --budget 1.0" + out, 6, {"1.0 effective bits at T=8192", "minimum"}, "no.json");
  expect_refusal(inputs() + " --budget 4,5" + out, 2, {"4,5"}, "no.json");
  expect_refusal(inputs() + out, 2, {"--budget"}, "no.json");
  expect_refusal(inputs() + " --budget 4 --profile compact" + out, 2, {"--budget", "--profile"}, "no.json");
  expect_refusal(inputs() + " --profile tiny" + out, 2, {"tiny", "compact"}, "no.json");
  expect_refusal("--budget 4" + out, 2, {"--sens"}, "no.json");
  expect_refusal("--budget 4 --sens " + file("absent.h5") + out, 3, {"absent.h5: file not found; kvsens writes scores"}, "no.json");
  expect_refusal("--uniform bf16 --stats " + file("absent.h5") + out, 3, {"absent.h5: file not found; kvcalib writes statistics"}, "no.json");
  expect_refusal("show " + file("absent.json"), 3, {"absent.json: file not found; kvplan writes plans"});
  expect_refusal("--budget 4 --sens " + file("stats.h5") + out, 4, {"stats.h5"}, "no.json");
  expect_refusal("--budget 4 --stats " + file("stats.h5") + " --sens " + file("foreign.h5") + out, 5, {"stats.h5", "foreign.h5", "weights sha256"}, "no.json");
  expect_refusal(inputs() + " --budget 4 --target foo" + out, 2, {"foo", "native", "vllm"}, "no.json");
  expect_refusal(inputs() + " --budget 4 --target vllm" + out, 7, {"vllm"}, "no.json");
  expect_refusal(inputs() + " --budget 4 --metric nonsense" + out, 2, {"nonsense", "fisher_vec"}, "no.json");
  expect_refusal(inputs() + " --budget 4 --page-tokens 48" + out, 2, {"--page-tokens"}, "no.json");
  expect_refusal(inputs() + " --budgets 4", 2, {"--budgets"});
  for (const char* name : {"export", "refine"}) expect_refusal(std::string(name) + " x.json --to vllm", 7, {name});
  ASSERT_EQ(run(inputs() + " --budget 4.5 -o " + file("old.json")).exit_code, 0);
  const std::string old = test::read_file(file("old.json"));
  expect_refusal(inputs() + " --budget 1.0 -o " + file("old.json"), 6, {});
  EXPECT_EQ(test::read_file(file("old.json")), old);
}

TEST_F(Kvplan, CheckFailsWithExitOne) {
  ASSERT_EQ(run(inputs() + " --budget 5 -o " + file("c.json")).exit_code, 0);
  std::string text = test::read_file(file("c.json"));
  const std::string bytes = "\"bytes\": ";
  const std::size_t at = text.find(bytes, text.find("\"summary\""));
  text.insert(at + bytes.size(), "1");
  test::write_file(file("c.json"), text);
  const Outcome check = run("check " + file("c.json"));
  EXPECT_EQ(check.exit_code, 1);
  EXPECT_THAT(check.out, HasSubstr("counted"));
  EXPECT_EQ(check.err, "");
  EXPECT_EQ(json::parse(run("check --json " + file("c.json")).out)["ok"], false);
}

TEST_F(Kvplan, SameTextIsSaid) {
  const Outcome o = run("--stats " + file("stats.h5") + " --sens " + file("same_text.h5") + " --budget 4.5 -o " + file("s.json"));
  EXPECT_EQ(o.exit_code, 0);
  EXPECT_THAT(o.err, HasSubstr("same text"));
}

// CASES.md PL-01: a key bias in layers 0 and 3 makes their keys hard to store, and nothing else.
TEST_F(Kvplan, BitsGoWhereTheLossIs) {
  const auto shell = [](const std::string& command) { return std::system((std::string(CALIB_BIN_DIR) + "/" + command + " >/dev/null 2>&1").c_str()); };
  test::write_file(file("text.txt"), test::txt(6000));
  const std::string common = " --seq-len 256 --num-samples 4 --threads 2 --data " + file("text.txt");
  for (const std::string name : {"m-qwen2-big", "m-qwen2"}) {
    test::write_hf_folder(test::make_tiny_model(name), file(name));
    const std::string model = " --model " + file(name), stats = file(name + "_stats.h5"), scores = file(name + "_sens.h5");
    ASSERT_EQ(shell("kvcalib --sinks 0" + model + common + " -o " + stats), 0);
    ASSERT_EQ(shell("kvsens --sinks 0 --window 0 --metric attn_out --candidates int8.token.g,int4.token.g,int3.token.g,int2.token.g --stats " + stats + model +
                    common + " -o " + scores),
              0);
    // Uniform int4.token.g: 4 bits and a 16-bit scale and minimum for 16 channels.
    for (const char* budget : {"7", "6"}) {
      const Outcome made = run("--stats " + stats + " --sens " + scores + " --context 4096 --budget " + budget + " -o " + file("chain.json"));
      ASSERT_EQ(made.exit_code, 0) << made.err;
      const plan::Plan plan = artifacts::read_plan(file("chain.json"));
      EXPECT_LE(plan.summary.effective_bits, budget[0] - '0');
      EXPECT_THAT(made.out, HasSubstr("without calibrated constants"));
      for (const plan::Baseline& b : plan.baselines)
        EXPECT_TRUE(b.name != "uniform" || !b.feasible || plan.summary.predicted->score <= b.score * (1 + 1e-12));
      if (name == "m-qwen2") {
        EXPECT_LE(kvrt::code_bits(plan.layers[3].k.scheme.format), 4) << budget;
        continue;
      }
      for (const plan::LayerPlan& layer : plan.layers) {
        const bool hard = layer.index == 0 || layer.index == 3;
        EXPECT_EQ(kvrt::to_string(layer.k.scheme) == "int8.token.g", hard) << layer.index << " at " << budget;
        if (budget[0] != '7') continue;
        EXPECT_EQ(kvrt::to_string(layer.v.scheme), "int4.token.g") << layer.index;
        EXPECT_EQ(kvrt::to_string(layer.k.scheme), hard ? "int8.token.g" : "int4.token.g") << layer.index;
      }
    }
  }
}

TEST_F(Kvplan, SubcommandsRefuseTheProgramsOwnOptions) {
  ASSERT_EQ(run(inputs() + " --budget 4.5 -o " + file("s.json")).exit_code, 0);
  const std::string plan = file("s.json");
  expect_refusal("--budget 4.5 show " + plan, 2, {"--budget: is not an option of kvplan show"});
  expect_refusal("show " + plan + " --budget 4.5", 2, {"--budget: is not an option of kvplan show"});
  expect_refusal("check " + plan + " -o x.json", 2, {"--output: is not an option of kvplan check"});
  expect_refusal("list --same-kv", 2, {"--same-kv: is not an option of kvplan list"});
  expect_refusal("--stats " + file("stats.h5") + " check " + plan, 2, {"--stats: stands before check"});
  EXPECT_EQ(run("--threads 1 show " + plan + " --json -q").exit_code, 0);  // these are everybody's
  EXPECT_EQ(run(inputs() + " plan --budget 4.5 -o " + plan).exit_code, 0);
  // A file may hold the options of every command.
  test::write_file(file("all.toml"), run(inputs() + " --budget 4.5 --print-config").out);
  EXPECT_EQ(run("show " + plan + " --config " + file("all.toml")).err, "");
  const Outcome again = run("plan --config " + file("all.toml") + " -o " + plan);
  EXPECT_EQ(again.exit_code, 0) << again.err;
  expect_refusal("show " + plan + " --budget 3 --config " + file("all.toml"), 2, {"--budget"});
}

TEST_F(Kvplan, StandardOutputThatCannotBeWritten) {
  ASSERT_EQ(run(inputs() + " --budget 4.5 -o " + file("f.json")).exit_code, 0);
  const std::string plan = " " + file("f.json");
  for (const std::string& command : {"show" + plan, "show --json" + plan, "explain" + plan, "explain --layer 2" + plan, "check" + plan, "diff" + plan + plan,
                                     "memory" + plan, "memory --stats " + file("stats.h5"), std::string("list"), std::string("--help"),
                                     std::string("show --help"), std::string("--version"), std::string("--print-config"), inputs() + " --budget 4.5 --dry-run"})
    expect_refusal(command + " > /dev/full", 3, {"standard output: cannot be written"});
}

TEST_F(Kvplan, HelpVersionList) {
  EXPECT_EQ(run("--help").exit_code, 0);
  EXPECT_THAT(run("--help").out, HasSubstr("--budget"));
  EXPECT_EQ(run("--version").exit_code, 0);
  const Outcome list = run("list");
  EXPECT_EQ(list.exit_code, 0);
  for (const char* part : {"kivi4", "llamacpp-q4_0-had", "default-2 (58 strings)"}) EXPECT_THAT(list.out, HasSubstr(part));
  expect_refusal("list nonsense", 2, {"nonsense"});
}

}  // namespace
}  // namespace calib

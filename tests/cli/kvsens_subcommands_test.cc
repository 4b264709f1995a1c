// kvsens drift, saliency, refine and joint: exit codes, files, messages.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>

#include <nlohmann/json.hpp>

#include "libcalib/artifacts/eval_file.h"
#include "libcalib/artifacts/plan_file.h"
#include "libcalib/artifacts/sens_file.h"
#include "tests/cli/kvsens_fixture.h"
#include "tests/model/s260k_golden.h"
#include "tests/support/shared_data.h"

namespace calib {
namespace {

TEST_F(Kvsens, DriftOfTheSameTextIsOkAndOfLongerTextIsNot) {
  const std::string common = "kvsens drift --model " + file("m") + " --data " + file("a.txt") + " --stats " + file("stats.h5") + " --threads 1 --seed 1";
  test::write_file(file("rows.ids"), [] {
    std::string rows;
    for (int row = 0; row < 8; ++row) {
      for (int i = 0; i < 250; ++i) rows += std::to_string((i * 7 + row * 13) % 50 + 3) + " ";
      rows += "\n";
    }
    return rows;
  }());
  const Outcome same = run(common + " --seq-len 64 --num-samples 8 --json");
  EXPECT_EQ(same.exit_code, 0) << same.text;
  EXPECT_NE(same.text.find("\"schema\""), std::string::npos);
  EXPECT_NE(same.text.find("nothing can have drifted"), std::string::npos) << same.text;
  const Outcome longer = run(common + " --seq-len 750 --num-samples 8");
  EXPECT_EQ(longer.exit_code, 1) << longer.text;
  for (const char* part : {"decision: recalibrate", "positions that the calibration never reached", "run kvcalib"})
    EXPECT_NE(longer.text.find(part), std::string::npos) << longer.text;
  const Outcome other = run("kvsens drift --model " + file("m") + " --data " + file("rows.ids") + " --stats " + file("stats.h5") + " --threads 1");
  EXPECT_NE(other.text.find("psi"), std::string::npos) << other.text;
  EXPECT_TRUE(other.exit_code == 0 || other.exit_code == 1) << other.text;
}

TEST_F(Kvsens, SaliencyRanksTokensOnHeldOutText) {
  test::write_file(file("held.txt"), test::txt(9000).substr(6500));
  const std::string common = "kvsens saliency --model " + file("m") + " --data " + file("held.txt") + " --stats " + file("stats.h5") +
                             " --seq-len 640 --num-samples 2 --threads 1 --window 32";
  const Outcome o = run(common + " --fraction 0.2 -o " + file("s.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  for (const char* part : {"expected_attention", "probe", "accumulated", "recency", "random", "oracle", "last_probe", "256+", "hit rate", "overlap", "ahead of",
                           "layers that abstain with", "every layer", "fraction 0.2: 16 of every 80 coded tokens"})
    EXPECT_NE(o.text.find(part), std::string::npos) << part << "\n" << o.text;
  EXPECT_EQ(o.text.find("text of the statistics"), std::string::npos) << o.text;
  const nlohmann::json j = nlohmann::json::parse(test::read_file(file("s.json")));
  EXPECT_EQ(j.at("schema").at("name"), "kvcalib.saliency");
  EXPECT_EQ(j.at("settings").at("window"), 32);
  EXPECT_EQ(j.at("settings").at("n_sinks"), 4) << "as the statistics";
  EXPECT_FALSE(j.at("same_text_as_calibration").get<bool>());
  ASSERT_EQ(j.at("fractions").size(), 1u);
  const nlohmann::json& scores = j.at("fractions")[0].at("scores");
  ASSERT_EQ(scores.size(), 9u);
  for (const nlohmann::json& score : scores) {
    const double hit = score.at("total").at("hit_rate").at("mean");
    EXPECT_TRUE(hit > 0 && hit <= 1 + 1e-12) << score.at("name");
    EXPECT_EQ(score.at("buckets").size(), 2u) << "rows 256 to 511 and 512 to 639";
    EXPECT_EQ(score.at("layers").size(), j.at("layers").size());
  }
  EXPECT_EQ(j.at("provenance").at("parents").size(), 1u);
  const auto without_provenance = [&](const std::string& name) {
    nlohmann::json x = nlohmann::json::parse(test::read_file(file(name)));
    x.erase("provenance");
    return x.dump();
  };
  const Outcome again = run(common + " --fraction 0.2 --json -o " + file("s2.json"));
  ASSERT_EQ(again.exit_code, 0) << again.text;
  EXPECT_EQ(without_provenance("s.json"), without_provenance("s2.json"));
  EXPECT_NE(again.text.find("\"kvcalib.saliency\""), std::string::npos);

  const Outcome same = run("kvsens saliency --model " + file("m") + " --data " + file("a.txt") + " --stats " + file("stats.h5") +
                           " --seq-len 400 --num-samples 1 --threads 1 -o " + file("s3.json"));
  EXPECT_EQ(same.exit_code, 0) << same.text;
  for (const char* part : {"held-out text is needed", "one document has no standard error"}) EXPECT_NE(same.text.find(part), std::string::npos) << same.text;
  const Outcome dry = run(common + " --dry-run -o " + file("s4.json"));
  EXPECT_EQ(dry.exit_code, 0) << dry.text;
  EXPECT_NE(dry.text.find("fractions  0.1, 0.2"), std::string::npos) << dry.text;
  EXPECT_FALSE(exists("s4.json"));
}

TEST_F(Kvsens, SaliencyRefusesWhatItCannotDo) {
  const auto refused = [&](const std::string& arguments, int code, const std::string& part) { expect("saliency " + arguments, code, part); };
  const std::string common = "--model " + file("m") + " --data " + file("a.txt") + " --seq-len 400 --num-samples 1 --threads 1 -o " + file("no.json");
  const std::string with_stats = common + " --stats " + file("stats.h5");
  refused("--help", 0, "--fraction");
  refused("--help > /dev/full", 3, "");
  refused(common, 2, "--stats");
  refused("--stats " + file("stats.h5"), 2, "--model");
  refused(with_stats + " --fraction 0", 2, "--fraction: is 0");
  refused(with_stats + " --fraction 0.1,,0.2", 2, "--fraction");
  refused(with_stats + " --fraction 0.7", 2, "--fraction");
  refused(with_stats + " --fraction x", 2, "--fraction");
  refused(with_stats + " --fraction ''", 2, "--fraction: is empty");
  refused(with_stats + " --fraction 0.001", 2, "rounds to no token");
  refused(with_stats + " --base int4.token.g", 2, "KSCHEME:VSCHEME");
  refused(with_stats + " --base int5.token.g:int4.token.g", 2, "int5");
  refused(with_stats + " --salient int8.token.g96", 2, "int8.token.g96");
  refused(with_stats + " --metric fisher", 2, "--metric: is not an option of kvsens saliency");
  refused(common + " --stats " + file("absent.h5"), 3, "absent.h5");
  refused("--model " + file("m") + " --data " + file("a.txt") + " --stats " + file("stats.h5") + " -o " + file("no/such/s.json"), 3, "no/such");
  refused(common + " --stats " + file("a.txt"), 4, "a.txt");
  refused("--model " + file("other") + " --data " + file("a.txt") + " --seq-len 400 --num-samples 1 --threads 1 --stats " + file("stats.h5") + " -o " +
              file("no.json"),
          5, "stats.h5");
  refused("--model " + file("m") + " --data " + file("a.txt") + " --seq-len 256 --num-samples 1 --stats " + file("stats.h5") + " -o " + file("no.json"), 6,
          "later rows to be judged by");
  EXPECT_FALSE(exists("no.json"));
  test::write_file(file("plan-like.json"), "{\"schema\": {\"name\": \"kvcalib.plan\", \"version\": \"1.0\"}}\n");
  refused("--model " + file("m") + " --data " + file("a.txt") + " --stats " + file("stats.h5") + " -o " + file("plan-like.json"), 2, "plan-like.json");
}

TEST_F(Kvsens, DriftMeasuresThePlanAgainstItsLimits) {
  ASSERT_EQ(run("kvplan --uniform int8-token --stats " + file("stats.h5") + " -o " + file("good.json")).exit_code, 0);
  std::string plan = test::read_file(file("good.json"));
  const std::string common =
      "kvsens drift --model " + file("m") + " --data " + file("a.txt") + " --stats " + file("stats.h5") + " --seq-len 240 --num-samples 8 --threads 1 --plan ";
  const Outcome good = run(common + file("good.json"));
  EXPECT_EQ(good.exit_code, 0) << good.text;
  for (const char* part : {"mean_kld", "ppl_ratio", "decision: "}) EXPECT_NE(good.text.find(part), std::string::npos) << good.text;
  const std::size_t at = plan.find("\"kl_max\"");
  ASSERT_NE(at, std::string::npos);
  plan.replace(at, plan.find(',', at) - at, "\"kl_max\": 1e-12");
  test::write_file(file("strict.json"), plan);
  const Outcome strict = run(common + file("strict.json"));
  EXPECT_EQ(strict.exit_code, 1) << strict.text;
  EXPECT_NE(strict.text.find("decision: step_up"), std::string::npos) << strict.text;
  EXPECT_NE(strict.text.find("the plan's limit is 1e-12"), std::string::npos) << strict.text;
}

TEST_F(Kvsens, RefineMeasuresAPlanAndMeetsItsTarget) {
  test::write_file(file("scores.txt"), test::txt(6000).substr(3000));
  test::write_file(file("verify.txt"), "Verification text. " + test::txt(9000).substr(6000));
  const std::string model = "--model " + file("m") + " --threads 1 --seq-len 256 --num-samples 2 ";
  ASSERT_EQ(run("kvsens " + model + "--data " + file("scores.txt") + " --stats " + file("stats.h5") +
                " --window 32 --candidates int8.token.g,int4.token.g,int4.channel.g32.pre,int3.token.g,int2.token.g -o " + file("r.h5"))
                .exit_code,
            0);
  ASSERT_EQ(run("kvplan --sens " + file("r.h5") + " --budget 11 --context 4096 -o " + file("p.json")).exit_code, 0);
  const std::string refine = "kvsens refine --model " + file("m") + " --threads 1 --sens " + file("r.h5"),
                    call = refine + " --seq-len 256 --num-samples 2 --joint 8 --plan ";
  const Outcome same = run(call + file("p.json") + " --data " + file("scores.txt") + " -o " + file("no.json"));
  EXPECT_EQ(same.exit_code, 5) << same.text;
  EXPECT_NE(same.text.find("neither has seen"), std::string::npos) << same.text;
  EXPECT_FALSE(exists("no.json"));
  const Outcome o = run(call + file("p.json") + " --data " + file("verify.txt") + " -o " + file("refined.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  for (const char* part : {"joint runs: measured = ", "Spearman", "this plan",
                           "damage-curve gate on 2 documents: noise on every key never raises perplexity 5 times", "it rejects nothing"})
    EXPECT_NE(o.text.find(part), std::string::npos) << o.text;
  const plan::Plan refined = artifacts::read_plan(file("refined.json"));
  ASSERT_TRUE(refined.summary.measured);
  EXPECT_GT(refined.summary.measured->kld, 0.0);
  ASSERT_TRUE(refined.summary.predicted->joint);
  EXPECT_EQ(refined.summary.predicted->joint->n_runs, 8u);
  EXPECT_FALSE(refined.summary.predicted->unfitted);
  EXPECT_EQ(refined.decision.back().rule, "damage");
  EXPECT_EQ(run("kvplan check " + file("refined.json")).exit_code, 0);

  // What another tool chose has no scores behind it.
  std::string widths;
  for (int l = 0; l < 4; ++l) widths += std::to_string(l) + ": {nbits_key: 8, nbits_value: 4}\n";
  test::write_file(file("k.yaml"), widths);
  ASSERT_EQ(run("kvplan import --from kvtuner " + file("k.yaml") + " --base-model " + file("m") + " --mode pertoken -o " + file("k.json")).exit_code, 0);
  const Outcome imported = run(call + file("k.json") + " --data " + file("verify.txt") + " -o " + file("no.json"));
  EXPECT_EQ(imported.exit_code, 2) << imported.text;
  EXPECT_NE(imported.text.find("was imported, not searched"), std::string::npos) << imported.text;

  // The tensor file is an input through the plan, and the plan itself may be replaced.
  if (exists("p.safetensors")) {
    const Outcome tensor = run(call + file("p.json") + " --data " + file("verify.txt") + " -o " + file("p.safetensors"));
    EXPECT_EQ(tensor.exit_code, 2) << tensor.text;
  }
  // One document has no standard error: nothing is swapped.
  const Outcome one =
      run(refine + " --plan " + file("p.json") + " --data " + file("verify.txt") + " --seq-len 256 --num-samples 1 --joint 0 -o " + file("one.json"));
  ASSERT_EQ(one.exit_code, 0) << one.text;
  EXPECT_NE(one.text.find("kept unjudged: 1 document has no standard error"), std::string::npos) << one.text;
  const plan::Plan searched = artifacts::read_plan(file("p.json")), kept = artifacts::read_plan(file("one.json"));
  for (std::size_t l = 0; l < searched.layers.size(); ++l)
    for (const Side side : {Side::kK, Side::kV}) EXPECT_EQ(kept.layers[l].unit(side).scheme, searched.layers[l].unit(side).scheme);
  // Windows of text that stay exact measure nothing.
  for (const char* more : {"", " --dry-run"}) {
    const Outcome exact = run(refine + " --plan " + file("p.json") + " --data " + file("verify.txt") + " --seq-len 36 --num-samples 2 -o " + file("no.json") + more);
    EXPECT_EQ(exact.exit_code, 6) << exact.text;
    EXPECT_NE(exact.text.find("the plan keeps all of it exact (sinks 4, window 32)"), std::string::npos) << exact.text;
    EXPECT_FALSE(exists("no.json"));
  }

  // A target between the losses of the candidates: the refined plan meets it on the text that was measured.
  const double limit = refined.summary.measured->kld / 3;
  ASSERT_EQ(run("kvplan --sens " + file("r.h5") + " --max-kl " + std::to_string(limit) + " --context 4096 -o " + file("t.json")).exit_code, 0);
  const Outcome t = run(call + file("t.json") + " --data " + file("verify.txt") + " -o " + file("t2.json"));
  ASSERT_EQ(t.exit_code, 0) << t.text;
  EXPECT_LE(artifacts::read_plan(file("t2.json")).summary.measured->kld, artifacts::read_plan(file("t.json")).request.max_kl);
}

/// Scores that lie: int2 keys of every layer lose `factor` times what int8 keys do.
void flatter_int2_keys(const std::string& path, double factor) {
  sens::SensResult sens = artifacts::read_sens_file(path);
  const auto at = [&](const char* scheme) { return static_cast<std::size_t>(std::find(sens.schemes.begin(), sens.schemes.end(), scheme) - sens.schemes.begin()); };
  for (auto& [metric, table] : sens.scores)
    for (std::size_t u = 0; u < sens.units.size(); ++u)
      for (std::size_t w = 0; w < sens.windows.size() && sens.units[u].side == Side::kK; ++w) {
        const std::size_t from = sens.index(u, at("int8.token.g"), w), to = sens.index(u, at("int2.token.g"), w);
        table.mean[to] = factor * table.mean[from], table.se[to] = factor * table.se[from];
      }
  artifacts::write_sens_file(path, sens);
}

std::string id_row(std::size_t first, std::size_t end) {
  std::string row = "1";
  for (std::size_t i = std::max<std::size_t>(first, 1); i < end; ++i) row += " " + std::to_string(test::kS260kIds[i]);
  return row + "\n";
}

// Keys of 2 bits per token ruin the trained stories260K; scores that say otherwise make plans of them, which the gate rejects unmeasured.
TEST_F(Kvsens, RefineRejectsRuinedPlansUnmeasured) {
  CALIB_SHARED_FILE(weights, "models/stories260K.bin");
  test::write_hf_folder(*test::restore_s260k(), file("s260k"));
  test::write_file(file("ruin-scores.ids"), id_row(30, 128) + id_row(10, 108));
  test::write_file(file("ruin-verify.ids"), id_row(0, 128) + id_row(0, 100));
  const std::string model = "--model " + file("s260k") + " --threads 1 --seq-len 128 --num-samples 2 ", scores = file("ruin.h5");
  ASSERT_EQ(
      run("kvsens " + model + "--data " + file("ruin-scores.ids") + " --window 0 --candidates int8.token.g,int4.token.g,int2.token.g -o " + scores).exit_code,
      0);
  flatter_int2_keys(scores, 0.5);
  const std::string refine = "kvsens refine " + model + "--data " + file("ruin-verify.ids") + " --joint 0 --sens " + scores + " --plan ";

  // A budget for K at 8 and V at 4 bits: the search prefers K at 2 and V at 8.
  ASSERT_EQ(run("kvplan --sens " + scores + " --budget 11 --context 4096 -o " + file("ruin.json")).exit_code, 0);
  EXPECT_EQ(kvrt::to_string(artifacts::read_plan(file("ruin.json")).layers[0].k.scheme), "int2.token.g");
  const Outcome o = run(refine + file("ruin.json") + " -o " + file("ruin2.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  for (const char* part : {"the plan is rejected unmeasured: x ",
                           "the damage-curve gate rejects the searched plan: the K at 8 bits, V at 4: int8.token.g:int4.token.g window 0 is written",
                           "a perplexity ratio of 5 is predicted from x = "})
    EXPECT_NE(o.text.find(part), std::string::npos) << part << "\n" << o.text;
  const plan::Plan kept = artifacts::read_plan(file("ruin2.json"));
  for (const plan::LayerPlan& layer : kept.layers) {
    EXPECT_EQ(kvrt::to_string(layer.k.scheme), "int8.token.g");
    EXPECT_EQ(kvrt::to_string(layer.v.scheme), "int4.token.g");
  }
  ASSERT_TRUE(kept.summary.measured);
  EXPECT_LT(kept.summary.measured->ppl_ratio, 5);
  ASSERT_EQ(kept.decision.back().rule, "damage");
  std::map<std::string, double> numbers(kept.decision.back().numbers.begin(), kept.decision.back().numbers.end());
  EXPECT_GE(numbers.at("plan_x"), numbers.at("rejects_from"));
  EXPECT_GE(numbers.at("plan_ppl_ratio"), 5);
  for (const plan::Baseline& b : kept.baselines) EXPECT_EQ(b.measured_kld.has_value(), b.pair == "int8.token.g:int4.token.g") << b.description;
  EXPECT_EQ(run("kvplan check " + file("ruin2.json")).exit_code, 0);
  const Outcome explained = run("kvplan explain " + file("ruin2.json"));
  EXPECT_NE(explained.text.find("unmeasured: the plan (x "), std::string::npos) << explained.text;
  const Outcome as_json = run(refine + file("ruin.json") + " -q --json -o " + file("ruin3.json"));
  const nlohmann::json j = nlohmann::json::parse(as_json.text.substr(std::min(as_json.text.size(), as_json.text.find("{\n"))));
  EXPECT_EQ(j.at("rejected").at(0).at("name"), "the plan");
  EXPECT_GE(j.at("rejected").at(0).at("predicted_ppl_ratio").get<double>(), 5);

  // Nothing else fits.
  ASSERT_EQ(run("kvplan --sens " + scores + " --budget 11 --context 4096 --allow-k int2.token.g -o " + file("ruin4.json")).exit_code, 0);
  const Outcome none = run(refine + file("ruin4.json") + " -o " + file("no.json"));
  EXPECT_EQ(none.exit_code, 6) << none.text;
  for (const char* part : {"the damage-curve gate rejects the plan (x ", "no baseline that fits the budget"})
    EXPECT_NE(none.text.find(part), std::string::npos) << none.text;
  EXPECT_FALSE(exists("no.json"));

  // A limit on loss: rejected plans count as misses, and the repair goes on to wider keys.
  flatter_int2_keys(scores, 30);
  ASSERT_EQ(run("kvplan --sens " + scores + " --max-kl 1 --allow-v int4.token.g --context 4096 -o " + file("ruin5.json")).exit_code, 0);
  const Outcome repaired = run(refine + file("ruin5.json") + " -o " + file("ruin6.json"));
  ASSERT_EQ(repaired.exit_code, 0) << repaired.text;
  for (const char* part : {"the plan is rejected unmeasured", "round 1", "the damage-curve gate rejected the searched one"})
    EXPECT_NE(repaired.text.find(part), std::string::npos) << repaired.text;
  EXPECT_LE(artifacts::read_plan(file("ruin6.json")).summary.measured->kld, 1);
}

TEST_F(Kvsens, RefineSaysWhetherRaisedRangesPay) {
  test::write_file(file("scores.txt"), test::txt(6000).substr(3000));
  test::write_file(file("verify.txt"), "Verification text. " + test::txt(9000).substr(6000));
  const std::string model = "--model " + file("m") + " --threads 1 --seq-len 256 --num-samples 2 ";
  for (const auto& [candidates, answer] :
       {std::pair<std::string, std::string>{"fp8e4m3.head,bf16", "every 64 tokens: mean KL"}, {"int8.token.g,bf16", "nothing to refresh"}}) {
    ASSERT_EQ(run("kvsens " + model + "--data " + file("scores.txt") + " --stats " + file("stats.h5") + " --window 32 --candidates " + candidates + " -o " +
                  file("s8.h5"))
                  .exit_code,
              0);
    ASSERT_EQ(run("kvplan --sens " + file("s8.h5") + " --budget 15 --context 4096 -o " + file("p8.json")).exit_code, 0);
    const Outcome o = run("kvsens refine " + model + "--sens " + file("s8.h5") + " --plan " + file("p8.json") + " --data " + file("verify.txt") +
                          " --joint 0 --scale-refresh 64 -o " + file("p8r.json"));
    ASSERT_EQ(o.exit_code, 0) << o.text;
    EXPECT_NE(o.text.find(answer), std::string::npos) << o.text;
    const plan::Plan plan = artifacts::read_plan(file("p8r.json"));
    ASSERT_FALSE(plan.decision.empty());
    EXPECT_EQ(plan.decision.back().rule, "scale_refresh");
    EXPECT_EQ(plan.scale_refresh_tokens == 64, plan.decision.back().text.find("raised every") != std::string::npos) << plan.decision.back().text;
    EXPECT_EQ(run("kvplan check " + file("p8r.json")).exit_code, 0);
  }
}

TEST_F(Kvsens, LayersWithoutRopeAreCalibratedScoredAndPlannedInOneFrame) {
  test::write_hf_folder(test::make_tiny_model("m-smollm3"), file("nope"));
  const std::string schemes = "int8.token.g,int4.channel.g32,int4.channel.g32.pre,int3.channel.g32.pre";
  ASSERT_EQ(run("kvcalib " + inputs("nope") + " -o " + file("nope.h5")).exit_code, 0);
  const Outcome scored = run("kvsens " + inputs("nope") + " -v --stats " + file("nope.h5") + " --window 16 --candidates " + schemes + " -o " + file("nope_sens.h5"));
  ASSERT_EQ(scored.exit_code, 0) << scored.text;
  EXPECT_NE(scored.text.find("layers 3 have no RoPE"), std::string::npos) << scored.text;
  ASSERT_EQ(run("kvplan --stats " + file("nope.h5") + " --sens " + file("nope_sens.h5") + " --budget 7 --context 4096 -o " + file("nope.json")).exit_code, 0);
  const Outcome shown = run("kvplan show " + file("nope.json"));
  std::istringstream lines(shown.text);
  for (std::string line; std::getline(lines, line);)
    if (line.rfind("        3  ", 0) == 0) EXPECT_EQ(line.find(".pre"), std::string::npos) << line;
  // A preset that wants keys before RoPE: measured and written in the one frame there.
  ASSERT_EQ(run("kvplan --uniform int4.channel.g32.pre:int8.token.g --stats " + file("nope.h5") + " --context 4096 -o " + file("nope_uniform.json")).exit_code, 0);
  const Outcome uniform = run("kvplan explain " + file("nope_uniform.json") + " --layer 3");
  EXPECT_NE(uniform.text.find("this layer has no RoPE"), std::string::npos) << uniform.text;
  const Outcome measured = run("kvsens evaluate " + inputs("nope") + " --backend kvrt --uniform int4.channel.g32.pre:int8.token.g --plan " + file("nope.json") +
                               " --plan " + file("nope_uniform.json") + " -o " + file("nope_eval.json"));
  ASSERT_EQ(measured.exit_code, 0) << measured.text;
}

TEST_F(Kvsens, JointRunsFitThePredictionsOfEveryPlan) {
  test::write_file(file("scores.txt"), test::txt(6000).substr(3000));
  test::write_file(file("verify.txt"), "Verification text. " + test::txt(9000).substr(6000));
  const std::string model = "--model " + file("m") + " --threads 1 --seq-len 256 --num-samples 2 ";
  ASSERT_EQ(run("kvsens " + model + "--data " + file("scores.txt") + " --stats " + file("stats.h5") +
                " --window 0,32 --candidates int8.token.g,int4.token.g,int3.token.g,int2.token.g -o " + file("r.h5"))
                .exit_code,
            0);
  const std::string joint = "kvsens joint " + model + "--sens " + file("r.h5") + " --runs 8";
  const Outcome seen = run(joint + " --data " + file("scores.txt") + " -o " + file("no.h5"));
  EXPECT_EQ(seen.exit_code, 5) << seen.text;
  EXPECT_FALSE(exists("no.h5"));
  EXPECT_EQ(run(joint + " --data " + file("verify.txt") + " --metric attn_out -o " + file("no.h5")).exit_code, 2);
  const Outcome o = run(joint + " --data " + file("verify.txt") + " -o " + file("fitted.h5"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  for (const char* part : {"fisher_softmax", "measured = ", "Spearman"}) EXPECT_NE(o.text.find(part), std::string::npos) << o.text;
  const sens::SensResult fitted = artifacts::read_sens_file(file("fitted.h5"));
  ASSERT_TRUE(fitted.joint);
  EXPECT_EQ(fitted.joint->size(), 8u);
  EXPECT_NE(std::count(fitted.joint->tier_class.begin(), fitted.joint->tier_class.end(), 0), 0);
  EXPECT_NE(std::count(fitted.joint->tier_class.begin(), fitted.joint->tier_class.end(), 1), 0);
  for (const double kld : fitted.joint->kld) EXPECT_GT(kld, 0.0);

  ASSERT_EQ(run("kvplan --sens " + file("r.h5") + " --budget 11 --context 4096 -o " + file("plain.json")).exit_code, 0);
  const Outcome made = run("kvplan --sens " + file("fitted.h5") + " --budget 11 --context 4096 -o " + file("fitted.json"));
  ASSERT_EQ(made.exit_code, 0) << made.text;
  EXPECT_NE(made.text.find("from 8 joint runs"), std::string::npos) << made.text;
  const plan::Plan plain = artifacts::read_plan(file("plain.json")), plan = artifacts::read_plan(file("fitted.json"));
  // The slope is that of the runs with the plan's window; another window may have become the better one.
  double least = 1e9, most = 0;
  for (std::size_t r = 0; r < fitted.joint->size(); ++r) {
    double sum = 0;
    for (std::size_t l = 0; l < fitted.joint->n_layers; ++l) {
      const std::size_t at = r * fitted.joint->n_layers + l;
      for (const Side side : {Side::kK, Side::kV})
        sum += fitted.scores.at("fisher_softmax")
                   .mean[fitted.index(2 * l + (side == Side::kV), static_cast<std::size_t>(side == Side::kK ? fitted.joint->k[at] : fitted.joint->v[at]),
                                      static_cast<std::size_t>(fitted.joint->tier_class[at]))];
    }
    least = std::min(least, fitted.joint->kld[r] / sum), most = std::max(most, fitted.joint->kld[r] / sum);
  }
  EXPECT_FALSE(plan.summary.predicted->unfitted);
  EXPECT_TRUE(plain.summary.predicted->unfitted);
  EXPECT_GE(plan.summary.predicted->joint->slope, least);
  EXPECT_LE(plan.summary.predicted->joint->slope, most);
  EXPECT_NEAR(plan.summary.predicted->kl(), plan.summary.predicted->joint->slope * plan.summary.predicted->score, 1e-12);
  // Once more onto the same file: the runs are replaced.
  EXPECT_EQ(run(joint + " --data " + file("verify.txt") + " -o " + file("r.h5")).exit_code, 0);
  EXPECT_EQ(run(joint + " --data " + file("verify.txt") + " -o " + file("r.h5")).exit_code, 0);
  EXPECT_EQ(artifacts::read_sens_file(file("r.h5")).joint->kld, fitted.joint->kld);
}

}  // namespace
}  // namespace calib

// The salient tier as a user meets it: scores with it, the evidence for it, plans and measurements.

#include <string>

#include <nlohmann/json.hpp>

#include "libcalib/artifacts/eval_file.h"
#include "libcalib/artifacts/plan_file.h"
#include "libcalib/artifacts/sens_file.h"
#include "tests/cli/kvsens_fixture.h"

namespace calib {
namespace {

// From scores to a measured plan: token saliency decides where a tier may stand, and every reader of the plan knows it.
TEST_F(Kvsens, SalientTierFromScoresToAMeasuredPlan) {
  test::write_file(file("tier_scores.txt"), test::txt(6000).substr(3000));
  test::write_file(file("tier_held.txt"), test::txt(9000).substr(6500));
  const std::string model = "--model " + file("m") + " --threads 1 ", stats = " --stats " + file("stats.h5");
  const std::string grid = "kvsens " + model + "--data " + file("tier_scores.txt") + stats + " --seq-len 256 --num-samples 2 --window 16 --candidates int2.token.g";
  const Outcome scored = run(grid + " --salient 0.2 -o " + file("t.h5"));
  ASSERT_EQ(scored.exit_code, 0) << scored.text;
  EXPECT_NE(scored.text.find("salient 0,0.2 at fp8e4m3.token.g"), std::string::npos) << scored.text;
  EXPECT_NE(scored.text.find("sum over units, window 16, salient 0.2 at fp8e4m3.token.g"), std::string::npos) << scored.text;
  const sens::SensResult sens = artifacts::read_sens_file(file("t.h5"));
  EXPECT_EQ(sens.windows, (std::vector<std::int64_t>{16, 16}));
  EXPECT_EQ(sens.salient_fractions, (std::vector<double>{0, 0.2}));
  EXPECT_EQ(sens.saliency.size(), sens.model.layers.size());
  ASSERT_EQ(run(grid + " -o " + file("plain.h5")).exit_code, 0);
  const sens::SensResult plain = artifacts::read_sens_file(file("plain.h5"));
  const auto mean = [](const sens::SensResult& r, std::size_t unit, std::size_t tier_class) { return r.scores.at("fisher_vec").mean[r.index(unit, 0, tier_class)]; };
  for (std::size_t u = 0; u < sens.units.size(); ++u) {
    EXPECT_EQ(mean(sens, u, 0), mean(plain, u, 0)) << u;
    EXPECT_LT(mean(sens, u, 1), mean(sens, u, 0)) << u;
  }

  ASSERT_EQ(run("kvsens saliency " + model + "--data " + file("tier_held.txt") + stats + " --seq-len 640 --num-samples 2 --window 16 --fraction 0.2 -o " +
                file("ts.json"))
                .exit_code,
            0);
  nlohmann::json saliency = nlohmann::json::parse(test::read_file(file("ts.json")));
  const auto layers = [&]() -> nlohmann::json& { return saliency["fractions"][0]["scores"][0]["layers"]; };
  for (nlohmann::json& layer : layers()) layer["abstain"] = nlohmann::json::array();
  layers()[1]["abstain"] = {"hit rate 0.123 < 0.70"};
  test::write_file(file("ts.json"), saliency.dump());
  // Without its evidence a tier is left out, and that is said.
  const std::string search = "kvplan --sens " + file("t.h5") + " --budget 11 --context 4096 -o ";
  const Outcome without = run(search + file("t0.json"));
  ASSERT_EQ(without.exit_code, 0) << without.text;
  EXPECT_NE(without.text.find("--saliency"), std::string::npos) << without.text;
  EXPECT_FALSE(artifacts::read_plan(file("t0.json")).salient);
  const Outcome o = run(search + file("t.json") + " --saliency " + file("ts.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  const plan::Plan plan = artifacts::read_plan(file("t.json"));
  for (std::size_t l = 0; l < plan.layers.size(); ++l) EXPECT_EQ(plan.layers[l].salient_fraction, l == 1 ? 0.0 : 0.2) << l;
  EXPECT_EQ(plan.layers[0].saliency, sens.saliency.at(0));
  EXPECT_EQ(plan.provenance.parents.size(), 2u);
  EXPECT_EQ(run("kvplan check " + file("t.json")).exit_code, 0);
  const auto shows = [&](const std::string& command, const std::vector<std::string>& parts) {
    const Outcome shown = run("kvplan " + command);
    EXPECT_EQ(shown.exit_code, 0) << shown.text;
    for (const std::string& part : parts) EXPECT_NE(shown.text.find(part), std::string::npos) << command << ": " << part << "\n" << shown.text;
  };
  shows("show " + file("t.json"), {"salient tier at fp8e4m3.token.g", "salient\n", "0.2\n"});
  shows("explain " + file("t.json") + " --layer 1", {"no salient tier: 0.2: hit rate 0.123 < 0.70"});
  shows("explain " + file("t.json"), {"salient 0.2", "1 layer may not have one"});
  shows("diff " + file("t0.json") + " " + file("t.json"), {"salient 0 -> 0.2"});
  const auto bytes_at = [&](const std::string& name) {
    return nlohmann::json::parse(run("kvplan memory " + file(name) + " --contexts 4096 --json").text)["contexts"][0]["bytes"].get<std::int64_t>();
  };
  EXPECT_EQ(bytes_at("t.json"), plan.summary.bytes);
  EXPECT_GT(bytes_at("t.json"), bytes_at("t0.json"));

  const std::string evaluate = "kvsens evaluate " + model + "--data " + file("tier_held.txt") + " --seq-len 320 --num-samples 2 --plan " + file("t.json");
  ASSERT_EQ(run(evaluate + " " + file("t0.json") + " --uniform tiered4" + stats + " -o " + file("te.json")).exit_code, 0);
  const sens::EvalResult e = artifacts::read_eval_file(file("te.json"));
  ASSERT_EQ(e.contenders.size(), 3u);
  EXPECT_LT(e.contenders[1].total.kld.mean, e.contenders[2].total.kld.mean) << "the same schemes, with and without a tier";
  EXPECT_NE(e.contenders[1].description.find("salient tier at fp8e4m3.token.g"), std::string::npos);
  expect("evaluate " + model + "--data " + file("tier_held.txt") + " --seq-len 320 --num-samples 1 --plan " + file("t.json") + " --backend kvrt -o " +
             file("no.json"),
         7, "a salient tier is not offered by the runtime");
  expect("evaluate " + model + "--data " + file("tier_held.txt") + " --uniform tiered4 -o " + file("no.json"), 2, "--stats");
  const Outcome refined = run("kvsens refine " + model + "--data " + file("tier_held.txt") + " --seq-len 320 --num-samples 2 --joint 4 --sens " + file("t.h5") +
                              " --plan " + file("t.json") + " -o " + file("tr.json"));
  EXPECT_EQ(refined.exit_code, 0) << refined.text;
  EXPECT_EQ(run("kvplan check " + file("tr.json")).exit_code, 0);
  ASSERT_EQ(run("kvplan --uniform tiered4" + stats + " --context 4096 -o " + file("tu.json")).exit_code, 0);
  EXPECT_EQ(artifacts::read_plan(file("tu.json")).layers[0].salient_fraction, 0.2);
  EXPECT_EQ(run("kvplan check " + file("tu.json")).exit_code, 0);

  const std::string bad = model + "--data " + file("tier_scores.txt") + " --seq-len 256 --num-samples 1 --candidates int2.token.g -o " + file("no.h5");
  expect(bad + stats + " --salient 0.7", 2, "--salient");
  expect(bad + stats + " --salient 0.001", 2, "rounds to no token");
  expect(bad + stats + " --salient 0.2 --salient-scheme int4.token.g", 2, "--salient-scheme");
  expect(bad + stats + " --salient 0.2 --salient-score probe", 2, "--salient-score");
  expect(bad + " --salient 0.2", 2, "--stats");
  expect(model + "--data " + file("tier_scores.txt") + stats + " --seq-len 90 --num-samples 1 --window 16 --candidates int2.token.g --salient 0.2 -o " +
             file("no.h5"),
         6, "salient 0.2");
  EXPECT_FALSE(exists("no.h5"));
  EXPECT_FALSE(exists("no.json"));
  const auto refused = [&](const std::string& arguments, int code, const std::string& part) {
    const Outcome r = run("kvplan " + arguments + " -o " + file("no.json"));
    EXPECT_EQ(r.exit_code, code) << r.text;
    EXPECT_NE(r.text.find(part), std::string::npos) << r.text;
  };
  refused("--sens " + file("plain.h5") + " --budget 11 --saliency " + file("ts.json"), 2, "--salient 0.1,0.2");
  refused("--uniform tiered4" + stats + " --saliency " + file("ts.json"), 2, "--saliency");
  refused("--sens " + file("t.h5") + " --budget 11 --saliency " + file("absent.json"), 3, "absent.json");
  saliency["settings"]["n_sinks"] = 0;
  test::write_file(file("other_sinks.json"), saliency.dump());
  refused("--sens " + file("t.h5") + " --budget 11 --saliency " + file("other_sinks.json"), 5, "--sinks 4");
}

}  // namespace
}  // namespace calib

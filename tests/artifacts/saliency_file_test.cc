#include "libcalib/artifacts/saliency_file.h"

#include <limits>

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/io/example_identity.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::artifacts {
namespace {

sens::SaliencyResult example() {
  sens::SaliencyResult out;
  out.provenance = test::example_provenance();
  out.model = test::example_model();
  out.data = out.calibration_data = test::example_data();
  out.settings = {2048, 4, 4, 128, 32, "int4.token.g", "int3.token.g", "fp8e4m3.token.g"};
  out.layers = {{0, 0.4, 0.05, 1000}, {2, 0.6, 0.25, 1000}};
  sens::SaliencyFraction f;
  f.requested = 0.1, f.achieved = 7.0 / 71, f.block_base = 64, f.block_salient = 7, f.best = 1, f.runner_up = 0, f.lead = {0.02, 0.01};
  f.e_out_base = f.e_out_salient = f.e_mass_base = f.e_mass_salient = {0.001, 0.002};
  for (std::size_t s = 0; s < sens::kTokenScores; ++s) {
    sens::SaliencyScore& score = f.scores[s];
    score.total.hit = {0.8 + 0.01 * static_cast<double>(s), 0.01};
    score.buckets = {{256, 512, 4, score.total}};
    sens::SaliencyLayer a{score.total, 2, 0.5, 0.001, 0.002, {}}, b = a;
    b.rates.hit.mean = s == 7 ? 0.75 : 0.6;
    b.abstain = {"hit rate 0.600 < 0.70"};
    if (s >= sens::kOwnScores) a.e_out.reset(), a.e_mass.reset();
    score.layers = {a, b};
  }
  out.fractions = {f};
  out.warnings = {"one"};
  return out;
}

TEST(SaliencyFile, HoldsWhatWasMeasured) {
  const test::TempFolder folder;
  write_saliency_file(folder.file("s.json"), example());
  const nlohmann::json j = nlohmann::json::parse(test::read_file(folder.file("s.json")));
  EXPECT_EQ(j.at("schema").at("version"), 1);
  EXPECT_EQ(j.at("settings").at("base_v"), "int3.token.g");
  EXPECT_EQ(j.at("layers")[1].at("query_shift"), 0.25);
  const nlohmann::json& f = j.at("fractions")[0];
  EXPECT_EQ(f.at("best"), "probe");
  EXPECT_EQ(f.at("runner_up"), "expected_attention");
  EXPECT_EQ(f.at("lead").at("se"), 0.01);
  EXPECT_EQ(f.at("last_layer")[0].at("worst_layer"), 2) << "the model's number, not the position";
  EXPECT_FALSE(f.at("last_layer")[0].at("allowed").get<bool>());
  EXPECT_TRUE(f.at("last_layer")[1].at("allowed").get<bool>());
  const nlohmann::json& score = f.at("scores")[3];
  EXPECT_EQ(score.at("name"), "recency");
  EXPECT_NEAR(score.at("total").at("hit_rate").at("mean").get<double>(), 0.83, 1e-12);
  EXPECT_EQ(score.at("buckets")[0].at("end_position"), 512);
  EXPECT_EQ(score.at("layers")[1].at("abstain")[0], "hit rate 0.600 < 0.70");
  EXPECT_EQ(score.at("layers")[0].at("e_out"), 0.001);
  EXPECT_FALSE(f.at("scores")[6].at("layers")[0].contains("e_out"));
  EXPECT_EQ(saliency_to_json(example()), test::read_file(folder.file("s.json")));
}

TEST(SaliencyFile, APlannerReadsItsVerdicts) {
  const test::TempFolder folder;
  write_saliency_file(folder.file("s.json"), example());
  const sens::SaliencyVerdicts v = read_saliency_file(folder.file("s.json"));
  EXPECT_EQ(v.settings.base_v, "int3.token.g");
  EXPECT_EQ(v.settings.n_sinks, 4);
  EXPECT_EQ(v.model.weights_sha256, example().model.weights_sha256);
  ASSERT_EQ(v.fractions.size(), 1u);
  EXPECT_EQ(v.fractions[0].requested, 0.1);
  EXPECT_EQ(v.fractions[0].layers.size(), sens::kTokenScores);
  const std::vector<sens::SaliencyVerdicts::Layer>& layers = v.fractions[0].layers.at("expected_attention");
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[1].index, 2);
  EXPECT_EQ(layers[1].hit_rate, 0.6);
  EXPECT_TRUE(layers[0].abstain.empty());
  EXPECT_EQ(layers[1].abstain, (std::vector<std::string>{"hit rate 0.600 < 0.70"}));
  nlohmann::json j = nlohmann::json::parse(test::read_file(folder.file("s.json")));
  const auto refused = [&](const nlohmann::json& bad, ErrorKind kind, const std::vector<std::string>& parts) {
    test::write_file(folder.file("bad.json"), bad.dump());
    test::expect_error([&] { read_saliency_file(folder.file("bad.json")); }, kind, parts);
  };
  nlohmann::json bad = j;
  bad["schema"]["version"] = 2;
  refused(bad, ErrorKind::kVersion, {"1 to 1"});
  bad = j, bad["schema"]["name"] = "kvcalib.plan";
  refused(bad, ErrorKind::kFormat, {"kvcalib.saliency"});
  bad = j, bad["fractions"][0]["scores"][0]["layers"][0]["index"] = 99;
  refused(bad, ErrorKind::kFormat, {"/fractions/0/scores/0/layers/0/index"});
  bad = j, bad["fractions"][0]["scores"][0]["layers"][0].erase("abstain");
  refused(bad, ErrorKind::kFormat, {"abstain"});
  test::expect_error([&] { read_saliency_file(folder.file("absent.json")); }, ErrorKind::kNotFound, {"kvsens saliency"});
}

TEST(SaliencyFile, ANumberThatIsNotFiniteIsRefused) {
  sens::SaliencyResult bad = example();
  bad.fractions[0].scores[2].total.hit.mean = std::numeric_limits<double>::quiet_NaN();
  test::expect_error([&] { saliency_to_json(bad); }, ErrorKind::kNumeric, {"hit_rate"});
}

}  // namespace
}  // namespace calib::artifacts

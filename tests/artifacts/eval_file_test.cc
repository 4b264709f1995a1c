#include "libcalib/artifacts/eval_file.h"

#include <cmath>

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "libcalib/base/json.h"
#include "tests/io/example_identity.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::artifacts {
namespace {

using test::expect_error;

sens::KldBlock block(double x) {
  sens::KldBlock out;
  out.n_rows = 1024;
  out.n_documents = 16;
  out.ppl_q = {x + 10, 0.1};
  out.ppl_base = {x + 9, 0.2};
  out.ppl_ratio = {1.01, 0.003};
  out.kld = {x, x / 10};
  out.kld_max = 100 * x;
  out.kld_min = -1e-9;
  for (std::size_t i = 0; i < out.kld_percentiles.size(); ++i) out.kld_percentiles[i] = x / (1.0 + static_cast<double>(i));
  out.delta_p = {-0.5, 0.01};
  out.rms_delta_p = {2.5, 0.02};
  out.same_top_p = {98.25, 0.3};
  return out;
}

sens::EvalResult example() {
  sens::EvalResult out;
  out.provenance = test::example_provenance();
  out.model = test::example_model();
  out.data = test::example_data();
  out.calibration_data = test::example_data();
  out.settings = {2048, 16, 16384, true, "quantised", "fake"};
  out.noise_floor = block(1e-6);
  sens::EvalContender contender;
  contender.name = "plans/ours 4.5.json";
  contender.kind = "plan";
  contender.description = "30 layers, 7 schemes";
  contender.plan_sha256 = std::string(64, '9');
  contender.n_sinks = 4;
  contender.window = 128;
  contender.effective_bits_2048 = 5.1;
  contender.effective_bits_8192 = 4.5;
  contender.total = block(0.01);
  contender.document_kld = {0.004, 0.016};
  contender.buckets = {{0, 256, block(0.02), {0.001, 0.0001}}, {256, 512, block(0.03), {0.002, 0.0002}}};
  out.contenders = {contender};
  contender.name = "bf16";
  contender.kind = "uniform";
  contender.k = contender.v = "bf16";
  contender.effective_bits_2048.reset();
  contender.length_limit = 2048;
  contender.indistinguishable = true;
  contender.kld_slope = sens::MeanSe{0.61, 0.04};
  contender.flags = {"kld_slope", "entropy_shift"};
  contender.generation = {{{0.25, 0.01}, {12.5, 3}, 0.75, {0.2, 0.3}}, {0.5, 0.125}, {0.75, 0.2}, {0.5, 1.5}, 1, 0.02, 0.4};
  contender.retrieval = sens::EvalRetrieval{{{1024, 0.1, 2, 1}, {1024, std::nullopt, 4, 3}}, false};
  contender.damage = sens::EvalDamage{0.25, 17, 6.5, true};
  out.damage_curve = sens::DamageCurve{2, 2048, {{0.005, 1e-5, 1.0001}, {0.8, 0.4, 30.5}}, 0.2};
  out.generation = {2, 1024, 512, 2};
  out.reference_retrieval = sens::EvalRetrieval{{{1024, 0.1, 2, 2}, {1024, std::nullopt, 4, 4}}, std::nullopt};
  out.reference_replies = {{0.125, 0.02}, {3, 1}, 0.5, {0.1, 0.15}};
  out.contenders.push_back(contender);
  out.warnings = {"same text"};
  return out;
}

TEST(EvalFile, RoundTrip) {
  const test::TempFolder folder;
  const std::string path = folder.file("eval.json");
  write_eval_file(path, example());
  const sens::EvalResult read = read_eval_file(path);
  EXPECT_EQ(eval_to_json(read), eval_to_json(example()));  // every field is in the text
  EXPECT_EQ(read.contenders[0].buckets[1].end_position, 512);
  EXPECT_EQ(read.contenders[0].buckets[1].block.kld.mean, 0.03);
  EXPECT_EQ(read.contenders[0].document_kld, (std::vector<double>{0.004, 0.016}));
  EXPECT_FALSE(read.contenders[1].effective_bits_2048.has_value());
  EXPECT_FALSE(read.contenders[0].length_limit.has_value());
  EXPECT_EQ(read.contenders[1].length_limit, 2048);
  EXPECT_FALSE(read.negative_control.has_value());
  EXPECT_FALSE(read.contenders[0].kld_slope.has_value());
  EXPECT_TRUE(read.contenders[0].flags.empty());
  EXPECT_FALSE(read.contenders[0].generation.has_value());
  EXPECT_EQ(read.contenders[1].kld_slope->mean, 0.61);
  EXPECT_EQ(read.contenders[1].flags, (std::vector<std::string>{"kld_slope", "entropy_shift"}));
  EXPECT_EQ(read.contenders[1].generation->agreeing_prefix.se, 0.125);
  EXPECT_EQ(read.contenders[1].generation->replies.document_rep_4[1], 0.3);
  EXPECT_EQ(read.contenders[1].generation->document_row_kld[1], 1.5);
  EXPECT_EQ(read.contenders[1].generation->catastrophic_high, 0.4);
  EXPECT_EQ(read.reference_replies->hit_cap, 0.5);
  EXPECT_FALSE(read.contenders[0].damage.has_value());
  EXPECT_EQ(read.contenders[1].damage->worst_layer, 17);
  EXPECT_EQ(read.contenders[1].damage->predicted_ppl_ratio, 6.5);
  EXPECT_TRUE(read.contenders[1].damage->rejected);
  ASSERT_EQ(read.damage_curve->points.size(), 2u);
  EXPECT_EQ(read.damage_curve->points[1].ppl_ratio, 30.5);
  EXPECT_EQ(read.damage_curve->rejects_from, 0.2);
  EXPECT_EQ(read.generation->depth, 1024);
  EXPECT_EQ(read.generation->end_token, 2);
  EXPECT_FALSE(read.contenders[0].retrieval.has_value());
  ASSERT_EQ(read.contenders[1].retrieval->cells.size(), 2u);
  EXPECT_EQ(read.contenders[1].retrieval->cells[0].depth, 0.1);
  EXPECT_FALSE(read.contenders[1].retrieval->cells[1].depth.has_value());
  EXPECT_EQ(read.contenders[1].retrieval->cells[1].hits, 3);
  EXPECT_EQ(read.contenders[1].retrieval->pass, false);
  EXPECT_EQ(read.reference_retrieval->cells[1].n, 4);
  EXPECT_FALSE(read.reference_retrieval->pass.has_value());
  EXPECT_TRUE(read.settings.second_half);
  test::expect_equal(read.provenance, example().provenance);

  sens::EvalResult with_control = example();
  with_control.negative_control = with_control.contenders[0];
  with_control.calibration_data.reset();
  with_control.damage_curve->rejects_from.reset();
  write_eval_file(path, with_control);
  EXPECT_EQ(eval_to_json(read_eval_file(path)), eval_to_json(with_control));
}

TEST(EvalFile, NamesOfTheKnownBlock) {
  const auto document = parse_json_strict(eval_to_json(example()), "eval.json");
  const auto& total = document["contenders"][0]["total"];
  for (const char* name : {"Mean PPL(Q)", "Mean PPL(base)", "Mean PPL(Q)/PPL(base)", "Mean KLD", "Mean Δp", "RMS Δp", "Same top p"}) {
    EXPECT_TRUE(total.at(name).at("mean").is_number_float()) << name;
    EXPECT_TRUE(total.at(name).at("se").is_number_float()) << name;
  }
  for (const char* name :
       {"Maximum KLD", "99.9% KLD", "99.0% KLD", "95.0% KLD", "90.0% KLD", "Median KLD", "10.0% KLD", "5.0% KLD", "1.0% KLD", "0.1% KLD", "Minimum KLD"})
    EXPECT_TRUE(total.at(name).is_number_float()) << name;
  EXPECT_EQ(total["Median KLD"].get<double>(), 0.01 / 5);
}

TEST(EvalFile, NumbersThatAreNotFiniteAreNamed) {
  sens::EvalResult result = example();
  result.contenders[1].total.kld.mean = std::nan("");
  expect_error([&] { eval_to_json(result); }, ErrorKind::kNumeric, {"/contenders/1/total/Mean KLD/mean"});
}

TEST(EvalFile, WrongFilesAreNamed) {
  const test::TempFolder folder;
  const std::string path = folder.file("eval.json");
  const auto refuse = [&](nlohmann::json document, ErrorKind kind, const std::string& part) {
    test::write_file(path, document.dump());
    expect_error([&] { read_eval_file(path); }, kind, {path, part});
  };
  const nlohmann::json good = nlohmann::json::parse(eval_to_json(example()));
  nlohmann::json bad = good;
  bad["schema"]["version"] = 2;
  refuse(bad, ErrorKind::kVersion, "version 2");
  bad["schema"]["name"] = "kvcalib.plan";
  refuse(bad, ErrorKind::kFormat, "kvcalib.plan");
  bad.erase("schema");
  refuse(bad, ErrorKind::kFormat, "/schema is missing");
  bad = good;
  bad["contenders"][0]["total"]["Mean KLD"] = "small";
  refuse(bad, ErrorKind::kFormat, "/contenders/0/total/Mean KLD");
  bad = good;
  bad["contenders"][1]["n_sinks"] = 4.5;
  refuse(bad, ErrorKind::kFormat, "/contenders/1/n_sinks is 4.5");
  refuse(nlohmann::json::array(), ErrorKind::kFormat, "expected an object");
}

}  // namespace
}  // namespace calib::artifacts

#include "libcalib/artifacts/sens_file.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "libcalib/io/h5.h"
#include "tests/artifacts/example_artifacts.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::artifacts {
namespace {

using test::expect_error;
using test::TempFolder;

// NaN marks what is not valid, so equality is equality of bits.
void expect_bits(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) << i;
}

sens::SensResult with_joint_runs() {
  sens::SensResult out = test::example_sens();
  sens::JointRuns joint;
  joint.data = out.data, joint.data.documents_sha256 = std::string(64, 'd');
  joint.provenance = out.provenance;
  joint.n_layers = out.model.layers.size();
  for (std::size_t r = 0; r < 3; ++r) {
    for (std::size_t l = 0; l < joint.n_layers; ++l)
      joint.k.push_back(static_cast<std::int64_t>((r + l) % out.schemes.size())), joint.v.push_back(0),
          joint.tier_class.push_back(static_cast<std::int64_t>(out.windows.size()) - 1);
    joint.kld.push_back(0.25 / (1 + static_cast<double>(r))), joint.kld_se.push_back(0.01), joint.ln_ppl_ratio.push_back(-0.5);
  }
  out.joint = joint;
  return out;
}

TEST(SensFile, JointRunsComeBack) {
  const TempFolder folder;
  const sens::SensResult written = with_joint_runs();
  write_sens_file(folder.file("sens.h5"), written);
  const sens::SensResult read = read_sens_file(folder.file("sens.h5"));
  ASSERT_TRUE(read.joint);
  EXPECT_EQ(read.joint->n_layers, written.joint->n_layers);
  EXPECT_EQ(read.joint->k, written.joint->k);
  EXPECT_EQ(read.joint->v, written.joint->v);
  EXPECT_EQ(read.joint->tier_class, written.joint->tier_class);
  EXPECT_EQ(read.joint->kld, written.joint->kld);
  EXPECT_EQ(read.joint->kld_se, written.joint->kld_se);
  EXPECT_EQ(read.joint->ln_ppl_ratio, written.joint->ln_ppl_ratio);
  test::expect_equal(read.joint->data, written.joint->data);
}

TEST(SensFile, JointRunsNameSchemesThatAreThere) {
  const TempFolder folder;
  sens::SensResult wrong = with_joint_runs();
  wrong.joint->v.back() = static_cast<std::int64_t>(wrong.schemes.size());
  write_sens_file(folder.file("sens.h5"), wrong);
  expect_error([&] { read_sens_file(folder.file("sens.h5")); }, ErrorKind::kFormat, {"/joint/v", "holds " + std::to_string(wrong.schemes.size())});
}

TEST(SensFile, IsolatedRunsComeBack) {
  const TempFolder folder;
  const sens::SensResult written = test::example_isolated();
  write_sens_file(folder.file("sens.h5"), written);
  const sens::SensResult read = read_sens_file(folder.file("sens.h5"));
  ASSERT_TRUE(read.isolated);
  const sens::IsolatedRuns &a = *read.isolated, &b = *written.isolated;
  EXPECT_EQ(a.metric, b.metric);
  EXPECT_EQ(a.above, b.above);
  for (const Side side : {Side::kK, Side::kV}) {
    EXPECT_EQ(a.slope(side).value, b.slope(side).value);
    EXPECT_EQ(a.slope(side).se_ln, b.slope(side).se_ln);
    EXPECT_EQ(a.slope(side).n_pairs, b.slope(side).n_pairs);
  }
  EXPECT_EQ(a.taken_up, b.taken_up);
  expect_bits(a.mean, b.mean);
  expect_bits(a.se, b.se);
  test::expect_equal(a.data, b.data);
  test::expect_equal(a.provenance, b.provenance);
  EXPECT_EQ(io::H5Reader(folder.file("sens.h5"), "kvcalib.sens", 1).schema_version(), 1) << "additive: older programs read the estimates";
  write_sens_file(folder.file("plain.h5"), test::example_sens());
  EXPECT_FALSE(read_sens_file(folder.file("plain.h5")).isolated);
}

TEST(SensFile, IsolatedRunsThatNoPlanCouldSpendAreRefused) {
  const TempFolder folder;
  const double nan = std::nan("");
  const auto refused = [&](const std::function<void(sens::SensResult&, sens::IsolatedRuns&)>& spoil, const std::vector<std::string>& parts) {
    sens::SensResult bad = test::example_isolated();
    spoil(bad, *bad.isolated);
    write_sens_file(folder.file("bad.h5"), bad);
    expect_error([&] { read_sens_file(folder.file("bad.h5")); }, ErrorKind::kFormat, parts);
  };
  refused([](auto&, auto& runs) { runs.metric = "fisher"; }, {"bad.h5", "/isolated", "\"fisher\", which /score does not hold"});
  for (const double above : {0.0, -1.0, nan, std::numeric_limits<double>::infinity()})
    refused([&](auto&, auto& runs) { runs.above = above; }, {"/isolated", "above"});
  for (const double slope : {0.0, -1.0, nan}) refused([&](auto&, auto& runs) { runs.v.value = slope; }, {"/isolated", "slope of V"});
  refused([&](auto&, auto& runs) { runs.k.se_ln = nan; }, {"/isolated", "slope of K"});
  refused([](auto&, auto& runs) { runs.k.n_pairs = -1; }, {"/isolated", "-1 pairs"});
  refused([](auto&, auto& runs) { runs.taken_up[2] = 2; }, {"/isolated/taken_up", "layer 2 K has 2"});
  refused([](auto&, auto& runs) { runs.taken_up[1] = 1; }, {"/isolated/mean", "layer 0 V is taken up and holds no measurement"});
  refused([](auto& s, auto& runs) { runs.mean[s.index(0, 1, 1)] = -0.5; }, {"/isolated/mean", "layer 0 K int4.token.g8 is -0.5"});
  refused([](auto& s, auto& runs) { runs.mean[s.index(0, 1, 1)] = std::numeric_limits<double>::infinity(); }, {"/isolated/mean", "inf"});
  refused([&](auto& s, auto& runs) { runs.se[s.index(0, 1, 1)] = nan; }, {"/isolated/se", "layer 0 K int4.token.g8 is nan beside a mean of"});
  refused([&](auto& s, auto& runs) { runs.mean[s.index(0, 1, 1)] = nan; }, {"/isolated/se", "0.01 beside a mean of nan"});
  // Pairs 3, 7 and 11 of the example are not valid: bf16 of unit 1, int4 of unit 2, int3 of unit 3.
  refused([](auto& s, auto& runs) { runs.mean[s.index(1, 0, 0)] = runs.se[s.index(1, 0, 0)] = 0.5; },
          {"/isolated/mean", "layer 0 V bf16 is measured and not valid"});

  sens::SensResult bad = test::example_isolated();
  bad.isolated->se.pop_back();
  expect_error([&] { write_sens_file(folder.file("no.h5"), bad); }, ErrorKind::kInternal, {"/isolated"});
  EXPECT_FALSE(std::filesystem::exists(folder.file("no.h5")));
  // Shapes are those of the scores: units taken away from the arrays alone.
  bad = test::example_isolated();
  bad.isolated->taken_up.push_back(0);
  expect_error([&] { write_sens_file(folder.file("no.h5"), bad); }, ErrorKind::kInternal, {"/isolated"});
}

TEST(SensFile, RoundTrip) {
  const TempFolder folder;
  const sens::SensResult written = test::example_sens();
  write_sens_file(folder.file("sens.h5"), written);
  const sens::SensResult read = read_sens_file(folder.file("sens.h5"));
  test::expect_equal(read.model, written.model);
  test::expect_equal(read.data, written.data);
  test::expect_equal(read.calibration_data, written.calibration_data);
  test::expect_equal(read.provenance, written.provenance);
  EXPECT_EQ(read.n_sinks, 4);
  EXPECT_EQ(read.seq_len, 2048);
  EXPECT_EQ(read.candidate_list, "custom");
  EXPECT_EQ(read.schemes, written.schemes);
  EXPECT_EQ(read.valid, written.valid);
  EXPECT_EQ(read.windows, written.windows);
  EXPECT_EQ(read.n_buckets, 3);
  expect_bits(read.base_bytes_per_token, written.base_bytes_per_token);
  ASSERT_EQ(read.units.size(), written.units.size());
  for (std::size_t i = 0; i < read.units.size(); ++i) {
    EXPECT_EQ(read.units[i].layer, written.units[i].layer);
    EXPECT_EQ(read.units[i].side, written.units[i].side);
  }
  ASSERT_EQ(read.scores.size(), 2u);
  for (const auto& [metric, table] : written.scores) {
    const sens::ScoreTable& other = read.scores.at(metric);
    expect_bits(other.mean, table.mean);
    expect_bits(other.se, table.se);
    expect_bits(other.p99, table.p99);
    expect_bits(other.max, table.max);
    expect_bits(other.worst_decile, table.worst_decile);
    expect_bits(other.by_bucket, table.by_bucket);
  }
  ASSERT_EQ(read.params.size(), 2u);
  const auto& arrays = read.params.at("00/k/int4.token.g8");
  ASSERT_EQ(arrays.size(), 2u);
  EXPECT_EQ(arrays[0].what, "clip_hi");
  EXPECT_EQ(arrays[0].shape, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(arrays[1].values, (std::vector<float>{0.5f, -1, 2}));
}

TEST(SensFile, ClassesWithASalientTier) {
  const TempFolder folder;
  sens::SensResult written = test::example_sens();
  written.windows = {128, 128};
  written.salient_fractions = {0, 0.2};
  written.salient_scheme = "fp8e4m3.token.g", written.salient_score = "expected_attention";
  for (const LayerGeometry& g : written.model.layers) {
    quant::SaliencyFactors& f = written.saliency[g.index];
    f.rank = 2;
    for (int i = 0; i < g.n_q_heads * g.head_dim; ++i) f.a.push_back(static_cast<float>(i) + 0.25f), f.m.insert(f.m.end(), {static_cast<float>(g.index), -1.0f});
  }
  write_sens_file(folder.file("a.h5"), written);
  const sens::SensResult read = read_sens_file(folder.file("a.h5"));
  EXPECT_EQ(read.windows, written.windows);
  EXPECT_EQ(read.salient_fractions, written.salient_fractions);
  EXPECT_EQ(read.salient_scheme, "fp8e4m3.token.g");
  EXPECT_EQ(read.salient_score, "expected_attention");
  EXPECT_EQ(read.saliency, written.saliency);
  EXPECT_EQ(io::H5Reader(folder.file("a.h5"), "kvcalib.sens", 9).schema_version(), 2) << "programs that know no tiers would mistake the classes for windows";
  // Without a tier the file is what it was before there were any.
  write_sens_file(folder.file("plain.h5"), test::example_sens());
  EXPECT_EQ(io::H5Reader(folder.file("plain.h5"), "kvcalib.sens", 1).schema_version(), 1);
  const sens::SensResult plain = read_sens_file(folder.file("plain.h5"));
  EXPECT_TRUE(plain.salient_fractions.empty() && plain.saliency.empty() && plain.salient_scheme.empty());
  EXPECT_EQ(plain.salient_fraction(1), 0);

  const auto refused = [&](const std::vector<double>& fractions, const char* scheme, const std::vector<std::string>& parts) {
    sens::SensResult bad = written;
    bad.salient_fractions = fractions, bad.salient_scheme = scheme;
    write_sens_file(folder.file("bad.h5"), bad);
    expect_error([&] { read_sens_file(folder.file("bad.h5")); }, std::string(scheme) == "fp8e4m3.token.g" ? ErrorKind::kFormat : ErrorKind::kUsage, parts);
  };
  refused({0.2, 0.2}, "fp8e4m3.token.g", {"bad.h5", "/salient_fraction", "twice"});
  refused({0, 0.7}, "fp8e4m3.token.g", {"/salient_fraction", "0.7"});
  refused({0, 0.2}, "int4.token.g", {"bad.h5", "8-bit"});
}

TEST(SensFile, SameContentGivesTheSameBytes) {
  const TempFolder folder;
  write_sens_file(folder.file("a.h5"), test::example_sens());
  write_sens_file(folder.file("b.h5"), test::example_sens());
  EXPECT_EQ(test::read_file(folder.file("a.h5")), test::read_file(folder.file("b.h5")));
}

TEST(SensFile, TablesOfTheWrongSizeAreOurFault) {
  const TempFolder folder;
  sens::SensResult result = test::example_sens();
  result.scores["attn_kl"].p99.pop_back();
  expect_error([&] { write_sens_file(folder.file("a.h5"), result); }, ErrorKind::kInternal, {"/score/attn_kl/p99"});
  result = test::example_sens();
  result.valid.pop_back();
  expect_error([&] { write_sens_file(folder.file("a.h5"), result); }, ErrorKind::kInternal, {"valid"});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SensFile, UnitsAndSchemesMustBeDistinct) {
  const TempFolder folder;
  sens::SensResult result = test::example_sens();
  result.units[3] = result.units[2];
  write_sens_file(folder.file("a.h5"), result);
  expect_error([&] { read_sens_file(folder.file("a.h5")); }, ErrorKind::kFormat, {"a.h5", "/units", "twice"});
  result = test::example_sens();
  result.schemes[2] = result.schemes[1];
  write_sens_file(folder.file("a.h5"), result);
  expect_error([&] { read_sens_file(folder.file("a.h5")); }, ErrorKind::kFormat, {"/schemes/name", "twice"});
}

}  // namespace
}  // namespace calib::artifacts

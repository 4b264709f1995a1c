#include "libcalib/artifacts/stats_file.h"

#include <cstdlib>
#include <filesystem>

#include <gtest/gtest.h>

#include "libcalib/io/h5.h"
#include "tests/artifacts/example_artifacts.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::artifacts {
namespace {

using stats::GramAccumulator;
using stats::LayerStats;
using stats::TensorStats;
using test::expect_error;
using test::TempFolder;

void expect_same_tensor(const TensorStats& a, const TensorStats& b) {
  ASSERT_EQ(a.n_channels(), b.n_channels());
  for (std::size_t i = 0; i < a.n_channels(); ++i) {
    EXPECT_EQ(a.moments[i].n, b.moments[i].n);
    EXPECT_EQ(a.moments[i].mean, b.moments[i].mean);
    EXPECT_EQ(a.moments[i].m2, b.moments[i].m2);
    EXPECT_EQ(a.moments[i].m3, b.moments[i].m3);
    EXPECT_EQ(a.moments[i].m4, b.moments[i].m4);
    EXPECT_EQ(a.extrema[i].min, b.extrema[i].min);
    EXPECT_EQ(a.extrema[i].max, b.extrema[i].max);
    EXPECT_TRUE(a.sketches[i] == b.sketches[i]);
  }
}

// The file holds matrices divided by the number of tokens: one rounding each way.
void expect_same_gram(const GramAccumulator& a, const GramAccumulator& b) {
  for (int m = 0; m < a.n_matrices(); ++m) {
    EXPECT_EQ(a.n_rows(m), b.n_rows(m));
    const auto x = a.matrix(m), y = b.matrix(m);
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], 4e-16 * std::fabs(y[i]));
  }
  EXPECT_EQ(a.mean_state(), b.mean_state());
}

void expect_same_layer(const LayerStats& a, const LayerStats& b) {
  EXPECT_EQ(a.geometry().index, b.geometry().index);
  for (const auto split : {&LayerStats::k_pre, &LayerStats::k_post, &LayerStats::v, &LayerStats::q_pre, &LayerStats::q_post}) {
    expect_same_tensor((a.*split).body, (b.*split).body);
    expect_same_tensor((a.*split).sink, (b.*split).sink);
  }
  expect_same_gram(a.query_moment, b.query_moment);
  expect_same_gram(a.query_cov, b.query_cov);
  expect_same_gram(a.key_cov, b.key_cov);
  expect_same_gram(a.value_cov, b.value_cov);
  EXPECT_EQ(a.pair_absmax, b.pair_absmax);
  EXPECT_EQ(a.output_moment, b.output_moment);
  ASSERT_EQ(a.attention.n_buckets(), b.attention.n_buckets());
  EXPECT_EQ(a.attention.rows_state(), b.attention.rows_state());
  EXPECT_EQ(a.attention.weight_state(), b.attention.weight_state());
  for (std::size_t i = 0; i < a.attention.sum_state().size(); ++i)
    EXPECT_NEAR(a.attention.sum_state()[i], b.attention.sum_state()[i], 1e-15 * (1 + b.attention.sum_state()[i]));
}

TEST(StatsFile, RoundTrip) {
  const TempFolder folder;
  const StatsFile written = test::example_stats();
  write_stats_file(folder.file("stats.h5"), written);
  const StatsFile read = read_stats_file(folder.file("stats.h5"));
  test::expect_equal(read.header.provenance, written.header.provenance);
  test::expect_equal(read.header.model, written.header.model);
  test::expect_equal(read.header.data, written.header.data);
  EXPECT_EQ(read.header.n_sinks, 4);
  EXPECT_EQ(read.header.rows_per_document, 128);
  EXPECT_EQ(read.reference.nll_sum, written.reference.nll_sum);
  EXPECT_EQ(read.reference.nll_count, written.reference.nll_count);
  EXPECT_EQ(read.reference.warnings, written.reference.warnings);
  EXPECT_EQ(read.reference.n_distinct_tokens, 3);
  EXPECT_EQ(read.reference.commonest_token_share, 0.5);
  ASSERT_EQ(read.reference.massive.size(), 2u);
  EXPECT_EQ(read.reference.massive[0].token, 40);
  EXPECT_EQ(read.reference.massive[0].value, -1234.5);
  EXPECT_TRUE(read.reference.massive[0].functional_sink);
  EXPECT_EQ(read.reference.massive[1].layer, 2);
  ASSERT_EQ(read.layers.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) expect_same_layer(read.layers[i], written.layers[i]);
}

// Files of older versions have no moment of the output projection: they read, merge, and say so by an empty array.
TEST(StatsFile, OutputMomentIsOptional) {
  const TempFolder folder;
  StatsFile with = test::example_stats(), without = with;
  for (LayerStats& layer : with.layers) layer.output_moment.assign(2 * 16 * 16, 0.25);
  write_stats_file(folder.file("with.h5"), with);
  write_stats_file(folder.file("without.h5"), without);
  LayerStats older = read_stats_file(folder.file("without.h5")).layers[1];
  const LayerStats newer = read_stats_file(folder.file("with.h5")).layers[1];
  EXPECT_TRUE(older.output_moment.empty());
  EXPECT_EQ(newer.output_moment, with.layers[1].output_moment);
  older.merge(newer);
  EXPECT_EQ(older.output_moment, newer.output_moment);
}

TEST(StatsFile, WhatWasReadMergesLikeWhatWasMeasured) {
  const TempFolder folder;
  const StatsFile a = test::example_stats(test::example_model(), 1), b = test::example_stats(test::example_model(), 2);
  write_stats_file(folder.file("a.h5"), a);
  write_stats_file(folder.file("b.h5"), b);
  LayerStats read = read_stats_file(folder.file("a.h5")).layers[1], measured = a.layers[1];
  read.merge(read_stats_file(folder.file("b.h5")).layers[1]);
  measured.merge(b.layers[1]);
  expect_same_tensor(read.k_post.body, measured.k_post.body);
  expect_same_tensor(read.q_pre.all(), measured.q_pre.all());
  EXPECT_EQ(read.k_pre.body.n_tokens(), 4 * 96);
  EXPECT_NEAR(read.key_cov.matrix(0)[1], measured.key_cov.matrix(0)[1], 1e-14);
}

TEST(StatsFile, SameContentGivesTheSameBytes) {
  const TempFolder folder;
  write_stats_file(folder.file("a.h5"), test::example_stats());
  write_stats_file(folder.file("b.h5"), test::example_stats());
  EXPECT_EQ(test::read_file(folder.file("a.h5")), test::read_file(folder.file("b.h5")));
}

TEST(StatsFile, DerivedNumbersCanBeReadWithoutOurCode) {
  const TempFolder folder;
  const StatsFile s = test::example_stats();
  write_stats_file(folder.file("a.h5"), s);
  const io::H5Reader file(folder.file("a.h5"), "kvcalib.stats", 1);
  const auto absmax = file.read<float>("/layers/02/v/absmax", {2, 16});
  EXPECT_EQ(absmax[17], s.layers[1].v.body.absmax(1, 1));
  const auto quantiles = file.read<double>("/layers/02/v/abs_quantiles", {2, 16, 5});
  EXPECT_EQ(quantiles[17 * 5 + 1], s.layers[1].v.body.abs_quantile(1, 1, 0.9));
  EXPECT_EQ(file.integer_attribute("/layers/02/v/abs_quantiles", "low_n"), 192);
  const auto rank = file.read<std::int32_t>("/layers/00/outliers/k_pre/rank", {2, 16});
  const auto ratio = file.read<double>("/layers/00/outliers/k_pre/ratio", {2, 16});
  for (int i = 1; i < 16; ++i)
    EXPECT_GE(ratio[static_cast<std::size_t>(rank[static_cast<std::size_t>(i - 1)])], ratio[static_cast<std::size_t>(rank[static_cast<std::size_t>(i)])]);
  const auto eigenvalues = file.read<double>("/layers/00/key_cov_eigenvalues", {2, 16});
  const auto covariance = file.read<double>("/layers/00/key_cov", {2, 16, 16});
  double trace = 0, sum = 0;
  for (std::size_t i = 0; i < 16; ++i) {
    trace += covariance[i * 17];
    sum += eigenvalues[i];
  }
  EXPECT_NEAR(sum, trace, 1e-12 * trace);
  EXPECT_NEAR(file.number_attribute("/", "reference_nll"), 197.75 / 100, 1e-15);
  EXPECT_EQ(file.read<double>("/model/inv_freq", {io::kAnySize}).size(), 8u);
}

TEST(StatsFile, ManyTokensNeedNoLowCountMark) {
  const TempFolder folder;
  ModelIdentity model = test::example_model(1, 1, 1, 2);
  write_stats_file(folder.file("a.h5"), test::example_stats(model, 3, 3, 4000));
  const io::H5Reader file(folder.file("a.h5"), "kvcalib.stats", 1);
  EXPECT_FALSE(file.has_attribute("/layers/00/v/abs_quantiles", "low_n"));
  EXPECT_TRUE(file.has_attribute("/layers/00/v/sink/abs_quantiles", "low_n"));
  expect_same_layer(read_stats_file(folder.file("a.h5")).layers[0], test::example_stats(model, 3, 3, 4000).layers[0]);
}

TEST(StatsFile, LayersThatSawNothingAreNamed) {  // CASES.md SA-03
  const TempFolder folder;
  StatsFile s = test::example_stats();
  s.layers[1] = LayerStats(s.header.model.layers[1], 4);
  expect_error([&] { write_stats_file(folder.file("a.h5"), s); }, ErrorKind::kNumeric, {"layer 2", "K and V"});
  s = test::example_stats();
  s.layers.pop_back();
  expect_error([&] { write_stats_file(folder.file("a.h5"), s); }, ErrorKind::kNumeric, {"layers 2", "K and V"});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(StatsFile, H5dumpReadsIt) {
  if (std::system("h5dump --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "SKIP StatsFile.H5dumpReadsIt: h5dump not installed";
  const TempFolder folder;
  write_stats_file(folder.file("a.h5"), test::example_stats());
  const std::string command = "h5dump " + folder.file("a.h5") + " > " + folder.file("dump.txt") + " 2> " + folder.file("err.txt");
  ASSERT_EQ(std::system(command.c_str()), 0) << test::read_file(folder.file("err.txt"));
  const std::string dump = test::read_file(folder.file("dump.txt"));
  for (const char* name : {"\"k_pre\"", "\"sketch\"", "\"abs_quantiles\"", "kvcalib.stats", "\"massive\""}) EXPECT_NE(dump.find(name), std::string::npos) << name;
}

}  // namespace
}  // namespace calib::artifacts

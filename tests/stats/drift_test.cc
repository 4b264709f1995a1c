#include "libcalib/stats/drift.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "tests/stats/random_documents.h"

namespace calib::stats {
namespace {

using namespace test;

std::vector<UnitDrift> drift_of(const LayerStats& reference, const std::vector<Document>& documents, int n_threads = 1) {
  ThreadPool pool(n_threads);
  LayerDrift drift(reference);
  for (const Document& d : documents) drift.add_document(d.view(), pool);
  return drift.finish();
}
const DriftSignal& signal(const UnitDrift& unit, const std::string& name) {
  for (const DriftSignal& s : unit.signals)
    if (s.name == name) return s;
  throw std::runtime_error("no signal " + name);
}
std::vector<Document> documents_of(std::int64_t n, std::uint64_t first_seed) {
  std::vector<Document> out;
  for (std::uint64_t s = 0; s < 8; ++s) out.push_back(make_document(n, first_seed + s));
  return out;
}
LayerStats calibration() { return stats_of(documents_of(1000, 0)); }
std::vector<Document> fresh() { return documents_of(600, 100); }

TEST(Drift, StabilityIndexG46) {
  const std::array<double, 6> a = {.4, .45, .12, .012, .012, .006};
  EXPECT_NEAR(population_stability(a, kPsiExpected), .060710, 1e-6);
  EXPECT_EQ(population_stability(kPsiExpected, kPsiExpected), 0.0);
  const std::array<double, 6> empty = {1, 0, 0, 0, 0, 0};
  EXPECT_TRUE(std::isfinite(population_stability(empty, kPsiExpected)));
}

TEST(Drift, MeanShiftIsTheMahalanobisDistancePerChannel) {
  const std::vector<double> covariance = {4, 0, 0, 1};
  // Trace 5, d 2: the ridge is 0.0025.
  EXPECT_NEAR(mean_shift(std::vector<double>{0, 0}, std::vector<double>{2, 1}, covariance), (4 / 4.0025 + 1 / 1.0025) / 2, 1e-12);
  EXPECT_EQ(mean_shift(std::vector<double>{1, 2}, std::vector<double>{1, 2}, {0, 0, 0, 0}), 0.0);
  EXPECT_TRUE(std::isinf(mean_shift(std::vector<double>{0, 0}, std::vector<double>{2, 1}, {0, 0, 0, 0})));
}

TEST(Drift, TextOfTheSameDistributionIsOk) {
  const std::vector<UnitDrift> units = drift_of(calibration(), fresh());
  ASSERT_EQ(units.size(), 2u);
  for (const UnitDrift& unit : units) {
    EXPECT_EQ(unit.level(), DriftLevel::kOk);
    EXPECT_LT(signal(unit, "psi").value, 0.02);
    EXPECT_GT(signal(unit, "psi").se, 0.0);
    EXPECT_LT(signal(unit, "psi").se, 0.01);
  }
}

TEST(Drift, AChannelThatGrowsIsSeenInItsUnitAndHeadAlone) {
  std::vector<Document> documents = fresh();
  for (Document& d : documents)
    for (std::int64_t t = 4; t < d.n; ++t) d.v[static_cast<std::size_t>((t * kKv + 1) * kDim + 5)] *= 8;
  const std::vector<UnitDrift> units = drift_of(calibration(), documents);
  EXPECT_EQ(units[0].level(), DriftLevel::kOk);
  EXPECT_EQ(units[1].level(), DriftLevel::kOut);
  EXPECT_EQ(signal(units[1], "range_exceedance").head, 1);
  EXPECT_GT(signal(units[1], "range_ratio").value, 2.0);
  // Half of the normal values of one channel of 16 lie beyond 1/8 of the largest of 8,000.
  EXPECT_NEAR(signal(units[1], "range_exceedance").value, 0.64 / 16, 0.01);
}

TEST(Drift, NarrowerValuesMoveTheIndexButNoRange) {
  std::vector<Document> documents = fresh();
  for (Document& d : documents)
    for (float& x : d.k_pre) x *= 0.25f;
  const UnitDrift k = drift_of(calibration(), documents)[0];
  EXPECT_EQ(signal(k, "psi").level(), DriftLevel::kOut);
  EXPECT_EQ(signal(k, "range_exceedance").value, 0.0);
}

TEST(Drift, SinksAreLeftOut) {
  std::vector<Document> documents = fresh();
  for (Document& d : documents)
    for (std::size_t i = 0; i < 4 * kKv * kDim; ++i) d.k_pre[i] = d.v[i] = 1e6f;
  for (const UnitDrift& unit : drift_of(calibration(), documents)) EXPECT_EQ(unit.level(), DriftLevel::kOk);
}

TEST(Drift, QueriesThatMoveWarnAndNeverCondemnARange) {
  std::vector<Document> documents = fresh();
  for (Document& d : documents)
    for (std::size_t i = 0; i < d.q_pre.size(); ++i) d.q_pre[i] += 2;
  const UnitDrift k = drift_of(calibration(), documents)[0];
  EXPECT_NEAR(signal(k, "query_shift").value, 4.0, 0.3);
  EXPECT_EQ(signal(k, "query_shift").level(), DriftLevel::kOut);
  EXPECT_EQ(k.level(), DriftLevel::kWarn);
  for (Document& d : documents)
    for (float& x : d.q_post) x *= 2;
  EXPECT_NEAR(signal(drift_of(calibration(), documents)[0], "query_moment").value, 3.0, 0.1);
}

TEST(Drift, ThreadsDoNotMatter) {
  const LayerStats reference = calibration();
  const std::vector<UnitDrift> one = drift_of(reference, fresh(), 1), three = drift_of(reference, fresh(), 3);
  for (std::size_t u = 0; u < one.size(); ++u)
    for (std::size_t s = 0; s < one[u].signals.size(); ++s) EXPECT_EQ(one[u].signals[s].value, three[u].signals[s].value);
}

TEST(Drift, SaturationIsAShareOfTheUnit) {
  ThreadPool pool(1);
  LayerDrift drift(calibration());
  for (const Document& d : fresh()) {
    drift.add_document(d.view(), pool);
    drift.add_saturation(Side::kK, 12, 600 * kKv * kDim);
  }
  const std::vector<UnitDrift> units = drift.finish();
  EXPECT_DOUBLE_EQ(signal(units[0], "saturation").value, 12.0 / (600 * kKv * kDim));
  EXPECT_NEAR(signal(units[0], "saturation").se, 0.0, 1e-15);
  EXPECT_EQ(units[1].signals.size(), 3u);
}

UnitDrift unit_at(DriftLevel level) {
  const double value = level == DriftLevel::kOut ? 1.0 : level == DriftLevel::kWarn ? 0.2 : 0.0;
  return {0, Side::kK, {{"psi", 0, value, 0, 0.10, 0.25}}};
}
DriftDecision decide(int n_ok, int n_warn, int n_out, std::vector<MonitorSignal> monitor = {}, double unseen = 0) {
  DriftReport report;
  for (int i = 0; i < n_ok; ++i) report.units.push_back(unit_at(DriftLevel::kOk));
  for (int i = 0; i < n_warn; ++i) report.units.push_back(unit_at(DriftLevel::kWarn));
  for (int i = 0; i < n_out; ++i) report.units.push_back(unit_at(DriftLevel::kOut));
  report.monitor = std::move(monitor), report.unseen_share = unseen;
  decide_drift(report);
  EXPECT_EQ(report.reasons.empty(), report.decision == DriftDecision::kOk);
  return report.decision;
}

TEST(Drift, DecisionsFollowTheTable) {
  EXPECT_EQ(decide(20, 0, 0), DriftDecision::kOk);
  EXPECT_EQ(decide(19, 1, 0), DriftDecision::kWatch);
  EXPECT_EQ(decide(10, 10, 0), DriftDecision::kWatch);
  EXPECT_EQ(decide(19, 0, 1), DriftDecision::kWatch);
  EXPECT_EQ(decide(18, 0, 2), DriftDecision::kRecalibrate);
  const MonitorSignal within{"mean_kld", 0.01, 0, 0.045, 0.05, {0.01, 0.01}}, near{"mean_kld", 0.047, 0, 0.045, 0.05, {0.047, 0.047}};
  const MonitorSignal hit{"mean_kld", 0.06, 0, 0.045, 0.05, {0.04, 0.08, 0.04}}, twice{"mean_kld", 0.06, 0, 0.045, 0.05, {0.04, 0.06, 0.08}};
  EXPECT_EQ(decide(20, 0, 0, {within}), DriftDecision::kOk);
  EXPECT_EQ(decide(20, 0, 0, {near}), DriftDecision::kWatch);
  EXPECT_EQ(decide(20, 0, 0, {hit}), DriftDecision::kStepUp);
  EXPECT_EQ(decide(20, 0, 0, {twice}), DriftDecision::kRecalibrate);
  EXPECT_EQ(decide(20, 0, 0, {}, 0.05), DriftDecision::kWatch);
  EXPECT_EQ(decide(20, 0, 0, {}, 0.5), DriftDecision::kRecalibrate);
}

}  // namespace
}  // namespace calib::stats

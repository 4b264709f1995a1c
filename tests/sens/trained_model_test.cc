// SN-06 of the test catalogue and the estimator's truth, on the trained stories260K.

#include <cmath>

#include <gtest/gtest.h>

#include "tests/sens/sampled_text.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/shared_data.h"

namespace calib::sens {
namespace {

using test_fixture::Grid;
using test_fixture::OpenModel;
using test_fixture::sampled_sequences;
using test_fixture::score;
using test_fixture::sweep;

class Trained : public testing::Test {
 protected:
  static OpenModel* model() {
    static std::unique_ptr<OpenModel> open = [] {
      const auto tiny = test::restore_s260k();
      return tiny ? std::make_unique<OpenModel>(*tiny) : nullptr;
    }();
    return open.get();
  }
  static const std::vector<text::Document>& documents() {
    static const std::vector<text::Document> d = sampled_sequences(model()->model);
    return d;
  }
};

TEST_F(Trained, ScoresFallWithBitsAndChannelKeysWin) {
  CALIB_SHARED_FILE(file, "models/stories260K.bin");
  SweepOptions options;
  options.windows = {0};
  const SensResult r = sweep(model()->model, documents(),
                             {{"int8.token.g", "int4.token.g", "int3.token.g", "int2.token.g", "int4.channel.g32.pre"},
                              {"int8.token.g", "int4.token.g", "int3.token.g", "int2.token.g"}, {}}, options);
  for (int l = 0; l < model()->model.n_layers(); ++l) {
    for (const Side side : {Side::kK, Side::kV})
      for (const char* metric : {"fisher_vec", "fisher", "attn_out", "attn_kl"}) {
        if (side == Side::kV && std::string(metric) == "attn_kl") continue;
        double last = 0;
        for (const char* scheme : {"int8.token.g", "int4.token.g", "int3.token.g", "int2.token.g"}) {
          const double x = score(r, metric, l, side, scheme);
          EXPECT_GT(x, last) << metric << " layer " << l << " " << side_name(side) << " " << scheme;
          last = x;
        }
      }
    EXPECT_LT(score(r, "attn_kl", l, Side::kK, "int4.channel.g32.pre"), 0.2 * score(r, "attn_kl", l, Side::kK, "int4.token.g")) << l;
  }
  // The whole chain against the numbers it gave before: sums over layers, 5 %.
  struct Row { const char* metric; Side side; const char* scheme; double sum; };
  for (const Row& row : {Row{"attn_kl", Side::kK, "int4.token.g", 2.4801}, Row{"attn_kl", Side::kK, "int4.channel.g32.pre", 2.4248e-2},
                         Row{"attn_out", Side::kK, "int4.token.g", 1.3375}, Row{"attn_out", Side::kV, "int4.token.g", 8.6663e-3},
                         Row{"attn_out", Side::kV, "int2.token.g", 0.21827}, Row{"fisher_vec", Side::kK, "int4.channel.g32.pre", 1.6034e-3},
                         Row{"fisher_vec", Side::kV, "int4.token.g", 9.3344e-4}}) {
    double sum = 0;
    for (int l = 0; l < model()->model.n_layers(); ++l) sum += score(r, row.metric, l, row.side, row.scheme);
    EXPECT_NEAR(sum, row.sum, 0.05 * row.sum) << row.metric << " " << side_name(row.side) << " " << row.scheme;
  }
}

// fisher_vec is an estimate of isolated logit KL in nats. A second-order estimate from two draws: within a factor of 2 for every unit and
// within 25 % on the sum over units, for schemes from 8 to 3 bits.
TEST_F(Trained, FisherEstimatesIsolatedLogitKl) {
  CALIB_SHARED_FILE(file, "models/stories260K.bin");
  SweepOptions options;
  options.windows = {16};
  options.metrics = {"fisher_vec", "logit_kl"};
  options.n_draws = 8;
  const SensResult r = sweep(model()->model, documents(),
                             {{"int8.token.g", "int4.channel.g32", "int4.channel.g32.pre"}, {"int8.token.g", "int4.token.g", "int3.token.g"}, {}}, options);
  std::map<std::string, std::pair<double, double>> sums;
  for (std::size_t u = 0; u < r.units.size(); ++u)
    for (std::size_t s = 0; s < r.schemes.size(); ++s) {
      if (r.valid[u * r.schemes.size() + s] == 0) continue;
      const std::size_t i = r.index(u, s, 0);
      const double estimate = r.scores.at("fisher_vec").mean[i], truth = r.scores.at("logit_kl").mean[i];
      EXPECT_LT(std::fabs(std::log(estimate / truth)), std::log(2.0))
          << r.units[u].layer << side_name(r.units[u].side) << " " << r.schemes[s] << " " << estimate << " " << truth;
      auto& sum = sums[r.schemes[s] + side_name(r.units[u].side)];
      sum.first += estimate;
      sum.second += truth;
    }
  for (const auto& [name, sum] : sums) EXPECT_NEAR(sum.first / sum.second, 1.0, 0.25) << name;
}

}  // namespace
}  // namespace calib::sens

#include "libcalib/quant/scale_refresh.h"

#include <gtest/gtest.h>

#include <cmath>

#include "layer_stats.h"
#include "libcalib/quant/scheme.h"

namespace calib::quant {
namespace {

/// |x| of head h and token t is (1 + t) (1 + h) times a number in [-1, 1]: ranges made for the first tokens are soon too narrow.
std::vector<float> growing(std::int64_t n_tokens, const LayerGeometry& g) {
  Rng rng(5);
  return quant_test::fill(n_tokens, g.n_kv_heads, g.head_dim,
                          [&](std::int64_t t, int h, int) { return static_cast<float>((1.0 + static_cast<double>(t)) * (1 + h) * (2 * rng.uniform() - 1)); });
}

double error(const std::vector<float>& x, const std::vector<float>& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += std::pow(static_cast<double>(x[i]) - y[i], 2);
  return sum;
}

TEST(ScaleRefresh, RangesHoldWhatEarlierIntervalsHad) {
  const LayerGeometry g = quant_test::geometry();
  ThreadPool pool(1);
  constexpr std::int64_t kTokens = 27, kInterval = 8, kSinks = 3;
  const std::int64_t row = static_cast<std::int64_t>(g.n_kv_heads) * g.head_dim;
  const std::vector<float> x = growing(kTokens, g);
  SchemeParams params;
  for (int h = 0; h < g.n_kv_heads; ++h) params.clip_hi.push_back(4.0f * static_cast<float>(1 + h));
  std::vector<float> refreshed(x.size()), expected(x), fixed(x.size());
  const kvrt::Scheme scheme = parse_scheme("fp8e4m3.head");
  std::int64_t n_raised = 0;
  fake_quant_refreshed(scheme, Side::kV, g, params, kInterval, kSinks, false, kTokens, x.data(), refreshed.data(), pool, &n_raised);
  // By hand: the three intervals after the first are read with the largest value of all tokens before them, sinks left out.
  for (std::int64_t first = kSinks; first < kTokens;) {
    const std::int64_t end = std::min(kTokens, (first / kInterval + 1) * kInterval);
    SchemeParams now = params;
    for (std::int64_t t = kSinks; t < first; ++t)
      for (std::int64_t c = 0; c < row; ++c) {
        float& hi = now.clip_hi[static_cast<std::size_t>(c / g.head_dim)];
        hi = std::max(hi, std::fabs(x[static_cast<std::size_t>(t * row + c)]));
      }
    fake_quant_document(scheme, Side::kV, g, now, 0, false, end - first, x.data() + first * row, expected.data() + first * row, pool);
    first = end;
  }
  EXPECT_EQ(refreshed, expected);
  EXPECT_EQ(n_raised, 3 * g.n_kv_heads);
  fake_quant_document(scheme, Side::kV, g, params, kSinks, false, kTokens, x.data(), fixed.data(), pool);
  EXPECT_LT(error(x, refreshed), 0.5 * error(x, fixed));
}

TEST(ScaleRefresh, RangesThatHoldEverythingStay) {
  const LayerGeometry g = quant_test::geometry();
  ThreadPool pool(1);
  const std::vector<float> x = growing(20, g);
  SchemeParams head, tensor;
  head.clip_lo.assign(static_cast<std::size_t>(g.n_kv_heads), -100.0f), head.clip_hi.assign(static_cast<std::size_t>(g.n_kv_heads), 100.0f);
  tensor.clip_hi = {100.0f};
  for (const auto& [text, params] : {std::pair<const char*, const SchemeParams*>{"int8.head", &head}, {"fp8e4m3.tensor", &tensor}}) {
    std::vector<float> refreshed(x.size()), fixed(x.size());
    std::int64_t n_raised = -1;
    fake_quant_refreshed(parse_scheme(text), Side::kK, g, *params, 6, 4, false, 20, x.data(), refreshed.data(), pool, &n_raised);
    fake_quant_document(parse_scheme(text), Side::kK, g, *params, 4, false, 20, x.data(), fixed.data(), pool);
    EXPECT_EQ(refreshed, fixed) << text;
    EXPECT_EQ(n_raised, 0) << text;
  }
}

TEST(ScaleRefresh, OnlyStaticRangesOfPlainValues) {
  for (const char* text : {"fp8e4m3.tensor", "fp8e5m2.head", "int8.head", "sint8.tensor", "fp8e4m3.head.pre"}) EXPECT_TRUE(can_refresh(parse_scheme(text))) << text;
  for (const char* text : {"bf16", "fp8e4m3.token.g", "int8.channel.static", "int8.token.g", "fp8e4m3.head.had", "fp8e4m3.head.center", "q8_0"})
    EXPECT_FALSE(can_refresh(parse_scheme(text))) << text;
}

}  // namespace
}  // namespace calib::quant

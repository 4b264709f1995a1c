#include "libcalib/plan/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "synthetic_sens.h"

namespace calib::plan {
namespace {

using plan_test::synthetic_sens;
using plan_test::tiny_model;
using testing::HasSubstr;

const std::vector<std::string> kWidths = {"int8.token.g", "int4.token.g", "int3.token.g", "int2.token.g"};

Limits bits(double value) {
  Limits limits;
  limits.budget = Budget{Budget::Kind::kEffectiveBits, value, fmt::format("{}", value)};
  return limits;
}

Error error_of(const Candidates& c, const Limits& limits) {
  try {
    search(c, limits);
  } catch (const Error& e) {
    return e;
  }
  ADD_FAILURE() << "accepted";
  return Error(ErrorKind::kInternal, "", "");
}

// CASES.md PL-01 with its structure as scores: two key units dominate, everything else is even; losses flatten at few bits.
TEST(Search, SpendsBitsWhereTheLossIs) {
  const ModelIdentity model = tiny_model(4, 4, 2, 16);
  sens::SensResult sens = synthetic_sens(model, kWidths, {0}, [](int layer, Side side) { return side == Side::kK && (layer == 0 || layer == 3) ? 1e4 : 1.0; }, 0);
  // At 2 and 3 bits the dominant units have lost everything that there is to lose: the curve is flat.
  for (const std::size_t unit : {0u, 6u})
    for (const std::size_t scheme : {2u, 3u}) sens.scores["fisher_vec"].mean[sens.index(unit, scheme, 0)] = 1e4 * std::pow(4.0, -4) * 1.1;
  Accounting accounting;
  accounting.context_tokens = 4096;
  const Candidates c(sens, accounting, "");
  const kvrt::Scheme int4 = quant::parse_scheme("int4.token.g");
  std::int64_t uniform = 0;
  accounting.sink_tokens = 0;
  for (const LayerGeometry& g : model.layers) uniform += layer_bytes(g, int4, int4, 0, accounting);
  const double uniform_bits = effective_bits(uniform, c.elements());
  EXPECT_NEAR(uniform_bits, 6.0, 1e-9);  // 16-bit scale and minimum on 16 channels

  for (const double more : {1.0, 0.0}) {
    const Found found = search(c, bits(uniform_bits + more));
    EXPECT_LE(effective_bits(found.bytes, c.elements()), uniform_bits + more);
    EXPECT_TRUE(found.solution.proven);
    for (std::size_t l = 0; l < 4; ++l) {
      const bool dominant = l == 0 || l == 3;
      EXPECT_EQ(kWidths[found.choice[l].k] == "int8.token.g", dominant) << l;
      if (more == 1.0) {
        EXPECT_EQ(kWidths[found.choice[l].k], dominant ? "int8.token.g" : "int4.token.g") << l;
        EXPECT_EQ(kWidths[found.choice[l].v], "int4.token.g") << l;
      }
    }
    // No uniform pair within the budget predicts less.
    for (std::size_t k = 0; k < kWidths.size(); ++k)
      for (std::size_t v = 0; v < kWidths.size(); ++v) {
        std::int64_t bytes = 0;
        double score = 0;
        for (std::size_t l = 0; l < 4; ++l) bytes += c.option(l, k, v, 0).bytes, score += c.option(l, k, v, 0).score;
        EXPECT_TRUE(bytes > found.limit_bytes || found.score <= score * (1 + 1e-12)) << kWidths[k] << ' ' << kWidths[v];
      }
  }
}

TEST(Search, WindowIsChosenForTheWholeModel) {
  // Exact tokens are worth much at equal schemes: the wide window wins while bytes are plenty, the narrow one at the floor.
  const sens::SensResult sens = synthetic_sens(tiny_model(3), kWidths, {0, 128, 512}, [](int, Side) { return 1.0; });
  Accounting accounting;
  accounting.context_tokens = 8192;
  const Candidates c(sens, accounting, "");
  const Found rich = search(c, bits(16));
  for (const LayerOption& o : rich.choice) EXPECT_EQ(sens.windows[o.tier_class], 512);
  std::int64_t floor = 0;
  for (std::size_t l = 0; l < 3; ++l) floor += c.option(l, 3, 3, 0).bytes;
  const Found poor = search(c, bits(effective_bits(floor, c.elements())));
  EXPECT_EQ(poor.bytes, floor);
  for (const LayerOption& o : poor.choice) EXPECT_EQ(sens.windows[o.tier_class], 0);
  // Free windows can only do better.
  Limits free = bits(3.5);
  free.window_per_layer = true;
  EXPECT_LE(search(c, free).score, search(c, bits(3.5)).score);
}

TEST(Search, InfeasibleStatesMinimumAndFix) {
  const sens::SensResult sens = synthetic_sens(tiny_model(3), {"int8.token.g", "int4.token.g"}, {128}, [](int, Side) { return 1.0; });
  Accounting accounting;
  accounting.context_tokens = 1024;
  const Candidates c(sens, accounting, "");
  std::int64_t floor = 0;
  for (std::size_t l = 0; l < 3; ++l) floor += c.option(l, 1, 1, 0).bytes;
  const double floor_bits = effective_bits(floor, c.elements());
  const Error window = error_of(c, bits(floor_bits - 0.1));
  EXPECT_EQ(window.kind(), ErrorKind::kInfeasible);
  EXPECT_EQ(exit_code(window.kind()), 6);
  EXPECT_THAT(window.what(), HasSubstr("minimum " + bits_that_allow(floor, c.elements()) + " with"));
  EXPECT_THAT(window.what(), HasSubstr("effective bits at T=1024"));
  Limits stated;
  stated.budget = parse_budget(bits_that_allow(floor, c.elements()));
  EXPECT_EQ(search(c, stated).bytes, floor);
  EXPECT_THAT(window.what(), HasSubstr("window 64 gives"));
  EXPECT_THAT(error_of(c, bits(2.9)).what(), HasSubstr("int2.token.g"));
  EXPECT_THAT(error_of(c, bits(0.5)).what(), HasSubstr("no window or candidate"));
  Limits bytes;
  bytes.budget = parse_budget("1kB");
  EXPECT_THAT(error_of(c, bytes).what(), HasSubstr(fmt::format("minimum {} bytes", floor)));
}

/// The limit that an infeasible one's message asks for.
std::string stated(const std::string& text) {
  const std::string mark = "can meet is ";
  const std::size_t at = text.find(mark) + mark.size();
  return text.substr(at, text.find_first_of(" ;", at) - at);
}

TEST(Search, LeastBytesForALossLimit) {
  const sens::SensResult sens = synthetic_sens(tiny_model(6), kWidths, {0, 128}, [](int l, Side s) { return (l + 1) * (s == Side::kK ? 3.0 : 1.0); });
  const Candidates c(sens, Accounting{}, "");
  for (const double limit : {0.5, 0.05, 0.005}) {
    Limits limits;
    limits.max_score = limit;
    const Found found = search(c, limits);
    EXPECT_LE(found.score, limit);
    // One byte less than that and no plan holds the limit.
    Limits less;
    less.budget = Budget{Budget::Kind::kBytes, static_cast<double>(found.bytes - 1), "x"};
    EXPECT_GT(search(c, less).score, limit);
  }
  Limits impossible;
  impossible.max_score = 1e-12;
  const Error e = error_of(c, impossible);
  EXPECT_EQ(e.kind(), ErrorKind::kInfeasible);
  // What the message asks for is met, in the unit that was asked in.
  Limits lowest;
  lowest.max_score = parse_above(0, stated(e.what()), "--max-kl", "0.05");
  EXPECT_LE(search(c, lowest).score, lowest.max_score);
  impossible.as_ppl_ratio = true;
  impossible.asked = "1.0000000001";
  const Error ratio = error_of(c, impossible);
  EXPECT_THAT(ratio.what(), testing::StartsWith("predicted PPL ratio <= 1.0000000001: the lowest limit that these candidates can meet is 1."));
  lowest.max_score = std::log(parse_above(1, stated(ratio.what()), "--max-ppl-ratio", "1.02"));
  EXPECT_LE(search(c, lowest).score, lowest.max_score);
}

TEST(Search, WideGroupsHoldLimitsWithAMargin) {
  const auto weight = [](int l, Side) { return 1.0 + l; };
  const std::vector<std::string> schemes = {"int8.token.g", "int4.token.g", "int4.token.g32"};
  const sens::SensResult wide = synthetic_sens(tiny_model(4, 8, 2), schemes, {0}, weight), narrow = synthetic_sens(tiny_model(4, 4, 2), schemes, {0}, weight);
  Limits limits;
  limits.max_score = 0.05;
  const Found careful = search(Candidates(wide, Accounting{}, ""), limits), plain = search(Candidates(narrow, Accounting{}, ""), limits);
  EXPECT_LE(1.25 * careful.score + careful.se, 0.05);
  EXPECT_LE(plain.score, 0.05);
  EXPECT_GT(careful.bytes, plain.bytes);
  limits.max_score = 1e-9;
  limits.max_score = parse_above(0, stated(error_of(Candidates(wide, Accounting{}, ""), limits).what()), "--max-kl", "0.05");
  const Found lowest = search(Candidates(wide, Accounting{}, ""), limits);
  EXPECT_LE(1.25 * lowest.score + lowest.se, limits.max_score);
  EXPECT_GT(lowest.se, 0);
}

TEST(Search, ProfilesKeepTheirBand) {
  const auto sens_of = [](double weight) {
    return synthetic_sens(tiny_model(4), {"bf16", "int8.token.g", "int4.token.g", "int3.token.g", "int2.token.g"}, {0}, [=](int, Side) { return weight; });
  };
  Limits compact;
  compact.profile = "compact";
  const sens::SensResult easy = sens_of(1e-6), middling = sens_of(0.5), hard = sens_of(1e3);
  const Candidates c_easy(easy, Accounting{}, ""), c_middling(middling, Accounting{}, ""), c_hard(hard, Accounting{}, "");
  EXPECT_NEAR(effective_bits(search(c_easy, compact).bytes, c_easy.elements()), 2.667, 0.1);
  const Found found = search(c_middling, compact);
  EXPECT_LE(found.score, 0.05);
  EXPECT_LE(effective_bits(found.bytes, c_middling.elements()), 4.0);
  EXPECT_EQ(error_of(c_hard, compact).kind(), ErrorKind::kInfeasible);
  EXPECT_THROW(profile_of("tiny"), Error);
}

TEST(Search, LossLimitNeedsNats) {
  sens::SensResult sens = synthetic_sens(tiny_model(2), kWidths, {0}, [](int, Side) { return 1.0; });
  sens.scores["attn_out"] = sens.scores["fisher_vec"];
  Limits limits;
  limits.max_score = 0.1;
  EXPECT_EQ(error_of(Candidates(sens, Accounting{}, "attn_out"), limits).kind(), ErrorKind::kUsage);
}

TEST(Search, MemoryBudgetsCountConstantsOnce) {
  const sens::SensResult sens = synthetic_sens(tiny_model(2), {"fp8e4m3.head"}, {0}, [](int, Side) { return 1.0; });
  Accounting accounting;
  accounting.context_tokens = 64;
  const Candidates c(sens, accounting, "");
  const std::int64_t bytes = c.option(0, 0, 0, 0).bytes * 2, constants = 2 * 2 * 2 * 4;  // layers, sides, heads, fp32
  Limits limits;
  limits.budget = Budget{Budget::Kind::kBytes, static_cast<double>(bytes + constants), "x"};
  EXPECT_EQ(search(c, limits).bytes, bytes);
  limits.budget->value -= 1;
  EXPECT_EQ(error_of(c, limits).kind(), ErrorKind::kInfeasible);
  // Effective bits leave them out.
  EXPECT_EQ(search(c, bits(effective_bits(bytes, c.elements()))).bytes, bytes);
}

}  // namespace
}  // namespace calib::plan

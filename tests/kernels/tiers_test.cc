#include "kernels/core/tiers.h"

#include <algorithm>

#include "gtest/gtest.h"
#include "kernels/core/layout.h"

namespace kvrt {
namespace {

// A sequence grown token by token: sinks first, then a window that gives away whole exit blocks once W newer tokens stand behind them.
struct SimulatedSequence {
  Tiers tiers;
  std::int64_t sinks = 0, coded = 0, window = 0;
  void append() {
    if (sinks < tiers.n_sinks) {
      ++sinks;
      return;
    }
    ++window;
    if (window - tiers.window >= tiers.exit_block()) {
      window -= tiers.exit_block();
      coded += tiers.exit_block();
    }
  }
};

void expect_counts_follow_a_simulated_ring(const Tiers& tiers, std::int64_t n_tokens) {
  SimulatedSequence sequence{tiers};
  std::int64_t widest = 0;
  for (std::int64_t n = 1; n <= n_tokens; ++n) {
    sequence.append();
    ASSERT_EQ(blocks_out(tiers, n) * tiers.exit_block(), sequence.coded) << n;
    ASSERT_EQ(coded_end(tiers, n), tiers.n_sinks + sequence.coded);
    widest = std::max(widest, sequence.window);
  }
  EXPECT_LE(widest, tiers.window + tiers.exit_block() - 1);
  if (ring_slots(tiers) > 0) {
    EXPECT_GE(ring_slots(tiers), widest + 1);  // the newest token is written before a block leaves
  }
  EXPECT_EQ(ring_slots(tiers) % 16, 0);
}

TEST(Tiers, CountsFollowASimulatedRing) {
  for (const std::int64_t window : {0, 2, 128}) {
    for (const std::int64_t block : {1, 32, 64, 80, 128}) {
      for (const std::int64_t sinks : {0, 1, 4}) expect_counts_follow_a_simulated_ring({sinks, window, block, 0}, 100000);
    }
  }
  expect_counts_follow_a_simulated_ring({4, 2, 64, 16}, 100000);
  expect_counts_follow_a_simulated_ring({4, 128, 64, 7}, 100000);
}

TEST(Tiers, ExitBlocksOfTheDesign) {
  Scheme token, channel;
  std::string error;
  ASSERT_TRUE(parse_scheme("int4.token.g32", &token, &error));
  ASSERT_TRUE(parse_scheme("int4.channel.g32", &channel, &error));
  EXPECT_EQ(finish_tiers(token, token, 4, 128, 0).exit_block(), 1);
  EXPECT_EQ(finish_tiers(channel, token, 4, 128, 0).exit_block(), 32);
  EXPECT_EQ(finish_tiers(token, token, 4, 2, 0.2).exit_block(), 80);
  EXPECT_EQ(finish_tiers(token, channel, 4, 2, 0.1).exit_block(), 71);
  EXPECT_EQ(finish_tiers(token, token, 4, 2, 0.1).block_salient, 7);
}

TEST(Tiers, WithoutARingARowReadsItsOwnTokenFromTheCodedCache) {
  const Tiers none{0, 0, 1, 0};
  EXPECT_EQ(ring_slots(none), 0);
  EXPECT_FALSE(encodes_bf16(none));
  EXPECT_EQ(coded_end(none, 1), 1);
  EXPECT_TRUE(encodes_bf16({0, 0, 32, 0}));
  EXPECT_TRUE(encodes_bf16({0, 1, 1, 0}));
  EXPECT_EQ(sink_slots({0, 0, 1, 0}), 0);
  EXPECT_EQ(sink_slots({4, 0, 1, 0}), 16);
}

}  // namespace
}  // namespace kvrt

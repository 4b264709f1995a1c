#pragma once
// Which tokens are sinks, coded and exact at a given length. Counts are a function of length alone (KERNELS.md 3.1), shared by
// host, device, planner and evaluation. C++17, constexpr.

#include <cstdint>

#include "kernels/core/host_device.h"

namespace kvrt {

/// Tier settings of one layer class.
struct Tiers {
  std::int64_t n_sinks = 4;        ///< S
  std::int64_t window = 128;       ///< W
  std::int64_t block_base = 1;     ///< N*: base tokens of an exit block (largest channel.g<N> of the two sides, 1 if none)
  std::int64_t block_salient = 0;  ///< n_s
  KVRT_HOST_DEVICE constexpr std::int64_t exit_block() const { return block_base + block_salient; }  ///< E
};

/// X: exit blocks that have left the window of a sequence of `length` tokens.
KVRT_HOST_DEVICE constexpr std::int64_t blocks_out(const Tiers& t, std::int64_t length) {
  const std::int64_t body = length > t.n_sinks ? length - t.n_sinks : 0;
  return body > t.window ? (body - t.window) / t.exit_block() : 0;
}
/// End (exclusive) of the coded token range [n_sinks, coded_end) seen by a sequence of `length` tokens. Row t reads with
/// length t + 1: with W = 0 and E = 1 it reads even its own token from the coded cache.
KVRT_HOST_DEVICE constexpr std::int64_t coded_end(const Tiers& t, std::int64_t length) {
  return t.n_sinks + blocks_out(t, length) * t.exit_block();
}
/// R: slots of the exact ring, in whole pages of 16; none if every token is coded at once.
KVRT_HOST_DEVICE constexpr std::int64_t ring_slots(const Tiers& t, std::int64_t q_max = 1) {
  if (t.window == 0 && t.exit_block() == 1) return 0;
  return (t.window + t.exit_block() - 1 + q_max + 15) / 16 * 16;
}
KVRT_HOST_DEVICE constexpr std::int64_t sink_slots(const Tiers& t) { return (t.n_sinks + 15) / 16 * 16; }
/// Where a layer has a ring, the encoder's input is the BF16 rounding of x (KERNELS.md 4.1).
KVRT_HOST_DEVICE constexpr bool encodes_bf16(const Tiers& t) { return t.window > 0 || t.exit_block() > 1; }

}  // namespace kvrt

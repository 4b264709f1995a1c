#include "libcalib/quant/token_tiers.h"

#include <algorithm>
#include <numeric>

#include "libcalib/base/error.h"
#include "libcalib/quant/expected_attention.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/scheme.h"

namespace calib::quant {

kvrt::Scheme parse_salient_scheme(const std::string& text, const std::string& where) {
  const kvrt::Scheme scheme = parse_scheme(text);
  const char* const example = "expected a form such as fp8e4m3.token.g or int8.token.g";
  if (kvrt::code_bits(scheme.format) != 8 || scheme.granularity != kvrt::Granularity::kToken)
    fail(ErrorKind::kUsage, where, "is {}, but a salient tier holds 8-bit codes in token groups; {}", kvrt::to_string(scheme), example);
  if (scheme.pre || scheme.smooth || scheme.pair || kvrt::needs_calibration(scheme))
    fail(ErrorKind::kUsage, where, "is {}, but a salient tier holds keys after RoPE and values alike, without calibrated constants; {}",
         kvrt::to_string(scheme), example);
  if (const std::string missing = kvrt::check_implemented(scheme); !missing.empty()) fail(ErrorKind::kUnsupported, where, "{}", missing);
  return scheme;
}

bool takes_tier(const kvrt::Scheme& base) { return kvrt::code_bits(base.format) < 8; }

TierMap place_block(const LayerGeometry& layer, const SaliencyFactors& factors, const kvrt::Tiers& tiers, std::int64_t first, const float* k_post, const float* v) {
  const std::int64_t block = tiers.exit_block(), heads = layer.n_kv_heads, stride = heads * layer.head_dim;
  TierMap map{first, block, std::vector<std::uint8_t>(static_cast<std::size_t>(block * heads), 0)};
  std::vector<std::int64_t> order(static_cast<std::size_t>(block));
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::vector<double> scores =
        exit_block_scores(layer, factors, static_cast<int>(h), first + block + tiers.window, k_post + h * layer.head_dim, v + h * layer.head_dim, stride, block);
    std::iota(order.begin(), order.end(), std::int64_t{0});
    std::nth_element(order.begin(), order.begin() + tiers.block_salient, order.end(), [&](std::int64_t a, std::int64_t b) {
      const double x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
      return x != y ? x > y : a < b;
    });
    for (std::int64_t i = 0; i < tiers.block_salient; ++i) map.salient[static_cast<std::size_t>(order[static_cast<std::size_t>(i)] * heads + h)] = 1;
  }
  return map;
}

TierMap place_tokens(const LayerGeometry& layer, const SaliencyFactors& factors, const kvrt::Tiers& tiers, std::int64_t n_tokens, const float* k_post,
                     const float* v, ThreadPool& pool) {
  const std::int64_t block = tiers.exit_block(), blocks = kvrt::blocks_out(tiers, n_tokens), row = std::int64_t{layer.n_kv_heads} * layer.head_dim;
  TierMap map{tiers.n_sinks, blocks * block, {}};
  std::vector<TierMap> placed(static_cast<std::size_t>(blocks));
  pool.parallel_for(blocks, [&](std::int64_t x) {
    const std::int64_t first = tiers.n_sinks + x * block;
    placed[static_cast<std::size_t>(x)] = place_block(layer, factors, tiers, first, k_post + first * row, v + first * row);
  });
  for (const TierMap& one : placed) map.salient.insert(map.salient.end(), one.salient.begin(), one.salient.end());
  return map;
}

void fake_quant_tier(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer, const SchemeParams& params, const TierMap& map, bool salient,
                     const float* x, float* out, ThreadPool& pool) {
  const std::int64_t heads = layer.n_kv_heads, d = layer.head_dim;
  std::vector<std::vector<std::int64_t>> tokens(static_cast<std::size_t>(heads));  // per head, of this tier
  for (std::int64_t t = 0; t < map.n_tokens; ++t)
    for (std::int64_t h = 0; h < heads; ++h)
      if ((map.salient[static_cast<std::size_t>(t * heads + h)] != 0) == salient) tokens[static_cast<std::size_t>(h)].push_back(map.first + t);
  const auto n = static_cast<std::int64_t>(tokens.front().size());
  for (const std::vector<std::int64_t>& list : tokens) CALIB_CHECK(static_cast<std::int64_t>(list.size()) == n);
  if (n == 0) return;
  std::vector<float> dense(static_cast<std::size_t>(n * heads * d));
  const auto each_row = [&](auto&& move) {
    pool.parallel_for(n, [&](std::int64_t i) {
      for (std::int64_t h = 0; h < heads; ++h)
        move(dense.data() + (i * heads + h) * d, (tokens[static_cast<std::size_t>(h)][static_cast<std::size_t>(i)] * heads + h) * d);
    });
  };
  each_row([&](float* row, std::int64_t at) { std::copy(x + at, x + at + d, row); });
  fake_quant_document(scheme, side, layer, params, /*n_sinks=*/0, /*bf16_input=*/true, n, dense.data(), dense.data(), pool);
  each_row([&](const float* row, std::int64_t at) { std::copy(row, row + d, out + at); });
}

}  // namespace calib::quant

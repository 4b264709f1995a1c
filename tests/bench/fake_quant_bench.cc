// Values per second of fake_quant on one core, by scheme and head_dim: T 1024, 3 heads, dense, BF16 input rounding on.

#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/write/fake_quant.h"

namespace {

void run(benchmark::State& state, const std::string& text, int head_dim) {
  constexpr int kTokens = 1024, kHeads = 3;
  kvrt::Scheme scheme;
  std::string error;
  if (!kvrt::parse_scheme(text, &scheme, &error)) return state.SkipWithError(error.c_str());
  const std::size_t n = static_cast<std::size_t>(kTokens) * kHeads * static_cast<std::size_t>(head_dim);
  std::vector<float> x(n), out(n), mean(static_cast<std::size_t>(kHeads * head_dim), 0.125f);
  std::uint32_t seed = 1;
  for (float& v : x) v = static_cast<float>(static_cast<std::int32_t>(seed = seed * 1664525u + 1013904223u)) * 0x1p-29f;
  kvrt::FakeQuantArgs args;
  args.scheme = scheme;
  args.n_tokens = kTokens, args.n_heads = kHeads, args.head_dim = head_dim;
  args.x = x.data(), args.out = out.data();
  const std::size_t channels = static_cast<std::size_t>(kHeads * head_dim);
  std::vector<float> lo(channels, -4.0f), hi(channels, 4.0f), smooth(channels, 1.25f), book, u;
  std::vector<std::int32_t> order;
  for (int i = 0; i < 1 << kvrt::code_bits(scheme.format) && i < 16; ++i) book.push_back(static_cast<float>(i * 16 - 127) / 127.0f);
  for (int h = 0; scheme.ef && h < kHeads; ++h) {
    for (int i = 0; i < head_dim; ++i) {
      order.push_back(i);
      for (int j = i; j < head_dim; ++j) u.push_back(j == i ? 1.0f : 0.01f);
    }
  }
  args.mean = mean.data(), args.smooth = smooth.data(), args.clip_lo = lo.data(), args.clip_hi = hi.data(), args.codebook = book.data();
  args.ef_u = u.data(), args.ef_order = order.data();
  args.round_input_to_bf16 = true;
  for (auto _ : state) {
    if (const kvrt::Status status = kvrt::fake_quant(args); !status.ok()) return state.SkipWithError(status.text().c_str());
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  state.counters["values/s"] = benchmark::Counter(static_cast<double>(n), benchmark::Counter::kIsIterationInvariantRate);
}

const int kRegistered = [] {
  for (const char* scheme : {"bf16", "int8.token.g", "int4.token.g32", "int4.token.g64", "int3.token.g64", "int2.token.g32", "int4.channel.g32",
                             "int3.channel.g64.pre", "int8.channel.g64.pre", "int4.token.g32.had", "int4.token.g64.center.had",
                             "fp8e4m3.head", "fp8e4m3.token.g", "q8_0", "q4_0", "q4_0.had", "iq4_nl", "int8.channel.static.pre", "int4.token.g.smooth",
                             "lm4.token.g", "lm4.token.g.had", "lm3.token.g.had", "lm2.token.g", "nuq4.token.g", "nuq3.token.g", "nuq2.channel.static.pre",
                             "nvfp4", "mxfp4", "int4.token.g.ef", "int4.channel.g64.pre.ef", "lm4.token.g.ef", "int4.token.g.out1",
                             "int4.channel.g64.pre.out1", "nuq4.channel.static.pre.out1"}) {
    for (const int head_dim : {64, 128, 80}) {
      kvrt::Scheme s;
      std::string error;
      if (!kvrt::parse_scheme(scheme, &s, &error) || !kvrt::check_shape(s, head_dim, true).empty()) continue;
      const std::string name = std::string(scheme) + "/D" + std::to_string(head_dim);
      benchmark::RegisterBenchmark(name.c_str(), [scheme, head_dim](benchmark::State& state) { run(state, scheme, head_dim); });
    }
  }
  return 0;
}();

}  // namespace

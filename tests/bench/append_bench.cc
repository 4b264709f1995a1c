// kvrt_append of one layer on one thread: H 8, D 128, keys before RoPE, V int4.token.g unless K is its own pair; prefill of 2,048 tokens in one
// call (window 0 and 128), and one token a call. KVRT_FORCE_BACKEND=ref times the reference.

#include <exception>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "tests/bench/layer_cache.h"

namespace {

constexpr std::int64_t kTokens = 2048;

/// tokens: of one call.
void run(benchmark::State& state, const kvrt::bench::LayerShape& shape, std::int64_t tokens) {
  try {
    kvrt::bench::LayerCache cache(shape);
    const std::vector<float> k = kvrt::bench::random_rows(static_cast<std::size_t>(kTokens * cache.row()), 1);
    const std::vector<float> v = kvrt::bench::random_rows(static_cast<std::size_t>(kTokens * cache.row()), 2);
    for (auto _ : state) {
      cache.restart();
      for (std::int64_t t = 0; t < kTokens; t += tokens) cache.append(tokens, k.data() + t * cache.row(), v.data() + t * cache.row());
      benchmark::ClobberMemory();
    }
    state.counters["tokens/s"] = benchmark::Counter(kTokens, benchmark::Counter::kIsIterationInvariantRate);
    state.SetLabel(cache.description());
  } catch (const std::exception& e) {
    state.SkipWithError(e.what());
  }
}

const int kRegistered = [] {
  for (const char* k :
       {"int8.token.g", "int4.token.g", "int4.channel.g64.pre", "int3.token.g64.had", "fp8e4m3.token.g", "lm4.token.g.had", "q8_0", "q4_0", "bf16"}) {
    for (const std::int64_t window : {0, 128}) {
      for (const std::int64_t tokens : {kTokens, std::int64_t{1}}) {
        kvrt::bench::LayerShape shape;
        shape.k = k, shape.v = std::string(k).find(".pre") == std::string::npos ? k : "int4.token.g";
        shape.window = window, shape.max_length = kTokens;
        const std::string name = std::string(k) + "/window" + std::to_string(window) + (tokens == 1 ? "/steps" : "/prefill");
        benchmark::RegisterBenchmark(name.c_str(), [shape, tokens](benchmark::State& s) { run(s, shape, tokens); })->Unit(benchmark::kMillisecond);
      }
    }
  }
  return 0;
}();

}  // namespace

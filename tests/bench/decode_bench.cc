// kvrt_decode of one layer: one sequence, D 128, T 32768, (H, G) = (8, 4), (4, 8) and (1, 8), one thread and two. Every head has data of its
// own, so a call reads the whole cache. KVRT_FORCE_ISA picks the path.

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "tests/bench/layer_cache.h"

namespace {

constexpr int kTokens = 32768;

/// The cache of the last benchmark is kept: google-benchmark calls each one several times.
kvrt::bench::LayerCache& cache_of(const kvrt::bench::LayerShape& shape, const std::string& name) {
  static std::unique_ptr<kvrt::bench::LayerCache> cache;
  static std::string last;
  if (name != last) {
    cache.reset();
    cache = std::make_unique<kvrt::bench::LayerCache>(shape);
    cache->fill(kTokens);
    last = name;
  }
  return *cache;
}

void run(benchmark::State& state, const kvrt::bench::LayerShape& shape, const std::string& name) {
  try {
    kvrt::bench::LayerCache& cache = cache_of(shape, name);
    const std::vector<float> q = kvrt::bench::random_rows(static_cast<std::size_t>(cache.row() * shape.group), 3);
    std::vector<float> out(q.size());
    for (auto _ : state) {
      cache.decode(q.data(), out.data());
      benchmark::DoNotOptimize(out.data());
      benchmark::ClobberMemory();
    }
    state.counters["token-heads/s"] = benchmark::Counter(static_cast<double>(shape.n_heads) * kTokens, benchmark::Counter::kIsIterationInvariantRate);
    state.SetLabel(cache.description());
  } catch (const std::exception& e) {
    state.SkipWithError(e.what());
  }
}

const int kRegistered = [] {
  struct Pair {
    const char *name, *k, *v;
  };
  for (const Pair p : {Pair{"int8.token.g", "int8.token.g", "int8.token.g"}, Pair{"int4.token.g", "int4.token.g", "int4.token.g"},
                       Pair{"int4.channel.g64.pre", "int4.channel.g64.pre", "int4.token.g"}, Pair{"int4.channel.g64", "int4.channel.g64", "int4.token.g"},
                       Pair{"int3.token.g", "int3.token.g", "int3.token.g"}, Pair{"int2.token.g32", "int2.token.g32", "int2.token.g32"},
                       Pair{"fp8e4m3.token.g", "fp8e4m3.token.g", "fp8e4m3.token.g"}, Pair{"lm4.token.g", "lm4.token.g", "lm4.token.g"},
                       Pair{"q8_0", "q8_0", "q8_0"}, Pair{"q4_0", "q4_0", "q4_0"}, Pair{"bf16", "bf16", "bf16"}}) {
    for (const auto& [n_heads, group] : {std::pair(8, 4), std::pair(4, 8), std::pair(1, 8)}) {
      for (const int threads : {1, 2}) {
        const std::string name = std::string(p.name) + "/H" + std::to_string(n_heads) + "/G" + std::to_string(group) + "/threads" + std::to_string(threads);
        kvrt::bench::LayerShape shape;
        shape.k = p.k, shape.v = p.v, shape.n_heads = n_heads, shape.group = group, shape.n_threads = threads, shape.max_length = kTokens;
        benchmark::RegisterBenchmark(name.c_str(), [shape, name](benchmark::State& s) { run(s, shape, name); })->UseRealTime()->Unit(benchmark::kMillisecond);
      }
    }
  }
  return 0;
}();

}  // namespace

// Decode attention of one layer over compressed pages: D 128, T 32768, (H, G) = (8, 4) and (4, 8), one thread and two, which share
// pieces of 4096 tokens of one head. Every head has data of its own, so a call reads the whole cache. KVRT_FORCE_ISA picks the path.

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/core/layout.h"
#include "kernels/read/decode_cpu.h"
#include "tests/kernels/rope_storage.h"

namespace {

using kvrt::CacheSide;
using kvrt::Scheme;

constexpr int kHeadDim = 128, kTokens = 32768, kPageTokens = 64, kPages = kTokens / kPageTokens;
constexpr int kRange = 4096, kRanges = kTokens / kRange;  ///< tokens of one piece of work

struct Side {
  kvrt::PageCodec codec;
  kvrt::BlockLayout layout;
  std::vector<std::uint8_t> pool;
};

/// One layer's cache, filled with normal-like values.
struct Cache {
  Scheme k_scheme, v_scheme;
  Side k, v;
  std::vector<std::int32_t> pages;

  Cache(const std::string& k_text, const std::string& v_text, int n_heads) {
    std::string error;
    if (!kvrt::parse_scheme(k_text, &k_scheme, &error) || !kvrt::parse_scheme(v_text, &v_scheme, &error)) throw std::runtime_error(error);
    kvrt::LayerLayout l;
    l.n_kv_heads = n_heads, l.head_dim = kHeadDim, l.k = k_scheme, l.v = v_scheme, l.page_tokens = kPageTokens;
    for (int i = 0; i < kPages; ++i) pages.push_back(i);
    fill(&k, kvrt::block_layout(l, CacheSide::kK), k_scheme, n_heads, 1);
    fill(&v, kvrt::block_layout(l, CacheSide::kV), v_scheme, n_heads, 2);
  }

  static void fill(Side* side, const kvrt::BlockLayout& layout, const Scheme& scheme, int n_heads, std::uint32_t seed) {
    side->layout = layout;
    side->codec = kvrt::make_page_codec(scheme, kvrt::code_bits(scheme.format), kHeadDim, kPageTokens);
    side->pool.assign(static_cast<std::size_t>(layout.page * kPages), 0xFF);
    std::vector<float> rows(static_cast<std::size_t>(kPageTokens) * kHeadDim);
    kvrt::EncodeCounters counters;
    for (int page = 0; page < kPages; ++page) {
      for (int head = 0; head < n_heads; ++head) {
        std::uint8_t* block = side->pool.data() + page * layout.page + layout.header + head * layout.block;
        for (float& x : rows) {
          float sum = 0;
          for (int i = 0; i < 3; ++i) sum += static_cast<float>(static_cast<std::int32_t>(seed = seed * 1664525u + 1013904223u)) * 0x1p-31f;
          x = sum;
        }
        if (scheme.granularity == kvrt::Granularity::kChannel) {
          for (int g = 0; g * scheme.group < kPageTokens; ++g) {
            kvrt::encode_channel_group(side->codec, &rows[static_cast<std::size_t>(g * scheme.group) * kHeadDim], kHeadDim, g, block, &counters);
          }
        } else {
          for (int t = 0; t < kPageTokens; ++t) kvrt::encode_row(side->codec, &rows[static_cast<std::size_t>(t) * kHeadDim], t, block, &counters);
        }
      }
    }
  }
};

const Cache& cache_of(const std::string& k, const std::string& v, int n_heads) {
  static std::map<std::string, std::unique_ptr<Cache>> made;  // benchmarks of one process come one after another
  static std::string last;
  const std::string key = k + "/" + v + "/" + std::to_string(n_heads);
  if (key != last) made.clear(), last = key;
  auto& cache = made[key];
  if (!cache) cache = std::make_unique<Cache>(k, v, n_heads);
  return *cache;
}

/// One head's tokens [range * kRange, ...): partials are merged by the caller.
void attend_range(const Cache& cache, const std::vector<float>& q, const kvrt::test::RopeStorage& rope, const kvrt::DecodeBackend& path, int head, int range,
                  int n_queries, const kvrt::Partial& out) {
  const auto floats = static_cast<std::size_t>(kvrt::decode_workspace_floats(kHeadDim, n_queries));
  thread_local std::vector<float> storage;
  if (storage.size() < floats + 16) storage.resize(floats + 16);
  float* workspace = storage.data();
  while (reinterpret_cast<std::uintptr_t>(workspace) % 64 != 0) ++workspace;
  const auto side = [&](const Side& s) {
    return kvrt::SegmentSide{s.codec, s.pool.data(), s.layout.page, s.layout.header + head * s.layout.block};
  };
  kvrt::HeadAttention job;
  job.segment = {side(cache.k), side(cache.v), cache.pages.data() + range * (kRange / kPageTokens), kRange, 0, kRange, std::int64_t{range} * kRange,
                 cache.k_scheme.pre};
  job.q = q.data() + static_cast<std::ptrdiff_t>(head) * n_queries * kHeadDim;
  job.n_queries = n_queries, job.rope = &rope.tables, job.rope_tile = rope.tile.data(), job.out = out;
  kvrt::clear_partial(job.out, n_queries, kHeadDim);
  path.attend(job, workspace);
}

void run(benchmark::State& state, const std::string& k, const std::string& v, int n_heads, int n_queries, int n_threads) {
  const Cache& cache = cache_of(k, v, n_heads);
  kvrt::DecodeBackend path{};
  if (const kvrt::Status status = kvrt::choose_decode_backend(&path); !status.ok()) return state.SkipWithError(status.text().c_str());
  std::vector<double> inv_freq;
  for (int i = 0; i < kHeadDim / 2; ++i) inv_freq.push_back(std::pow(10000.0, -2.0 * i / kHeadDim));
  const kvrt::test::RopeStorage rope(inv_freq, false, kTokens);
  const auto n = static_cast<std::size_t>(n_heads * n_queries * kHeadDim);
  std::vector<float> q(n), out(n), sums(2 * n / kHeadDim * kRanges), outputs(n * kRanges);
  std::vector<kvrt::Partial> parts;
  for (int piece = 0; piece < n_heads * kRanges; ++piece) {
    float* m = sums.data() + static_cast<std::ptrdiff_t>(piece) * 2 * n_queries;
    parts.push_back({m, m + n_queries, outputs.data() + static_cast<std::ptrdiff_t>(piece) * n_queries * kHeadDim});
  }
  for (std::size_t i = 0; i < n; ++i) q[i] = 0.15f * std::sin(static_cast<float>(i));
  for (auto _ : state) {
#pragma omp parallel for num_threads(n_threads) schedule(dynamic)
    for (int piece = 0; piece < n_heads * kRanges; ++piece) {
      attend_range(cache, q, rope, path, piece / kRanges, piece % kRanges, n_queries, parts[static_cast<std::size_t>(piece)]);
    }
    for (int head = 0; head < n_heads; ++head) {
      kvrt::combine_partials(&parts[static_cast<std::size_t>(head * kRanges)], kRanges, n_queries, kHeadDim,
                             out.data() + static_cast<std::ptrdiff_t>(head) * n_queries * kHeadDim, nullptr);
    }
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  const double token_heads = static_cast<double>(n_heads) * kTokens;
  state.counters["token-heads/s"] = benchmark::Counter(token_heads, benchmark::Counter::kIsIterationInvariantRate);
  state.SetLabel(path.name);
}

const int kRegistered = [] {
  struct Pair {
    const char *name, *k, *v;
  };
  for (const Pair p : {Pair{"int8.token.g", "int8.token.g", "int8.token.g"}, Pair{"int4.token.g", "int4.token.g", "int4.token.g"},
                       Pair{"int4.channel.g64.pre", "int4.channel.g64.pre", "int4.token.g"}, Pair{"int4.channel.g64", "int4.channel.g64", "int4.token.g"},
                       Pair{"int3.token.g", "int3.token.g", "int3.token.g"}, Pair{"int2.token.g32", "int2.token.g32", "int2.token.g32"},
                       Pair{"fp8e4m3.token.g", "fp8e4m3.token.g", "fp8e4m3.token.g"}, Pair{"q8_0", "q8_0", "q8_0"}, Pair{"q4_0", "q4_0", "q4_0"},
                       Pair{"bf16", "bf16", "bf16"}}) {
    for (const int n_heads : {8, 4}) {
      for (const int threads : {1, 2}) {
        const std::string name = std::string(p.name) + "/H" + std::to_string(n_heads) + "/G" + std::to_string(32 / n_heads) + "/threads" + std::to_string(threads);
        benchmark::RegisterBenchmark(name.c_str(), [p, n_heads, threads](benchmark::State& s) { run(s, p.k, p.v, n_heads, 32 / n_heads, threads); })
            ->UseRealTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
  return 0;
}();

}  // namespace

// Long sequences are split over workers, and nobody can tell from the results; forced backends and paths are the ones that run.

#include <atomic>
#include <cstdlib>
#include <thread>

#include "kernels/core/context.h"
#include "kernels/core/isa.h"
#include "kernels/read/decode_sequence.h"
#include "tests/kernels/cache_fixture.h"

namespace kvrt::testing {
namespace {

/// A parallel_for of n threads that take pieces as they come, and what it was asked to run.
struct Workers {
  explicit Workers(int n) : n_threads(n) {}
  int n_threads;
  std::vector<std::int64_t> asked;

  static void run(void* user, std::int64_t n, void (*body)(void*, std::int64_t, std::int32_t), void* arg) {
    auto* const self = static_cast<Workers*>(user);
    self->asked.push_back(n);
    std::atomic<std::int64_t> next{0};
    std::vector<std::thread> threads;
    for (std::int32_t worker = 0; worker < self->n_threads; ++worker) {
      threads.emplace_back([&, worker] {
        for (std::int64_t i; (i = next.fetch_add(1)) < n;) body(arg, i, worker);
      });
    }
    for (std::thread& t : threads) t.join();
  }
};

struct Decoded {
  std::vector<float> out, lse, mass;
  bool operator==(const Decoded& o) const { return out == o.out && lse == o.lse && mass == o.mass; }
};

/// Decodes the last token of the given sequences through a context of its own.
Decoded decode_with(Cache* cache, const std::vector<std::int64_t>& lengths, const std::vector<float>& q, kvrt_backend backend, Workers* workers) {
  kvrt_limits limits = {};
  limits.max_batch = static_cast<std::int32_t>(lengths.size()), limits.max_length = 8192;
  if (workers) limits.n_workers = workers->n_threads, limits.parallel_for = Workers::run, limits.parallel_user = workers;
  const kvrt_device device = {backend, 0};
  kvrt_context* context = nullptr;
  kvrt_error err;
  EXPECT_EQ(kvrt_context_create(cache->plan(), &device, &limits, &context, &err), KVRT_OK) << err.text;
  std::vector<std::uint8_t> scratch(static_cast<std::size_t>(kvrt_workspace_bytes(context)), 0xFF);
  const kvrt_workspace workspace = {scratch.data(), static_cast<std::int64_t>(scratch.size())};
  std::vector<std::int64_t> before, n_new;
  for (const std::int64_t n : lengths) before.push_back(n > 0 ? n - 1 : 0), n_new.push_back(n > 0 ? 1 : 0);
  cache->set_lengths(before);
  const auto rows = static_cast<std::size_t>(std::count_if(lengths.begin(), lengths.end(), [](std::int64_t n) { return n > 0; }));
  const std::size_t heads = static_cast<std::size_t>(cache->q_row()) / static_cast<std::size_t>(cache->row() / cache->heads());
  Decoded d{std::vector<float>(rows * static_cast<std::size_t>(cache->q_row()), NAN), std::vector<float>(rows * heads, NAN),
            std::vector<float>(rows * heads * KVRT_SEGMENTS, NAN)};
  kvrt_attn attn = cache->attn(q.data(), d.out.data());
  attn.lse = d.lse.data(), attn.mass = d.mass.data();
  EXPECT_EQ(kvrt_decode(context, Cache::kLayer, &cache->batch(n_new), &attn, &cache->pools(), &workspace, nullptr, &err), KVRT_OK) << err.text;
  kvrt_context_destroy(context);
  return d;
}

TEST(DecodeSplit, RangesFollowFromTheLengthAlone) {
  EXPECT_EQ(ranges_of(0, 64).n, 1);
  for (const int page_tokens : {32, 64, 128}) {
    for (std::int64_t n = 1; n < 70000; n += n < 300 ? 1 : 997) {
      const Ranges r = ranges_of(n, page_tokens);
      const std::int64_t tokens = r.pages * page_tokens;
      ASSERT_GE(r.n, 1);
      ASSERT_LE(r.n, kMaxRanges);
      ASSERT_GE(r.n * tokens, n) << n;
      ASSERT_LT((r.n - 1) * tokens, n) << n;  // no range is empty
      if (r.n > 1) {
        ASSERT_GE(tokens, kRangeTokens) << n;
      }
    }
  }
  EXPECT_EQ(ranges_of(32768, 64).n, kMaxRanges);
}

TEST(DecodeSplit, WorkersDoNotMatter) {
  for (const int heads : {1, 3}) {
    for (const auto& [k, v] : {std::pair("int4.channel.g64.pre", "int4.token.g.had"), std::pair("int8.token.g.center", "int3.token.g"), std::pair("bf16", "q4_0")}) {
      for (const std::int64_t length : {1, 6, 1100, 2150, 4700}) {
        CacheShape shape;
        shape.k = k, shape.v = v, shape.heads = heads, shape.group = 2, shape.max_length = 8192;
        Cache cache(shape);
        const std::string what = shape.k + " H " + std::to_string(heads) + " T " + std::to_string(length);
        ASSERT_TRUE(cache.status().ok()) << cache.status().text();
        const std::vector<float> keys = normal_rows(71, length * cache.row()), values = normal_rows(72, length * cache.row(), 1, 0.5),
                                 q = normal_rows(73, cache.q_row(), 3);
        ASSERT_TRUE(cache.append(length, keys.data(), values.data()).ok());
        const Decoded alone = decode_with(&cache, {length}, q, KVRT_BACKEND_CPU, nullptr);
        for (const int n : {1, 2, 3, 8, 40}) {
          Workers workers(n);
          EXPECT_TRUE(decode_with(&cache, {length}, q, KVRT_BACKEND_CPU, &workers) == alone) << what << " workers " << n;
          if (n > 1 && length > 4000) {
            ASSERT_FALSE(workers.asked.empty()) << what;
            EXPECT_GT(workers.asked[0], heads) << what << ": a long sequence was not split over " << n << " workers";
          }
        }
        const Decoded reference = decode_with(&cache, {length}, q, KVRT_BACKEND_REF, nullptr);
        for (std::size_t i = 0; i < alone.out.size(); ++i) ASSERT_NEAR(alone.out[i], reference.out[i], 1e-4 * (1 + std::fabs(reference.out[i]))) << what;
        for (std::size_t i = 0; i < alone.lse.size(); ++i) ASSERT_NEAR(alone.lse[i], reference.lse[i], 1e-4 * (1 + std::fabs(reference.lse[i]))) << what;
        for (std::size_t i = 0; i < alone.mass.size(); ++i) ASSERT_NEAR(alone.mass[i], reference.mass[i], 1e-4) << what;
      }
    }
  }
}

TEST(DecodeSplit, OneLongSequenceAmongShortOnes) {
  CacheShape shape;
  shape.k = "int4.channel.g32.pre", shape.n_seqs = 5, shape.max_length = 8192;
  const std::vector<std::int64_t> lengths = {40, 5200, 0, 3, 900};
  Cache cache(shape);
  ASSERT_TRUE(cache.status().ok()) << cache.status().text();
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const std::vector<float> k = normal_rows(74, total * cache.row()), q = normal_rows(75, 4 * cache.q_row(), 3);
  ASSERT_TRUE(cache.append(lengths, k.data(), k.data()).ok());
  const Decoded one = decode_with(&cache, lengths, q, KVRT_BACKEND_CPU, nullptr);
  EXPECT_FALSE(std::any_of(one.out.begin(), one.out.end(), [](float x) { return std::isnan(x); }));
  for (const int n : {2, 4, 16}) {
    Workers workers(n);
    EXPECT_TRUE(decode_with(&cache, lengths, q, KVRT_BACKEND_CPU, &workers) == one) << n << " workers";
  }
  std::int64_t row = 0;
  for (std::size_t s = 0; s < lengths.size(); ++s) {  // and each sequence alone
    if (lengths[s] == 0) continue;
    std::vector<std::int64_t> only(lengths.size(), 0);
    only[s] = lengths[s];
    const auto begin = q.begin() + row * cache.q_row();
    const Decoded alone = decode_with(&cache, only, std::vector<float>(begin, begin + cache.q_row()), KVRT_BACKEND_CPU, nullptr);
    EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(), one.out.begin() + row * cache.q_row())) << "sequence " << s;
    ++row;
  }
}

TEST(Forced, IsaIsTheOneThatRuns) {  // bug class 7
  CacheShape shape;
  std::vector<DecodeBackend> paths = decode_backends();
  const std::vector<WritePath> writers = write_paths();
  ASSERT_EQ(paths.size(), writers.size());
  for (std::size_t i = 0; i < paths.size(); ++i) {
    setenv("KVRT_FORCE_ISA", paths[i].name, 1);
    Cache cache(shape);
    unsetenv("KVRT_FORCE_ISA");
    ASSERT_TRUE(cache.status().ok()) << cache.status().text();
    EXPECT_STREQ(writers[i].name, paths[i].name);
    EXPECT_NE(std::string(kvrt_describe(cache.context(), Cache::kLayer)).find(std::string("cpu ") + paths[i].name + ","), std::string::npos);
    const Context& context = cache.context()->context;
    EXPECT_EQ(context.attend(), paths[i].attend);
    ASSERT_NE(context.write_path(*context.find(Cache::kLayer)), nullptr);
    EXPECT_EQ(context.write_path(*context.find(Cache::kLayer))->encode, writers[i].encode);
  }
  EXPECT_STREQ(paths[0].name, kBaselineName);
  setenv("KVRT_FORCE_ISA", "sve9", 1);
  Cache refused(shape);
  unsetenv("KVRT_FORCE_ISA");
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_NE(refused.status().text().find("sve9"), std::string::npos);
}

TEST(Forced, BackendGoesBeforeTheDevice) {
  for (const auto& [forced, asked, expected] : {std::tuple("ref", KVRT_BACKEND_CPU, KVRT_BACKEND_REF), std::tuple("cpu", KVRT_BACKEND_REF, KVRT_BACKEND_CPU)}) {
    setenv("KVRT_FORCE_BACKEND", forced, 1);
    CacheShape shape;
    shape.backend = asked;
    Cache cache(shape);
    unsetenv("KVRT_FORCE_BACKEND");
    ASSERT_TRUE(cache.status().ok()) << cache.status().text();
    const Context& context = cache.context()->context;
    EXPECT_EQ(context.backend(), expected);
    EXPECT_EQ(context.write_path(*context.find(Cache::kLayer)) == nullptr, expected == KVRT_BACKEND_REF);
    EXPECT_NE(std::string(kvrt_describe(cache.context(), Cache::kLayer)).find(std::string(": ") + forced), std::string::npos);
  }
  setenv("KVRT_FORCE_BACKEND", "tpu", 1);
  Cache refused((CacheShape()));
  unsetenv("KVRT_FORCE_BACKEND");
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_NE(refused.status().text().find("tpu"), std::string::npos);
}

}  // namespace
}  // namespace kvrt::testing

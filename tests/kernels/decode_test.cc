#include <thread>

#include "kernels/codec/half.h"
#include "tests/kernels/cache_fixture.h"

namespace kvrt::testing {
namespace {

/// Whether the backend of this program decodes the shape. Only cuda refuses any.
bool is_offered(CacheShape shape) {
  shape.storage_only = false;
  return !kOnCuda || Cache(shape).status().ok();
}

/// Kernels for keys before RoPE want both channels of a pair in one lane.
void pair_channels(CacheShape* shape) {
  const bool is_natural = shape->chan_perm == "natural" && shape->k.find(".pre") != std::string::npos;
  if (kOnCuda && is_natural && shape->rope == KVRT_ROPE_HALF_SPLIT && shape->rotary_dim < 0) shape->chan_perm = "spread" + std::to_string(shape->width / 2);
}

/// Error of 16-bit operands against dense attention (KERNELS.md 7), 4 u (A_v + A_s) with u of bf16: of query head h, channel d.
struct Tolerance16 {
  const std::vector<double>&query, &keys;  ///< after RoPE
  const std::vector<float>& values;
  const Dense& dense;
  const CacheShape& shape;
  std::int64_t n;
  double soft_cap;

  std::vector<double> operator()() const {
    std::vector<double> out(dense.out.size());
    const double scale = 1.0 / std::sqrt(static_cast<double>(shape.width));
    for (int h = 0; h < shape.heads * shape.group; ++h) {
      for (std::int64_t t = 0; t < n; ++t) {
        double dot = 0, magnitude = 0;
        const std::int64_t row = t * shape.heads + h / shape.group;
        for (int d = 0; d < shape.width; ++d) {
          const double term = scale * query[static_cast<std::size_t>(h * shape.width + d)] * keys[static_cast<std::size_t>(row * shape.width + d)];
          dot += term, magnitude += std::fabs(term);
        }
        const double p = std::exp((soft_cap > 0 ? soft_cap * std::tanh(dot / soft_cap) : dot) - dense.lse[static_cast<std::size_t>(h)]);
        for (int d = 0; d < shape.width; ++d) {
          const std::size_t at = static_cast<std::size_t>(h * shape.width + d);
          const double v = values[static_cast<std::size_t>(row * shape.width + d)];
          out[at] += 4 * 0x1p-8 * p * (std::fabs(v) + std::fabs(v - dense.out[at]) * magnitude);
        }
      }
    }
    return out;
  }
};

/// Decodes the last token of a cache of n tokens and compares with a dense softmax over gathered rows, on all backends.
struct Case {
  CacheShape shape;
  std::int64_t n = 0;
  double soft_cap = 0;
  bool learned = false;
  int n_run = 0;  ///< on cuda

  void run() {
    if (kOnCuda) {
      pair_channels(&shape);
      if (is_offered(shape)) run_within(0x1p-6), ++n_run;  // of the log-sum-exp
      return;
    }
    shape.backend = KVRT_BACKEND_REF;
    run_within(2e-6);  // fp32 rotation of the query, then double
    shape.backend = KVRT_BACKEND_CPU;
    run_within(1e-4);  // fp32 sums over up to 128 channels of scores up to 50
  }
  void run_within(double tolerance) const {
    const std::string what = std::string(backend_name(shape.backend)) + " " + shape.k + " / " + shape.v + " D " + std::to_string(shape.width) + " G " +
                             std::to_string(shape.group) + " n " + std::to_string(n);
    Cache cache(shape);
    ASSERT_TRUE(cache.status().ok()) << what << ": " << cache.status().text();
    const std::vector<float> k = normal_rows(21, n * cache.row()), v = normal_rows(22, n * cache.row(), 1, 0.5), q = normal_rows(23, cache.q_row(), 2);
    ASSERT_TRUE(cache.append(n, k.data(), v.data()).ok()) << what;
    std::vector<float> out(q.size(), NAN), lse(static_cast<std::size_t>(shape.heads * shape.group), NAN), mass(lse.size() * KVRT_SEGMENTS, NAN),
        logits(lse.size(), 1.5f);
    kvrt_attn attn = cache.attn(q.data(), out.data());
    attn.lse = lse.data(), attn.mass = mass.data(), attn.soft_cap = soft_cap, attn.sink_logit = learned ? logits.data() : nullptr;
    const Status status = cache.decode(attn);
    ASSERT_TRUE(status.ok()) << what << ": " << status.text();

    const bool pre = shape.k.find(".pre") != std::string::npos;
    const std::vector<float> keys = cache.gather(KVRT_K, KVRT_AS_STORED), values = cache.gather(KVRT_V, KVRT_AS_STORED);
    std::vector<double> rotated(keys.begin(), keys.end()), query(q.begin(), q.end());
    for (std::int64_t i = 0; pre && i < n * shape.heads; ++i)
      rotate_row(shape, cache.inv_freq(), i / shape.heads, &rotated[static_cast<std::size_t>(i * shape.width)]);
    for (int h = 0; h < shape.heads * shape.group; ++h) rotate_row(shape, cache.inv_freq(), n - 1, &query[static_cast<std::size_t>(h * shape.width)]);
    const Dense dense = dense_attention(query, rotated, values, n, shape.heads, shape.group, shape.width, 1.0 / std::sqrt(static_cast<double>(shape.width)),
                                        soft_cap, attn.sink_logit);
    const std::vector<double> allowed = kOnCuda ? Tolerance16{query, rotated, values, dense, shape, n, soft_cap}() : std::vector<double>();
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], dense.out[i], kOnCuda ? allowed[i] : tolerance * (1 + std::fabs(dense.out[i]))) << what << " element " << i;
    }
    for (std::size_t h = 0; h < lse.size(); ++h) {
      ASSERT_NEAR(lse[h], dense.lse[h], tolerance * (1 + std::fabs(dense.lse[h]))) << what;
      double sum = learned ? std::exp(1.5 - dense.lse[h]) : 0;
      for (int s = 0; s < KVRT_SEGMENTS; ++s) sum += mass[h * KVRT_SEGMENTS + static_cast<std::size_t>(s)];
      ASSERT_NEAR(sum, 1.0, kOnCuda ? 1e-4 : 1e-5) << what;
    }
  }
};

const char* const kUniform[][2] = {{"bf16", "bf16"},
                                   {"int8.token.g", "int8.token.g"},
                                   {"int4.token.g", "int4.token.g"},
                                   {"int4.channel.g32", "int2.token.g"},
                                   {"int4.channel.g64.pre", "int3.token.g"},
                                   {"int3.channel.g64.pre", "int4.channel.g32"},
                                   {"fp8e4m3.head", "fp8e4m3.tensor"},
                                   {"int4.token.g.center.had", "int4.token.g.had"},
                                   {"int2.channel.g32.pre", "fp8e5m2.token.g"},
                                   {"lm4.token.g.had", "lm3.token.g.had"},
                                   {"int4.token.g.pre.center", "int4.token.g.center"},
                                   {"int4.token.g.smooth", "sint4.token.g"},
                                   {"int8.channel.static.pre", "nuq4.token.g"},
                                   {"int4.token.g.smooth.had", "int4.token.g.had"},
                                   {"int8.token.g", "int4.token.g"},
                                   {"int4.channel.g64.pre.out1", "nuq3.token.g.out1"},
                                   {"int3.channel.g32.clip.out2.pair", "int4.token.g.out0.5"},
                                   {"int4.token.g.had.out1", "int2.channel.g32.out2"}};

TEST(Decode, EqualsDenseSoftmaxOverGatheredRows) {
  int n_run = 0;
  for (const auto& pair : kUniform) {
    for (const int width : {64, 80, 96, 128}) {
      for (const int group : kOnCuda ? std::vector<int>{3} : std::vector<int>{1, 3, 4, 8}) {
        Case c;
        c.shape.k = pair[0], c.shape.v = pair[1], c.shape.width = width, c.shape.group = group, c.shape.heads = group == 3 ? 2 : 1;
        c.n = 150;
        c.run();
        n_run += c.n_run;
      }
    }
  }
  if (kOnCuda) {
    EXPECT_GE(n_run, 45);  // all but outliers and fp8e5m2
  }
}

TEST(Decode, EveryTailAndRingPlace) {  // bug classes 2, 9, 14: whatever lies behind the last token is 0xFF
  for (const auto& pair : kUniform) {
    const std::vector<std::int64_t> all = {1, 2, 4, 5, 15, 17, 63, 65, 67, 99, 100, 101, 127, 129, 131, 203}, few = {1, 5, 17, 67, 131};
    for (const std::int64_t n : kOnCuda ? few : all) {
      Case c;
      c.shape.k = pair[0], c.shape.v = pair[1];
      c.shape.window = n % 2 ? 8 : 32;
      c.n = n;
      c.run();
    }
  }
}

TEST(Decode, SinksAndWindowOfEverySize) {
  for (const std::int64_t sinks : {0, 1, 4, 20}) {
    for (const std::int64_t window : {0, 1, 2, 16, 128}) {
      for (const char* k : {"int4.token.g", "int4.channel.g32.pre"}) {
        Case c;
        c.shape.k = k, c.shape.sinks = sinks, c.shape.window = window;
        c.n = 190;
        c.run();
      }
    }
  }
}

TEST(Decode, RopeStylesPartialWidthAndFactor) {
  for (const kvrt_rope_style rope : {KVRT_ROPE_HALF_SPLIT, KVRT_ROPE_INTERLEAVED}) {
    for (const char* k : {"int4.token.g", "int4.channel.g64.pre"}) {
      Case c;
      c.shape.k = k, c.shape.rope = rope, c.shape.rotary_dim = 48, c.shape.attention_factor = 1.2;
      c.n = 170;
      c.run();
    }
  }
  Case none;
  none.shape.rope = KVRT_ROPE_NONE;
  none.n = 100;
  none.run();
}

TEST(Decode, StoredOrderOfChannels) {
  for (const char* k : {"int4.channel.g64.pre", "int3.channel.g32.pre", "int4.token.g32.pre", "bf16.pre", "lm3.token.g.pre", "int4.channel.g64.pre.out1",
                        "int3.token.g32.out2"}) {
    Case c;
    c.shape.k = k, c.shape.chan_perm = "spread32";
    c.n = 200;
    c.run();
  }
}

TEST(Decode, SoftCapAndLearnedLogit) {  // bug class 16
  for (const auto& pair : kUniform) {
    Case c;
    c.shape.k = pair[0], c.shape.v = pair[1];
    c.n = 140;
    c.learned = true;
    c.run();
    c.soft_cap = 5;
    c.run();
  }
}

TEST(Decode, TheKeyOutsideNeverCounts) {  // bug class 14: three turns of the ring, then a change in a slot that is not live
  CacheShape shape;
  shape.window = 8, shape.sinks = 0;
  Cache cache(shape);
  const std::int64_t n = 3 * 16 + 5;
  const std::vector<float> k = normal_rows(24, n * cache.row()), q = normal_rows(25, cache.q_row());
  for (std::int64_t t = 0; t < n; ++t) ASSERT_TRUE(cache.append(1, k.data() + t * cache.row(), k.data() + t * cache.row()).ok());
  std::vector<float> before(q.size()), after(q.size());
  ASSERT_TRUE(cache.decode(cache.attn(q.data(), before.data())).ok());
  // The window holds 8 of 16 slots: two pages would be one; every byte of a dead slot becomes NaN.
  const kvrt_batch& batch = cache.batch({0});
  const std::int32_t page = batch.pages[KVRT_WINDOW].pages[batch.pages[KVRT_WINDOW].offsets[0]];
  kvrt_layout layout;
  ASSERT_EQ(kvrt_page_layout(cache.context(), Cache::kLayer, KVRT_K, KVRT_WINDOW, &layout, nullptr), KVRT_OK);
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    for (int slot = 0; slot < 16; ++slot) {
      const std::int64_t behind = ((n - 1) % 16 - slot + 16) % 16;  // 0: the newest token
      if (behind < 8) continue;
      for (int h = 0; h < shape.heads; ++h) {
        std::fill_n(cache.bytes(true, side).begin() + page * layout.page_bytes + h * layout.block_bytes + slot * 2 * shape.width, 2 * shape.width,
                    std::uint8_t{0xFF});
      }
    }
  }
  ASSERT_TRUE(cache.decode(cache.attn(q.data(), after.data())).ok());
  EXPECT_EQ(before, after);
}

TEST(Decode, ScaleOfTheCallAndOfThePlan) {  // bug class 10
  CacheShape shape;
  Cache cache(shape);
  const std::vector<float> k = normal_rows(26, 90 * cache.row()), q = normal_rows(27, cache.q_row());
  std::vector<float> doubled = q, a(q.size()), b(q.size());
  for (float& x : doubled) x *= 2;
  ASSERT_TRUE(cache.append(90, k.data(), k.data()).ok());
  kvrt_attn attn = cache.attn(q.data(), a.data());
  attn.softmax_scale = 2.0 / 8.0;
  ASSERT_TRUE(cache.decode(attn).ok());
  ASSERT_TRUE(cache.decode(cache.attn(doubled.data(), b.data())).ok());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], kOnCuda ? 1e-3 : 1e-6);
}

TEST(Decode, PositionsFarOut) {
  CacheShape shape;
  shape.k = "int8.channel.g32.pre", shape.max_length = std::int64_t{1} << 20;
  shape.n_seqs = 1;
  shape.heads = 1, shape.group = 1;
  pair_channels(&shape);
  ASSERT_TRUE(is_offered(shape));
  Cache near(shape), far(shape);
  far.first_position = (std::int64_t{1} << 20) - 200;
  const std::vector<float> k = normal_rows(28, 200 * near.row()), q = normal_rows(29, near.q_row());
  std::vector<float> a(q.size()), b(q.size());
  ASSERT_TRUE(near.append(200, k.data(), k.data()).ok() && far.append(200, k.data(), k.data()).ok());
  ASSERT_TRUE(near.decode(near.attn(q.data(), a.data())).ok() && far.decode(far.attn(q.data(), b.data())).ok());
  // Attention depends on distances alone; angles of 10^6 radians leave 1e-7 after the fp32 tables.
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], kOnCuda ? 2e-3 : 2e-5);  // on cuda: keys are rotated in fp16
}

TEST(Decode, ABatchIsItsSequencesAndThreadsDoNotMatter) {
  CacheShape shape;
  shape.k = "int4.channel.g32.pre", shape.n_seqs = 3;
  pair_channels(&shape);
  ASSERT_TRUE(is_offered(shape));
  Cache together(shape), alone(shape);
  const std::int64_t row = together.row(), q_row = together.q_row(), lengths[] = {40, 171, 6};
  const std::vector<float> k = normal_rows(30, 217 * row), q = normal_rows(31, 3 * q_row);
  ASSERT_TRUE(together.append({40, 171, 6}, k.data(), k.data()).ok() && alone.append({40, 171, 6}, k.data(), k.data()).ok());
  std::vector<float> all(q.size(), NAN), one(q.size(), NAN);
  together.set_lengths({39, 170, 5});
  kvrt_attn attn = together.attn(q.data(), all.data());
  const kvrt_workspace w = together.workspace();
  kvrt_error err;
  ASSERT_EQ(kvrt_decode(together.context(), Cache::kLayer, &together.batch({1, 1, 1}), &attn, &together.pools(), &w, nullptr, &err), KVRT_OK) << err.text;
  for (int s = 0; s < 3; ++s) {
    ASSERT_EQ(alone.length(s), lengths[s]);
    attn.q.data = q.data() + s * q_row, attn.out.data = one.data() + s * q_row;
    ASSERT_TRUE(alone.decode(attn, s).ok());
  }
  EXPECT_EQ(all, one);

  // The same through a parallel loop of four workers.
  kvrt_limits limits = {};
  limits.max_batch = 3, limits.max_length = 512, limits.n_workers = 4;
  limits.parallel_for = [](void*, std::int64_t n, void (*body)(void*, std::int64_t, std::int32_t), void* arg) {
    std::vector<std::thread> threads;
    for (std::int32_t t = 0; t < 4; ++t) {
      threads.emplace_back([=] {
        for (std::int64_t i = t; i < n; i += 4) body(arg, i, t);
      });
    }
    for (std::thread& t : threads) t.join();
  };
  const kvrt_device device = {kTestBackend, 0};
  kvrt_context* context = nullptr;
  ASSERT_EQ(kvrt_context_create(together.plan(), &device, &limits, &context, &err), KVRT_OK) << err.text;
  std::vector<std::uint8_t> scratch(static_cast<std::size_t>(kvrt_workspace_bytes(context)), 0xFF);
  const kvrt_workspace many = {scratch.data(), static_cast<std::int64_t>(scratch.size())};
  std::vector<float> threaded(q.size(), NAN);
  attn = together.attn(q.data(), threaded.data());
  ASSERT_EQ(kvrt_decode(context, Cache::kLayer, &together.batch({1, 1, 1}), &attn, &together.pools(), &many, nullptr, &err), KVRT_OK) << err.text;
  EXPECT_EQ(all, threaded);
  kvrt_context_destroy(context);
}

TEST(Decode, ForkedPagesDecodeAlike) {
  CacheShape shape;
  shape.k = "int4.channel.g32.pre", shape.n_seqs = 2;
  pair_channels(&shape);
  ASSERT_TRUE(is_offered(shape));
  Cache cache(shape);
  const std::vector<float> k = normal_rows(32, 180 * cache.row()), q = normal_rows(33, cache.q_row());
  ASSERT_TRUE(cache.append({180, 0}, k.data(), k.data()).ok());
  const kvrt_batch& batch = cache.batch({0, 0});
  for (const kvrt_segment s : {KVRT_SINK, KVRT_WINDOW, KVRT_BASE}) {
    const kvrt_page_list& list = batch.pages[s];
    kvrt_error err;
    ASSERT_EQ(kvrt_copy_pages(cache.context(), Cache::kLayer, s, &cache.pools(), list.pages + list.offsets[0], list.pages + list.offsets[1],
                              list.offsets[1] - list.offsets[0], nullptr, &err), KVRT_OK) << err.text;
  }
  cache.set_lengths({180, 180});
  std::vector<float> a(q.size()), b(q.size());
  ASSERT_TRUE(cache.decode(cache.attn(q.data(), a.data()), 0).ok() && cache.decode(cache.attn(q.data(), b.data()), 1).ok());
  EXPECT_EQ(a, b);
  kvrt_verify_report first, second;
  ASSERT_TRUE(cache.verify(&first, 0).ok() && cache.verify(&second, 1).ok());
  EXPECT_EQ(first.checksum, second.checksum);
}

TEST(Decode, OutputsIn16Bit) {
  CacheShape shape;
  Cache cache(shape);
  const std::vector<float> k = normal_rows(34, 90 * cache.row()), q = normal_rows(35, cache.q_row());
  ASSERT_TRUE(cache.append(90, k.data(), k.data()).ok());
  std::vector<float> out(q.size());
  std::vector<std::uint16_t> half(q.size(), 0xFFFF);
  ASSERT_TRUE(cache.decode(cache.attn(q.data(), out.data())).ok());
  kvrt_attn attn = cache.attn(q.data(), nullptr);
  attn.out = {half.data(), KVRT_F16, 0, 0};
  ASSERT_TRUE(cache.decode(attn).ok());
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(half[i], f32_to_f16_rne(out[i]));
}

}  // namespace
}  // namespace kvrt::testing

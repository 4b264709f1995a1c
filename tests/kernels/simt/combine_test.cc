// The merge of partial results, and the yardstick that reads a buffer, on the executor.

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/read/decode_cuda.h"
#include "kernels/read/stream_cuda.h"
#include "tests/kernels/simt/executor.h"

namespace kvrt::simt {
namespace {

struct Merge {
  std::vector<float> m, l, o;
  std::vector<std::int64_t> first_chunk;
  std::vector<float> out, log_sum_exp;

  /// One head, two channels.
  void run(const float* sink_logit) {
    out.assign(2 * (first_chunk.size() - 1), NAN), log_sum_exp.assign(first_chunk.size() - 1, NAN);
    CombineArgs args{};
    args.partials = {m.data(), l.data(), o.data()};
    args.first_chunk = first_chunk.data(), args.n_rows = static_cast<std::int64_t>(first_chunk.size()) - 1;
    args.n_query_heads = 1, args.head_dim = 2, args.n_kv_heads = 1, args.sink_logit = sink_logit;
    args.out.data = out.data(), args.log_sum_exp = log_sum_exp.data();
    const Executor executor(Settings{});
    const Status s = combine_cuda(args, nullptr);
    ASSERT_TRUE(s.ok()) << s.text();
  }
};

TEST(Combine, WeighsChunksByTheirMaxima) {
  Merge merge{{3, 5}, {2, 1.5f}, {2, 4, 3, -3}, {0, 2}, {}, {}};
  merge.run(nullptr);
  const double l = 2 * 0.25 + 1.5;
  EXPECT_NEAR(merge.out[0], (2 * 0.25 + 3) / l, 1e-6);
  EXPECT_NEAR(merge.out[1], (4 * 0.25 - 3) / l, 1e-6);
  EXPECT_NEAR(merge.log_sum_exp[0], std::log(l * 32), 1e-6);
}

TEST(Combine, ChunksWithoutTokensCountNothingWhateverTheyHold) {
  Merge merge{{-1e30f, 2, NAN}, {0, 1, 0}, {NAN, NAN, 7, 8, NAN, NAN}, {0, 3, 3}, {}, {}};
  merge.run(nullptr);
  EXPECT_EQ(merge.out, (std::vector<float>{7, 8, 0, 0}));
  EXPECT_EQ(merge.log_sum_exp[1], -INFINITY);
}

TEST(Combine, LearnedLogitTakesItsShare) {
  Merge merge{{0}, {1}, {4, 8}, {0, 1}, {}, {}};
  const float logit = std::log(3.0f);
  merge.run(&logit);
  EXPECT_NEAR(merge.out[0], 1, 1e-6);
  EXPECT_NEAR(merge.out[1], 2, 1e-6);
  EXPECT_NEAR(merge.log_sum_exp[0], std::log(4.0), 1e-6);
}

TEST(Combine, LargeLogitsNeverOverflow) {
  Merge merge{{3000, -3000}, {1, 1}, {1, 2, 5, 5}, {0, 2}, {}, {}};
  merge.run(nullptr);
  EXPECT_EQ(merge.out, (std::vector<float>{1, 2}));
}

TEST(Stream, ReadsEveryByteOnce) {
  alignas(16) std::uint32_t data[4 * 1000];
  std::uint32_t expected = 0;
  for (std::uint32_t i = 0; i < 4000; ++i) data[i] = i * 2654435761u, expected ^= data[i];
  std::vector<std::uint32_t> sums(2 * 256, 0xFFFFFFFFu);
  const Executor executor(Settings{});
  const Status s = stream_cuda({reinterpret_cast<const std::uint8_t*>(data), sizeof data, 2, sums.data()}, nullptr);
  ASSERT_TRUE(s.ok()) << s.text();
  std::uint32_t sum = 0;
  for (const std::uint32_t x : sums) sum ^= x;
  EXPECT_EQ(sum, expected);
  EXPECT_EQ(executor.counts().load_bytes, static_cast<std::int64_t>(sizeof data));
}

}  // namespace
}  // namespace kvrt::simt

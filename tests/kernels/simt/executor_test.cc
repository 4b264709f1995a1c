// The executor itself: what it computes, and what it reports.

#include "tests/kernels/simt/executor.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/mma.h"
#include "libcalib/base/rng.h"
#include "tests/kernels/simt/decode_case.h"
#include "tests/kernels/simt/matrix_product.h"

namespace kvrt::simt {
namespace {

using cuda::lane_index;
using cuda::thread_index;

template <class Kernel>
Status run(const Settings& settings, int n_threads, Kernel kernel, std::int64_t n_blocks = 1) {
  const Executor executor(settings);
  return cuda::executor::run(n_blocks, n_threads, 0, kernel);
}

std::vector<Settings> all_settings() {
  return {{Mode::kFibers, Order::kForward}, {Mode::kFibers, Order::kReverse}, {Mode::kFibers, Order::kShuffled}, {Mode::kThreads}};
}

TEST(Executor, ShufflesAndVotes) {
  for (const Settings& settings : all_settings()) {
    std::vector<float> exchanged(64), broadcast(64);
    std::vector<int> votes(64);
    const Status s = run(settings, 64, [&] {
      const auto i = static_cast<std::size_t>(thread_index());
      exchanged[i] = cuda::shuffle_xor(static_cast<float>(i), 5);
      broadcast[i] = cuda::shuffle(static_cast<float>(i), (lane_index() * 7) % 32);
      votes[i] = cuda::warp_any(thread_index() == 40);
    });
    ASSERT_TRUE(s.ok()) << s.text();
    for (std::size_t i = 0; i < 64; ++i) {
      EXPECT_EQ(exchanged[i], static_cast<float>(i ^ 5u));
      EXPECT_EQ(broadcast[i], static_cast<float>(i / 32 * 32 + i % 32 * 7 % 32));
      EXPECT_EQ(votes[i], i / 32 == 1 ? 1 : 0);
    }
  }
}

/// Row and column of register r, half h of lane 4g + q, as the PTX manual draws the fragments of m16n8k16.
void a_place(int lane, int r, int h, int* row, int* column) { *row = lane / 4 + 8 * (r % 2), *column = 2 * (lane % 4) + h + 8 * (r / 2); }
void b_place(int lane, int r, int h, int* row, int* column) { *row = 2 * (lane % 4) + h + 8 * r, *column = lane / 4; }

TEST(Executor, MatrixProductFollowsTheDocumentedLayout) {
  calib::Rng rng(3);
  for (const bool is_bf16 : {false, true}) {
    const auto encode = [&](double x) { return is_bf16 ? f32_to_bf16(static_cast<float>(x)) : f32_to_f16_rne(static_cast<float>(x)); };
    const auto decode = [&](std::uint16_t h) { return static_cast<double>(is_bf16 ? bf16_to_f32(h) : f16_to_f32(h)); };
    std::uint16_t a[16][16], b[16][8];
    float c[16][8], d[16][8];
    for (auto& row : a) for (std::uint16_t& x : row) x = encode(rng.normal());
    for (auto& row : b) for (std::uint16_t& x : row) x = encode(rng.normal());
    for (auto& row : c) for (float& x : row) x = static_cast<float>(rng.normal());
    const Status s = run({}, 32, [&] {
      const int lane = lane_index();
      std::uint32_t fa[4] = {}, fb[2] = {};
      int row, column;
      for (int r = 0; r < 4; ++r) for (int h = 0; h < 2; ++h) a_place(lane, r, h, &row, &column), fa[r] |= static_cast<std::uint32_t>(a[row][column]) << (16 * h);
      for (int r = 0; r < 2; ++r) for (int h = 0; h < 2; ++h) b_place(lane, r, h, &row, &column), fb[r] |= static_cast<std::uint32_t>(b[row][column]) << (16 * h);
      float f[4];
      for (int i = 0; i < 4; ++i) f[i] = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
      if (is_bf16) cuda::mma_bf16(f, fa, fb);
      else cuda::mma_f16(f, fa, fb);
      for (int i = 0; i < 4; ++i) d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2] = f[i];
    });
    ASSERT_TRUE(s.ok()) << s.text();
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 8; ++j) {
        double expected = c[i][j];
        for (int k = 0; k < 16; ++k) expected += decode(a[i][k]) * decode(b[k][j]);
        EXPECT_FLOAT_EQ(d[i][j], static_cast<float>(expected));
      }
    }
  }
}

TEST(Executor, TransposeOfEightByEight) {
  std::vector<std::uint32_t> out(32);
  ASSERT_TRUE(run({}, 32, [&] {
    const auto element = [](int row, int column) { return static_cast<std::uint32_t>(100 * row + column); };
    const int g = lane_index() / 4, q = lane_index() % 4;
    out[static_cast<std::size_t>(lane_index())] = cuda::transpose_8x8(element(g, 2 * q) | element(g, 2 * q + 1) << 16);
  }).ok());
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t g = lane / 4, q = lane % 4;
    EXPECT_EQ(out[lane] & 0xFFFFu, 100 * (2 * q) + g);
    EXPECT_EQ(out[lane] >> 16, 100 * (2 * q + 1) + g);
  }
}

TEST(Executor, TruncatingSumsLoseWhatIsBelow24Bits) {
  float x[16] = {}, y[16] = {};
  for (int i = 0; i < 16; ++i) x[i] = 1, y[i] = 0x1p-2f;
  EXPECT_EQ(accumulate_products(0x1p20f, x, y, Accumulation::kExact), 0x1p20f + 4);
  EXPECT_EQ(accumulate_products(0x1p20f, x, y, Accumulation::kTruncating), 0x1p20f + 4);
  for (int i = 0; i < 16; ++i) y[i] = 0x1p-4f;
  EXPECT_EQ(accumulate_products(0x1p20f, x, y, Accumulation::kExact), 0x1p20f + 1);
  EXPECT_EQ(accumulate_products(0x1p20f, x, y, Accumulation::kTruncating), 0x1p20f);  // each product is cut before it is added
  EXPECT_EQ(accumulate_products(-0x1p20f, x, y, Accumulation::kTruncating), -0x1p20f);
  x[3] = NAN;
  EXPECT_TRUE(std::isnan(accumulate_products(0, x, y, Accumulation::kTruncating)));
}

TEST(Executor, SharedMemoryStartsPoisonedInEveryBlock) {
  struct Words { std::uint32_t w[64]; };
  std::vector<std::uint32_t> seen;
  ASSERT_TRUE(run({}, 32, [&] {
    KVRT_SHARED(Words, words);
    if (thread_index() == 0) seen.push_back(words.w[63]), words.w[63] = 1;
  }, 2).ok());
  EXPECT_EQ(seen, (std::vector<std::uint32_t>{0xCDCDCDCDu, 0xCDCDCDCDu}));
}

TEST(Executor, BarrierOrdersSharedMemory) {
  struct Words { int w[64]; };
  for (const Settings& settings : all_settings()) {
    std::vector<int> out(64);
    ASSERT_TRUE(run(settings, 64, [&] {
      KVRT_SHARED(Words, words);
      words.w[thread_index()] = thread_index();
      cuda::block_barrier();
      out[static_cast<std::size_t>(thread_index())] = words.w[63 - thread_index()];
    }).ok());
    for (int i = 0; i < 64; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], 63 - i);
  }
}

TEST(ExecutorReports, AWarpOperationThatALaneSkips) {
  for (const Settings& settings : all_settings()) {
    const Status s = run(settings, 64, [] { if (thread_index() != 37) cuda::shuffle_xor(1.0f, 1); });
    EXPECT_EQ(s.code(), Code::kInternal);
    EXPECT_NE(s.text().find("deadlock"), std::string::npos) << s.text();
    EXPECT_NE(s.text().find("shuffle_xor"), std::string::npos) << s.text();
  }
}

TEST(ExecutorReports, LanesInDifferentOperations) {
  for (const Settings& settings : all_settings()) {
    const Status s = run(settings, 32, [] {
      if (thread_index() == 9) cuda::shuffle(1.0f, 0);
      else cuda::shuffle_xor(1.0f, 1);
    });
    EXPECT_NE(s.text().find("divergent warp"), std::string::npos) << s.text();
  }
}

TEST(ExecutorReports, ABarrierInDivergentCode) {
  for (const Settings& settings : all_settings()) {
    const Status exited = run(settings, 64, [] { if (thread_index() < 50) cuda::block_barrier(); });
    EXPECT_NE(exited.text().find("14 have exited"), std::string::npos) << exited.text();
    const Status mixed = run(settings, 64, [] {
      if (thread_index() < 16) cuda::block_barrier();
      else cuda::shuffle_xor(1.0f, 1);
    });
    EXPECT_NE(mixed.text().find("deadlock"), std::string::npos) << mixed.text();
  }
}

TEST(ExecutorReports, MisalignedVectors) {
  alignas(16) std::uint8_t bytes[64] = {};
  const Status s = run({}, 32, [&] {
    std::uint32_t w[4];
    cuda::load_stream<4>(bytes + 8, w);
  });
  EXPECT_NE(s.text().find("misaligned access of 16 bytes"), std::string::npos) << s.text();
}

TEST(ExecutorReports, TwoSharedObjects) {
  struct Small { int w[1]; };
  struct Large { int w[2]; };
  const Status s = run({}, 32, [] {
    KVRT_SHARED(Small, small);
    KVRT_SHARED(Large, large);
    small.w[0] = large.w[0] = 0;
  });
  EXPECT_NE(s.text().find("two shared objects"), std::string::npos) << s.text();
}

// A barrier that is missing shows as poison in the result, or as a result that depends on the order of threads. Barrier 0 guards
// pointers: without it the kernel would follow poison.
TEST(DroppedBarrier, IsSeenInTheDecodeKernel) {
  DecodeSpec spec;
  spec.n_kv_heads = 1;
  spec.sequences = {{{"int4.token.g", "int4.token.g", 391}}};
  const DecodeCase decode(spec);
  for (const int barrier : {1, 2, 3, 4, 5}) {
    Settings settings;
    settings.dropped_barrier = barrier;
    const DecodeOutput forward = decode.run(settings);
    bool is_seen = decode.worst_ratio(forward) > 1;
    for (const Order order : {Order::kReverse, Order::kShuffled}) {
      settings.order = order;
      const DecodeOutput output = decode.run(settings);
      is_seen |= decode.worst_ratio(output) > 1 || output.out != forward.out;
    }
    EXPECT_TRUE(is_seen) << "barrier " << barrier;
  }
}

}  // namespace
}  // namespace kvrt::simt

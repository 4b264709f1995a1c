#include "libcalib/base/thread_pool.h"

#include <atomic>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace calib {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.n_threads(), threads);
    for (std::int64_t n : {0, 1, 2, 3, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(n));
      pool.parallel_for(n, [&](std::int64_t i) { ++runs[static_cast<std::size_t>(i)]; });
      for (const auto& r : runs) ASSERT_EQ(r, 1);
    }
  }
}

TEST(ThreadPool, RethrowsAndStaysUsable) {
  for (int threads : {1, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 50; ++round) {
      try {
        pool.parallel_for(100, [&](std::int64_t i) {
          if (i % 10 == 3) throw std::runtime_error("body " + std::to_string(i));
        });
        FAIL() << "nothing was thrown";
      } catch (const std::runtime_error& e) {
        EXPECT_EQ(std::string(e.what()).rfind("body ", 0), 0u);
      }
      std::atomic<int> sum{0};
      pool.parallel_for(100, [&](std::int64_t i) { sum += static_cast<int>(i); });
      ASSERT_EQ(sum, 4950);
    }
  }
}

TEST(ThreadPool, AFailureStopsTheRest) {
  ThreadPool pool(2);
  std::atomic<int> runs{0};
  EXPECT_THROW(pool.parallel_for(1'000'000,
                                 [&](std::int64_t) {
                                   ++runs;
                                   throw std::runtime_error("at once");
                                 }),
               std::runtime_error);
  EXPECT_LE(runs, 2);
}

TEST(ThreadPool, AtLeastOneThread) {
  EXPECT_EQ(ThreadPool(0).n_threads(), 1);
  EXPECT_EQ(ThreadPool(-3).n_threads(), 1);
}

TEST(ThreadPool, ManyShortLoops) {
  ThreadPool pool(3);
  std::int64_t total = 0;
  for (int round = 0; round < 2000; ++round) {
    std::atomic<std::int64_t> sum{0};
    pool.parallel_for(5, [&](std::int64_t i) { sum += i; });
    total += sum;
  }
  EXPECT_EQ(total, 20'000);
}

}  // namespace
}  // namespace calib
